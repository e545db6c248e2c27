"""Static shapes: what is compiled for which padding, what padding may not change, sizes with a bound, and bad input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.common import xla
from examples.xla import static_shapes
from examples.xla.static_shapes import LARGEST, POLICIES, POWERS, break_even, pad_batch
from studies.xla import static_shapes as study
from studies.xla.static_shapes import normalize
from tests.quiet import ran


@pytest.fixture(scope="module")
def facts():
    h = ran(static_shapes.demo, needs="torch_xla>=2.9")
    studied = ran(study.study, needs="torch_xla>=2.9", lesson=[])
    assert (len(h.record.checks), len(studied.record.checks)) == (3, 3 + 1 + 2)
    assert all(check["passed"] for check in h.record.checks + studied.record.checks)
    return h.record.facts | studied.record.facts


def test_compiles_and_wasted_rows(facts):
    (sweep,) = (fact for name, fact in facts.items() if name.startswith("batches of 1 to 64; a stream"))
    assert {name: row["compiles"] for name, row in sweep.items()} == dict(zip(POLICIES, (64, 1, 7), strict=True))
    useful = sum(range(1, 65))
    rows = {name: row["rows computed"] for name, row in sweep.items()}
    assert rows == dict(zip(POLICIES, (useful, 64 * 64, 2731), strict=True))
    for policy, row in sweep.items():
        assert row["wasted %"] == pytest.approx(100 * (1 - useful / rows[policy]), abs=0.05)


def test_padding_and_cutting_on_the_device_compile_for_each_size(facts):
    ways = facts["eight batches of 1 to 8 rows, padded to 8"]
    assert [way["compiles"] for way in ways.values()] == [1, 8, 8]
    assert ways["pick by a mask"]["on the host"] == "aten::nonzero"


def test_padding_leaks_only_without_the_mask(facts):
    errors = facts["batch norm padded to 64: relative error by rows"]
    assert all(error < 1e-5 for error in errors["with the mask"].values())
    assert all(error > 1e-3 for error in errors["without"].values())
    (changed,) = (fact for name, fact in facts.items() if "changed by NaN" in name)
    assert changed["batch norm, masked"] == 0 < changed["batch norm, not masked"]
    assert facts["compiles of the masked one"] == 1


def test_torch_compile_has_one_graph_with_a_symbol_and_xla_compiles_each_size(facts):
    assert facts["torch.compile(backend=openxla), eight batches of 2 to 9 rows"] == {
        "default": {"Dynamo's graphs": 8, "XLA's compiles": 8},
        "dynamic=True": {"Dynamo's graphs": 1, "XLA's compiles": 8},
    }


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


@given(rows=st.integers(1, 64))
def test_powers_of_two_waste_less_than_half(rows):
    padded, _ = pad_batch(torch.ones(rows, 1))
    assert rows <= len(padded) < 2 * rows
    assert len(padded) in POWERS


@settings(deadline=None)
@given(rows=st.integers(2, 64), width=st.integers(1, 5), fill=st.sampled_from([0.0, 1e30, float("inf"), float("nan")]))
def test_normalize_does_not_see_the_padding(rows, width, fill):
    x = torch.randn(rows, width, dtype=torch.float64)
    padded, mask = pad_batch(x, (LARGEST,))
    padded = torch.where(mask[:, None], padded, fill)
    want = torch.nn.functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(normalize(padded, mask)[:rows], want)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_break_even_is_the_first_call_ahead_for_good(times):
    ours, theirs = [a for a, _ in times], [b for _, b in times]
    calls = break_even(ours, theirs)
    ahead = [sum(ours[: n + 1]) < sum(theirs[: n + 1]) for n in range(len(times))]
    if calls is None:
        assert not ahead or not ahead[-1]
    else:
        assert all(ahead[calls - 1 :])
        assert calls == 1 or not ahead[calls - 2]


@pytest.mark.parametrize(
    ("x", "sizes", "error", "message"),
    [
        ([1.0, 2.0], POWERS, TypeError, r"pad_batch: got list, need a tensor .*torch\.as_tensor"),
        (torch.ones(2), (), ValueError, r"into sizes \(\)"),
        (torch.ones(()), POWERS, ValueError, r"shape \(\) into sizes"),
        (torch.ones(0, 3), POWERS, ValueError, r"shape \(0, 3\) into sizes"),
        (torch.ones(65, 3), POWERS, ValueError, "split the batch, or add a larger size"),
    ],
)
def test_pad_batch_says_what_is_wrong(x, sizes, error, message):
    with pytest.raises(error, match=message):
        pad_batch(x, sizes)


def test_pad_batch_is_for_the_host():
    with pytest.raises(ValueError, match=r"x is on xla:0, where padding compiles for each size; pad, then move it"):
        pad_batch(torch.ones(3, 2, device=xla.device()))
