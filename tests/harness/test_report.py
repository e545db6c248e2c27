"""The record: written whole, to whatever --json names, and never in place of something that is no file."""

import io
import os
import re
import subprocess
import threading

from harness.compare import Comparison, Row
from harness.hardware import ceilings, machine
from harness.report import (
    ExampleRecord,
    RunRecord,
    best_row,
    git_state,
    load_record,
    results_tables,
    show_comparison,
    show_rows,
    show_summary,
)
from harness.session import Harness

import pytest
from rich.console import Console


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


def row(variant, ms, ours=False, tbps=1.0, tflops=None):
    return {
        "variant": variant, "ours": ours, "ms": ms, "tbps": tbps, "tflops": tflops, "of_ceiling": 0.5,
        "speedup": None if ms is None else 10 / ms,
    }  # fmt: skip


def table(*rows, baseline="torch eager"):
    return {"title": "made", "case": "8x8", "baseline": baseline, "rows": list(rows)}


EAGER = row("torch eager", 10)
LIBRARY = table(EAGER, row("torch.compile", 5), row("CUDA graph", 4))


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        (LIBRARY["rows"], "CUDA graph"),  # nothing of ours: the best of what is put next to the baseline
        ([EAGER, row("torch.compile", 12)], "torch.compile"),  # even when it is slower
        ([row("torch eager", 1), row("torch.compile", 5), row("triton", 9, ours=True)], "triton"),  # ours, if there is
        ([EAGER, row("triton", 3, ours=True), row("triton two", 2, ours=True)], "triton two"),
        ([EAGER], None),
        ([], None),
        ([EAGER, row("torch.compile", None)], None),  # not timed
        ([EAGER, row("torch.compile", 5, tbps=None)], None),  # no work is counted: its times are those of launches
        ([EAGER, row("torch.compile", 5, tbps=None, tflops=3.0)], "torch.compile"),
        ([EAGER, row("torch.compile", 5), row("triton", None, ours=True)], None),
    ],
)
def test_the_best_row_of_a_case(rows, best):
    found = best_row(table(*rows))
    assert (found and found["variant"]) == best


def test_a_table_of_library_calls_is_put_next_to_its_baseline_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.report.ROOT", tmp_path)
    made = record()
    ours = table(row("cuBLAS", 10), row("torch", 8), row("triton", 5, ours=True), baseline="cuBLAS")
    example = ExampleRecord("modes", "passed", comparisons=[LIBRARY, ours])
    made.examples.append(example)
    made.save(tmp_path / "r.json")
    lines = [line for line in results_tables(tmp_path).splitlines() if line.startswith("| modes")]
    assert lines[0].endswith("| CUDA graph | 4.000 | 1.00 TB/s | 50.0% | 2.50x torch eager |")
    assert lines[1].endswith("| triton | 5.000 | 1.00 TB/s | 50.0% | 2.00x cuBLAS, 1.60x torch |")


def test_brackets_in_a_name_are_shown():
    named = table(row("torch eager", 10), row("torch x[x > 0]", 8), row("torch [/b]", 9), baseline="torch eager")
    shown = Comparison(
        "a [red]",
        "8x8 [0]",
        "torch eager",
        [Row(first_call_s=0.1, error=0.5, p20=1.0, p80=2.0, **each) for each in named["rows"]],
    )
    made = record()
    made.examples.append(ExampleRecord("modes", "passed", comparisons=[named]))
    console = Console(file=(said := io.StringIO()), width=200)
    show_comparison(console, shown)
    show_summary(console, made)
    for text in ("torch x[x > 0]", "torch [/b]", "a [red]  8x8 [0]"):
        assert text in said.getvalue()


def test_the_summary_shows_the_best_of_each_case():
    made = record()
    made.examples.append(ExampleRecord("modes", "passed", comparisons=[LIBRARY, table(EAGER)]))
    console = Console(file=(said := io.StringIO()), width=200)
    show_summary(console, made)
    text = said.getvalue()
    assert "the best of each case" in text
    assert re.search(r"modes: made +8x8 +CUDA graph +4\.0000 +50\.0% +2\.50 +torch eager", text)
    assert "PASSED  modes" in text


def test_rows_of_facts_are_kept_whole():
    console = Console(file=(said := io.StringIO()), width=20)
    show_rows(console, "a title longer than the table", {"one [0]": {"x": 1.5, "y": [1, 2]}, "two": {"z": "[red]"}})
    lines = [line.split() for line in said.getvalue().splitlines()]
    assert lines[0] == ["a", "title", "longer", "than", "the", "table"]
    assert ["x", "y", "z"] in lines
    assert ["one", "[0]", "1.5", "1", "/", "2"] in lines
    assert ["two", "[red]"] in lines


def test_a_table_of_facts_is_recorded_as_a_fact():
    h = Harness("t", console=Console(file=(said := io.StringIO()), width=80))
    rows = {"a": {"x": 1}, "b": {"x": [2.5, None]}}
    h.table("name", rows)
    assert h.record.facts == {"name": rows}
    assert "2.5 / None" in said.getvalue()
    with pytest.raises(TypeError, match="cannot be recorded"):
        h.table("bad", {"a": {"x": float("nan")}})
