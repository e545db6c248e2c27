"""Lazy tensors: each stage counted exactly, what is found again, numbers that compile, and the sync that is missing."""

import pytest

from examples.xla import lazy_tensors as example
from examples.xla.lazy_tensors import STEPS
from studies.xla import lazy_tensors as study
from tests.quiet import ran


@pytest.fixture(scope="module")
def facts():
    h = ran(example.demo, needs="torch_xla>=2.9")
    studied = ran(study.study, needs="torch_xla>=2.9", lesson=[])
    assert (len(h.record.checks), len(studied.record.checks)) == (1 + 2, 7)
    assert [len(table["rows"]) for table in h.record.tables] == [2] * 2
    return h.record.facts | studied.record.facts


def test_stages(facts):
    stages = facts["what XLA did"]
    assert {stage: {what: n for what, n in row.items() if n and what != "s"} for stage, row in stages.items()} == {
        "three tensors to the device": {"sent": 3},
        "recording": {},
        "recording and sync": {"compiled": 1, "run": 1, "syncs": 1},
        "reading the result": {"fetched": 1},
        "the same again": {"run": 1, "found again": 1, "syncs": 1},
    }
    assert stages["recording and sync"]["s"] > 0


def test_what_is_found_again_and_which_numbers_compile(facts):
    again = {what for what, told in facts["recorded"].items() if told != "compiled"}
    assert again == {"other values", "other code, the same operations", "a result more that nobody holds"}
    found = facts["programs for 4 values"]
    assert {what: told["compiles"] for what, told in found.items()} == {
        "x * s": 1,
        "x * s, 0 and 1 among them": 3,
        "x * torch.tensor([s], device=xla), the same": 1,
        "x ** n": 4,
        "x ** torch.tensor([n], device=xla)": 1,
        "x[:, n]": 4,
        "x.index_select(1, [n] there)": 1,
    }
    assert all(told["compiles"] + told["found again"] == 4 for told in found.values())


def test_a_forgotten_sync(facts):
    told = facts[f"{STEPS} steps that read their loss"]
    kept, forgot = told["with sync"], told["forgotten"]
    assert (kept["compiles"], kept["executions"], kept["matrix products run"]) == (1, STEPS, STEPS)
    # A step's own graph was compiled with one output more: its x.
    assert (forgot["compiles"], forgot["executions"]) == (STEPS, STEPS)
    assert forgot["matrix products run"] == STEPS * (STEPS + 1) // 2
