"""companion: what was recorded can be shown and compared, and a kernel leaves with all that it needs."""

import copy
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

from harness.catalog import ROOT, topics
from harness.hardware import machine

import pytest

from companion.__main__ import main
from companion.readme import results_tables
from companion.report import _part

RECORD = ROOT / "results/h200/triton_examples.json"
MOVED = ("triton", "fp8", "tma")  # topics with kernels; PyTorch/XLA and the compiler have none
LESSONS = {t.name: t for topic in topics() for t in topic.techniques if t.path.parent.name in MOVED}
WITHOUT_A_KERNEL = {"debugging", "accuracy"}  # of its own: tools that are the harness's, other lessons' recipes
# With variants, scales, descriptors, whole modules of common, a name that common has otherwise; the rest is slow.
SOME = {
    "softmax",
    "rms_norm",
    "matmul",
    "dropout",
    "fp8_attention",
    "fused_layer_norm_quantize",
    "descriptors",
    "tma_epilogues",
}


def test_show_has_the_answer_the_tables_and_where_they_are_from(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["show", "softmax"]) == 0
    out = capsys.readouterr().out
    example = next(each for each in json.loads(RECORD.read_text())["examples"] if each["name"] == "softmax")
    assert "NVIDIA H200" in out
    assert example["commit"][:12] in out
    assert "examples/triton/softmax.py" in out
    assert all(table["case"].split(" ")[0] in out for table in example["tables"])
    assert max(map(len, out.splitlines())) <= 80
    assert example["answer"]
    assert f"Answer: {example['answer']}" in " ".join(out.split())
    for name in ("graph_breaks", "fp8_matmul"):  # cells of code, nine cases of eight variants
        assert main(["show", name, "--study"]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert main(["show"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name}: " in listed for name in LESSONS)


def test_a_study_that_ended_early_says_so_beside_its_tables(tmp_path, capsys):
    record, path = json.loads(RECORD.read_text()), tmp_path / RECORD.name
    study = next(each for each in record["examples"] if each["name"] == "softmax")["study"]
    for broken in (False, True):
        if broken:
            study["status"], study["reason"] = "failed", "no memory"
        path.write_text(json.dumps(record))
        assert main(["show", "softmax", "--study", "--record", str(path)]) == 0
        assert ("failed: no memory" in capsys.readouterr().out) == broken
        assert ("softmax, failed: no memory" in results_tables([path], study=True).splitlines()) == broken
        assert ("failed: no memory" in _part(study, None)["conclusions"]) == broken


def test_bad_input_is_one_sentence(capsys):
    for argv, message in (
        (["show", "softmux"], "there is no technique 'softmux'; did you mean softmax?"),
        (["show", "softmax", "--record", "nowhere.json"], "nowhere.json: No such file"),
        (["export", "modes"], "modes has no kernel"),
        (["export", "layer_norm_resident"], "layer_norm_resident is a variant of layer_norm: export that"),
        (["export", "debugging", "-o", "unwritten.py"], "debugging needs process of the harness"),
        (["compare", "nowhere.json", str(RECORD)], "nowhere.json"),
        (["compare", str(RECORD), str(ROOT / "results/h200/triton_tma_blackwell.json")], "compare one topic"),
        (["compare", str(RECORD), str(RECORD), "softmux"], "has no technique softmux"),
        (["compare", str(ROOT / "pyproject.toml"), str(RECORD)], "not JSON"),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


def slower(record: dict, technique: str, factor: float) -> dict:
    """The record with our rows of one technique that many times as slow."""
    record = copy.deepcopy(record)
    example = next(each for each in record["examples"] if each["name"] == technique)
    for row in (row for table in example["tables"] for row in table["rows"] if row["ours"] and row["ms"]):
        for name in ("ms", "p20", "p80"):
            row[name] *= factor
        row["speedup"] /= factor
    return record


def test_compare_joins_rows_and_holds_ratios(tmp_path, capsys):
    record, mine = json.loads(RECORD.read_text()), tmp_path / "mine.json"
    for factor, status in ((1.0, 0), (1.015, 0), (1.2, 1)):
        mine.write_text(json.dumps(slower(record, "softmax", factor)))
        assert main(["compare", str(RECORD), str(mine), "--fail-under", "0.95"]) == status
        found = int(re.search(r"(\d+) of \d+ held ratios are under 0\.95", capsys.readouterr().out)[1])
        assert bool(found) == bool(status), factor
    gone = record | {"examples": [each for each in record["examples"] if each["name"] != "softmax"]}
    mine.write_text(json.dumps(gone))
    assert main(["compare", str(RECORD), str(mine), "--fail-under", "0.5"]) == 1
    assert "softmax: not in my record" in capsys.readouterr().out


def test_compare_allows_for_what_lies_between_two_machines(tmp_path, capsys):
    """What two runs of one code on two H200 machines showed: 0.995x and 1.007x, with spreads of a thousandth."""
    record, mine = json.loads(RECORD.read_text()), tmp_path / "mine.json"
    for example in record["examples"]:
        for row in (row for table in example["tables"] for row in table["rows"] if row["ms"]):
            row["p20"], row["p80"] = 0.9995 * row["ms"], 1.0005 * row["ms"]
    (tmp_path / "reference.json").write_text(json.dumps(record))
    for technique, factor, agree in (
        ("vector_add", 1 / 0.995, True),
        ("softmax", 1 / 1.007, True),
        ("softmax", 1.03, False),
    ):
        mine.write_text(json.dumps(slower(record, technique, factor)))
        assert main(["compare", str(tmp_path / "reference.json"), str(mine), technique]) == 0
        agreed, of = map(int, re.search(r"(\d+) of (\d+) ratios agree", capsys.readouterr().out).groups())
        assert (agreed == of) == agree, (technique, factor)


def test_a_slower_host_is_no_regression(tmp_path, capsys):
    """And a slower GPU is: of whole calls its part is compared; where a record lacks it or a call waits, nothing."""

    def written(name, speedup, gpu_ms, host=0.5):
        eager, graph = ("torch eager", 9.0, 2.0), ("CUDA graph", 9 / speedup, gpu_ms)
        rows = [
            {"variant": variant, "ours": False, "peer": False, "ms": ms, "p20": 0.99 * ms, "p80": 1.01 * ms,
             "speedup": 9 / ms, "gpu_ms": part if gpu_ms else None, "enqueue_us": 1000 * host * ms}
            for variant, ms, part in (eager, graph)
        ]  # fmt: skip
        tables = [{"title": "modes", "case": "1x1", "baseline": "torch eager", "rows": rows}]
        example = {"name": "modes", "status": "passed", "tables": tables}
        record = {"schema": 2, "topic": "t", "gpu": "H200", "running": None, "examples": [example]}
        (tmp_path / name).write_text(json.dumps(record))
        return str(tmp_path / name)

    before = written("before.json", 8.68, 1.0)
    for after, status, told in (
        (written("host.json", 5.62, 1.01), 0, "host 0.647"),
        (written("gpu.json", 8.68, 1.3), 1, "GPU 0.769"),
        (written("old.json", 5.62, None), 0, "host 0.647"),
        (written("same.json", 8.6, 1.0), 0, "1 of 1 ratios agree"),
        (written("waits.json", 5.62, 1.6, host=1.0), 0, "host 0.647"),  # all of 1.6 ms, which the host takes, too
        (written("near.json", 5.62, 1.4, host=1.0), 1, "GPU 0.714"),
        (written("busy.json", 5.62, 1.4), 1, "GPU 0.714"),
    ):
        assert main(["compare", before, after, "--fail-under", "0.95"]) == status
        out = capsys.readouterr().out
        assert told in out
        assert ("by their host alone" in out) == ("host" in told)


def test_an_export_goes_to_a_file_a_folder_or_the_terminal_and_replaces_none_unless_told(tmp_path, capsys):
    assert main(["export", "tma_epilogues", "-o", str(tmp_path)]) == 0
    assert "checks linear; not checked here: swiglu, linear_fp8" in capsys.readouterr().out
    path = tmp_path / "tma_epilogues.py"
    assert main(["export", "tma_epilogues", "-o", str(path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["export", "tma_epilogues", "-o", str(path), "--force"]) == 0
    assert main(["export", "tma_epilogues", "-o", str(tmp_path / "no/folder.py")]) == 2
    assert main(["export", "tma_epilogues", "-o", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "tma_epilogues.py").is_file()
    capsys.readouterr()
    assert main(["export", "tma_epilogues", "-o", "-"]) == 0
    assert (text := capsys.readouterr().out) == path.read_text()
    assert text.startswith("# SPDX-License-Identifier: MIT\n")
    assert not re.search(r"\b(harness|studies|docs|tests)/", text)


# Runs files as scripts where neither the harness nor the examples can be imported, and says which end well; then calls
# one with bfloat16, which without its guard is garbage in silence.
ALONE = """
import runpy, sys, traceback

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("harness", "examples", "studies", "companion"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Gone())
for path in sys.argv[1:]:
    try:
        module = runpy.run_path(path, run_name="__main__")
        print("ENDED WELL", path)
    except BaseException:
        traceback.print_exc(limit=3)
import torch
module["vector_add"](*[torch.ones(8, dtype=torch.bfloat16)] * 2)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("names", [SOME, pytest.param(LESSONS.keys() - SOME, marks=pytest.mark.slow)], ids=["", "rest"])
def test_every_export_runs_alone(tmp_path, names):
    """On a GPU or in the interpreter: the check that comes with it, with its guards."""
    paths = [tmp_path / f"{name}.py" for name in [*(names - WITHOUT_A_KERNEL - {"vector_add"}), "vector_add"]]
    assert all(main(["export", path.stem, "-o", str(path)]) == 0 for path in paths)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F", "--line-length=120", str(tmp_path)]
    assert not subprocess.run(ruff, capture_output=True, text=True).stdout.replace("All checks passed!", "").strip()
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *map(str, paths)], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    failed = [path.stem for path in paths if f"ENDED WELL {path}" not in done.stdout]
    assert not failed, f"{failed}\n{done.stderr[-4000:]}"
    assert re.search(r"vector_add: .*(bfloat16|tensors are on cpu)", done.stderr.splitlines()[-1])


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("name", ["one_shot_allreduce", pytest.param("fused_collectives", marks=pytest.mark.slow)])
def test_an_export_of_several_ranks_is_started_by_torchrun(tmp_path, name, capsys):
    assert main(["export", name, "-o", str(tmp_path)]) == 0
    assert f"torchrun --nproc-per-node 2 {name}.py" in capsys.readouterr().out
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> subprocess.CompletedProcess:
        how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run([sys.executable, *command, f"{name}.py"], **how)

    assert "torchrun --nproc-per-node 2" in run().stderr
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("right ") >= 2


def test_doctor_names_every_technique_and_what_it_lacks(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    kernels = {"interpreted": "interpreted", "gpu": "runs", "cpu": "skipped: needs a GPU, or TRITON_INTERPRET=1"}
    for setting in (os.environ.get("TRITON_INTERPRET", ""), "0"):
        monkeypatch.setenv("TRITON_INTERPRET", setting)
        assert main(["doctor"]) == 0
        lines = capsys.readouterr().out.splitlines()
        for technique in (technique for found in topics() for technique in found.techniques):
            line = next(line for line in lines if f" {technique.name} " in line)
            here = "runs" if machine().torch_xla or not technique.needs.xla else "skipped: needs torch_xla>=2.9"
            assert technique.error or (kernels[machine().mode] if technique.needs.triton else here) in line


def test_what_was_python_m_harness_names_its_successor(cli):
    for words, successor in ((("doctor",), "doctor"), (("frobnicate",), "--help")):
        done = cli(("-m", "harness"), *words)
        assert done.returncode == 2
        assert done.stderr.endswith(f"python -m companion {successor}\n")
