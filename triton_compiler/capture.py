"""Capture: from Dynamo's graph to compiled functions, forward and backward.

Dynamo hands a backend a graph of torch functions and the real inputs. AOTAutograd traces it again, through autograd,
functionalization and our decompositions, to graphs of ATen operations without mutation; the min-cut partitioner splits
forward from backward so that little is saved between them. Each of the two graphs then goes through lowering, fusion,
scheduling and code generation.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import sympy
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from triton_compiler.codegen import Source, generate
from triton_compiler.decompose import channels_last, decompositions, windows
from triton_compiler.device import INTERPRETED
from triton_compiler.fusion import Fusion, Kernel
from triton_compiler.lowering import Lowering
from triton_compiler.runtime import Wrapper
from triton_compiler.schedule import schedule

STRICT = bool(os.environ.get("TRITON_COMPILER_STRICT"))  # an error of this compiler is raised, not warned of
CHANNELS_LAST = not INTERPRETED  # cuDNN's kernels for tensor cores want it


@dataclass
class CompiledGraph:
    """One ATen graph and what became of it: what explain() shows."""

    kind: str  # "forward", "backward" or "inference"
    graph: torch.fx.GraphModule
    lowered: Lowering
    fusion: Fusion
    sources: dict[Kernel, Source]
    wrapper: Wrapper | None = None
    call: Callable | None = None


@dataclass
class Captured:
    """All that was compiled within `recording()`: graphs as Dynamo handed them over, and as they were compiled."""

    dynamo: list[torch.fx.GraphModule] = field(default_factory=list)
    graphs: list[CompiledGraph] = field(default_factory=list)


_recordings: list[Captured] = []


@contextlib.contextmanager
def recording():
    """Within, everything that this backend compiles is kept."""
    captured = Captured()
    _recordings.append(captured)
    try:
        yield captured
    finally:
        _recordings.remove(captured)


def hints_of(gm: torch.fx.GraphModule) -> dict[sympy.Symbol, int]:
    """The size that each symbol had when the graph was traced."""
    hints: dict = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol) and size.node.has_hint():
                hints.setdefault(size.node.expr, size.node.hint)
    return hints


def plan_graph(gm: torch.fx.GraphModule, kind: str = "inference") -> CompiledGraph:
    """An ATen graph, whose nodes have fake tensors in meta["val"], as kernels in Triton's language: needs no GPU."""
    lowered = Lowering(gm)
    fusion = Fusion(lowered, hints_of(gm))
    sources = {kernel: generate(kernel, schedule(kernel, fusion.hint)) for kernel in fusion.kernels}
    return CompiledGraph(kind, gm, lowered, fusion, sources)


def compile_graph(gm: torch.fx.GraphModule, kind: str = "inference") -> CompiledGraph:
    """The same, compiled: `call` takes a list of the graph's inputs and returns its outputs."""
    graph = plan_graph(gm, kind)
    device = graph.lowered.only_device
    with torch.cuda.device(device) if device is not None and device.type == "cuda" else contextlib.nullcontext():
        graph.wrapper = Wrapper(graph.fusion, graph.sources)
        graph.call = graph.wrapper.finish()
    for captured in _recordings:
        captured.graphs.append(graph)
    return graph


def compiler(kind: str) -> Callable:
    """What AOTAutograd calls with a graph of that kind: compiled, or as it is where that fails."""

    def compile_it(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        try:
            graph = compile_graph(gm, kind)
        except Exception as error:
            if STRICT:
                raise
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            warnings.warn(f"triton_compiler: this {kind} graph runs in eager: {reason}", stacklevel=2)
            return make_boxed_func(gm.forward)

        call, device = graph.call, graph.lowered.only_device
        anywhere = device is None or device.type == "cpu"

        def run(args: list):
            if anywhere or torch._C._cuda_getDevice() == device.index:
                return call(args)
            with torch.cuda.device(device):
                return call(args)

        run._boxed_call = True
        return run

    return compile_it


def triton_backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable:
    """The backend: what torch.compile(model, backend=triton_backend) calls with each graph that Dynamo captures."""
    for captured in _recordings:
        captured.dynamo.append(gm)
    windows(gm)
    if CHANNELS_LAST:
        channels_last(gm)
    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=decompositions(),
        keep_inference_input_mutations=True,
    )
    return backend(gm, example_inputs)


def triton_compiler(model: Callable, **options) -> Callable:
    """torch.compile with this backend: a module or function in, the same kind out; options are torch.compile's."""
    return torch.compile(model, backend=triton_backend, **options)
