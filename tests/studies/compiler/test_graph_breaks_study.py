"""studies/compiler/graph_breaks: the further fixes, what fullgraph and explain say, what does not break."""

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from rich.console import Console

from compile_inspect import ALL, REST, find_breaks
from examples.compiler.graph_breaks import PAIRS, Layer, budget, operands, prints, reference
from studies.compiler.graph_breaks import (
    FIXES,
    branches_in_the_graph,
    catches_nothing_that_breaks,
    fullgraph_says,
    generates_inside,
    reads_items_in_a_generator,
    settings,
    study,
)
from studies.compiler.graph_breaks_cost import study as study_of_cost


@pytest.fixture
def h() -> Harness:
    return Harness("graph_breaks", Needs.parse("torch"), console=Console(quiet=True), timing=False, lesson=[])


@pytest.fixture(autouse=True)
def state_as_found():
    with settings_kept("a test", 0):
        yield


def test_study(h):
    study(h)
    study_of_cost(h)
    facts = h.record.facts
    assert all(facts[f"{cause}: {fix}"] == {"graphs": 1, "breaks": 0} for cause, each in FIXES.items() for fix in each)
    assert facts["lines printed by two compiled calls"] == {
        "broken": 2, "torch.compiler.is_compiling": 0, "reorderable_logging_functions": 2,
    }  # fmt: skip
    api = facts["claim is-compiling-api"]
    assert api["torch.compiler.is_compiling()"] == "eager False, compiled True"
    assert "RuntimeError" in api["with torch._dynamo.disable()"]
    assert api["@torch.compiler.disable"] == "2 graphs, 1 break"
    assert facts["a generator function, compiled itself"] == {"graphs": 0, "messages": 0}
    (written,) = (value for name, value in facts.items() if name.startswith("kernels that Inductor writes"))
    assert written["one graph"] == 1
    assert written["print"] == written[".item()"] == written["if on a tensor"] == 2


@pytest.mark.parametrize("cause", PAIRS)
def test_fullgraph_names_the_line(h, cause):
    inputs, (broken, _) = operands(h, 8, 64), PAIRS[cause]
    message = fullgraph_says(broken, *inputs)
    if cause in (".item()", "try/except"):
        assert message == "compiles"  # fullgraph=True captures scalars
    else:
        (each,) = broken.breaks(*inputs).breaks
        assert message.startswith(f"Unsupported: {each.reason}")
        assert message.endswith(f"line {each.line}")


def test_what_does_not_break(h):
    for fn in (catches_nothing_that_breaks, generates_inside):
        found = find_breaks(fn, *operands(h, 8, 64))
        assert (found.graphs, found.breaks) == (1, [])
    (each,) = find_breaks(reads_items_in_a_generator, *operands(h, 8, 64)).breaks
    assert each.lost in (REST, ALL)


def test_cond_takes_both_branches(h):
    x, scale, _ = operands(h, 8, 64)
    fn = Layer(branches_in_the_graph).compiled(backend="aot_eager", fullgraph=True)
    for temperature in (1.5, -1.5, 0.0):
        t = x.new_tensor(temperature)
        want = reference(x, scale, t if temperature > 0 else torch.ones_like(t))
        h.check(fn, lambda *_, want=want: want, x, scale, t, what="cond", poison=False, **budget(x.dtype))


def test_settings_end_with_the_block(h):
    before = set(torch._dynamo.config.reorderable_logging_functions)
    with settings({"reorderable_logging_functions": {print}}):
        assert Layer(prints).breaks(*operands(h, 8, 64)).graphs == 1
    assert set(torch._dynamo.config.reorderable_logging_functions) == before
