"""Dynamic shapes: graphs of each policy in any order of sizes, right results, the limit, CUDA graphs (gpu)."""

from harness.catalog import Needs
from harness.compiler import cuda_graphs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from examples.compiler import dynamic_shapes
from examples.compiler.dynamic_shapes import (
    LARGEST,
    POLICIES,
    Counting,
    Served,
    bucket,
    cuda_graphs_over_sizes,
    pad_rows,
    reference_of,
    sizes_compiled,
)


def quiet(**options) -> Harness:
    return Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False, **options)


@pytest.fixture
def h():
    torch.compiler.reset()
    yield quiet()
    torch.compiler.reset()


def model_of(h, width=16):
    return nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)).to(h.device).requires_grad_(False)


def test_demo(h):
    with settings_kept("dynamic_shapes", seed=0):
        dynamic_shapes.demo(h)
    facts = h.record.facts
    assert facts["graphs for batches of 1 to 64"] == {
        "static": 64, "automatic": 2, "dynamic=True": 2, "mark_dynamic": 2, "mark_unbacked": 1, "padded to 64": 1,
        "powers of two": 7,
    }  # fmt: skip
    assert facts["graphs for batches of 2 to 64"] == {
        "automatic": 2, "dynamic=True": 1, "mark_dynamic": 1, "mark_unbacked": 1,
    }  # fmt: skip
    assert facts["graphs for batches of 64 down to 1"]["automatic"] == 3
    rows = facts["batches of 1 to 64"]
    assert rows["mark_dynamic"]["compiled at"] == "1 2"
    assert rows["powers of two"]["compiled at"] == "1 2 3 5 9 17 33"
    assert rows["powers of two"]["rows per useful row"] == round(2731 / 2080, 3)
    assert rows["padded to 64"]["rows per useful row"] == round(64 * 64 / 2080, 3)
    assert rows["mark_dynamic"]["seconds"] > 0
    assert rows["static"]["seconds"] is None  # only counted, at quick sizes
    limit = facts["static, at the default limit"]
    assert limit == {
        "limit": 8, "graphs": 8, "calls": 64, "in eager": 56, "in eager, second time": 56, "warnings": 1,
    }  # fmt: skip
    told = facts["how to be told of the limit"]
    assert [row["at rows"] for row in told.values()] == [9, 9]
    assert all(row["error"].startswith("FailOnRecompileLimitHit") for row in told.values())
    marks = facts["a mark on code that needs the size"]
    assert marks["mark_dynamic, four_rows"].startswith("ConstraintViolationError: You marked")
    assert marks["maybe_mark_dynamic, four_rows"] == "compiled for rows == 8"
    assert marks["mark_unbacked, other_above_4"].startswith("UserError")
    assert facts["guards on the rows"]["mark_dynamic"] == ["2 <= L['x'].size()[0]", "rows == 1"]
    assert facts["guards on the rows"]["mark_unbacked"] == ["0 <= L['x'].size()[0]"]
    assert facts["verdict dynamic-recompiles"].startswith("false by default: 2 graphs for 64 sizes")
    assert facts["mix of batches: graphs compiled while it was timed"] == 0
    assert all(check["passed"] for check in h.record.checks)
    right = {row["variant"] for table in h.record.comparisons for row in table["rows"]}
    right |= {f"torch.compile {check['what'].split(', ')[0]}" for check in h.record.checks}
    assert {f"torch.compile {name}" for name in POLICIES} <= right


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_right_in_any_order(h, name):
    model = model_of(h)
    counting = Counting("aot_eager")
    served = Served(model, name, POLICIES[name], backend=counting)
    sizes = (3, 64, 1, 2, 17, 3, 64)
    batches = [h.randn(rows, 16) for rows in sizes]
    compiled = sizes_compiled(served, batches, counting)
    assert len(compiled) == len(set(compiled)) <= len(set(sizes))
    h.check(served.mix, reference_of(model), *batches, what=name, terms=32, poison=False)
    assert counting.graphs == len(compiled)  # unmarked inputs passed the guards too
    assert not any(hasattr(x, "_dynamo_dynamic_indices") for x in batches)


def test_policies_do_not_share_what_they_learn(h):
    """Of one model: the graphs of one policy neither serve the next nor count against its limit."""
    model, batches = model_of(h), [h.randn(rows, 16) for rows in range(2, 12)]
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


def test_counting(h):
    counting = Counting(runs=True)
    compiled = torch.compile(lambda x: x + 1, backend=counting, dynamic=True)
    for rows in (2, 3, 2):
        assert torch.equal(compiled(torch.ones(rows)), torch.full((rows,), 2.0))
    assert (counting.graphs, counting.runs) == (1, 3)


def test_no_cuda_graphs_without_a_gpu(h):
    if h.device.type == "cuda":
        pytest.skip("this machine has a GPU")
    assert cuda_graphs() == 0
    cuda_graphs_over_sizes(h, model_of(h), [])
    assert not h.record.facts


def test_profile_shows_calls_only():
    h = quiet(profile=True)
    model = model_of(h)
    served = {"mark_dynamic": Served(model, "mark_dynamic", POLICIES["mark_dynamic"], backend="eager")}
    dynamic_shapes.time_mix(h, model, served, [h.randn(rows, 16) for rows in (1, 2)], "mix")
    torch.compiler.reset()
    assert not h.record.facts
    assert not h.record.comparisons


@pytest.mark.gpu
def test_one_cuda_graph_for_each_size(h):
    model = model_of(h).to(torch.bfloat16)
    cuda_graphs_over_sizes(h, model, [h.randn(rows, 16, dtype=torch.bfloat16) for rows in range(2, 20)])
    (table,) = [value for name, value in h.record.facts.items() if name.startswith("CUDA graphs for batches")]
    numbers = {name: (row["graphs compiled"], row["CUDA graphs"]) for name, row in table.items()}
    assert numbers == {
        "marked, no CUDA graphs": (1, 0), "marked, reduce-overhead": (1, 18),
        "marked, cudagraph_skip_dynamic_graphs": (1, 0), "powers of two, reduce-overhead": (5, 5),
    }  # fmt: skip
    assert len(table["marked, reduce-overhead"]["warnings"]) == 1
    assert "9 distinct sizes" in table["marked, reduce-overhead"]["warnings"][0]
    assert h.record.facts["verdict dynamic-cudagraphs"].startswith("false: 18 sizes gave 1 compiled graph and 18")


@pytest.mark.gpu
def test_the_record_of_static_and_marked_on_a_gpu(h):
    """Compiled for real: 64 static graphs, one of a marked size for 2 to 64, and one for all of an unbacked size."""
    h.full = True
    with settings_kept("dynamic_shapes", seed=0):
        dynamic_shapes.demo(h)
    rows = h.record.facts["batches of 1 to 64"]
    assert (rows["static"]["graphs"], rows["mark_dynamic"]["graphs"], rows["mark_unbacked"]["graphs"]) == (64, 2, 1)
    assert rows["static"]["seconds"] > rows["mark_unbacked"]["seconds"]
