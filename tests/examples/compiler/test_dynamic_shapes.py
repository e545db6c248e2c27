"""Dynamic shapes: graphs of each policy in any order of sizes, right results, the limit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compile_inspect import watch
from examples.compiler import dynamic_shapes
from examples.compiler.dynamic_shapes import (
    LARGEST,
    POLICIES,
    GatedMLP,
    Served,
    bucket,
    pad_rows,
    reference_of,
    sizes_compiled,
)
from tests.quiet import ran


def test_demo():
    record = ran(dynamic_shapes.demo, finish=False).record
    rows = record.facts["batches of 1 to 64"]
    assert {name: row["graphs"] for name, row in rows.items()} == {
        "static": 64, "automatic": 2, "dynamic=True": 2, "mark_dynamic": 2, "mark_unbacked": 1, "padded to 64": 1,
        "powers of two": 7,
    }  # fmt: skip
    assert rows["mark_dynamic"]["compiled at"] == "1 2"
    assert rows["powers of two"]["compiled at"] == "1 2 3 5 9 17 33"
    assert rows["powers of two"]["rows per useful row"] == round(2731 / 2080, 3)
    assert rows["mark_dynamic"]["seconds"] > 0


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_right_in_any_order(h, name):
    model, sizes = GatedMLP(16, 32).to(h.device).requires_grad_(False), (3, 64, 1, 2, 17, 3)
    served, batches = Served(model, name, backend="aot_eager"), [h.randn(rows, 3, 16) for rows in sizes]
    compiled, _ = sizes_compiled(served, batches)
    assert len(compiled) == len(set(compiled)) <= len(set(sizes))
    with watch() as seen:
        h.check(served.mix, reference_of(model), *batches, what=name, terms=64, roundings=8, poison=False)
    assert seen.graphs == 0  # unmarked inputs pass the guards too
    assert not any(hasattr(x, "_dynamo_dynamic_indices") for x in batches)


def test_policies_do_not_share_what_they_learn(h):
    """Of one model: the graphs of one policy neither serve the next nor count against its limit."""
    model, batches = GatedMLP(16, 32).to(h.device), [h.randn(rows, 3, 16) for rows in range(2, 12)]
    for name, graphs in {"static": 10, "automatic": 2, "mark_dynamic": 1}.items():
        assert len(sizes_compiled(Served(model, name, backend="eager"), batches)[0]) == graphs


@given(rows=st.integers(1, 300), more=st.integers(0, 20), inner=st.lists(st.integers(0, 3), max_size=3))
def test_bucket_and_pad_rows(rows, more, inner):
    size = bucket(rows, 512)
    assert size & (size - 1) == 0
    assert rows <= size < 2 * rows
    assert bucket(min(rows, 48), 48) <= 48
    x = torch.randn(rows, *inner)
    padded = pad_rows(x, rows + more)
    assert padded.shape == (rows + more, *inner)
    assert torch.equal(padded[:rows], x)
    assert not padded[rows:].count_nonzero()


def test_no_bucket_and_no_padding():
    for rows in (-1, 0, LARGEST + 1):
        with pytest.raises(ValueError, match=rf"bucket: {rows} rows; need 1 to 64: split the batch"):
            bucket(rows)
    for shape in ((), (0, 3), (9, 3)):
        with pytest.raises(ValueError, match=r"pad_rows: shape \(.*\) into 8 rows; split the batch, or use a larger"):
            pad_rows(torch.ones(shape), 8)
