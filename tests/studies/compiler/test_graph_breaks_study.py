"""studies/compiler/graph_breaks: the further fixes, what fullgraph and explain say, what does not break."""

import pytest
import torch

from compile_inspect import ALL, REST, find_breaks
from examples.compiler.graph_breaks import PAIRS, Layer, budget, operands, reference
from studies.compiler import graph_breaks
from studies.compiler.graph_breaks import (
    FIXES,
    branches_in_the_graph,
    fullgraph_says,
    reads_items_in_a_generator,
    study,
)
from tests.quiet import ran


def test_study(monkeypatch):
    monkeypatch.setattr(graph_breaks, "show_kernels", lambda *_: None)  # six compilations
    facts = ran(study, lesson=[]).record.facts
    assert all(facts[name] == {"graphs": 1, "breaks": 0} for name in FIXES)
    api = facts["claim is-compiling-api"]
    assert api["torch.compiler.is_compiling()"] == "eager False, compiled True"
    assert "RuntimeError" in api["with torch._dynamo.disable()"]
    assert api["@torch.compiler.disable"] == "2 graphs, 1 break"
    for name in ("try/except around a raise", "a generator made inside"):
        assert facts[name] == {"graphs": 1, "breaks": 0, "lost": "nothing"}
    assert facts["print in a loop"] == {"graphs": 0, "breaks": 1, "lost": ALL}
    explained = {cause: row["torch._dynamo.explain"] for cause, row in facts["what torch's own tools say"].items()}
    for cause in PAIRS:  # explain does not count what Dynamo cannot resume from
        unresumed = cause in (".item() inside try", "generator argument")
        assert explained[cause].startswith("0 breaks" if unresumed else "1 breaks")


def test_fullgraph_names_the_line(h):
    inputs = operands(h, 8, 64)
    for cause, (broken, _) in PAIRS.items():
        message = fullgraph_says(broken, *inputs)
        if cause in (".item()", ".item() inside try"):
            assert message == "compiles"  # fullgraph=True captures scalars
        else:
            (each,) = broken.breaks(*inputs).breaks
            assert message.startswith(f"Unsupported: {each.reason}")
            assert message.endswith(f"line {each.line}")
    (each,) = find_breaks(reads_items_in_a_generator, *inputs).breaks
    assert each.lost in (REST, ALL)


@pytest.mark.parametrize("temperature", [-1.5, 0.0])
def test_cond_takes_both_branches(h, temperature):
    x, scale, t = operands(h, 8, 64)
    fn = Layer(branches_in_the_graph).compiled(backend="aot_eager", fullgraph=True)
    want = reference(x, scale, torch.ones_like(t))
    h.check(fn, lambda *_: want, x, scale, t.new_tensor(temperature), what="cond", poison=False, **budget(x.dtype))
