"""Runtime: kernels compiled in parallel and kept on disk, and one Python function that allocates, launches and frees.

The function is written as text, as Inductor writes its wrapper: allocations with the strides that torch would give,
one line for each kernel or call, `del` after the last use, and memory of dead buffers handed on. A launch goes straight
to Triton's compiled launcher: grids and block sizes are settled, and nothing is specialized again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import sympy
import torch

from triton_compiler.codegen import WIDE, Source
from triton_compiler.device import INTERPRETED
from triton_compiler.fusion import Fusion, Kernel, base_of, strides_of
from triton_compiler.ir import Extern, Node, View
from triton_compiler.lowering import strided_view

_guards = torch._C._dynamo.guards
_kernels: dict[tuple, Future] = {}


# ---------------------------------------------------------------------------------------------- kernels
def cache_dir() -> Path:
    """Where generated kernels are kept; Triton keeps what it compiles of them in a cache of its own."""
    given = os.environ.get("TRITON_COMPILER_CACHE_DIR")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"triton_compiler_{os.getuid()}"


@functools.cache
def pool() -> ThreadPoolExecutor:
    """Threads that compile: Triton's passes and the assembler run without Python's lock."""
    return ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1), thread_name_prefix="triton_compiler")


def load(source: Source):
    """The @triton.jit function of a source, from a file named by the hash of its text."""
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:20]
    path = cache_dir() / digest[:2] / f"{source.name[:60]}_{digest}.py"
    if not path.is_file() or path.read_text(encoding="utf-8") != source.text:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(source.text, encoding="utf-8")
        os.replace(partial, path)
    spec = importlib.util.spec_from_file_location(f"triton_compiler_kernel_{digest}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, source.name)


def build(source: Source, hints: dict) -> Future:
    """The launcher of a source, which a thread compiles: launch(stream, programs_0, programs_1, *arguments)."""
    dtypes = tuple(node.dtype for node, _ in source.arguments)
    key = (source.text, dtypes, source.plan.warps, None if INTERPRETED else torch.cuda.current_device())
    if key not in _kernels:
        if INTERPRETED:
            _kernels[key] = Future()
            _kernels[key].set_result(interpreted(load(source)))
        else:
            device = torch.cuda.current_device()
            _kernels[key] = pool().submit(compiled, source, dtypes, device)
    return _kernels[key]


def interpreted(kernel) -> Callable:
    def launch(stream, x, y, *arguments):
        if x and y:
            kernel[(x, y)](*arguments)

    return launch


def compiled(source: Source, dtypes, device: int) -> Callable:
    kernel = load(source)
    options = {"num_warps": source.plan.warps, "debug": "dev.check(" in source.text, "sanitize_overflow": False}

    def compile_one(wide: bool):
        with torch.cuda.device(device):
            numbers = [*([2] * len(source.symbols)), wide] if source.symbols else []
            binary = kernel.warmup(*dtypes, *numbers, grid=(1,), **options)
            return binary.run, binary.function, binary.packed_metadata

    run, function, metadata = compile_one(False)
    if not source.symbols:

        def launch(stream, x, y, *arguments):
            run(x, y, 1, stream, function, metadata, None, None, None, *arguments)

        return launch

    @functools.cache
    def wide_one():
        return compile_one(True)

    def launch_dynamic(stream, x, y, *arguments):
        if not (x and y):
            return
        run_it, fn, data = wide_one() if arguments[-1] else (run, function, metadata)
        run_it(x, y, 1, stream, fn, data, None, None, None, *arguments)

    return launch_dynamic


# ---------------------------------------------------------------------------------------------- calls of torch's
def as_expected(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A library's result with the strides that kernels were written for; a copy where they differ."""
    if tensor.stride() == stride or not tensor.numel():
        return tensor
    if all(size == 1 or a == b for size, a, b in zip(tensor.shape, tensor.stride(), stride, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Memory that begins at a multiple of 16 bytes, which vectorized loads need; a copy where it does not."""
    if tensor.data_ptr() % 16 == 0:
        return tensor
    size = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    flat = torch.as_strided(tensor, (size,), (1,)).clone()
    return torch.as_strided(flat, tensor.shape, tensor.stride(), 0)


def shape_text(sizes) -> str:
    return "(" + "".join(f"{size}, " for size in sizes) + ")"


class Wrapper:
    """Writes the function that runs a graph; `source` is its text, `call` the function."""

    def __init__(self, fusion: Fusion, sources: dict[Kernel, Source]) -> None:
        self.fusion, self.sources, lowered = fusion, sources, fusion.lowered
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []
        self.globals: dict = {
            "torch": torch, "assert_size_stride": _guards.assert_size_stride, "view": _guards._reinterpret_tensor,
            "aligned": aligned, "as_expected": as_expected, "device": torch.device,
        }  # fmt: skip
        self.free: list[tuple[Node, str]] = []
        self.last_use: dict[Node, int] = {}
        self.outputs = list(lowered.outputs)
        self.launches: list[Future] = []
        self.write()

    def write(self) -> None:
        steps, lowered = self.fusion.steps, self.fusion.lowered
        lasting = {base_of(each) for each in self.outputs if isinstance(each, Node)}
        lasting |= {getattr(each, "target", None) for each in lasting}
        shared: set[Node] = set()  # what eager may have returned a view of
        for i, step in enumerate(steps):
            for each in Fusion.reads_of(step):
                self.last_use[each] = i
                if isinstance(step, Extern) and not step.library:
                    shared.add(each)
            for root in step.roots if isinstance(step, Kernel) else ():
                if (target := getattr(root, "target", None)) is not None:
                    self.last_use[target] = i
        self.inputs(lowered.inputs)
        own: set[Node] = set()
        for i, step in enumerate(steps):
            if isinstance(step, Kernel):
                for root in step.stored:
                    self.last_use.setdefault(root, i)
                    own.add(root)
                self.kernel(step)
            else:
                for _, result in step.outputs:
                    if isinstance(result, Node):
                        self.last_use.setdefault(result, i)
                self.extern(step)
            for node in [node for node, last in self.last_use.items() if last == i and node not in lasting]:
                if node not in self.names:
                    continue
                if node in own and node not in shared and getattr(node, "target", None) is None:
                    self.free.append((node, self.names[node]))
                else:
                    self.lines.append(f"del {self.names[node]}")
        results = ", ".join(self.argument(each) for each in self.outputs)
        self.lines.append(f"return ({results}{',' if self.outputs else ''})")
        body = "\n".join(f"    {line}" for line in self.lines)
        self.source = f"def call(args):\n{body}\n"

    def inputs(self, inputs) -> None:
        names = []
        for i, each in enumerate(inputs):
            names.append(f"arg{i}")
            if isinstance(each, Node):
                self.names[each] = names[-1]
        if names:
            self.lines.append(f"{', '.join(names)}, = args")
        self.lines.append("args.clear()")
        bound: set = set()
        for name, each in zip(names, inputs, strict=True):
            if isinstance(each, sympy.Symbol):
                self.lines.append(f"{each} = {name}")
                bound.add(each)
        for name, each in zip(names, inputs, strict=True):
            for axis, size in enumerate(each.shape if isinstance(each, Node) else ()):
                if isinstance(size, sympy.Symbol) and size not in bound:
                    self.lines.append(f"{size} = {name}.shape[{axis}]")
                    bound.add(size)
        read = set().union(*(step.reads for step in self.fusion.steps if isinstance(step, Kernel)))
        targets = {
            getattr(root, "target", None)
            for step in self.fusion.steps
            if isinstance(step, Kernel)
            for root in step.roots
        }
        for each in inputs:
            if isinstance(each, Node) and each.strides is not None and each in read | targets:
                name = self.names[each]
                self.lines.append(f"assert_size_stride({name}, {shape_text(each.shape)}, {shape_text(each.strides)})")
                if not INTERPRETED:
                    if each in targets:  # written: a copy would lose that
                        self.lines.append(
                            f"assert {name}.data_ptr() % 16 == 0, 'triton_compiler: an unaligned input is mutated'"
                        )
                    else:
                        self.lines.append(f"if {name}.data_ptr() & 15: {name} = aligned({name})")
        if not INTERPRETED:
            self.lines.append(f"stream = torch._C._cuda_getCurrentRawStream({torch.cuda.current_device()})")

    def argument(self, value) -> str:
        """An expression for a node, a view of one, a size, or any other argument."""
        if isinstance(value, View):
            base, strides, offset = strided_view(value)
            return f"view({self.name(base)}, {shape_text(value.shape)}, {shape_text(strides)}, {offset})"
        if isinstance(value, Node):
            return self.name(value)
        if isinstance(value, sympy.Expr):
            return str(value)
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            inside = "".join(f"{self.argument(each)}, " for each in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self.constant(value, "c")

    def name(self, node: Node) -> str:
        target = getattr(node, "target", None)
        return self.names[target if target is not None else node]

    def constant(self, value, prefix: str) -> str:
        name = f"{prefix}{len(self.globals)}"
        self.globals[name] = value
        return name

    def allocate(self, node: Node) -> None:
        """Memory of its own: of a dead buffer of the same size where there is one."""
        if getattr(node, "target", None) is not None:
            return
        name, strides = f"buf{len(self.names)}", strides_of(node)
        for i, (dead, old) in enumerate(self.free):
            if (
                dead.dtype is node.dtype
                and dead.device == node.device
                and dead.elements == node.elements
                and dense(node)
                and dense(dead)
            ):
                del self.free[i]
                self.lines.append(f"{name} = view({old}, {shape_text(node.shape)}, {shape_text(strides)}); del {old}")
                break
        else:
            kind, dtype = node.device.type, str(node.dtype).replace(".", "_")
            self.globals[f"empty_{kind}"], self.globals[dtype] = getattr(_guards, f"_empty_strided_{kind}"), node.dtype
            self.lines.append(f"{name} = empty_{kind}({shape_text(node.shape)}, {shape_text(strides)}, {dtype})")
        self.names[node] = name

    def kernel(self, kernel: Kernel) -> None:
        source = self.sources[kernel]
        for root in kernel.stored:
            self.allocate(root)
        arguments = [self.name(node) for node, _ in source.arguments] + source.symbols
        if source.symbols:
            extents = ", ".join(str(extent) for extent in source.plan.extents if not isinstance(extent, int))
            arguments.append(f"max(0, 0, {extents}) > {WIDE}")
        future = build(source, self.fusion.hints)
        self.launches.append(future)
        kernel.name = f"k{len(self.launches) - 1}"
        self.globals[kernel.name] = future
        x, y = source.plan.grid
        self.lines.append(f"{kernel.name}({'None' if INTERPRETED else 'stream'}, {x}, {y}, {', '.join(arguments)})")

    def extern(self, call: Extern) -> None:
        target = self.constant(fast_call(call.target), "op")
        arguments = [self.argument(each) for each in call.args]
        arguments += [f"{key}={self.argument(each)}" for key, each in call.kwargs.items()]
        result = f"res{len(self.globals)}"
        self.lines.append(f"{result} = {target}({', '.join(arguments)})")
        for path, node in call.outputs:
            place = result + "".join(f"[{i}]" for i in path)
            if not isinstance(node, Node):
                if isinstance(node, sympy.Symbol):
                    self.lines.append(f"{node} = {place}")
                continue
            name = self.names[node] = f"ext{len(self.names)}"
            if node.strides is None or node.device.type not in ("cpu", "cuda"):
                self.lines.append(f"{name} = {place}")
                continue
            have, strides = f"{place}.stride()", shape_text(node.strides)
            self.lines.append(f"{name} = {place} if {have} == {strides} else as_expected({place}, {strides})")
            if not INTERPRETED and not call.library:
                self.lines.append(f"if {name}.data_ptr() & 15: {name} = aligned({name})")
        self.lines.append(f"del {result}")

    def finish(self) -> Callable:
        """Waits for the kernels; the function."""
        for name, value in list(self.globals.items()):
            if isinstance(value, Future):
                self.globals[name] = value.result()
        code = compile(self.source, "<triton_compiler>", "exec")
        exec(code, self.globals)
        return self.globals["call"]


def dense(node: Node) -> bool:
    """Whether its strides leave no gaps: it can take the memory of another dense tensor of its size."""
    pairs = sorted(
        ((s, n) for s, n in zip(strides_of(node), node.shape, strict=True) if n != 1), key=lambda p: str(p[0])
    )
    if not all(isinstance(s, int) and isinstance(n, int) for s, n in pairs):
        return list(strides_of(node)) == list(
            __import__("triton_compiler.ir", fromlist=["row_major"]).row_major(node.shape)
        )
    expected = 1
    for stride, size in sorted(pairs):
        if stride != expected:
            return False
        expected = stride * size
    return True


def fast_call(target):
    """torch's own binding of the commonest calls, which takes half the host time of torch.ops."""
    aten = torch.ops.aten
    fast = {aten.mm.default: torch.mm, aten.bmm.default: torch.bmm, aten.addmm.default: torch.addmm,
            aten.convolution.default: torch.convolution}  # fmt: skip
    return fast.get(target, target)
