"""Graph boundaries: what each costs in programs and copies, which guard finds it, and that the fixes give the same."""

import pytest

from examples.xla import graph_boundaries as example
from examples.xla.graph_boundaries import STEPS
from studies.xla import graph_boundaries as study
from tests.quiet import ran

TITLE = f"{STEPS} steps with the boundary / without"


@pytest.fixture(scope="module")
def records():
    return (
        ran(example.demo, needs="torch_xla>=2.9").record,
        ran(study.study, needs="torch_xla>=2.9", lesson=[]).record,
    )


def test_what_each_boundary_costs(records):
    n = STEPS
    assert [len(table["rows"]) for record in records for table in record.tables] == [2] * 7
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
        "median: kthvalue": [(2, 2 * n + 1, n + 1), (1, n + 1, 1)],
        "bias on the CPU: moved before": [(1, n + 1, 1), (1, n + 1, 1)],
    }
    assert selection[1] == (1, n + 1, 1)
    assert selection[0][1:] == (2 * n + 1, n + 1)
    assert n <= selection[0][0] <= n + 1  # a program for every number of hits
    assert rows["bias on the CPU: moved before"]["sent"] == [n, 0]
    assert rows["boolean index: a mask"]["on the host"] == "aten::nonzero"
    assert rows["median: kthvalue"]["on the host"] == "aten::median"


def test_lines_and_guards(records):
    facts = records[1].facts
    found = facts["lines of Python on a tensor that is pending"]
    lines = {name: what for what, row in found.items() for name in row["lines"].split("; ")}
    assert lines["y.isnan().any()"] == "only recorded"
    assert lines["if y.isnan().any()"] == lines["F.one_hot(index)"] == "1 run, 1 read"
    assert lines["max(y[0, :3])"] == "2 run, 2 read"
    assert lines["y[y > 0] = 0"] == "1 run, 1 read, on the host: nonzero"

    raised = {name: told for name, told in facts["torch_xla.compile(full_graph=True)"].items() if told != "passes"}
    for name, line in {
        ".item() before the sync": "size(x).item()", "print": "raises", "if": "if x.abs().max() > LIMIT:",
        "boolean index": "x[x > 0].sum()", "median": "x.median()",
    }.items():  # fmt: skip
        assert line in raised.pop(name)
    assert not raised
