"""tensor_parallel in two ranks by gloo: results, and what its graphs send."""

import json

from harness.catalog import ROOT

import pytest
import torch

from examples.common.transformer import TINY, Block
from examples.distributed.tensor_parallel import in_order_of_ranks, parallelize


@pytest.mark.slow
def test_the_lesson_in_two_ranks(cli, tmp_path):
    """It raises where a graph sends other bytes than by theory."""
    if torch.cuda.device_count() == 1:
        pytest.skip("one GPU is one rank")
    done = cli(
        ROOT / "torch_distributed_examples.py", "tensor_parallel", "--quick", "--ranks", "2", "--json", tmp_path / "r",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (example,) = json.loads((tmp_path / "r").read_text())["examples"]
    assert all(row["error"] <= 1 for table in example["tables"] for row in table["rows"])
    rows = example["facts"]["what a rank sends"]
    assert rows["torch.compile, tensor parallel"].keys() & {"all_reduce", "all_gather"} == {"all_reduce"}
    for kind in ("all_gather", "reduce_scatter"):
        assert rows["torch.compile, sequence parallel"][kind].startswith("4, ")


def test_fused_weights_are_in_the_order_of_the_ranks():
    linear = torch.nn.Linear(1, 6, bias=False)
    linear.weight.data = torch.tensor([[0.0], [1], [2], [3], [10], [11]])  # four rows of one part, two of the other
    in_order_of_ranks(linear, [4, 2], 2)
    assert linear.weight.flatten().tolist() == [0, 1, 10, 2, 3, 11]


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"^parallelize: 2 kv_heads and 704 columns on 3 ranks; both must divide"):
        parallelize(Block(TINY), 3, sequence=True)
