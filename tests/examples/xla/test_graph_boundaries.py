"""Graph boundaries: what each costs in programs and copies, which guard finds it, and that the fixes give the same."""

import os
import re
from pathlib import Path

from harness.catalog import Needs
from harness.process import Child
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
import torch_xla
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from examples.common import xla
from examples.xla import graph_boundaries as example
from examples.xla.graph_boundaries import STEPS, Step, advance, branch, keep, loop, where
from studies.xla import graph_boundaries as study
from studies.xla import graph_boundaries_guards as guards
from studies.xla.graph_boundaries import MOST, TOLERANCE, until


def quiet(**options) -> Harness:
    return Harness("test", Needs.parse("torch_xla>=2.9"), console=Console(quiet=True), timing=False, **options)


def demonstrate() -> dict:
    h, studied = quiet(), quiet(lesson=[])
    with settings_kept("graph_boundaries", seed=0):
        example.demo(h)
        study.study(studied)
        guards.study(studied)
    tables = h.record.tables + studied.record.tables
    assert [len(table["rows"]) for table in tables] == [2] * 8 + [3]
    assert all(row["ms"] is None and row["error"] <= 1 for table in tables for row in table["rows"])
    return h.record.facts | studied.record.facts


@pytest.fixture(scope="module")
def facts():
    return demonstrate()


def test_what_each_boundary_costs(facts):
    n = STEPS
    rows = facts[f"{n} steps with the boundary / without"]
    counted = {
        what: [(row["compiled"][i], row["run"][i], row["fetched"][i]) for i in (0, 1)] for what, row in rows.items()
    }
    selection = counted.pop("boolean index: a mask")
    # From the third on the values are read once at the end of both loops: a run and a copy.
    assert counted == {
        ".item() before the sync: after it": [(2, 2 * n, n), (1, n, n)],
        ".item() after the sync: at the end": [(1, n, n), (2, n + 1, 1)],  # the second program stacks the values
        "print: step closure": [(2, 2 * n + 1, n + 1), (1, n + 1, n + 1)],
        "if: torch.where": [(3, 2 * n + 1, n + 1), (1, n + 1, 1)],
        ".cpu(): on the device": [(2, 2 * n + 1, n + 1), (1, n + 1, 1)],
        "median: kthvalue": [(2, 2 * n + 1, n + 1), (1, n + 1, 1)],
        "bias on the CPU: moved before": [(1, n + 1, 1), (1, n + 1, 1)],
    }
    assert selection[1] == (1, n + 1, 1)
    assert selection[0][1:] == (2 * n + 1, n + 1)
    assert n <= selection[0][0] <= n + 1  # a program for every number of hits
    assert rows["bias on the CPU: moved before"]["sent"] == [n, 0]
    assert rows["boolean index: a mask"]["on the host"] == "aten::nonzero"
    assert rows["median: kthvalue"]["on the host"] == "aten::median"


def test_a_loop_that_ends_by_a_value(facts):
    found = facts["a loop until it converges"]
    needed = found["asked every 1"]["steps needed"]
    assert 4 < needed < MOST
    for every, row in zip((1, 4, 16), found.values(), strict=True):
        reads = -(-needed // every)
        assert row["steps needed"] == needed
        assert (row["steps run"], row["values read"]) == (reads * every, reads)


def test_lines(facts):
    found = {
        name: what for what, row in facts["lines of Python on a tensor that is pending"].items()
        for name in row["lines"].split("; ")
    }  # fmt: skip
    assert set(found) == set(study.lines(torch.ones(2, 2), torch.ones(2, dtype=torch.int64)))
    for name in ("y.shape, len(y), y.dtype", "y.isnan().any()", "F.one_hot(index, 5)", "y[index]"):
        assert found[name] == "only recorded"
    for name in ("print(y)", "if y.isnan().any()", "F.one_hot(index)", "y[: index[0]]", "torch.full((3,), y[0, 0])"):
        assert found[name] == "1 run, 1 read"
    assert found["max(y[0, :3])"] == "2 run, 2 read"
    assert found["y[y > 0] = 0"] == "1 run, 1 read, on the host: nonzero"
    assert found["y.median()"] == "1 run, 1 read, on the host: median"


def test_guards(facts):
    found = facts["torch_xla.compile"]
    full = {name: row["full_graph"] for name, row in found.items() if row["full_graph"] != "passes"}
    assert full == {
        ".item() before the sync": "raises at `return x, size(x).item()`",
        "print": "raises at `print(x[0, :4], file=io.StringIO())`",
        "if": "raises at `if x.abs().max() > LIMIT:`",
        "boolean index": "raises at `return x, x[x > 0].sum() / x.numel()`",
        ".cpu()": "raises at `peak = x.cpu().abs().max().to(x.device)`",
        "median": "raises at `return x - x.median(), size(x)`",
    }
    assert len(found) == 16
    few = {name: row["max_different_graphs=1"] for name, row in found.items()}
    raised = {name for name, told in few.items() if told != "passes"}
    assert raised == {"if", "boolean index"}
    assert all(re.fullmatch(r"raises in step [2-9]", few[name]) for name in raised)


def test_what_torch_xla_says_of_cpu_tensors(facts):
    rows = facts["x is on the XLA device, index and other are on the CPU"]
    told = {what: row["what torch_xla does"] for what, row in rows.items()}
    accepted = {what for what, text in told.items() if text.startswith("accepted: 1 to device")}
    assert accepted == {"x + other", "x[index]", "other + x (in place)"}
    assert told["x @ other"] == "RuntimeError: Expected XLA tensor. Got: torch.FloatTensor"
    assert all("XLA tensor" in text for what, text in told.items() if what not in accepted)


def test_a_second_run_compiles_nothing(facts):
    again = demonstrate()
    name = f"{STEPS} steps with the boundary / without"
    for what, row in again[name].items():
        assert row["compiled"] == [0, 0]
        assert row["run"] == facts[name][what]["run"]
    for name in ("torch_xla.compile", "lines of Python on a tensor that is pending"):
        assert again[name] == facts[name]


def test_profile_runs_the_tables_only():
    h = quiet(profile=True)
    for part in (example.demo, study.study, guards.study):
        part(h)
    assert not any(h.record.facts.values())
    assert not h.record.checks


def test_debug_level_names_the_line():
    """What the docstring says of PT_XLA_DEBUG_LEVEL."""
    with Child(guards.child_looks, env={"PT_XLA_DEBUG_LEVEL": "2"}) as child:
        text = child.output()
    lines = Path(example.__file__).read_text().splitlines()
    function, file, line = xla.frames(text)[0]
    assert (function, Path(file).name) == ("read_early", "graph_boundaries.py")
    assert ".item()" in lines[line - 1]
    assert {"Compilation Cause", "Execution Cause"} <= set(re.findall(r"(?:Compilation|Execution) Cause", text))


def test_amax_without_dim_is_not_used_for_a_reason():
    """torch_xla 2.9 reduces nothing; when this fails, the comment in branch() can go."""
    assert torch.ones(2, 3).to(xla.device()).amax().shape == (2, 3)


@given(st.integers(1, 9), st.integers(1, 4))
def test_until_gives_the_same_however_rarely_it_asks(every, seed):
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(4, 9, generator=generator), torch.randn(9, 9, generator=generator) / 6
    steps, want = 0, x
    while steps < MOST:
        old, want, steps = want, advance(want, w), steps + 1
        if (want - old).abs().max() < TOLERANCE:
            break
    got, needed, reads = until(x.to(xla.device()), w.to(xla.device()), every)
    assert int(needed) == steps < MOST - every
    assert reads == -(-steps // every)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-6)


def test_until_stops_without_converging():
    x, w = torch.ones(2, 3).to(xla.device()), torch.eye(3).to(xla.device())
    _, needed, reads = until(x, w, every=2, tolerance=0.0, most=6)
    assert (int(needed), reads) == (6, 2)


@given(st.floats(0.1, 3), st.integers(1, 4))
def test_where_is_the_branch(gain, steps):
    x, w = torch.randn(5, 7), torch.eye(7) * gain
    xs = [loop(Step(call), x.to(xla.device()), w.to(xla.device()), steps) for call in (branch, where)]
    for a, b in zip(*xs, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, there: loop(Step(keep), x, there), r"loop: tensor 0 is on cpu; move it once, before: \.to\("),
        (lambda x, there: loop(Step(keep), there, x), r"loop: tensor 1 is on cpu"),
        (lambda x, there: loop(Step(keep), there, there, 0), "loop: 0 steps; there is no value to return, pass 1"),
        (lambda x, there: until(there, x, 1), r"until: tensor 1 is on cpu; move it once"),
        (lambda x, there: until(there, there, 0), "until: every=0, most=64; both must be at least 1"),
        (lambda x, there: until(there, there, 1, most=0), "until: every=1, most=0; both must be at least 1"),
    ],
)
def test_bad_input(call, message):
    x = torch.eye(3)
    with pytest.raises(ValueError, match=message):
        call(x, x.to(xla.device()))


def test_the_device_works_after_the_guards_raised():
    """torch_xla.compile puts back what it forbids, also when it raises."""
    x, w = torch.randn(3, 11), torch.randn(11, 11)
    there = x.to(xla.device()), w.to(xla.device())
    with xla.printed() as text, pytest.raises(RuntimeError, match="Unexpected execution happens"):
        torch_xla.compile(Step(example.read_early), full_graph=True)(*there)
    assert "Unexpected Execution Analysis" in text[0]
    got, value = Step(example.read_early)(*there)
    torch.testing.assert_close(got.cpu(), torch.tanh(x @ w))
    assert value == pytest.approx(torch.tanh(x @ w).square().mean().item(), rel=1e-5)


def test_printed_takes_what_is_written_past_python(capfd):
    with xla.printed() as text:
        os.write(2, b"from C++\n")
    os.write(2, b"after\n")
    assert text == ["from C++\n"]
    assert capfd.readouterr().err == "after\n"
