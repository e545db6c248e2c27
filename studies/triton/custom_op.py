"""Study of custom operators: what torch says of each, the graph it makes for the compiler, and the passes that remain.

opcheck holds each operator's schema, fake and gradient to what it computes; one graph without breaks, compiled for any
number of rows, must serve three batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable

from harness import Harness

import torch

from examples.triton.custom_op import (
    layer,
    layer_budget,
    layer_inputs,
    layer_reference,
    silu_mul_backward,
    silu_mul_opaque,
    silu_mul_traced,
)


def graph_of(fn, *inputs) -> list[str]:
    """The operations of the graph that a compiler's backend is given for fn, less views and arithmetic on sizes.

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


def graphs_for(h: Harness, name: str, fn, backend: str, cases: list) -> int:
    """How many graphs are compiled for these cases, whose first and last tensors have any number of rows."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(fn, backend=counter, fullgraph=True)
    for case in cases:
        for tensor in (case[0], case[-1]):
            torch._dynamo.mark_dynamic(tensor, 0)
        what = f"{name} compiled for any rows: {len(case[0])}"
        h.check(compiled, layer_reference, *case, what=what, poison=False, **layer_budget(case[0].dtype))
    torch.compiler.reset()
    return counter.frame_count


def compiler_facts(h: Harness, name: str, op) -> None:
    gate, up = (h.randn(5, 7).requires_grad_() for _ in range(2))
    for inputs in ((gate, up), (gate.t(), up.t())):
        checks = torch.library.opcheck(op, inputs)  # raises at the first that fails
    h.fact(f"{name}: opcheck", checks)
    small = layer_inputs(h, 16, 64)
    explained = torch._dynamo.explain(layer(op))(*small)
    h.fact(f"{name}: graphs and breaks", [explained.graph_count, explained.graph_break_count])
    h.fact(f"{name}: graph for the compiler", graph_of(layer(op), *small))
    cases, backend = [layer_inputs(h, rows, 64) for rows in (16, 48, 7)], "aot_eager" if h.interpreted else "inductor"
    h.fact(f"{name}: graphs for 3 batch sizes", graphs_for(h, name, layer(op), backend, cases))


def study(h: Harness) -> None:
    x = h.meta(1 << 20)
    h.codegen(silu_mul_backward, x, x, x, find={90: ("ld.global.v4", "st.global.v4")})
    if h.profile:
        return
    compiler_facts(h, "custom_op", silu_mul_opaque)
    if h.interpreted:
        h.say("a triton_op is not compiled here: to trace it is to compile its kernel, which is interpreted")
        return
    compiler_facts(h, "triton_op", silu_mul_traced)
    if passes := {
        row.variant: round(3 / row.of_ceiling, 1) for table in h.lesson for row in table.rows if row.of_ceiling
    }:
        h.say(f"in its time a copy makes this many passes over the result, where 3 must be: {passes}")
