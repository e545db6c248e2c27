"""The record: written whole, to whatever --json names, and never in place of something that is no file."""

import os
import subprocess
import threading

from harness.hardware import ceilings, machine
from harness.report import RunRecord, git_state, load_record


def record():
    return RunRecord("topic", "python topic.py", machine(), ceilings(), 0, "quick")


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()))
    reader.start()
    record().save(fifo)
    reader.join(10)
    assert fifo.is_fifo()
    assert '"topic": "topic"' in read[0]


def test_a_file_in_a_folder_where_nothing_may_be_made(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.touch()

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refuse)
    record().save(path)
    assert load_record(path)["command"] == "python topic.py"


def test_no_path_is_no_record(tmp_path):
    record().save(None)


def test_the_commit_of_a_copy_without_history_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.report.ROOT", tmp_path)
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
    assert len(commit) == 40
    assert dirty is False
    (tmp_path / "file").write_text("2")
    assert git_state() == (commit, True)
