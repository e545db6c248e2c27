"""The record: written whole, to whatever --json names, and never in place of something that is no file."""

import io
import os
import re
import subprocess
import threading

from harness.codegen import Kernel
from harness.compare import Comparison, Row
from harness.hardware import ceilings, machine
from harness.report import (
    ExampleRecord,
    RunRecord,
    best_row,
    git_state,
    load_record,
    measured_cell,
    results_tables,
    show_architectures,
    show_codegen,
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


def row(variant, ms, ours=False, tbps=1.0, tflops=None, **more):
    return {
        "variant": variant, "ours": ours, "ms": ms, "tbps": tbps, "tflops": tflops, "of_ceiling": 0.5,
        "speedup": None if ms is None else 10 / ms, **more,
    }  # fmt: skip


def table(*rows, baseline="torch eager"):
    return {"title": "made", "case": "8x8", "baseline": baseline, "rows": list(rows)}


EAGER = row("torch eager", 10)
OTHER = {"ours": True, "comparator": True}  # a kernel of this repository that the technique is put next to
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
        ([EAGER, row("triton", 1, **OTHER), row("gluon", 3, ours=True, comparator=False)], "gluon"),
        ([EAGER, row("triton", 1, **OTHER)], None),  # not the library's row instead: this is no table of library calls
        ([row("triton", 1, **OTHER), row("gluon", 3, ours=True)], "gluon"),  # the baseline may be one of them
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


def test_the_fastest_comparator_stands_beside_the_libraries(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.report.ROOT", tmp_path)
    others = [row("triton tile", 6, **OTHER), row("triton split", 4, **OTHER), row("triton late", None, **OTHER)]
    made, compared = record(), table(EAGER, *others, row("gluon", 5, ours=True))
    made.examples.append(ExampleRecord("by_hand", "passed", comparisons=[compared]))
    made.save(tmp_path / "r.json")
    (line,) = (line for line in results_tables(tmp_path).splitlines() if line.startswith("| by_hand"))
    assert line.endswith("| gluon | 5.000 | 1.00 TB/s | 50.0% | 2.00x torch eager, 0.80x triton split |")
    cell = measured_cell(load_record(tmp_path / "r.json")["examples"][0])
    assert cell == "2.00x torch eager, 50 % of ceiling"  # README compares with libraries alone


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


SMS = (80, 89, 90, 100, 120)
GIVEN = {"registers": 100, "spills": 0, "shared": 2048, "shared_limit": 232448}


def entry(sm, call=1, kernel="k", **found):
    return Kernel(kernel, sm, **(found if "error" in found else GIVEN | found)).record() | {"call": call}


def closing(*examples, sms=SMS, width=100):
    """The lines of the table, and its rows by technique: {"name": {"sm_90": the words after it}}."""
    made = record()
    made.examples += examples
    console = Console(file=(said := io.StringIO()), width=width)
    show_architectures(console, made, sms)
    rows: dict[str, dict[str, str]] = {}
    for line in said.getvalue().splitlines():
        if re.match(r" [a-z]\w*( |$)", line):
            current = rows.setdefault(line.split()[0], {})
        elif match := re.match(r"   (sm_\d+) +(\S.*)", line):
            sm = match[1]
            current[sm] = f"{current[sm]} and {match[2]}" if sm in current else match[2]
        elif line.startswith(" " * 10) and rows:
            current[sm] += " " + line.strip()
    return said.getvalue().splitlines(), rows


MATMUL = ExampleRecord(
    "tma_matmul",
    "passed",
    codegen=[
        entry(90, found={"mma.sync": 1}, registers=1),  # of an evidence for one architecture, before the main call
        entry(80, 2, error="TypeError: tma_matmul needs sm_90 [or newer], and this is sm_80; use a pointer"),
        entry(89, 2, found={"ld.global.v4": 2}, shared=200 * 1024, shared_limit=99 * 1024),
        entry(90, 2, found={"wgmma": 4, "cp.async.bulk.tensor": 12, "mbarrier": 3}, spills=8),
        entry(100, 2, found={"fma.f32": 9, **{f"tcgen05.{i}": 1 for i in range(8)}}, tensor_memory=256),
    ],
)


def test_the_closing_table_says_what_each_technique_becomes_on_each_architecture():
    lines, rows = closing(MATMUL, ExampleRecord("later", "failed"))
    assert lines[0] == "what each technique becomes on each architecture, compiled here"
    assert list(rows["tma_matmul"]) == ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]
    rows = {sm: " ".join(text.split()) for sm, text in rows["tma_matmul"].items()}
    assert rows["sm_80"] == (
        "cannot, because TypeError: tma_matmul needs sm_90 [or newer], and this is sm_80; use a pointer"
    )
    assert rows["sm_89"] == "cannot, because a program takes 200.0 KiB of shared memory, and there are 99"
    assert rows["sm_90"] == "wgmma x4, cp.async.bulk.tensor x12, mbarrier x3 100 8 2.0"
    assert rows["sm_100"].startswith("tcgen05.0 x1, tcgen05.1 x1, ")
    assert "fma.f32" not in rows["sm_100"]  # what every kernel has gives way
    assert rows["sm_100"].endswith("and 1 more")
    assert " 100 0 2.0 256" in rows["sm_100"]
    assert rows["sm_120"] == "not compiled for it"
    assert " later  nothing was compiled: failed" in lines


@pytest.mark.parametrize("width", [40, 80, 100, 140, 170])
def test_the_closing_table_keeps_to_the_terminal(width):
    lines, rows = closing(MATMUL, width=width)
    assert max(map(len, lines)) <= max(width, 80)
    text = " ".join(rows["tma_matmul"]["sm_90"].split())
    assert set(text.replace(",", "").split()) == {
        "wgmma", "x4", "cp.async.bulk.tensor", "x12", "mbarrier", "x3", "100", "8", "2.0"
    }  # fmt: skip
    assert not any(re.match(r" +x\d", line) for line in lines)  # no count without its name
    heads = next(line for line in lines if "registers" in line)
    numbers = next(line for line in lines if line.startswith("   sm_100"))
    for column, value in (("registers", "100"), ("bytes", "0"), ("KiB", "2.0"), ("memory", "256")):
        end = heads.index(column) + len(column)
        assert numbers[:end].endswith(" " + value)


def test_kernels_of_one_call_are_named_and_those_of_one_are_not():
    two = [entry(90, kernel="one", found={"wgmma": 1}), entry(90, kernel="two", error="X"), entry(80, found={})]
    _, rows = closing(ExampleRecord("t", "passed", codegen=two))
    assert re.fullmatch(r"one: wgmma x1 +100 +0 +2\.0 and two: cannot, because X", rows["t"]["sm_90"])
    assert re.fullmatch(r"none of those counted +100 +0 +2\.0", rows["t"]["sm_80"])


def test_entries_without_a_call_are_one_call():
    bare = [{name: value for name, value in entry(sm).items() if name != "call"} for sm in (80, 90)]
    assert set(closing(ExampleRecord("t", "passed", codegen=bare))[1]["t"]) == {f"sm_{sm}" for sm in SMS}


def test_no_closing_table_without_architectures_or_without_code():
    assert closing(MATMUL, sms=())[0] == []
    assert closing(ExampleRecord("t", "passed"))[0] == []


def test_tensor_memory_has_a_column_where_there_is_some():
    def shown(*kernels):
        console = Console(file=(said := io.StringIO()), width=200)
        show_codegen(console, list(kernels))
        return said.getvalue()

    hopper, blackwell = Kernel("k", 90, **GIVEN), Kernel("k", 100, **GIVEN, tensor_memory=128)
    assert "tensor memory" not in shown(hopper)
    both = shown(hopper, blackwell)
    assert "tensor memory" in both
    assert re.search(r"sm_100 +- +100 +0 +2\.0 +128", both)
    assert re.search(r"sm_90 +- +100 +0 +2\.0 *$", both, re.M)
    assert "does not fit: 300.0 KiB" in shown(Kernel("k", 90, **(GIVEN | {"shared": 300 * 1024})))


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
