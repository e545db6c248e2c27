"""studies/compiler/graph_breaks: the further fixes, what fullgraph and explain say, what does not break."""

import re

import pytest
import torch

from compile_inspect import ALL
from examples.compiler.graph_breaks import Layer, budget, operands, reference
from studies.compiler import graph_breaks
from studies.compiler.graph_breaks import FIXES, branches_in_the_graph, study
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
    for cause, row in facts["what torch's own tools say"].items():
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
