"""studies/compiler/dynamic_shapes: graphs in any order, guards, refused marks, CUDA graphs (gpu)."""

import pytest
import torch

from examples.compiler.dynamic_shapes import GatedMLP
from studies.compiler import dynamic_shapes
from studies.compiler.dynamic_shapes_cuda_graphs import cuda_graphs_over_sizes
from tests.quiet import ran


def test_study(monkeypatch):
    monkeypatch.setattr(dynamic_shapes, "small_model", lambda h: None)  # three compilations
    facts = ran(dynamic_shapes.study, lesson=[]).record.facts
    assert facts["graphs for batches of 2 to 64"] == {
        "automatic": 2, "dynamic=True": 1, "mark_dynamic": 1, "mark_unbacked": 1,
    }  # fmt: skip
    assert facts["graphs for batches of 64 down to 1"]["automatic"] == 3
    marks = facts["a mark on code that needs the size"]
    assert marks["mark_dynamic, four_rows"].startswith("ConstraintViolationError: You marked")
    assert marks["maybe_mark_dynamic, four_rows"] == "compiled for rows == 8"
    assert marks["mark_unbacked, other_above_4"].startswith("UserError")
    assert facts["guards on the rows"]["mark_dynamic"] == ["2 <= L['x'].size()[0]", "rows == 1"]
    assert facts["guards on the rows"]["mark_unbacked"] == ["0 <= L['x'].size()[0]"]


@pytest.mark.gpu
def test_one_cuda_graph_for_each_size(h):
    model = GatedMLP(16, 32).to(h.device, torch.bfloat16).requires_grad_(False)
    cuda_graphs_over_sizes(h, model, [h.randn(rows, 3, 16, dtype=torch.bfloat16) for rows in range(2, 20)])
    (table,) = [value for name, value in h.record.facts.items() if name.startswith("CUDA graphs for batches")]
    assert {name: (row["graphs compiled"], row["CUDA graphs"]) for name, row in table.items()} == {
        "marked, no CUDA graphs": (1, 0), "marked, reduce-overhead": (1, 18),
        "marked, cudagraph_skip_dynamic_graphs": (1, 0), "powers of two, reduce-overhead": (5, 5),
    }  # fmt: skip
    (warning,) = table["marked, reduce-overhead"]["warnings"]
    assert "9 distinct sizes" in warning
