"""Dynamic shapes: graphs of each policy in any order of sizes, right results, the limit, CUDA graphs (gpu)."""

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from examples.compiler import dynamic_shapes
from examples.compiler.dynamic_shapes import (
    LARGEST,
    POLICIES,
    Counting,
    GatedMLP,
    Served,
    bucket,
    pad_rows,
    reference_of,
    sizes_compiled,
    time_mix,
)


def quiet(**options) -> Harness:
    return Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False, **options)


@pytest.fixture
def h():
    torch.compiler.reset()
    yield quiet()
    torch.compiler.reset()


def model_of(h, width=16):
    return GatedMLP(width, 32).to(h.device).requires_grad_(False)


def test_demo(h):
    with settings_kept("dynamic_shapes", seed=0):
        dynamic_shapes.demo(h)
    rows = h.record.facts["batches of 1 to 64"]
    assert {name: row["graphs"] for name, row in rows.items()} == {
        "static": 64, "automatic": 2, "dynamic=True": 2, "mark_dynamic": 2, "mark_unbacked": 1, "padded to 64": 1,
        "powers of two": 7,
    }  # fmt: skip
    assert rows["mark_dynamic"]["compiled at"] == "1 2"
    assert rows["powers of two"]["compiled at"] == "1 2 3 5 9 17 33"
    assert rows["powers of two"]["rows per useful row"] == round(2731 / 2080, 3)
    assert rows["padded to 64"]["rows per useful row"] == round(64 * 64 / 2080, 3)
    assert rows["mark_dynamic"]["seconds"] > 0
    assert rows["static"]["seconds"] == "not generated"  # only counted, at quick sizes
    assert all(check["passed"] for check in h.record.checks)
    right = {row["variant"] for table in h.record.tables for row in table["rows"]}
    right |= {f"torch.compile {check['what'].split(', ')[0]}" for check in h.record.checks}
    assert {f"torch.compile {name}" for name in POLICIES} <= right


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_right_in_any_order(h, name):
    model = model_of(h)
    counting = Counting("aot_eager")
    served = Served(model, name, POLICIES[name], backend=counting)
    sizes = (3, 64, 1, 2, 17, 3, 64)
    batches = [h.randn(rows, 3, 16) for rows in sizes]
    compiled = sizes_compiled(served, batches, counting)
    assert len(compiled) == len(set(compiled)) <= len(set(sizes))
    h.check(served.mix, reference_of(model), *batches, what=name, terms=64, roundings=8, poison=False)
    assert counting.graphs == len(compiled)  # unmarked inputs passed the guards too
    assert not any(hasattr(x, "_dynamo_dynamic_indices") for x in batches)


def test_policies_do_not_share_what_they_learn(h):
    """Of one model: the graphs of one policy neither serve the next nor count against its limit."""
    model, batches = model_of(h), [h.randn(rows, 3, 16) for rows in range(2, 12)]
    for name, graphs in {"static": 10, "automatic": 2, "mark_dynamic": 1}.items():
        counting = Counting()
        assert len(sizes_compiled(Served(model, name, POLICIES[name], backend=counting), batches, counting)) == graphs


@given(rows=st.integers(1, 300))
def test_bucket(rows):
    size = bucket(rows, 512)
    assert size & (size - 1) == 0
    assert rows <= size < 2 * rows
    assert bucket(min(rows, 48), 48) <= 48


@given(rows=st.integers(1, 20), more=st.integers(0, 20), inner=st.lists(st.integers(0, 3), max_size=3))
def test_pad_rows(rows, more, inner):
    x = torch.randn(rows, *inner)
    padded = pad_rows(x, rows + more)
    assert padded.shape == (rows + more, *inner)
    assert torch.equal(padded[:rows], x)
    assert not padded[rows:].count_nonzero()


@pytest.mark.parametrize("rows", [-1, 0, LARGEST + 1])
def test_no_bucket(rows):
    with pytest.raises(ValueError, match=rf"bucket: {rows} rows; need 1 to 64: split the batch"):
        bucket(rows)


@pytest.mark.parametrize("shape", [(), (0, 3), (9, 3)])
def test_no_padding(shape):
    with pytest.raises(
        ValueError, match=r"pad_rows: shape \(.*\) into 8 rows; split the batch, or use a larger bucket"
    ):
        pad_rows(torch.ones(shape), 8)


def test_profile_shows_calls_only():
    h = quiet(profile=True)
    model = model_of(h)
    served = {"mark_dynamic": Served(model, "mark_dynamic", POLICIES["mark_dynamic"], backend="eager")}
    time_mix(h, model, served, [h.randn(rows, 3, 16) for rows in (1, 2)], "mix")
    torch.compiler.reset()
    assert not h.record.facts
    assert not h.record.tables


@pytest.mark.gpu
def test_the_record_of_static_and_marked_on_a_gpu(h):
    """Compiled for real: 64 static graphs, one of a marked size for 2 to 64, and one for all of an unbacked size."""
    h.full = True
    with settings_kept("dynamic_shapes", seed=0):
        dynamic_shapes.demo(h)
    rows = h.record.facts["batches of 1 to 64"]
    assert (rows["static"]["graphs"], rows["mark_dynamic"]["graphs"], rows["mark_unbacked"]["graphs"]) == (64, 2, 1)
    assert rows["static"]["seconds"] > rows["mark_unbacked"]["seconds"]
