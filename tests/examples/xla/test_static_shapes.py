"""Static shapes: what is compiled for which padding, what padding may not change, and bad input."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common import xla
from examples.xla import static_shapes
from examples.xla.static_shapes import POLICIES, POWERS, break_even, pad_batch
from studies.xla import static_shapes as study
from tests.quiet import ran


@pytest.fixture(scope="module")
def facts():
    h = ran(static_shapes.demo, needs="torch_xla>=2.9")
    studied = ran(study.study, needs="torch_xla>=2.9", lesson=[])
    assert (len(h.record.checks), len(studied.record.checks)) == (3, 2 + 1 + 1)
    return h.record.facts | studied.record.facts


def test_compiles_and_wasted_rows(facts):
    (sweep,) = (fact for name, fact in facts.items() if name.startswith("batches of 1 to 64; a stream"))
    assert {name: row["compiles"] for name, row in sweep.items()} == dict(zip(POLICIES, (64, 1, 7), strict=True))
    useful = sum(range(1, 65))
    rows = {name: row["rows computed"] for name, row in sweep.items()}
    assert rows == dict(zip(POLICIES, (useful, 64 * 64, 2731), strict=True))

    cut_on = facts["programs of eight batches of 1 to 8 rows, padded to 8, by where the padding is cut off"]
    assert cut_on == {"host": 1, "device": 8}
    (compiled,) = (fact for name, fact in facts.items() if "dynamic=True" in name)
    assert compiled == {"Dynamo's graphs": 1, "XLA's compiles": 8}


def test_padding_leaks_only_without_the_mask(facts):
    errors = facts["batch norm padded to 64: relative error by rows"]
    assert all(error < 1e-5 for error in errors["with the mask"].values())
    assert all(error > 1e-3 for error in errors["without"].values())
    (changed,) = (fact for name, fact in facts.items() if "changed by NaN" in name)
    assert changed["with the mask"] == 0 < changed["without"]
    assert facts["compiles of the masked one"] == 1


@given(
    rows=st.integers(1, 64), inner=st.lists(st.integers(0, 3), max_size=2),
    sizes=st.lists(st.integers(1, 80), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)  # fmt: skip
def test_pad_batch(rows, inner, sizes, dtype):
    x = torch.randint(2, (rows, *inner)).to(dtype)
    if rows > max(sizes):
        with pytest.raises(ValueError, match="split the batch, or add a larger size"):
            pad_batch(x, sizes)
        return
    padded, mask = pad_batch(x, sizes)
    assert len(padded) == len(mask) == min(size for size in sizes if size >= rows)
    assert padded.dtype is dtype
    assert padded.shape[1:] == x.shape[1:]
    assert torch.equal(padded[:rows], x)
    assert not padded[rows:].any()
    assert mask.tolist() == [True] * rows + [False] * (len(mask) - rows)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_break_even_is_the_first_call_ahead_for_good(times):
    ours, theirs = [a for a, _ in times], [b for _, b in times]
    ahead = [sum(ours[: n + 1]) < sum(theirs[: n + 1]) for n in range(len(times))]
    assert break_even(ours, theirs) == next((n + 1 for n in range(len(ahead)) if all(ahead[n:])), None)


def test_pad_batch_says_what_is_wrong():
    for x, sizes, error, message in (
        ([1.0, 2.0], POWERS, TypeError, r"pad_batch: got list, need a tensor .*torch\.as_tensor"),
        (torch.ones(2), (), ValueError, r"into sizes \(\)"),
        (torch.ones(()), POWERS, ValueError, r"shape \(\) into sizes"),
        (torch.ones(0, 3), POWERS, ValueError, r"shape \(0, 3\) into sizes"),
        (torch.ones(3, 2, device=xla.device()), POWERS, ValueError, "x is on xla:0, where padding compiles for each"),
    ):
        with pytest.raises(error, match=message):
            pad_batch(x, sizes)
