"""Lazy tensors: each stage counted exactly, what is found again, numbers that compile, and the sync that is missing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_xla.experimental.eager import is_eager_mode

from examples.common import xla
from examples.xla import lazy_tensors as example
from examples.xla.lazy_tensors import OPS, STEPS, chain, train_like
from studies.xla import lazy_tensors as study
from studies.xla.lazy_tensors import programs
from tests.quiet import ran


@pytest.fixture(scope="module")
def facts():
    h = ran(example.demo, needs="torch_xla>=2.9")
    studied = ran(study.study, needs="torch_xla>=2.9", lesson=[])
    assert (len(h.record.checks), len(studied.record.checks)) == (1 + 2, 11)
    assert all(check["passed"] for check in h.record.checks + studied.record.checks)
    tables = h.record.tables + studied.record.tables
    assert [len(table["rows"]) for table in tables] == [2] * 3
    assert all(row["ms"] is None for table in tables for row in table["rows"])
    assert not is_eager_mode()
    return h.record.facts | studied.record.facts


def done(row: dict) -> dict:
    """Of a row, what happened."""
    return {what: n for what, n in row.items() if n and what != "s"}


def test_stages(facts):
    rows, inner, width = example.ROWS, example.INNER, example.WIDTH
    given = 4 * (rows * inner + inner * width + width)
    assert {stage: done(row) for stage, row in facts["what XLA did"].items()} == {
        "three tensors to the device": {"sent": 3, "bytes": given},
        "recording": {},
        "recording and sync": {"compiled": 1, "run": 1, "syncs": 1},
        "reading the result": {"fetched": 1, "bytes": 4 * rows},
        "the same again": {"run": 1, "found again": 1, "syncs": 1},
    }
    assert facts["what XLA did"]["recording and sync"]["s"] > 0


def test_texts(facts):
    operations = facts["operations"]
    assert {name: n for name, n in operations["IR"].items() if name.startswith("aten")} == {
        "aten::mm": 1, "aten::add": 1, "aten::gelu": 1, "aten::mean": 1,
    }  # fmt: skip
    assert operations["HLO"]["dot"] == operations["StableHLO"]["dot_general"] == operations["HLO"]["erf"] == 1


def test_what_is_found_again(facts):
    found = facts["recorded"]
    again = {what for what, told in found.items() if told == "found again"}
    assert again == {
        "the same again", "other values", "other code, the same operations", "a result more that nobody holds",
    }  # fmt: skip
    assert {told for what, told in found.items() if what not in again} == {"compiled"}


def test_numbers(facts):
    found = facts["programs for 4 values"]
    assert {what: told["compiles"] for what, told in found.items()} == {
        "x * s": 1,
        "x * s, 0 and 1 among them": 3,
        "x * torch.tensor(s, device=xla), the same": 3,
        "x * torch.tensor([s], device=xla), the same": 1,
        "x ** n": 4,
        "x ** torch.tensor([n], device=xla)": 1,
        "x[:, n]": 4,
        "x[:, torch.tensor(n, device=xla)]": 4,
        "x.index_select(1, [n] there)": 1,
        "x[:, :n].sum(1)": 4,
        "torch.where(column < [n] there, x, 0).sum(1)": 1,
    }
    assert all(told["compiles"] + told["found again"] == 4 for told in found.values())
    assert [what for what, told in found.items() if "read by the host" in told] == ["x[:, torch.tensor(n, device=xla)]"]


def test_a_forgotten_sync(facts):
    told = facts[f"{STEPS} steps that read their loss"]
    kept, forgot = told["with sync"], told["forgotten"]
    assert (kept["compiles"], kept["executions"], kept["matrix products run"]) == (1, STEPS, STEPS)
    # A step's own graph was compiled with one output more: its x.
    assert (forgot["compiles"], forgot["executions"]) == (STEPS, STEPS)
    assert forgot["matrix products run"] == STEPS * (STEPS + 1) // 2


@given(st.lists(st.floats(2, 100, width=32), min_size=1, max_size=6))
def test_a_float_is_an_input_of_one_program(values):
    x = torch.randn(5, 71)
    _, results = programs(lambda x, value: (x * value).cos(), x.to(xla.device()), values)
    warm, _ = programs(lambda x, value: (x * value).cos(), x.to(xla.device()), values)
    assert (warm.compiles, warm.executions) == (0, len(values))
    for value, result in zip(values, results, strict=True):
        torch.testing.assert_close(result.cpu(), (x * value).cos(), rtol=1e-4, atol=1e-4)


@given(st.integers(1, 3), st.integers(1, 7))
def test_a_chain_records_its_operations_once_each(layers, rows):
    x, weights = torch.randn(rows, 9), [torch.randn(9, 9) for _ in range(layers)]
    y = chain(x.to(xla.device()), *(w.to(xla.device()) for w in weights))
    recorded = {name: n for name, n in xla.operations(xla.ir(y)).items() if name.startswith("aten")}
    assert sum(recorded.values()) == layers * OPS
    torch.testing.assert_close(y.cpu(), chain(x, *weights), rtol=1e-4, atol=1e-4)


@given(st.integers(1, 5))
def test_without_sync_each_step_holds_all_before_it(steps):
    x, w = torch.randn(3, 13), torch.randn(13, 13) / 4
    y, told = train_like(x.to(xla.device()), w.to(xla.device()), steps, synced=False)
    assert told == list(range(1, steps + 1))
    z, told = train_like(x.to(xla.device()), w.to(xla.device()), steps, synced=True)
    assert told == [1] * steps
    torch.testing.assert_close(y.cpu(), z.cpu())
