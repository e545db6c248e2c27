"""What a kernel becomes: compile it for any architecture, without that GPU, and count what it uses.

A wrapper is called on meta tensors in a worker process whose Triton compiles and never launches: a kernel is
specialised as a launch would specialise it (strides, alignment, configuration), which a signature written by hand gets
wrong. It is another process since this one may be interpreting, and since an LLVM abort must not end the run.

    compile_for(wrapper, args, kwargs, sms=(80, 90, 100))   ->  list[Kernel]
    dump(wrapper, args, kwargs, sm=90)                      ->  {"ttir": text, ..., "sass": text, "log": text}
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import inspect
import io
import os
import pickle
import queue
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from unittest.mock import patch

from harness.catalog import ROOT, load_module

TIMEOUT_S = 180
TENSOR_MEMORY = (10, 11)  # the generations that have it, by their major number: sm_120 has none
TENSOR_COLUMNS = 512  # of it, each of 128 words of 32 bits, that an SM has
STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")  # of a kernel, from Triton's own IR to machine code

# The instruction that proves a technique, as it is written in PTX. A format counts only on a tensor-core
# instruction: a conversion to it proves nothing.
_MMA = r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b[^;]*"
INSTRUCTIONS = {
    "ld.global.v4": r"\bld\.global\S*\.(?:v4\.[bfsu]32|v8\.[bfsu](?:16|32)|v2\.[bfsu]64)",
    "st.global.v4": r"\bst\.global\S*\.(?:v4\.[bfsu]32|v8\.[bfsu](?:16|32)|v2\.[bfsu]64)",
    "cp.async": r"\bcp\.async\.c[ag]\.",
    "cp.async.bulk.tensor": r"\bcp\.async\.bulk\.tensor\.",
    "mbarrier": r"\bmbarrier\.",
    "mma.sync": r"\bmma\.sync\.",
    "wgmma": r"\bwgmma\.mma_async\.",
    "tcgen05.mma": r"\btcgen05\.mma\b",
    "tcgen05.alloc": r"\btcgen05\.alloc\b",
    "tcgen05.cp": r"\btcgen05\.cp\b",
    "tcgen05.ld": r"\btcgen05\.ld\b",
    "tcgen05.commit": r"\btcgen05\.commit\b",
    "cta_group::2": r"\bcta_group::2\b",
    "kind::f16": r"kind::f16",
    "mma tf32": _MMA + r"(?:\.tf32|kind::tf32)",
    "cvt f8": r"\bcvt\.rn\.satfinite\S*\.e[45]m[23]x2\.f(?:32|16x2)\b",
    "cvt f8 by f16": r"\bcvt\.rn\.satfinite\S*\.e[45]m[23]x2\.f16x2\b",
    "cvt tf32": r"\bcvt\.rna\S*\.tf32\.f32\b",
    "mma s8": _MMA + r"(?:\.s8\b|kind::i8)",
    "mma f8": _MMA + r"(?:\.e4m3|\.e5m2|kind::f8f6f4)",
    "block_scale": _MMA + r"block_scale",
    "kind::mxf8f6f4": r"kind::mxf8f6f4",
    "kind::mxf4": r"kind::mxf4\b",
    "kind::mxf4nvf4": r"kind::mxf4nvf4",
    "setmaxnreg": r"\bsetmaxnreg\.",
    "atom": r"\batom\.",
    "ld.acquire.sys": r"\bld\.acquire\.sys\b",
    "ld.relaxed.sys": r"\bld\.relaxed\.sys\b",
    "release.sys": r"\b(?:st|atom|red)\.\S*(?:release\.sys|sys\.release)\b",
    "mul.hi": r"\bmul\.hi\.[su]32\b",
    "fma.f32": r"\bfma\.rn(?:\.ftz)?\.f32(?:x2)?\b",
}


class CodegenError(AssertionError):
    """The instruction a technique stands for is missing, or its kernel does not compile where it must."""


@dataclass
class Kernel:
    """One kernel compiled for one architecture; `error` says why there is none.

    `tensor_memory` counts the 32-bit columns of tensor memory that the program takes; None where the architecture has
    no tensor memory, and in records from before it was counted. `ptx_hash` tells two programs apart: what it is called
    and where its source stands are not in it.
    """

    kernel: str
    sm: int
    found: dict[str, int] = field(default_factory=dict)
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    shared_limit: int | None = None
    warps: int | None = None
    config: str = ""
    error: str | None = None
    tensor_memory: int | None = None
    ptx_hash: str | None = None

    @property
    def too_much(self) -> str | None:
        """What the program takes more of than there is, in words: an offline compiler does not refuse it."""
        if self.shared is not None and self.shared_limit is not None and self.shared > self.shared_limit:
            return f"{self.shared / 1024:.1f} KiB of shared memory, and there are {self.shared_limit / 1024:g}"
        if self.tensor_memory is not None and self.tensor_memory > TENSOR_COLUMNS:
            return f"{self.tensor_memory} columns of tensor memory, and there are {TENSOR_COLUMNS}"
        return None


def compile_for(
    wrapper: Callable, args: tuple = (), kwargs: dict | None = None, *, sms: tuple[int, ...] = (80, 90, 100), config=0
) -> list[Kernel]:
    """Compile each kernel that wrapper(*args, **kwargs) launches, for each architecture in `sms`.

    Tensors are replaced by meta tensors of the same shape, strides and dtype. An autotuned kernel is compiled in one
    configuration: number `config` of those its own pruning keeps there. A kernel that does not compile, or takes the
    compiler down with it, comes back with its `error`.
    """

    def kernels(sm: int) -> list[Kernel]:
        answer = _ask(wrapper, args, kwargs, config, sm)
        return [Kernel(wrapper.__qualname__, sm, error=answer)] if isinstance(answer, str) else [k for k, _ in answer]

    with ThreadPoolExecutor() as pool:  # its threads only wait, for as many processes as there are
        try:
            return [kernel for each in pool.map(kernels, sms) for kernel in each]
        except BaseException:  # Ctrl-C: nobody waits for a compilation to end
            for worker in _workers:
                worker.close()
            raise


def dump(
    wrapper: Callable, args: tuple = (), kwargs: dict | None = None, *, sm: int, kernel: str = ""
) -> dict[str, str]:
    """The text of every stage of one kernel that wrapper(*args, **kwargs) launches, compiled for architecture `sm`.

    Keys are those of STAGES (a Gluon kernel has no "ttir"), and "log": what was printed meanwhile (tl.static_print, the
    assembler's report). `kernel` names one of several; of several launches of it, this is the last. Raises CodegenError
    when it does not compile, ValueError when it is not clear which one is meant.
    """
    answer = _ask(wrapper, args, kwargs, 0, sm, texts=True)
    if isinstance(answer, str):
        raise CodegenError(f"dump: {wrapper.__name__} on sm_{sm}: {answer}")
    texts = {each.kernel: text for each, text in answer}
    if not kernel and len(texts) == 1:
        (kernel,) = texts
    if kernel not in texts:
        have = ", ".join(texts) or "none"
        raise ValueError(f"dump: {wrapper.__name__} launches {have}; name one of them: kernel={kernel!r} does not")
    return texts[kernel]


Compiled = list[tuple[Kernel, "dict[str, str]"]]  # each kernel, and the text of its stages if that is asked for


class _Pickler(pickle.Pickler):
    """Tensors travel without their data. Their offset decides a pointer's alignment, and so the width of accesses."""

    def reducer_override(self, value):
        import torch

        if not isinstance(value, torch.Tensor):
            return NotImplemented
        return _meta, (value.shape, value.stride(), value.dtype, value.storage_offset())


def _meta(shape, stride, dtype, offset):
    import torch

    extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    return torch.empty(offset + extent, dtype=dtype, device="meta").as_strided(shape, stride, offset)


class _Worker:
    """A compiling process, started on first use and again after it died. It has a Triton cache of its own, which goes
    with it: a kernel found in the reader's would come without the assembler's report."""

    process: subprocess.Popen | None = None

    def ask(self, request: bytes) -> Compiled | str:
        """The answer, or why there is none: the process died or took too long."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        overdue = Timer(TIMEOUT_S, self.process.kill)
        overdue.start()
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
            return pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError):
            status = self.process.wait()
        finally:
            overdue.cancel()
        said = f"out of memory, or not ready after {TIMEOUT_S} s" if status == -9 else "no message"
        lines = [line for line in self.noise.read_text(errors="replace").splitlines() if "error" in line.lower()]
        self.close()
        return f"the compiler ended with status {status}: {[said, *lines][-1]}"

    def _start(self) -> None:
        self.close()
        self.folder = TemporaryDirectory(prefix="triton-offline-", ignore_cleanup_errors=True)
        self.noise = Path(self.folder.name, "stderr")
        with self.noise.open("w") as noise:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from harness.codegen import _serve; _serve()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=noise, cwd=ROOT,
                start_new_session=True,  # Ctrl-C is for the run, which then ends this process itself
                env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": self.folder.name},
            )  # fmt: skip

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            with contextlib.suppress(OSError, ValueError):  # closing flushes, and nobody reads any more
                self.process.communicate()
            self.folder.cleanup()
            self.process = None


_workers = [_Worker() for _ in range(min(4, os.cpu_count() or 1))]
_idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # last in, first out: one request after another meets a warm one
for _one in reversed(_workers):
    _idle.put(_one)
    atexit.register(_one.close)


def _ask(
    wrapper: Callable, args: tuple, kwargs: dict | None, config: int, sm: int, texts: bool = False
) -> Compiled | str:
    """What the call launches, or why there is nothing."""
    from examples.common.device import compiling_for

    if compiling_for():  # each worker would start workers of its own
        raise CodegenError(
            f"codegen: {wrapper.__qualname__} was asked for while its file was being imported to compile it; "
            "call compile_for and dump from within a function, or below `if __name__ == '__main__':`"
        )
    file = Path(inspect.unwrap(wrapper).__globals__["__file__"]).resolve()
    _Pickler(request := io.BytesIO()).dump((file, wrapper.__qualname__, args, kwargs or {}, config, texts, sm))
    worker = _idle.get()
    try:
        return worker.ask(request.getvalue())
    finally:
        _idle.put(worker)


# From here on: the worker's side.


def _serve() -> None:
    import triton

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a compiler prints must not end up in the protocol
    triton.runtime.driver.set_active(driver := OfflineDriver())
    while True:
        try:
            *call, driver.sm = pickle.load(sys.stdin.buffer)
            answer = _compile(*call, driver.sm)
        except EOFError:
            return
        except Exception as error:  # any failure is an answer: "not supported: ..."
            answer = _reason(error)
        pickle.dump(answer, out)
        out.flush()


def _reason(error: Exception) -> str:
    cause = error
    while cause.__cause__ is not None:  # Triton wraps the telling message in one error per call level
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[-1] if lines else 'no message'}"


class OfflineDriver:
    """What triton asks of a GPU driver in order to compile, answered for an architecture that is not here."""

    compile_only = True  # examples.common.device asks: wrappers then take meta tensors

    sm = 90

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return self.sm  # JITFunction keeps one kernel cache per device number

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(file: Path, function: str, args: tuple, kwargs: dict, number: int, texts: bool, sm: int) -> Compiled:
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    compiled, chosen = [], ""
    jit_run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        log = io.StringIO()
        with contextlib.redirect_stdout(log):  # triton prints the assembler's report there
            kernel = jit_run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((_read(self, kernel, log.getvalue(), chosen, sm), _texts(kernel) if texts else {}))
        return kernel

    def one_config(self, *args, **kwargs):
        nonlocal chosen
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = self.prune_configs(kwargs)
        config = configs[min(number, len(configs) - 1)]
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        chosen = str(config)
        kernel = self.fn.run(*args, **kwargs, **config.all_kwargs())
        chosen = ""
        return kernel

    wrapper = attrgetter(function)(load_module(file))
    with (
        patch.object(JITFunction, "run", compile_only), patch.object(Autotuner, "run", one_config),
        triton.knobs.nvidia.scope(),
    ):  # fmt: skip
        triton.knobs.nvidia.dump_ptxas_log = True
        wrapper(*args, **kwargs)
    return compiled


_logs: dict[str, str] = {}


def _texts(kernel) -> dict[str, str]:
    stages = [stage for stage in STAGES if stage in kernel.asm or stage == "sass"]  # which is made when it is asked for
    return {stage: kernel.asm[stage] for stage in stages} | {"log": _logs.get(kernel.hash, "")}


_WHERE = re.compile(  # what PTX says of its source, and no instruction: comments, debug sections, places, their labels
    r"/\*.*?\*/|//[^\n]*|\.section\s+\.debug\w*\s*\{[^{}]*\}|^\s*\.(?:loc|file)\b[^\n]*|^\s*\$L__(?:tmp|func_)\w*:",
    re.MULTILINE | re.DOTALL,
)


def _ptx_hash(ptx: str) -> str:
    """The same for two kernels of the same instructions, whatever their names and wherever their source stands."""
    for entry in re.findall(r"\.entry\s+([\w$]+)", ptx):
        ptx = re.sub(rf"\b{re.escape(entry)}(?=\b|_param_\d)", "entry", ptx)
    lines = (" ".join(line.split()) for line in _WHERE.sub("", ptx).splitlines())
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:16]


def _read(function, kernel, log: str, config: str, sm: int) -> Kernel:
    from examples.common.device import SHARED_LIMIT

    if log:  # a second launch of the same kernel is found in memory and is not assembled again
        _logs[kernel.hash] = log
    log = _logs.get(kernel.hash, "")
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores", log)
    used, spilled = (max(map(int, registers)), sum(map(int, spills))) if registers else (None, None)
    ptx = kernel.asm["ptx"]
    counts = {name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()}
    return Kernel(
        kernel=function.fn.__name__, sm=sm, found={name: n for name, n in counts.items() if n}, registers=used,
        spills=spilled, shared=kernel.metadata.shared, shared_limit=SHARED_LIMIT.get(sm),
        warps=kernel.metadata.num_warps, config=config,
        tensor_memory=kernel.metadata.tmem_size if sm // 10 in TENSOR_MEMORY else None,
        ptx_hash=_ptx_hash(ptx),
    )  # fmt: skip
