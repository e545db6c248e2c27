"""graph_breaks: each cause breaks at its line, each mended layer is one graph and right."""

import io
import re
from contextlib import redirect_stdout

from harness.bench import Row, Table

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compile_inspect import ALL, REST, SPLIT
from examples.common.shown import NotShown
from examples.compiler import graph_breaks
from examples.compiler.graph_breaks import EAGER, ONE_GRAPH, PAIRS, budget, operands, reference
from tests.quiet import quiet, ran

# What the line of each break holds, and the least that it costs.
EXPECTED = {
    "print": ('print("temperature", temperature)', {SPLIT}),
    ".item()": ("temperature.item()", {SPLIT}),
    "if on a tensor": ("if temperature > 0:", {SPLIT}),
    ".item() inside try": ("1 / temperature.item()", {REST, ALL}),
    "generator argument": ("for divisor in divisors:", {REST, ALL}),
}


def test_the_demo_and_its_facts(capfd, monkeypatch):
    monkeypatch.setattr(graph_breaks, "compare", lambda *_: None)  # six compilations, which every run of it checks
    record = ran(graph_breaks.demo, finish=False).record
    said = capfd.readouterr()
    assert "Graph break from" not in said.out + said.err  # torch's own warning is shown as a fact, or not at all
    (rows,) = record.facts.values()
    for cause, (text, lost) in EXPECTED.items():
        row = rows[cause]
        assert re.match(rf"graph_breaks\.py:\d+: .*{re.escape(text)}", row["line"])
        assert row["left to eager"] in lost
        assert row["graphs"] == 2 if lost == {SPLIT} else row["graphs"] < 2
        assert row["mended"] >= row["operations captured"]
    assert len(record.checks) == len(PAIRS)


def test_the_answer_has_the_cost_of_an_item_and_of_the_worst_break():
    rows = {cause: {"left to eager": REST if "generator" in cause else SPLIT} for cause in PAIRS}
    ms = {EAGER: 9.0, ONE_GRAPH: 1.0} | {name: 4.0 if "generator" in name else 2.0 for name in graph_breaks.TIMED}
    table = Table("one layer", "32x1024 bfloat16", EAGER, [
        Row(name, False, None, 0.0, ms=each, speedup=9.0 / each, gpu_ms=each) for name, each in ms.items()
    ])  # fmt: skip
    assert graph_breaks.answer(rows, [table]) == (
        "Speed with the break mended, over broken: at 32x1024 .item() 2.00x, generator argument 4.00x (it "
        "leaves the rest to eager)."
    )


def test_a_mended_layer_that_breaks_fails(monkeypatch):
    broken, _ = PAIRS[".item()"]  # which fullgraph=True compiles
    monkeypatch.setattr(graph_breaks, "PAIRS", {".item()": (broken, broken)})
    with pytest.raises(NotShown, match=r"\.item\(\), mended, breaks: graph_breaks.py:\d+: .*\.item\(\)"):
        ran(graph_breaks.demo, finish=False)


@given(rows=st.integers(1, 9), width=st.integers(1, 40), temperature=st.sampled_from([0.25, 1.0, 1.7, 100.0]))
def test_every_way_to_write_it_is_the_same_layer(rows, width, temperature):
    h = quiet()
    inputs = (h.randn(rows, width), h.randn(width).abs() + 0.5, torch.tensor(temperature, device=h.device))
    for pair in PAIRS.values():
        for layer in pair:
            with redirect_stdout(io.StringIO()):
                got = layer.fn(*inputs, *layer.extra(inputs[-1]))
                half = layer.fn(*(x.half() for x in inputs), *layer.extra(inputs[-1].half()))
            torch.testing.assert_close(got.double(), reference(*inputs), rtol=1e-4, atol=1e-4)
            assert half.dtype == torch.float16


@pytest.mark.parametrize(
    ("cause", "temperature"), [("if on a tensor", -1.5), ("if on a tensor", 0.0), (".item() inside try", 0.0)]
)
def test_the_mended_where_nothing_is_divided_by(h, cause, temperature):
    """The layer is as at a temperature of 1, and so are its gradients."""
    x, scale, t = (each.float() for each in operands(h, 8, 64))  # on a GPU they are bfloat16
    mended, one, t = PAIRS[cause][1], torch.ones_like(t), t.new_tensor(temperature)
    fn, want = mended.compiled(backend="aot_eager", fullgraph=True), reference(x, scale, one)
    h.check(fn, lambda *_: want, x, scale, t, what=cause, poison=False, **budget(x.dtype))
    inputs = [each.requires_grad_() for each in (x, scale, t)]
    got = torch.autograd.grad(mended.fn(*inputs).sum(), inputs)
    want = torch.autograd.grad(reference(x, scale, one).sum(), inputs[:2])
    assert got[2] == 0
    for mine, theirs in zip(got, want, strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
