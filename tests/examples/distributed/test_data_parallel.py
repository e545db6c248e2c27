"""DDP and FSDP2 in two ranks by gloo: results, and the bytes that each rank gives away, are what theory says."""

import json

from harness.catalog import ROOT

import pytest
import torch


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_lesson_and_its_study_in_two_ranks(cli, tmp_path, name):
    """The study raises where a rank sends other bytes than by theory."""
    if torch.cuda.device_count() == 1:
        pytest.skip("one GPU is one rank")
    done = cli(
        ROOT / "torch_distributed_examples.py", name, "--study", "--quick", "--ranks", "2", "--json", tmp_path / "r",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (example,) = json.loads((tmp_path / "r").read_text())["examples"]
    assert (example["status"], example["study"]["status"], example["machine"]["ranks"]) == ("passed", "passed", 2)
    assert all(row["error"] <= 1 for table in example["tables"] for row in table["rows"])
    if name == "ddp":
        (rows,) = example["facts"].values()
        assert len({row["bytes"] for row in rows.values()}) == 1
        assert rows["torch.compile, one graph"]["graphs"] == 1 < rows["torch.compile, DDPOptimizer"]["graphs"]
