"""numerics: errors against float64, results that repeat and that do not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.compiler.numerics import DETERMINISTIC, EAGER, distinct, measure, off_by, repeat, share_differing


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_distinct_counts_values(values):
    queue = iter(values)
    assert distinct(lambda: torch.tensor([float(next(queue))]), calls=len(values)) == len(set(values))


def test_distinct_keeps_no_reference_and_measures():
    """A result whose memory the next call overwrites, as a CUDA graph's, still counts."""
    memory = torch.zeros(3)
    assert distinct(lambda: memory.add_(1), calls=5) == 5
    want = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert off_by(want.float(), want) == 0
    assert off_by(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert share_differing(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.5, 3.0, 4.0])) == 0.25


@pytest.mark.gpu
def test_emulation_and_atomics_on_the_gpu(h):
    """Nearer to eager than what is not emulated; a float32 product and sum in one rounding, unless emulated."""
    row = measure(h, torch.bfloat16)["multiply-add"]
    assert row["emulated differs"] < row["compiled differs"]
    row = measure(h, torch.float32)["multiply-add"]
    assert row["compiled error"] < row["eager error"]
    assert row["emulated differs"] == 0
    _, results = repeat(h)
    assert results[EAGER] > 1
    assert results["torch eager, deterministic"] == results[DETERMINISTIC] == 1
