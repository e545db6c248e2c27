"""graph_breaks: each cause breaks at its line, each mended layer is one graph and right."""

import io
from contextlib import redirect_stdout
from pathlib import Path

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from compile_inspect import ALL, REST, SPLIT
from examples.compiler import graph_breaks
from examples.compiler.graph_breaks import ONE_GRAPH, PAIRS, budget, compare, operands, reference

# What the line of each break holds, and the least that it costs.
EXPECTED = {
    "print": ('print("temperature", temperature)', {SPLIT}),
    ".item()": ("temperature.item()", {SPLIT}),
    "if on a tensor": ("if temperature > 0:", {SPLIT}),
    "unsupported call": ("json.loads(SETTINGS)", {SPLIT}),
    "try/except": ("1 / temperature.item()", {REST, ALL}),
    "generator": ("for divisor in divisors:", {REST, ALL}),
}


@pytest.fixture
def h() -> Harness:
    return Harness("graph_breaks", Needs.parse("torch"), console=Console(quiet=True), timing=False)


@pytest.fixture(autouse=True)
def state_as_found():
    with settings_kept("a test", 0):
        yield


def test_the_demo_and_its_facts(h, capfd):
    with settings_kept("graph_breaks", 0):
        graph_breaks.demo(h)
    said = capfd.readouterr()
    assert "Graph break from" not in said.out + said.err  # torch's own warning is shown as a fact, or not at all
    (rows,) = h.record.facts.values()
    for cause, (text, lost) in EXPECTED.items():
        assert text in rows[cause]["line"]
        assert rows[cause]["left to eager"] in lost
    assert len(h.record.checks) == len(PAIRS)
    (table,) = h.record.tables
    assert {row["variant"] for row in table["rows"]} >= {f"torch.compile, {cause}" for cause in PAIRS}


def test_nothing_but_the_calls_under_a_profiler():
    h = Harness("graph_breaks", Needs.parse("torch"), console=Console(quiet=True), profile=True)
    graph_breaks.demo(h)
    assert not any(h.record.facts.values())
    assert not h.record.checks


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
    for size in ((8, 64), (3, 5)):
        inputs, fn = operands(h, *size), mended.compiled(backend="aot_eager", fullgraph=True)
        h.check(fn, reference, *inputs, what=cause, poison=False, **budget(inputs[0].dtype))


@given(rows=st.integers(1, 9), width=st.integers(1, 40), temperature=st.sampled_from([0.25, 1.0, 1.7, 100.0]))
def test_every_way_to_write_it_is_the_same_layer(rows, width, temperature):
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True))
    x, scale = h.randn(rows, width), h.randn(width).abs() + 0.5
    inputs = (x, scale, torch.tensor(temperature, device=h.device))
    for pair in PAIRS.values():
        for layer in pair:
            with redirect_stdout(io.StringIO()):
                got = layer.fn(*inputs, *layer.extra(inputs[-1]))
            torch.testing.assert_close(got.double(), reference(*inputs), rtol=1e-4, atol=1e-4)


def test_the_branch_mended_goes_both_ways(h):
    x, scale, _ = operands(h, 8, 64)
    fn = PAIRS["if on a tensor"][1].compiled(backend="aot_eager", fullgraph=True)
    for temperature in (1.5, -1.5, 0.0):  # not above 0: left as it is
        t = x.new_tensor(temperature)
        want = reference(x, scale, t if temperature > 0 else torch.ones_like(t))
        h.check(fn, lambda *_, want=want: want, x, scale, t, what="where", poison=False, **budget(x.dtype))


def test_the_mended_try_survives_the_zero(h):
    x, scale, t = operands(h, 8, 64)
    fn = PAIRS["try/except"][1].compiled(backend="aot_eager", fullgraph=True)
    want = reference(x, scale, torch.ones_like(t))
    h.check(fn, lambda *_: want, x, scale, torch.zeros_like(t), what="temperature 0", poison=False, **budget(x.dtype))


@pytest.mark.gpu
def test_one_graph_is_faster_than_two_on_the_gpu():
    """Where memory is the limit: a break writes and reads what one kernel keeps in registers (2 passes against 5)."""
    h = Harness("graph_breaks", Needs.parse("torch"), console=Console(quiet=True))
    layers = {cause: broken.compiled() for cause, (broken, _) in PAIRS.items() if cause != "print"}
    table = compare(h, operands(h, 8192, 8192), layers)
    assert table.over("torch eager", ONE_GRAPH) > 2
    for cause in (".item()", "if on a tensor", "try/except", "generator"):
        assert table.over(cause, ONE_GRAPH) > 1.3
