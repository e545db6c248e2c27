"""Graph boundaries: what each costs in programs and copies, which guard finds it, and that the fixes give the same."""

import re

import pytest
import torch
import torch_xla
from hypothesis import given
from hypothesis import strategies as st

from examples.common import xla
from examples.xla import graph_boundaries as example
from examples.xla.graph_boundaries import STEPS, advance, branch, loop, where
from studies.xla import graph_boundaries as study
from studies.xla import graph_boundaries_guards as guards
from studies.xla.graph_boundaries import MOST, TOLERANCE, until
from tests.quiet import ran

TITLE = f"{STEPS} steps with the boundary / without"


@pytest.fixture(scope="module")
def records():
    return (
        ran(example.demo, needs="torch_xla>=2.9").record,
        ran(study.study, guards.study, needs="torch_xla>=2.9", lesson=[]).record,
    )


@pytest.fixture(scope="module")
def facts(records):
    return records[1].facts


def test_what_each_boundary_costs(records):
    n = STEPS
    tables = [table for record in records for table in record.tables]
    assert [len(table["rows"]) for table in tables] == [2] * 8 + [3]
    assert all(row["ms"] is None and row["error"] <= 1 for table in tables for row in table["rows"])
    rows = records[0].facts[TITLE] | records[1].facts[TITLE]
    counted = {
        what: [(row["compiled"][i], row["run"][i], row["fetched"][i]) for i in (0, 1)] for what, row in rows.items()
    }
    selection = counted.pop("boolean index: a mask")
    # Where a value stays on the device, all are read once at the end: a run, which stacks them, and a copy.
    assert counted == {
        ".item() before the sync: after it": [(2, 2 * n, n), (1, n, n)],
        ".item() after the sync: at the end": [(1, n, n), (1, n + 1, 1)],
        "print: step closure": [(3, 2 * n + 1, n + 1), (1, n + 1, n + 1)],
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
    for name in ("y.shape, len(y), y.dtype", "y.isnan().any()", "F.one_hot(index, 5)", "y[index]"):
        assert found[name] == "only recorded"
    for name in ("print(y)", "if y.isnan().any()", "F.one_hot(index)", "y[: index[0]]", "torch.full((3,), y[0, 0])"):
        assert found[name] == "1 run, 1 read"
    assert found["max(y[0, :3])"] == "2 run, 2 read"
    assert found["y[y > 0] = 0"] == "1 run, 1 read, on the host: nonzero"


def test_guards(facts):
    found = facts["torch_xla.compile"]
    assert {name: row["full_graph"] for name, row in found.items() if row["full_graph"] != "passes"} == {
        ".item() before the sync": "raises at `lambda x: (x, size(x).item()),`",
        "print": "raises at `print(x[0, :4], file=io.StringIO())`",
        "if": "raises at `if x.abs().max() > LIMIT:`",
        "boolean index": "raises at `lambda x: (x, x[x > 0].sum() / x.numel()),`",
        "median": "raises at `lambda x: (x - x.median(), size(x)),`",
    }
    assert len(found) == 10
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


@given(st.floats(0.1, 3), st.integers(1, 4))
def test_where_is_the_branch(gain, steps):
    x, w = torch.randn(5, 7), torch.eye(7) * gain
    xs = [loop(lines, x.to(xla.device()), w.to(xla.device()), steps) for lines in (branch, where)]
    for a, b in zip(*xs, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu())


def test_the_device_works_after_the_guards_raised():
    """torch_xla.compile puts back what it forbids, also when it raises."""
    x = torch.randn(3, 11)
    with xla.printed() as text, pytest.raises(RuntimeError, match="Unexpected execution happens"):
        torch_xla.compile(branch, full_graph=True)(x.to(xla.device()))
    assert "Unexpected Execution Analysis" in text[0]
    torch.testing.assert_close(branch(x.to(xla.device()))[0].cpu(), branch(x)[0])
