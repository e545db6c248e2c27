"""graph_breaks: each cause breaks at its line, each mended layer is one graph and right."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

from harness.session import LONGEST_ANSWER

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from companion.compare import RENAMED
from compile_inspect import ALL, REST, SPLIT, find_breaks
from examples.common.shown import NotShown
from examples.compiler import graph_breaks
from examples.compiler.graph_breaks import ONE_GRAPH, PAIRS, TIMED, answer, budget, operands, reference
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
    assert all(text in rows[cause]["line"] for cause, (text, _) in EXPECTED.items())
    assert len(record.checks) == len(PAIRS)
    assert all(row["mended"] >= row["operations captured"] for row in rows.values())


@pytest.mark.parametrize("cause", [".item()", ".item() inside try"])  # fullgraph=True compiles both
def test_a_mended_layer_that_breaks_fails(cause, monkeypatch):
    broken, _ = PAIRS[cause]
    monkeypatch.setattr(graph_breaks, "PAIRS", {cause: (broken, broken)})
    with pytest.raises(NotShown, match=rf"{re.escape(cause)}, mended, breaks: graph_breaks.py:\d+: .*\.item\(\)"):
        ran(graph_breaks.demo, finish=False)


def test_the_answer_fits():
    class Table:
        def __init__(self, case, dearest):
            self.case, self.dearest = case, dearest

        def over(self, name, other):
            assert other == ONE_GRAPH
            return 14.5 if name == f"torch.compile, {self.dearest}" else 11.5

    rows = {cause: {"left to eager": SPLIT} for cause in PAIRS}
    tables = [Table("32x1024 bfloat16", ".item() inside try"), Table("8192x8192 bfloat16", "generator argument")]
    first = "A break multiplies a call's time by 11.5 to 14.5 at 32x1024 bfloat16 (most: .item() inside try), 11.5 to "
    assert answer(rows, tables).startswith(first)
    assert "leave" not in answer(rows, tables)
    for cause in (".item() inside try", "generator argument"):
        rows[cause]["left to eager"] = REST
    said = answer(rows, tables)
    assert len(said) <= LONGEST_ANSWER
    assert said.endswith(". .item() inside try and generator argument leave the rest of the call to eager.")
    assert "torch.compile, print" not in TIMED
    assert set(RENAMED["graph_breaks"]["variants"].values()) <= set(TIMED)


@pytest.mark.parametrize("cause", PAIRS)
def test_each_cause(h, cause):
    text, lost = EXPECTED[cause]
    broken, mended = PAIRS[cause]
    inputs = operands(h, 8, 64)
    found = broken.breaks(*inputs)
    (each,) = found.breaks
    assert Path(each.file).name == "graph_breaks.py"
    assert text in each.source
    assert each.lost in lost
    assert found.graphs == 2 if each.lost == SPLIT else found.graphs < 2
    assert broken.breaks(*inputs) == found  # and again, not suppressed as known
    after = mended.breaks(*inputs)
    assert (after.graphs, after.breaks) == (1, [])
    assert after.operations >= found.operations


def test_every_break_is_found():
    def noisy(x):
        print("one")
        x = x + 1
        print("two")
        return x * 2

    with redirect_stdout(io.StringIO()):
        found = find_breaks(noisy, torch.zeros(3))
    assert [each.source for each in found.breaks] == ['print("one")', 'print("two")']
    assert [each.lost for each in found.breaks] == [SPLIT, SPLIT]


@given(rows=st.integers(1, 9), width=st.integers(1, 40), temperature=st.sampled_from([0.25, 1.0, 1.7, 100.0]))
def test_every_way_to_write_it_is_the_same_layer(rows, width, temperature):
    h = quiet()
    x, scale = h.randn(rows, width), h.randn(width).abs() + 0.5
    inputs = (x, scale, torch.tensor(temperature, device=h.device))
    for pair in PAIRS.values():
        for layer in pair:
            with redirect_stdout(io.StringIO()):
                got = layer.fn(*inputs, *layer.extra(inputs[-1]))
            torch.testing.assert_close(got.double(), reference(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("cause", "temperature"), [("if on a tensor", -1.5), ("if on a tensor", 0.0), (".item() inside try", 0.0)]
)
def test_the_other_way_through_the_mended(h, cause, temperature):
    """A temperature that is not divided by: the layer is as at 1."""
    x, scale, t = operands(h, 8, 64)
    fn = PAIRS[cause][1].compiled(backend="aot_eager", fullgraph=True)
    want = reference(x, scale, torch.ones_like(t))
    h.check(fn, lambda *_: want, x, scale, t.new_tensor(temperature), what=cause, poison=False, **budget(x.dtype))


@pytest.mark.parametrize("cause", ["if on a tensor", ".item() inside try"])
def test_the_mended_trains_where_nothing_is_divided_by(h, cause):
    x, scale, t = operands(h, 8, 64)
    inputs = [each.requires_grad_() for each in (x, scale, torch.zeros_like(t))]
    fn = PAIRS[cause][1].fn
    got = torch.autograd.grad(fn(*inputs).sum(), inputs)
    want = torch.autograd.grad(reference(x, scale, torch.ones_like(t)).sum(), inputs[:2])
    assert got[2] == 0
    for mine, theirs in zip(got, want, strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cause", PAIRS)
def test_the_mended_keeps_the_dtype(h, cause, dtype):
    inputs = [each.to(dtype) for each in operands(h, 4, 8)]
    with redirect_stdout(io.StringIO()):
        assert PAIRS[cause][1].fn(*inputs, *PAIRS[cause][1].extra(inputs[-1])).dtype == dtype
