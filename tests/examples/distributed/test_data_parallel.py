"""DDP and FSDP2 in two ranks by gloo: results, and the bytes that each rank gives away, are what theory says."""

import json

from harness.bench import Row, Table
from harness.catalog import ROOT

import pytest
import torch

from studies.distributed import ddp as buckets


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


def test_the_size_of_buckets_is_told_only_where_times_differ():
    def told(*times: float) -> str:
        names = [f"torch DDPOptimizer, {size} MiB" for size in (25, 400)]
        rows = [Row(n, False, None, 0.0, ms=ms, speedup=times[0] / ms) for n, ms in zip(names, times, strict=True)]
        return buckets.answer(Table("size of the buckets", "a case", names[0], rows))

    assert told(190.0, 189.0).startswith("Of buckets of 25 MiB, 400 MiB none is faster by more than noise: ")
    assert told(190.0, 150.0).endswith(", 400 MiB is the fastest: 1.27x the speed of 25 MiB.")
