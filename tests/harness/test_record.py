"""The record: one example replaced and the rest kept, written whole, to whatever --json names."""

import json
import os
import subprocess
import threading

from harness import record as module
from harness.catalog import ROOT, topics
from harness.record import ExampleRecord, Record, as_run, git_state, load, recorded, recorded_answer

import pytest

RECORDS = sorted((ROOT / "results").glob("*/*.json"))
NAMES = {topic.name: [technique.name for technique in topic.techniques] for topic in topics()}


def test_one_example_is_replaced_and_the_others_and_studies_stay(tmp_path):
    path, order = tmp_path / "r.json", ["a", "b", "c"]
    first = Record(path, "topic", "GPU")
    for name in "cb":
        study = ExampleRecord(name, "passed", facts={"of": "a study"}) if name == "b" else None
        first.put(ExampleRecord(name, "passed", facts={"n": 1}, study=study), order)
    first.running = "a"
    first.save()
    assert load(path) == first.as_dict() | {"running": "a"}
    again = Record(path, "topic", "GPU")
    for name in "ab":
        again.put(ExampleRecord(name, "failed", facts={"n": 2}), order)
    again.put(ExampleRecord("unlisted"), order)
    again.save()
    held = load(path)
    assert held["running"] is None
    assert [(e["name"], e["facts"].get("n"), "study" in e) for e in held["examples"]] == [
        ("a", 2, False), ("b", 2, True), ("c", 1, False), ("unlisted", None, False),
    ]  # fmt: skip
    assert held["examples"][1]["study"]["facts"] == {"of": "a study"}
    study = ExampleRecord("b", "passed", study=ExampleRecord("b", facts={"of": "another"}))
    again.put(study, order)
    assert again.examples[1]["study"]["facts"] == {"of": "another"}


def test_a_record_of_something_else_is_refused(tmp_path):
    path = tmp_path / "r.json"
    Record(path, "topic", "GPU").save()
    for topic, gpu in (("other", "GPU"), ("topic", "another GPU"), ("topic", None)):
        with pytest.raises(ValueError, match="choose another file"):
            Record(path, topic, gpu)
    for text in ("{", "[]", '{"schema": 1}', '{"schema": 2}', "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match="expected what --json writes"):
            Record(path, "topic", "GPU")
    path.write_text("")  # as mktemp leaves it
    assert Record(path, "topic", "GPU").examples == []


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


def test_a_recorded_answer_is_that_of_the_gpu_if_there_is_one(tmp_path):
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
    module.recorded.__defaults__, before = (tmp_path,), module.recorded.__defaults__
    try:
        assert recorded_answer("topic", "softmax") == "recorded on 4 cores of a CPU, 2026-11-22: 2x"
        write("h200", "NVIDIA H200", "3x")
        assert recorded_answer("topic", "softmax") == "recorded on an NVIDIA H200, 2026-11-22: 3x"
        write("h200", "NVIDIA H200", None)
        assert recorded_answer("topic", "softmax") is recorded_answer("topic", "none") is None
    finally:
        module.recorded.__defaults__ = before


def test_the_commit_of_a_copy_without_history_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.record.ROOT", tmp_path)
    monkeypatch.setenv("GIT_COMMIT", "abc123")
    assert git_state() == ("abc123", None)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)  # a repository, but nothing committed
    assert git_state() == ("abc123", None)
    monkeypatch.delenv("GIT_COMMIT")
    assert git_state() == (None, None)
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    (tmp_path / "file").write_text("1")
    subprocess.run(["git", "-C", tmp_path, "add", "file"], check=True)
    subprocess.run(["git", "-C", tmp_path, *identity, "commit", "-qm", "one"], check=True)
    commit, dirty = git_state()
    assert (len(commit), dirty) == (40, False)
    (tmp_path / "file").write_text("2")
    assert git_state() == (commit, True)
