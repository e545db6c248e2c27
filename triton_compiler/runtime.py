"""Runtime: kernels compiled in parallel and kept on disk, and one Python function that allocates, launches and frees.

The function is written as text, as Inductor writes its wrapper: allocations with the strides that torch would give,
one line for each kernel or call, `del` after the last use, and memory of dead buffers reused. A launch goes straight
to torch's launcher of compiled kernels: grids and block sizes are settled, and nothing is specialized again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import operator
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import sympy
import torch
import triton
from triton._utils import type_canonicalisation_dict
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triton_compiler.codegen import WIDE, Source
from triton_compiler.device import INTERPRETED
from triton_compiler.fusion import Fusion, Kernel, made_by, reads_of
from triton_compiler.ir import Extern, Node, View, row_major, same_strides, strided_view

aten, _guards = torch.ops.aten, torch._C._dynamo.guards
_kernels: dict[tuple, Future] = {}
# torch's own binding of the commonest calls takes half the host time of torch.ops.
FAST = {aten.mm.default: torch.mm, aten.bmm.default: torch.bmm, aten.addmm.default: torch.addmm,
        aten.convolution.default: torch.convolution}  # fmt: skip


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
        partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        partial.write_text(source.text, encoding="utf-8")
        os.replace(partial, path)
    spec = importlib.util.spec_from_file_location(f"triton_compiler_kernel_{digest}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, source.name)


def build(source: Source) -> Future:
    """The launcher of a source, which a thread compiles: launch(stream, programs_0, programs_1, *arguments)."""
    device = None if INTERPRETED else torch.cuda.current_device()
    key = (source.text, tuple(node.dtype for node, _ in source.arguments), source.plan.warps, device)
    if key not in _kernels:
        _kernels[key] = pool().submit(interpreted, source) if INTERPRETED else pool().submit(launcher, source, device)
    return _kernels[key]


def interpreted(source: Source) -> Callable:
    kernel, tensors = load(source), len(source.arguments)

    def run(stream, x, y, *arguments):
        sizes = map(operator.index, arguments[tensors:])  # a compiled kernel takes no other numbers
        if x and y:
            kernel[(x, y)](*arguments[:tensors], *sizes)

    return run


def compile_kernel(source: Source, target: GPUTarget, wide: bool = False):
    """Triton's binary for an architecture: pointers are multiples of 16 bytes; `wide`: sizes and indices of 64 bits."""
    kernel, pointers = load(source), len(source.arguments)
    types = [type_canonicalisation_dict[str(node.dtype).removeprefix("torch.")] for node, _ in source.arguments]
    types = [*(f"*{name}" for name in types), *(["i64" if wide else "i32"] * len(source.symbols))]
    rest = range(len(types), len(kernel.arg_names))
    constants = {(i,): wide for i in rest}  # WIDE, where there are sizes
    signature = dict(zip(kernel.arg_names, [*types, *("constexpr" for _ in rest)], strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(pointers)}
    options = {"num_warps": source.plan.warps, "debug": "dev.check(" in source.text, "sanitize_overflow": False}
    return triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)


def launcher(source: Source, device: int) -> Callable:
    """torch's launcher takes less time than Triton's, and needs no C compiler, as that of Triton 3.6 does."""
    major, minor = torch.cuda.get_device_capability(device)
    warps, launch = source.plan.warps, torch._C._StaticCudaLauncher._launch_kernel

    @functools.cache
    def loaded(wide: bool) -> tuple[int, int, str]:
        with torch.cuda.device(device):
            binary = compile_kernel(source, GPUTarget("cuda", 10 * major + minor, 32), wide)
            path = next(path for name, path in binary.metadata_group.items() if name.endswith(".cubin"))
            name, shared = binary.metadata.name, binary.metadata.shared
            # (function, registers, spills), after a module from torch 2.15 on
            function = torch._C._StaticCudaLauncher._load_kernel(path, name, shared, device)[-3]
        sizes = ("l" if wide else "i") * len(source.symbols)
        return function, shared, "O" * len(source.arguments) + sizes + "OO"

    function, shared, kinds = loaded(False)

    def static(stream, x, y, *arguments):
        launch(function, x, y, 1, warps, shared, kinds, (*arguments, None, None), stream)  # no scratch memory

    def dynamic(stream, x, y, *arguments):  # the last argument: whether sizes or indices need 64 bits
        chosen, memory, types = loaded(arguments[-1])
        launch(chosen, x, y, 1, warps, memory, types, (*arguments[:-1], None, None), stream)

    return dynamic if source.symbols else static


# ---------------------------------------------------------------------------------------------- calls of torch's
def as_expected(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A library's result with the strides that kernels were written for; a copy where they differ."""
    if not tensor.numel() or same_strides(tensor.shape, tensor.stride(), stride):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory that begins at a multiple of 16 bytes, which vectorized loads need."""
    size = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return torch.as_strided(torch.as_strided(tensor, (size,), (1,)).clone(), tensor.shape, tensor.stride(), 0)


def tuple_text(items) -> str:
    return "(" + "".join(f"{each}, " for each in items) + ")"


def dense(node: Node) -> bool:
    """Whether its strides leave no gaps: it can take the memory of another dense tensor of its size."""
    pairs = [(stride, size) for stride, size in zip(node.memory_strides, node.shape, strict=True) if size != 1]
    if not all(isinstance(each, int) for pair in pairs for each in pair):
        return node.is_row_major
    strides, sizes = zip(*sorted(pairs), strict=True) if pairs else ((), ())
    return list(strides) == row_major(sizes[::-1])[::-1]


def with_targets(nodes) -> list[Node]:
    """These, and the memory that they overwrite."""
    nodes = [each for each in nodes if isinstance(each, Node)]
    return nodes + [each.target for each in nodes if each.target is not None]


class Wrapper:
    """Writes the function that runs a graph; `source` is its text."""

    def __init__(self, fusion: Fusion, sources: dict[Kernel, Source]) -> None:
        self.fusion, self.sources, self.outputs = fusion, sources, fusion.lowered.outputs
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []
        self.free: list[tuple[Node, str]] = []
        self.globals: dict = {
            "torch": torch, "assert_size_stride": _guards.assert_size_stride, "view": _guards._reinterpret_tensor,
            "aligned": aligned, "as_expected": as_expected, "device": torch.device,
            # In sizes, as sympy and torch's functions for it are written.
            "Max": max, "Min": min, "Mod": operator.mod, "PythonMod": operator.mod, "ToFloat": float,
            "FloatTrueDiv": operator.truediv, "IntTrueDiv": operator.truediv, "TruncToInt": int,
            "FloorToInt": math.floor, "CeilToInt": math.ceil, "RoundToInt": round,
        }  # fmt: skip
        self.inputs(fusion.lowered.inputs)
        dying, shared = self.lifetimes()
        for i, step in enumerate(fusion.steps):
            self.kernel(step) if isinstance(step, Kernel) else self.extern(step)
            for node in dying[i]:
                if self.names.get(node, "").startswith("buf") and node not in shared:
                    self.free.append((node, self.names[node]))
                elif node in self.names:
                    self.lines.append(f"del {self.names[node]}")
        self.lines.append(f"return {tuple_text(map(self.argument, self.outputs))}")
        self.source = "\n    ".join(["def call(args):", *self.lines]) + "\n"

    def lifetimes(self) -> tuple[dict[int, list[Node]], set[Node]]:
        """(what is used by step i and no later one, what eager may have returned a view of)."""
        lasting = with_targets(each.base for each in self.outputs if isinstance(each, Node))
        last, shared, dying = {}, set(), defaultdict(list)
        for i, step in enumerate(self.fusion.steps):
            read, made = reads_of(step), step.stored if isinstance(step, Kernel) else made_by(step)
            last |= dict.fromkeys(with_targets([*read, *made]), i)
            if isinstance(step, Extern) and not step.library:
                shared |= set(with_targets(read))
        for node, i in last.items():
            dying[i] += [node] if node not in lasting else []
        return dying, shared

    def inputs(self, inputs) -> None:
        named = {f"arg{i}": each for i, each in enumerate(inputs)}
        self.lines += [f"{tuple_text(named)} = args"] if named else []
        self.lines.append("args.clear()")
        written = {root.target for kernel in self.fusion.kernels for root in kernel.roots}
        read, symbols = written.union(*(kernel.reads for kernel in self.fusion.kernels)), {}
        symbols |= {each: name for name, each in named.items() if isinstance(each, sympy.Symbol)}
        self.names |= {each: name for name, each in named.items() if isinstance(each, Node)}
        for each, name in self.names.items():
            for axis, size in enumerate(each.shape):
                if isinstance(size, sympy.Symbol):
                    symbols.setdefault(size, f"{name}.shape[{axis}]")
        self.lines += [f"{symbol} = {text}" for symbol, text in symbols.items()]
        for each, name in self.names.items():
            if each in read and each.strides is not None:
                self.lines.append(f"assert_size_stride({name}, {tuple_text(each.shape)}, {tuple_text(each.strides)})")
                if not INTERPRETED and each in written:  # a copy would lose what is written
                    why = "'triton_compiler: an unaligned input is mutated'"
                    self.lines.append(f"assert {name}.data_ptr() % 16 == 0, {why}")
                elif not INTERPRETED:
                    self.lines.append(f"if {name}.data_ptr() & 15: {name} = aligned({name})")
        if not INTERPRETED:
            self.lines.append(f"stream = torch._C._cuda_getCurrentRawStream({torch.cuda.current_device()})")

    def argument(self, value) -> str:
        """An expression for a node, a view of one, a size, or any other argument."""
        if isinstance(value, View):
            base, strides, offset = strided_view(value)
            return f"view({self.name(base)}, {tuple_text(value.shape)}, {tuple_text(strides)}, {offset})"
        if isinstance(value, Node):
            return self.name(value)
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            inside = tuple_text(map(self.argument, value))
            return f"list({inside})" if isinstance(value, list) else inside
        if value is None or isinstance(value, (bool, int, str, sympy.Expr)):
            return str(value) if isinstance(value, sympy.Expr) else repr(value)
        return self.constant(value)

    def name(self, node: Node) -> str:
        return self.names[node.target or node]

    def constant(self, value, kind: str = "const") -> str:
        name = f"{kind}{len(self.globals)}"
        self.globals[name] = value
        return name

    def allocate(self, node: Node) -> None:
        """Memory of its own: of a dead buffer of the same size where there is one."""
        name, shape, strides = f"buf{len(self.names)}", tuple_text(node.shape), tuple_text(node.memory_strides)
        self.names[node] = name
        for dead, old in self.free if dense(node) else ():
            if (dead.dtype, dead.device, dead.elements) == (node.dtype, node.device, node.elements) and dense(dead):
                self.free.remove((dead, old))
                self.lines.append(f"{name} = view({old}, {shape}, {strides}); del {old}")
                return
        empty, dtype = f"empty_{node.device.type}", str(node.dtype).replace(".", "_")
        self.globals |= {empty: getattr(_guards, f"_empty_strided_{node.device.type}"), dtype: node.dtype}
        self.lines.append(f"{name} = {empty}({shape}, {strides}, {dtype})")

    def kernel(self, kernel: Kernel) -> None:
        source = self.sources[kernel]
        for root in kernel.stored:
            if root.target is None:
                self.allocate(root)
        arguments = [self.name(node) for node, _ in source.arguments] + source.symbols
        if source.symbols:
            sizes = [str(extent) for extent in source.plan.extents if not isinstance(extent, int)] + source.symbols
            arguments.append(f"max(0, {', '.join(sizes)}) > {WIDE}")
        kernel.name = self.constant(build(source), "kernel")
        x, y = source.plan.grid
        self.lines.append(f"{kernel.name}({'None' if INTERPRETED else 'stream'}, {x}, {y}, {', '.join(arguments)})")

    def extern(self, call: Extern) -> None:
        arguments = [self.argument(each) for each in call.args]
        arguments += [f"{key}={self.argument(each)}" for key, each in call.kwargs.items()]
        result, target = f"res{len(self.globals)}", self.constant(FAST.get(call.target, call.target), "op")
        self.lines.append(f"{result} = {target}({', '.join(arguments)})")
        for path, node in call.outputs:
            place = result + "".join(f"[{i}]" for i in path)
            if isinstance(node, sympy.Symbol):
                self.lines.append(f"{node} = {place}")
            if not isinstance(node, Node):
                continue
            name = self.names[node] = f"ext{len(self.names)}"
            if node.strides is None or node.device.type not in ("cpu", "cuda"):
                self.lines.append(f"{name} = {place}")
                continue
            strides = tuple_text(node.strides)
            # cuDNN's attention returns no logarithms unless it is asked for them; the trace has a tensor.
            as_traced = f"{place} is None or {place}.stride() == {strides}"
            self.lines.append(f"{name} = {place} if {as_traced} else as_expected({place}, {strides})")
            if not INTERPRETED and not call.library:
                self.lines.append(f"if {name}.data_ptr() & 15: {name} = aligned({name})")
        self.lines.append(f"del {result}")

    def finish(self) -> Callable:
        """Waits for the kernels; the function."""
        self.globals |= {name: each.result() for name, each in self.globals.items() if isinstance(each, Future)}
        exec(compile(self.source, "<triton_compiler>", "exec"), self.globals)
        return self.globals["call"]
