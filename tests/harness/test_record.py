"""The record: one example replaced and the rest kept, written whole, to whatever --json names."""

import json
import os
import subprocess
import threading

from harness.catalog import ROOT, topics
from harness.record import ExampleRecord, Record, as_run, git_state, load, recorded, recorded_answer

import pytest

from compile_inspect.report import PHASES
from triton_compiler.benchmark import QUESTIONS

RECORDS = sorted((ROOT / "results").glob("*/*.json"))
NAMES = {topic.name: [technique.name for technique in topic.techniques] for topic in topics()}
NAMES["compile_inspect"], NAMES["triton_compiler"] = [*PHASES], [*QUESTIONS]


def test_a_pipe_is_written_to_and_a_file_where_nothing_may_be_made(tmp_path, monkeypatch):
    fifo, path, read = tmp_path / "fifo", tmp_path / "r.json", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()))
    reader.start()
    Record(fifo, "topic", None).save()
    reader.join(10)
    assert fifo.is_fifo()
    assert json.loads(read[0])["topic"] == "topic"
    path.touch()

    def refuse(partial, path):
        assert load(partial)["topic"] == "topic"  # it is whole before it takes the other's place
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refuse)
    Record(path, "topic", None).save()
    assert load(path)["topic"] == "topic"
    Record(None, "topic", None).save()  # no path is no record


def test_of_a_run_are_its_newest_examples_machine_and_where_it_was_killed():
    old, new = (
        {"name": name, "when": when, "commit": name, "machine": {"gpu": None, "host": {"cores": 4}}}
        for name, when in (("old", "2026-01-02"), ("new", "2026-02-01"))
    )
    run = as_run({"topic": "t", "running": "old", "examples": [new, old]})
    assert (run["commit"], run["machine"]["cores"], run["topic"]) == ("new", 4, "t")
    assert [(e["name"], e.get("status")) for e in run["examples"]] == [("new", None), ("old", "running")]
    assert as_run({"examples": []}) == {"examples": []}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_records_of_this_repository_load(path):
    held = load(path)
    assert (held["topic"], held["running"]) == (path.stem, None)
    assert Record(path, held["topic"], held["gpu"]).examples == held["examples"]
    names = [example["name"] for example in held["examples"]]
    assert names == [name for name in NAMES[path.stem] if name in names]
    for example in held["examples"]:
        known = {key: value for key, value in example.items() if key != "study"}
        assert ExampleRecord(**known).as_dict().items() >= known.items()
        assert set(example["machine"]["host"]) == {"cpu", "cores"}
        assert example["machine"]["gpu"] == held["gpu"]
        assert all("peer" in row for table in example["tables"] for row in table["rows"])


def test_a_recorded_answer_is_that_of_the_gpu_if_there_is_one(tmp_path, monkeypatch):
    def write(machine, gpu, answer):
        path = tmp_path / "results" / machine / "topic.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        made = Record(path, "topic", gpu)
        known = {"gpu": gpu, "host": {"cpu": "x", "cores": 4}}
        when = "2026-11-22T01:02:03+00:00"
        made.put(ExampleRecord("softmax", "passed", answer=answer, machine=known, when=when))
        made.save()

    assert recorded("topic", "softmax", tmp_path) is None
    write("cpu", None, "2x")
    monkeypatch.setattr(recorded, "__defaults__", (tmp_path,))
    assert recorded_answer("topic", "softmax") == "recorded on 4 cores of a CPU, 2026-11-22: 2x"
    write("h200", "NVIDIA H200", "3x")
    assert recorded_answer("topic", "softmax") == "recorded on an NVIDIA H200, 2026-11-22: 3x"
    write("h200", "NVIDIA H200", None)
    assert recorded_answer("topic", "softmax") is recorded_answer("topic", "none") is None


def test_the_commit_of_a_copy_without_history_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.record.ROOT", tmp_path)
    monkeypatch.setenv("GIT_COMMIT", "abc123")
    assert git_state() == ("abc123", None)
    git = ["git", "-C", tmp_path, "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)  # a repository, but nothing committed
    assert git_state() == ("abc123", None)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    subprocess.run([*git, "tag", "v1"], check=True)  # which is no commit's name
    commit, dirty = git_state()
    assert (len(commit), dirty) == (40, False)
    (tmp_path / "file").write_text("2")
    assert git_state() == (commit, True)
