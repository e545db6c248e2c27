"""What these tests share: a function compiled without Dynamo, and compared with eager and with a float64 run."""

from harness.hardware import machine

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map

from triton_compiler import capture, compile_graph
from triton_compiler.capture import CompiledGraph
from triton_compiler.decompose import decompositions

DEVICE = machine().device
capture.STRICT = True


def compiled(fn, *inputs) -> tuple[CompiledGraph, list]:
    """The graph of fn after functionalization and decompositions, and what it returns, as a flat list."""

    def flat(*args):
        return tree_flatten(fn(*args))[0]

    functional = torch.func.functionalize(flat, remove="mutations")
    gm = make_fx(functional, decomposition_table=decompositions(), tracing_mode="fake")(*inputs)
    gm.graph.eliminate_dead_code()  # as AOTAutograd does; on a GPU logsigmoid makes a tensor that nothing reads
    graph = compile_graph(gm)
    return graph, list(graph.call(list(inputs)))


def wide(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def check(fn, *inputs, kernels: int | None = None, fallbacks: tuple = ()) -> CompiledGraph:
    """fn compiled has eager's dtypes, shapes and strides, and its values within the budget of assert_near."""
    graph, got = compiled(fn, *inputs)
    eager = tree_flatten(fn(*inputs))[0]
    exact = tree_flatten(fn(*tree_map(wide, inputs)))[0]
    assert set(graph.lowered.fallbacks) == set(fallbacks), graph.lowered.reasons
    for mine, theirs, true in zip(got, eager, exact, strict=True):
        sizes = [i for i, size in enumerate(theirs.shape) if size != 1]
        assert [mine.stride(i) for i in sizes] == [theirs.stride(i) for i in sizes]
        assert_near(mine, theirs, true)
    if kernels is not None:
        assert len(graph.sources) == kernels, [source.text for source in graph.sources.values()]
    return graph


def assert_near(mine, theirs, true, factor: float = 4.0):
    """Of eager's dtype and shape, and as near to the float64 result as eager, within `factor` and a few roundings."""
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    if not theirs.dtype.is_floating_point:
        assert torch.equal(mine, theirs), (mine, theirs)
        return
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    mine, theirs, true = (torch.where(same, 0.0, each.double()) for each in (mine, theirs, true))
    eps = torch.finfo(torch.float32).eps
    budget = factor * (theirs - true).abs().max().nan_to_num() + 32 * eps * (1 + true.abs()) if mine.numel() else 0
    error = (mine - true).abs()
    assert not mine.numel() or bool((error <= budget).all()), (
        f"error {error.max():.3g}, eager's {(theirs - true).abs().max():.3g}"
    )
