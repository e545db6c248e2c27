"""studies/compiler/graph_breaks: what torch's own tools say of each cause, and the layer with torch.cond."""

import re

import pytest
import torch

from examples.compiler.graph_breaks import Layer, budget, operands, reference
from studies.compiler.graph_breaks import branches_in_the_graph, show_tools


def test_what_the_tools_say(h):
    show_tools(h, *operands(h, 8, 64))
    for cause, row in h.record.facts["what torch's own tools say"].items():
        # explain does not count what Dynamo cannot resume from, and fullgraph=True captures scalars
        unresumed = cause in (".item() inside try", "generator argument")
        assert row["torch._dynamo.explain"].startswith("0 breaks" if unresumed else "1 breaks")
        compiles = cause in (".item()", ".item() inside try")
        wanted = "compiles" if compiles else rf"Unsupported: {re.escape(row['reason'])}.*, line \d+"
        assert re.fullmatch(wanted, row["fullgraph=True"])


@pytest.mark.parametrize("temperature", [-1.5, 0.0])
def test_cond_takes_both_branches(h, temperature):
    x, scale, t = operands(h, 8, 64)
    fn = Layer(branches_in_the_graph).compiled(backend="aot_eager", fullgraph=True)
    want = reference(x, scale, torch.ones_like(t))
    h.check(fn, lambda *_: want, x, scale, t.new_tensor(temperature), what="cond", poison=False, **budget(x.dtype))
