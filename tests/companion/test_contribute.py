"""companion contribute: a record that a reader made is checked, loses what names its machine, and lands in results/."""

import copy
import json
import shutil

from harness.catalog import ROOT, topics
from harness.record import load
from harness.sources import sources_hash

import pytest

from companion import contribute
from companion.__main__ import main
from companion.readme import is_stale, stale_parts

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
    """The scripts, lessons and pages of this repository, and a copy of its results/."""
    for topic in topics():
        shutil.copy(ROOT / topic.file, tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "studies", tmp_path / "studies")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.copy(ROOT / "README.md", tmp_path)


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), (None, "cpu"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-blackwell-workstation-edition"),
    ],
)  # fmt: skip
def test_folder(gpu, folder):
    assert contribute.folder_name(gpu) == folder


def test_a_good_record_lands_without_names(tmp_path, capsys, monkeypatch, record):
    monkeypatch.setattr(contribute, "names_here", lambda: {"fractal": "host", "jane": "user", "torch": "user"})
    on_another_gpu(record, "NVIDIA GeForce RTX 4090", "3.6.0")
    record["examples"][0]["command"] = "python x.py --json /nfs/home/jane/mine.json"
    record["examples"][1]["facts"]["note"] = "Fractal says fractals, torch, /root/a and /roots/b, /tmp/inductor_jane"
    status, said = lines(tmp_path, capsys, record)
    assert status == 0
    path = tmp_path / "results/rtx-4090/triton_tma_blackwell.json"
    held = json.loads(path.read_text())
    assert held["examples"][0]["command"] == "python x.py --json ~/mine.json"
    assert held["examples"][1]["facts"]["note"] == "host says fractals, torch, ~/a and /roots/b, /tmp/inductor_user"
    assert [e["tables"] for e in held["examples"]] == [e["tables"] for e in record["examples"]]
    assert "8 techniques; 4 paths and names of this machine were taken out" in said[0]
    assert "docs/running.md: renewed" in said
    assert "CLAIMS.md: renewed" in said
    assert "NVIDIA GeForce RTX 4090" in (tmp_path / "docs/running.md").read_text()
    assert "git add results/rtx-4090 README.md CLAIMS.md docs" in said[-1]
    with pytest.raises(ValueError, match=r"exists; replace it with --force"):
        contribute.contribute([tmp_path / "mine.json"], root=tmp_path)
    assert contribute.contribute([tmp_path / "mine.json"], force=True, root=tmp_path) == 0
    on_another_gpu(record, "NVIDIA GeForce RTX 4090", "3.9.0")
    assert lines(tmp_path, capsys, record)[0] == 0
    assert (tmp_path / "results/rtx-4090-triton-3.9/triton_tma_blackwell.json").exists()
    with pytest.raises(ValueError, match="another record named here is of the same topic and machine"):
        contribute.contribute(2 * [tmp_path / "mine.json"], force=True, root=tmp_path)
    on_another_gpu(record, "NVIDIA B200", "3.6.0")
    with pytest.raises(ValueError, match=r"results/rtx-4090 holds records of NVIDIA GeForce RTX 4090; name another"):
        lines(tmp_path, capsys, record, ("folder", "rtx-4090"))


def test_a_record_of_several_gpus_has_a_folder_of_its_own(tmp_path):
    record = load(ROOT / "results/h100-x2/torch_distributed_examples.json")
    assert contribute._place(record, None, {}, tmp_path).parent.name == "h100-x2"
    for example in record["examples"]:
        example["machine"]["ranks"] = 4
    assert contribute._place(record, None, {}, tmp_path).parent.name == "h100-x4"


def on_another_gpu(record: dict, gpu: str, triton: str) -> None:
    record["gpu"] = gpu
    for example in record["examples"]:
        for part in (example, example["study"]):
            part["machine"] |= {"gpu": gpu, "triton": triton}


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
        (
            lambda r: r["examples"].append(r["examples"][0]),
            "what_is_tma: no technique of triton_tma_blackwell, or there",
        ),
        (lambda r: r["examples"][0]["study"].update(sizes="quick"), "the study of what_is_tma: at quick sizes"),
        (lambda r: r["examples"][0]["study"]["machine"].update(gpu="NVIDIA B200"), "mixes GPUs or versions"),
        (lambda r: r["examples"][0].pop("study"), "what_is_tma: without its study"),
        (lambda r: r["examples"][0].update(status="skipped"), "what_is_tma: skipped: None"),
        (lambda r: r["examples"][0].pop("seed"), "what_is_tma: lacks seed"),
        (lambda r: r["examples"][0].update(machine=None, peers=None), "what_is_tma: its machine, peers cannot be read"),
        (lambda r: r.update(gpu="NVIDIA B200"), "it says NVIDIA B200, and its examples NVIDIA H200"),
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
    for path in tmp_path.glob("results/*/*.json"):
        assert path.read_bytes() == (ROOT / path.relative_to(tmp_path)).read_bytes()


def test_older_code_is_seen():
    """Without the stand-in: what was measured with today's code is not older, and anything else is."""
    lesson, example = TOPIC.techniques[0], copy.deepcopy(RECORDED["examples"][0])
    example["peers"] = example["study"]["peers"] = []
    example["sources"] = sources_hash(lesson.path)
    example["study"]["sources"] = sources_hash(lesson.studies[0], lesson.studies[1:])
    assert not is_stale(lesson, example)
    assert stale_parts(lesson, example | {"sources": "0" * 16}) == ["lesson"]
    assert stale_parts(lesson, example | {"study": example["study"] | {"sources": "0" * 16}}) == ["study"]
    assert is_stale(lesson, example | {"peers": ["examples/triton/gone.py"]})


def test_bad_input_is_one_sentence(capsys, tmp_path):
    other, none, deep = (tmp_path / f"{name}.json" for name in ("other", "none", "deep"))
    other.write_text(json.dumps(RECORDED | {"topic": "painting"}))
    none.write_text(json.dumps({"schema": 2}))
    deep.write_text("[" * 100_000)
    for argv, message in (
        (["nowhere.json"], "nowhere.json: No such file"),
        ([str(ROOT / "pyproject.toml")], "not JSON"),
        ([str(other)], "of painting, which is no topic"),
        ([str(other), "--folder", "My GPU"], "use lower-case letters"),
        ([str(none)], "its topic, gpu, running, examples cannot be read"),
        ([str(deep)], "not JSON"),
        ([str(tmp_path)], "Is a directory"),
    ):
        assert main(["contribute", *argv]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
