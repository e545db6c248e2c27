"""Study of custom operators: the graph that each makes for the compiler, and the passes over memory that remain."""

from __future__ import annotations

from collections.abc import Callable

from harness import Harness

import torch

from examples.triton.custom_op import silu_mul_backward, silu_mul_opaque, silu_mul_traced
from examples.triton.custom_op_layer import layer, layer_inputs


def graph_of(fn, *inputs) -> list[str]:
    """The operations of the one graph that a compiler's backend is given for fn, less views and arithmetic on sizes.

    Nothing is launched: the backend made here hands out empty results.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    names = []

    def backend(graph: torch.fx.GraphModule, _) -> Callable:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        (results,) = graph.graph.output_node().args
        fakes = [node.meta["val"] for node in results]
        return make_boxed_func(
            lambda *_: [torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device=f.device) for f in fakes]
        )

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(fn, backend=aot_autograd(fw_compiler=backend), fullgraph=True, dynamic=False)(*inputs)
    torch.compiler.reset()
    return [name for name in names if not name.startswith(("<built-in", "aten.split", "aten.slice"))]


def study(h: Harness) -> None:
    x = h.meta(1 << 20)
    h.codegen(silu_mul_backward, x, x, x, find={90: ("ld.global.v4", "st.global.v4")})
    if h.profile:
        return
    operators = {"custom_op": silu_mul_opaque} | ({} if h.interpreted else {"triton_op": silu_mul_traced})
    for name, op in operators.items():  # to trace a triton_op is to compile its kernel
        h.fact(f"{name}: graph for the compiler", graph_of(layer(op), *layer_inputs(h, 16, 64)))
    if passes := {
        row.variant: round(3 / row.of_ceiling, 1) for table in h.lesson for row in table.rows if row.of_ceiling
    }:
        h.table("passes over the result that a copy makes in the same time; 3 must be", {"passes": passes})
