"""checkpoint_resume in two ranks by gloo: what goes on bit by bit, and what does not."""

import json

from harness.catalog import ROOT

import pytest
import torch

from examples.distributed.checkpoint_resume import OFF, compared, names


@pytest.mark.slow
def test_as_many_ranks_go_on_bit_by_bit_and_one_in_their_order(cli, tmp_path):
    done = cli(
        ROOT / "torch_distributed_examples.py", "checkpoint_resume", "--quick", "--ranks", "2",
        "--json", tmp_path / "r", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (example,) = json.loads((tmp_path / "r").read_text())["examples"]
    rows = example["facts"]["2 steps after a checkpoint of 2 ranks"]
    same = [how for how, row in rows.items() if row["bits that differ"] == "none"]
    assert same == ["2 ranks", "1 rank, in 2 parts"]
    assert all(float(row[OFF]) < 1e-5 for row in rows.values())


def test_names_of_what_is_compiled_in_place_are_those_of_a_plain_model():
    found = names()
    assert [how for how, row in found.items() if row["plain"] == "yes"] == [
        "model.compile()",
        "get_model_state_dict(...)",
    ]
    assert found["torch.compile(block)"]["name"] == "body.blocks.0._orig_mod.qkv.weight"


def test_a_training_that_begins_otherwise_is_refused():
    saved, end = torch.ones(3), torch.tensor([1.0, 2, 4])
    row = compared((saved, end + torch.tensor([0, 0, 1.0])), saved, end)
    assert row == {"bits that differ": "some", OFF: "0.2"}
    with pytest.raises(AssertionError, match=r"^1 of 3 numbers are not those that were saved"):
        compared((torch.tensor([1.0, 1, 0]), end), saved, end)
    with pytest.raises(AssertionError, match=r"^3 of 3 numbers differ, on the same ranks"):
        compared((saved, end + 1), saved, end, same_ranks=True)
