"""companion contribute: a record that a reader made is checked, loses what names its machine, and lands in results/."""

import copy
import json
import shutil

from harness.catalog import ROOT, topics

import pytest

from companion import contribute
from companion.__main__ import main
from companion.readme import is_stale

TOPIC = next(topic for topic in topics() if topic.name == "triton_tma_blackwell")
RECORDED = json.loads((ROOT / "results/h200/triton_tma_blackwell.json").read_text())


@pytest.fixture
def record(monkeypatch) -> dict:
    """The H200's record, as if it were of today's code."""
    monkeypatch.setattr(contribute, "is_stale", lambda technique, example, root: example["sources"] == "old")
    return copy.deepcopy(RECORDED)


def lines(tmp_path, capsys, record, *options) -> tuple[int, list[str]]:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(record))
    status = contribute.contribute([path], root=tmp_path, **dict(options))
    return status, capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def a_root(tmp_path):
    """The scripts and lessons of this repository, and results/ of its own."""
    (tmp_path / TOPIC.file).write_text((ROOT / TOPIC.file).read_text())
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "studies", tmp_path / "studies")


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), (None, "cpu"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-blackwell-workstation-edition"),
    ],
)  # fmt: skip
def test_folder(gpu, folder):
    assert contribute.folder_name(gpu) == folder


def test_a_good_record_lands_without_names(tmp_path, capsys, monkeypatch, record):
    monkeypatch.setattr(contribute, "names_here", lambda: {"fractal": "host", "jane": "user"})
    record["gpu"] = "NVIDIA GeForce RTX 4090"
    record["examples"][0]["command"] = "python x.py --json /home/jane/mine.json"
    record["examples"][1]["facts"]["note"] = "fractal says fractals, /root/a and /roots/b"
    status, said = lines(tmp_path, capsys, record)
    assert status == 0
    path = tmp_path / "results/rtx-4090/triton_tma_blackwell.json"
    held = json.loads(path.read_text())
    assert held["examples"][0]["command"] == "python x.py --json ~/mine.json"
    assert held["examples"][1]["facts"]["note"] == "host says fractals, ~/a and /roots/b"
    assert [e["tables"] for e in held["examples"]] == [e["tables"] for e in record["examples"]]
    assert "8 techniques; 3 paths and names of this machine were taken out" in said[0]
    assert "git add results/rtx-4090" in said[-1]
    with pytest.raises(ValueError, match=r"exists; replace it with --force"):
        contribute.contribute([tmp_path / "mine.json"], root=tmp_path)
    assert contribute.contribute([tmp_path / "mine.json"], force=True, root=tmp_path) == 0
    for example in record["examples"]:
        example["machine"]["triton"] = "3.9.0"
    assert lines(tmp_path, capsys, record)[0] == 0
    assert (tmp_path / "results/rtx-4090-triton-3.9/triton_tma_blackwell.json").exists()


def failed(example):
    example["status"], example["reason"] = "failed", "CheckError: x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["examples"].pop(), "blackwell: not recorded; python "),
        (lambda r: failed(r["examples"][0]), "what_is_tma: failed: CheckError: x"),
        (lambda r: failed(r["examples"][0]["study"]), "the study of what_is_tma: failed"),
        (lambda r: r["examples"][0].update(sizes="quick"), "what_is_tma: at quick sizes; run it with --full"),
        (lambda r: r["examples"][0].update(dirty=True), "what_is_tma: of a checkout with local changes"),
        (lambda r: r["examples"][0].update(commit=None), "what_is_tma: of a checkout with local changes, or of none"),
        (lambda r: r["examples"][0].update(sources="old"), "what_is_tma: of other code than this checkout's"),
        (lambda r: r["examples"][0]["machine"].update(triton="3.9.0"), "mixes GPUs or versions"),
        (lambda r: r["examples"][0].update(name="what"), "what: no technique of triton_tma_blackwell"),
        (lambda r: r.update(running="tma_copy"), "tma_copy: the run ended in it"),
        (lambda r: [e.update(tables=[]) for e in r["examples"]], "nothing was timed in it"),
        (lambda r: r.update(examples=[]), "nothing was timed in it"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_written(tmp_path, capsys, record, change, message):
    change(record)
    status, said = lines(tmp_path, capsys, record)
    assert status == 1
    assert any(message in line for line in said)
    assert "nothing was written" in said[-1]
    assert not (tmp_path / "results").exists()


def test_older_code_is_seen(tmp_path):
    """Without the stand-in: a lesson that changed since makes its record one of other code."""
    lesson = TOPIC.techniques[0]
    example = copy.deepcopy(RECORDED["examples"][0])
    example["sources"] = "0" * 16
    assert is_stale(lesson, example)


def test_bad_input_is_one_sentence(capsys, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(RECORDED | {"topic": "painting"}))
    for argv, message in (
        (["nowhere.json"], "nowhere.json: No such file"),
        ([str(ROOT / "pyproject.toml")], "not JSON"),
        ([str(other)], "of painting, which is no topic"),
        ([str(other), "--folder", "My GPU"], "use lower-case letters"),
    ):
        assert main(["contribute", *argv]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
