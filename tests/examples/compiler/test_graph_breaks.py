"""graph_breaks: each cause breaks at its line, each fix is one graph and right, bad input is told."""

import io
import logging
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

from examples.compiler import graph_breaks
from examples.compiler.graph_breaks import (
    ALL,
    CAUSES,
    REST,
    SPLIT,
    Form,
    budget,
    catches_nothing_that_breaks,
    find_breaks,
    fullgraph_says,
    generates_inside,
    reads_items_in_a_generator,
    reference,
    streams,
)

# What the line of each break holds, and the least that it costs.
EXPECTED = {
    "print": ('print("temperature", temperature)', {SPLIT}),
    ".item()": ("temperature.item()", {SPLIT}),
    "if on a tensor": ("if temperature > 0:", {SPLIT}),
    "unsupported call": ("json.loads(SETTINGS)", {SPLIT}),
    "try/except": ("1 / temperature.item()", {REST, ALL}),
    "generator": ("for divisor in divisors:", {REST, ALL}),
}
FIXES = [(cause, fix) for cause, each in CAUSES.items() for fix in each.fixes]


@pytest.fixture
def h() -> Harness:
    return Harness("graph_breaks", Needs.parse("torch"), console=Console(quiet=True), timing=False)


@pytest.fixture(autouse=True)
def state_as_found():
    with settings_kept("a test", 0):
        yield


def layer(h: Harness, rows: int = 8, width: int = 64) -> tuple[torch.Tensor, ...]:
    dtype = torch.bfloat16 if h.machine.mode == "gpu" else torch.float32
    scale = (h.randn(width).abs() + 0.5).to(dtype)
    return h.randn(rows, width, dtype=dtype), scale, torch.tensor(1.7, dtype=dtype, device=h.device)


def test_the_demo_and_its_facts(h, capfd):
    with settings_kept("graph_breaks", 0):
        graph_breaks.demo(h)
    said = capfd.readouterr()
    assert "Graph break from" not in said.out + said.err  # torch's own warning is shown as a fact, or not at all
    facts = h.record.facts
    for cause, (text, lost) in EXPECTED.items():
        row = facts[cause]
        assert row["breaks"] == 1
        assert text in row["line"]
        assert row["lost"] in lost
        assert set(row["graphs after"].values()) == {1}
        assert set(row["breaks after"].values()) == {0}
    assert facts["lines printed by two compiled calls"] == {
        "broken": 2, "torch.compiler.is_compiling": 0, "reorderable_logging_functions": 2,
    }  # fmt: skip
    api = facts["claim is-compiling-api"]
    assert api["torch.compiler.is_compiling()"] == "eager False, compiled True"
    assert "RuntimeError" in api["with torch._dynamo.disable()"]
    assert api["@torch.compiler.disable"] == "2 graphs, 1 break"
    assert facts["a generator function, compiled itself"] == {"graphs": 0, "messages": 0}
    assert len(h.record.checks) == len(FIXES)
    (table,) = h.record.comparisons
    assert {row["variant"] for row in table["rows"]} >= {f"torch.compile, {cause}" for cause in CAUSES}
    (written,) = (value for name, value in facts.items() if name.startswith("kernels that Inductor writes"))
    assert written["one graph"] == 1
    assert written["print"] == written[".item()"] == written["if on a tensor"] == 2


def test_nothing_but_the_calls_under_a_profiler():
    h = Harness("graph_breaks", Needs.parse("torch"), console=Console(quiet=True), profile=True)
    graph_breaks.demo(h)
    assert not h.record.facts
    assert not h.record.checks


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause(h, cause):
    text, lost = EXPECTED[cause]
    found = CAUSES[cause].broken.found(*layer(h))
    (each,) = found.breaks
    assert Path(each.file).name == "graph_breaks.py"
    assert text in each.source
    assert each.lost in lost
    assert found.graphs == 2 if each.lost == SPLIT else found.graphs < 2
    assert CAUSES[cause].broken.found(*layer(h)) == found  # and again, not suppressed as known


@pytest.mark.parametrize(("cause", "fix"), FIXES)
def test_each_fix(h, cause, fix):
    form, broken = CAUSES[cause].fixes[fix], CAUSES[cause].broken
    inputs = layer(h)
    found = form.found(*inputs)
    assert (found.graphs, found.breaks) == (1, [])
    assert found.operations >= broken.found(*inputs).operations
    with form.settings():
        for each in (inputs, layer(h, 3, 5)):
            fn = form.compiled(backend="aot_eager", fullgraph=True)
            h.check(fn, reference, *each, what=fix, poison=False, **budget(each[0].dtype))


@pytest.mark.parametrize("cause", CAUSES)
def test_fullgraph_names_the_line(h, cause):
    inputs, broken = layer(h), CAUSES[cause].broken
    said = fullgraph_says(broken, *inputs)
    if cause in (".item()", "try/except"):
        assert said == "compiles"  # fullgraph=True captures scalars
    else:
        (each,) = broken.found(*inputs).breaks
        assert said.startswith(f"Unsupported: {each.reason}")
        assert said.endswith(f"line {each.line}")


def test_what_does_not_break(h):
    for fn in (catches_nothing_that_breaks, generates_inside):
        found = find_breaks(fn, *layer(h))
        assert (found.graphs, found.breaks) == (1, [])
    (each,) = find_breaks(reads_items_in_a_generator, *layer(h)).breaks
    assert each.lost in (REST, ALL)


@given(rows=st.integers(1, 9), width=st.integers(1, 40), temperature=st.sampled_from([0.25, 1.0, 1.7, 100.0]))
def test_every_way_to_write_it_is_the_same_layer(rows, width, temperature):
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True))
    x, scale = h.randn(rows, width), h.randn(width).abs() + 0.5
    inputs = (x, scale, torch.tensor(temperature, device=h.device))
    for cause in CAUSES.values():
        for form in (cause.broken, *cause.fixes.values()):
            with redirect_stdout(io.StringIO()):
                got = form.fn(*inputs, *form.extra(inputs[-1]))
            torch.testing.assert_close(got.double(), reference(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["torch.where", "torch.cond"])
def test_the_fixes_of_a_branch_take_both_ways(h, name):
    x, scale, _ = layer(h)
    fn = CAUSES["if on a tensor"].fixes[name].compiled(backend="aot_eager", fullgraph=True)
    for temperature in (1.5, -1.5, 0.0):  # not above 0: left as it is
        t = x.new_tensor(temperature)
        want = reference(x, scale, t if temperature > 0 else torch.ones_like(t))
        h.check(fn, lambda *_, want=want: want, x, scale, t, what=name, poison=False, **budget(x.dtype))


def test_the_fix_of_the_try_survives_the_zero(h):
    x, scale, t = layer(h)
    fn = CAUSES["try/except"].fixes["torch.where"].compiled(backend="aot_eager", fullgraph=True)
    want = reference(x, scale, torch.ones_like(t))
    h.check(fn, lambda *_: want, x, scale, torch.zeros_like(t), what="temperature 0", poison=False, **budget(x.dtype))


def test_a_break_in_a_library_is_told_at_the_users_line():
    def logs_it(x):
        y = x + 1
        logging.getLogger("somewhere").info("here")
        return y + 1

    found = find_breaks(logs_it, torch.zeros(3))
    assert {each.source for each in found.breaks} == {'logging.getLogger("somewhere").info("here")'}


def test_two_breaks_and_a_module():
    class Noisy(torch.nn.Module):
        def forward(self, x):
            print("one")
            x = x + 1
            print("two")
            return x * 2

    with redirect_stdout(io.StringIO()):
        found = find_breaks(Noisy(), torch.zeros(3))
    assert [each.source for each in found.breaks] == ['print("one")', 'print("two")']
    assert [each.lost for each in found.breaks] == [SPLIT, SPLIT]
    assert found.operations == 2
    assert str(found.breaks[0]).startswith("test_graph_breaks.py:")


def test_no_break():
    found = find_breaks(torch.nn.Linear(3, 3), torch.zeros(2, 3))
    assert (found.graphs, found.operations, found.breaks) == (1, 1, [])


def test_bad_input():
    with pytest.raises(TypeError, match="find_breaks: got int, which cannot be called"):
        find_breaks(3)
    for compiled in (torch.compile(lambda x: x), torch.compile(torch.nn.Linear(3, 3))):
        with pytest.raises(ValueError, match="find_breaks: fn is compiled already; pass the function or module"):
            find_breaks(compiled, torch.zeros(3))
    with pytest.raises(ValueError, match="find_breaks: streams is a generator function"):
        find_breaks(streams, torch.zeros(3))


def test_what_the_function_raises_is_passed_on():
    def refuses(x):
        raise ValueError(f"rank {x.ndim}")

    with pytest.raises(Exception, match="rank 1"):
        find_breaks(refuses, torch.zeros(3))


def test_settings_of_a_form_end_with_it(h):
    before = set(torch._dynamo.config.reorderable_logging_functions)
    form = Form(graph_breaks.prints, config={"reorderable_logging_functions": {print}})
    assert form.found(*layer(h)).graphs == 1
    assert set(torch._dynamo.config.reorderable_logging_functions) == before


@pytest.mark.gpu
def test_one_graph_is_faster_than_two_on_the_gpu():
    """Where memory is the limit: a break writes and reads what one kernel keeps in registers (2 passes against 5)."""
    h = Harness("graph_breaks", Needs.parse("torch"), console=Console(quiet=True))
    x, scale, t = layer(h, 8192, 8192)
    graph_breaks.cost(h, x, scale, t, fixes=False)
    ms = {row["variant"]: row["ms"] for row in h.record.comparisons[0]["rows"]}
    one = ms["torch.compile, one graph"]
    assert ms["torch eager"] > 2 * one
    for cause in (".item()", "if on a tensor", "try/except", "generator"):
        assert ms[f"torch.compile, {cause}"] > 1.3 * one
