"""studies/compiler/dynamic_shapes: CUDA graphs."""

import pytest
import torch

from examples.compiler.dynamic_shapes import GatedMLP
from studies.compiler.dynamic_shapes import cuda_graphs_over_sizes


@pytest.mark.gpu
def test_one_cuda_graph_for_each_size(h):
    model = GatedMLP(16, 32).to(h.device, torch.bfloat16).requires_grad_(False)
    cuda_graphs_over_sizes(h, model, [h.randn(rows, 3, 16, dtype=torch.bfloat16) for rows in range(2, 20)])
    (table,) = [value for name, value in h.record.facts.items() if name.startswith("CUDA graphs for batches")]
    assert {name: (row["graphs compiled"], row["CUDA graphs"]) for name, row in table.items()} == {
        "marked, no CUDA graphs": (1, 0), "marked, reduce-overhead": (1, 18),
        "powers of two, reduce-overhead": (5, 5),
    }  # fmt: skip
    (warning,) = table["marked, reduce-overhead"]["warnings"]
    assert "9 distinct sizes" in warning
