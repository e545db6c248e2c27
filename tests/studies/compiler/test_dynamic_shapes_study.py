"""studies/compiler/dynamic_shapes: graphs in any order, the limit, guards, refused marks, CUDA graphs (gpu)."""

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from rich.console import Console

from compile_inspect import cuda_graphs
from examples.compiler.dynamic_shapes import GatedMLP
from studies.compiler.dynamic_shapes import CountingRuns, study
from studies.compiler.dynamic_shapes_cuda_graphs import cuda_graphs_over_sizes


@pytest.fixture
def h():
    torch.compiler.reset()
    yield Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False, lesson=[])
    torch.compiler.reset()


def model_of(h):
    return GatedMLP(16, 32).to(h.device).requires_grad_(False)


def test_study(h):
    with settings_kept("dynamic_shapes", seed=0):
        study(h)
    facts = h.record.facts
    assert facts["graphs for batches of 2 to 64"] == {
        "automatic": 2, "dynamic=True": 1, "mark_dynamic": 1, "mark_unbacked": 1,
    }  # fmt: skip
    assert facts["graphs for batches of 64 down to 1"]["automatic"] == 3
    limit = facts["static, at the default limit"]
    assert limit == {
        "limit": 8, "graphs": 8, "calls": 64, "in eager": 56, "in eager, second time": 56, "warnings": 1,
    }  # fmt: skip
    loud = facts["how to be told of the limit"]
    assert [row["at rows"] for row in loud.values()] == [9, 9]
    assert all(row["error"].startswith("FailOnRecompileLimitHit") for row in loud.values())
    marks = facts["a mark on code that needs the size"]
    assert marks["mark_dynamic, four_rows"].startswith("ConstraintViolationError: You marked")
    assert marks["maybe_mark_dynamic, four_rows"] == "compiled for rows == 8"
    assert marks["mark_unbacked, other_above_4"].startswith("UserError")
    assert facts["guards on the rows"]["mark_dynamic"] == ["2 <= L['x'].size()[0]", "rows == 1"]
    assert facts["guards on the rows"]["mark_unbacked"] == ["0 <= L['x'].size()[0]"]
    assert facts["graphs compiled while it was timed"] == 0


def test_counting_runs(h):
    counting = CountingRuns()
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


@pytest.mark.gpu
def test_one_cuda_graph_for_each_size(h):
    model = model_of(h).to(torch.bfloat16)
    cuda_graphs_over_sizes(h, model, [h.randn(rows, 3, 16, dtype=torch.bfloat16) for rows in range(2, 20)])
    (table,) = [value for name, value in h.record.facts.items() if name.startswith("CUDA graphs for batches")]
    numbers = {name: (row["graphs compiled"], row["CUDA graphs"]) for name, row in table.items()}
    assert numbers == {
        "marked, no CUDA graphs": (1, 0), "marked, reduce-overhead": (1, 18),
        "marked, cudagraph_skip_dynamic_graphs": (1, 0), "powers of two, reduce-overhead": (5, 5),
    }  # fmt: skip
    assert len(table["marked, reduce-overhead"]["warnings"]) == 1
    assert "9 distinct sizes" in table["marked, reduce-overhead"]["warnings"][0]
    assert h.record.facts["verdict dynamic-cudagraphs"].startswith("false: 18 sizes gave 1 compiled graph and 18")
