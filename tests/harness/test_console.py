"""What is printed: whole in 80 columns, nothing cut short, brackets and all."""

import io
import os
import re

from harness import Table, console
from harness.bench import Row
from harness.codegen import Kernel
from harness.record import ExampleRecord

import pytest
from rich.console import Console


def said(show, *args, width=80):
    """The lines that show(console, *args) prints."""
    show(Console(file=(file := io.StringIO()), width=width), *args)
    return file.getvalue().splitlines()


def made(case, *names, ms=1.0, **more):
    known = {"p20": 1.0, "p80": 2.0, "tbps": 1.0, "of_ceiling": 0.48, "enqueue_us": 5.0} | more
    rows = [Row(name, i > 0, 0.1, 0.5, ms * (i + 1), speedup=1 / (i + 1), **known) for i, name in enumerate(names)]
    return Table("made", case, names[0], rows)


ODD = ("torch eager", "torch x[x > 0]", "torch [/b]", "a [red] one")
MANY = ("cuBLAS", *(f"variant number {i}" for i in range(6)))


@pytest.mark.parametrize(
    ("names", "cases"),
    [
        (ODD, ("8x8",)), (MANY[:3], ("8x8 [0]", "16x16 [1]")), (MANY, ("8x8 [0]", "16x16 [1]")),
        (ODD, tuple(f"{8 * i} by {i}" for i in range(9))), (MANY, tuple(f"{8 * i} by {i}" for i in range(9))),
    ],
)  # fmt: skip
def test_tables_of_one_title_are_one_that_fits(names, cases):
    """A row for each case, unless only a column for each fits; every name and number is whole."""
    tables = [made(case, *names, peer=i == 1) for i, case in enumerate(cases)]
    tables[-1].notes = ["the power limit held"]
    lines = said(console.show_cases, tables)
    text = "\n".join(lines)
    whole = " ".join(text.split())
    assert max(map(len, lines)) <= 80
    assert ("…" in text, whole.count("the power limit held")) == (False, 1)
    for case in cases:
        assert case in whole
    for i, name in enumerate(names) if len(cases) == 1 else ():
        assert re.search(rf"^ ?{re.escape(name)} +{i + 1} .* {1 / (i + 1):.2f}", text, re.M)
    for i in range(1, len(names)):
        assert whole.count(f"{1 / (i + 1):.2f}") >= len(cases)
    assert text.count("48%") == (len(names) if len(cases) == 1 else len(cases))


@pytest.mark.parametrize("width", [50, 200])
def test_one_table_at_any_width_and_cases_without_times_or_without_a_variant(width):
    lines = said(console.show_comparison, made("8x8 [0]", *ODD), width=width)
    assert lines[0].split() == ["made", "8x8", "[0]"]
    assert not any("…" in line for line in lines)
    for i, name in enumerate(ODD):
        row = rf" ?{re.escape(name)} +{i + 1}\.0000 +1\.0000 - 2\.0000 +.* {1 / (i + 1):.2f} +50% +0\.10 *"
        assert any(re.fullmatch(row, line) for line in lines)
    untimed = made("8x8", "torch", "ours")
    for row in untimed.rows:
        row.ms = None
    assert said(console.show_cases, [untimed]) == []
    assert said(console.show_comparison, untimed)[0].endswith("of what rounding allows: torch 50%, ours 50%")
    lines = said(console.show_cases, [untimed, made("one", "torch", "a"), made("two", "torch", "a", "b")])
    assert [line.split() for line in lines[-2:]] == [["one", "1", "0.50", "48%"], ["two", "1", "0.50", "0.33", "48%"]]


def test_whole_calls_are_told_with_the_gpus_time_the_hosts_and_what_a_faster_host_makes_of_them():
    """Launch-bound eager at 9 ms beside a graph at 1.5: 6x here, and 3x where the host is twice as fast."""

    def calls(case, long):
        table = made(case, "torch eager", f"CUDA graph{long}", tbps=None)
        for row, ms, gpu_ms, host, over in zip(
            table.rows, (9.0, 1.5), (1.6, 1.5), (8900.0, 20.0), (1.0, 6.0), strict=True
        ):
            row.ms, row.p20, row.p80, row.gpu_ms, row.enqueue_us, row.speedup = ms, ms, ms, gpu_ms, host, over
        return table

    for long in ("", " of many compiled blocks, one a layer"):
        for tables in ([calls("1x1 tokens", long)], [calls("1x1 tokens", long), calls("1x16 tokens", long)]):
            lines = said(console.show_cases, tables)
            assert max(map(len, lines)) <= 80
            rows = [re.sub(r"\d+%", "", line).split() for line in lines if re.match(" *CUDA graph", line)]
            assert [row[-5:] for row in rows] == [["1.5", "1.5", "20", "6.00", "3.00"]] * len(tables)
            assert all(sum(table.case in line for line in lines) == 1 for table in tables)
    assert "host" not in "".join(said(console.show_cases, [made("8x8", "torch eager", "ours")]))


@pytest.mark.parametrize("cases", [("8x8",), ("8x8", "16x16")])
def test_a_ratio_of_uneven_times_is_marked_and_its_spread_told(cases):
    """On a CPU, or of whole calls: where it reaches from below 1 to above, or one call takes half as long again; on a
    GPU where the ratio of the times is another than that of the rounds."""
    for spread, over, told in (
        ((0.98, 1.02), 2.0, None), ((0.9, 1.1), 1.05, "0.86 to 1.28"), ((0.98, 2.39), 2.0, "0.82 to 2.08"),
    ):  # fmt: skip
        tables = [made(case, "torch", "ours", enqueue_us=None) for case in cases]
        for base, row in (table.rows for table in tables):
            base.ms, base.p20, base.p80 = 1.0, 0.98, 1.02
            row.ms, row.speedup = 1 / over, over
            row.p20, row.p80 = (each / over for each in spread)
            if over == 1.05:
                base.p20, base.p80 = 0.9, 1.1
        text = " ".join("\n".join(said(console.show_cases, tables)).split())
        assert (f"{over:.2f}?" in text) == bool(told), text
        assert ("uneven" in text) == bool(told)
        assert told is None or text.count(told) == len(cases), text
        for base, row in (table.rows for table in tables):
            base.enqueue_us, row.enqueue_us, row.ms = 5.0, 5.0, 1.04 / over
        assert f"{over:.2f}?" in " ".join(said(console.show_cases, tables))
        for table in tables:
            table.rows[1].ms = 1 / over
        assert "?" not in " ".join(said(console.show_cases, tables))


def test_rows_of_facts_and_the_closing_table_are_whole():
    rows = {"one [0]": {"x": 1.5, "y": [1, 2]}, "two": {"z": "[red]"}}
    lines = [line.split() for line in said(console.show_rows, "a title longer than the table", rows, width=30)]
    for line in ("a title longer than the table", "x y z", "one [0] 1.5 1 / 2", "two [red]"):
        assert line.split() in lines
    lines = said(console.show_rows, "longer than that", rows, width=15)  # row after row where the columns do not fit
    assert [line.strip() for line in lines[1:]] == [
        "longer than", "that", "one [0]", "x: 1.5; y:", "1 / 2", "two", "z: [red]"
    ]  # fmt: skip
    study = ExampleRecord("b", "failed", "CheckError: of the study\nmore")
    examples = [
        ExampleRecord("a", "passed", answer="Twice [as] fast: " + "and so on, " * 20),
        ExampleRecord("b", "passed", answer="not said", study=study),
        ExampleRecord("c", "failed", "CheckError: 3 of 4\nmore"),
        ExampleRecord("d", "skipped", "needs sm_100"),
        ExampleRecord("e", "passed"),
    ]
    lines = said(console.show_summary, examples, {"e": "recorded on an NVIDIA H200"})
    assert max(map(len, lines)) <= 80
    whole = " ".join(" ".join(lines).split())
    assert "a passed Twice [as] fast: and so on" in whole
    assert "b passed, study failed CheckError: of the study c failed CheckError: 3 of 4 d skipped needs sm_100" in whole
    assert whole.endswith("e passed recorded on an NVIDIA H200")


# --- generated code

GIVEN = {"registers": 100, "spills": 0, "shared": 2048, "shared_limit": 232448}


def test_tensor_memory_has_a_column_where_there_is_some():
    hopper, blackwell = Kernel("k", 90, **GIVEN), Kernel("k", 100, **GIVEN, tensor_memory=128)
    one, both = ("\n".join(said(console.show_codegen, each, width=200)) for each in ([hopper], [hopper, blackwell]))
    assert ("tensor memory" in one, "tensor memory" in both) == (False, True)
    assert re.search(r"sm_100 +- +100 +0 +2\.0 +128", both)
    assert re.search(r"sm_90 +- +100 +0 +2\.0 *$", both, re.M)


def test_what_compilers_print_is_shown_only_if_a_first_call_fails(capfd):
    with console.errors_held_back():
        os.write(2, b"a configuration that does not fit\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"

    @console.errors_held_back()
    def fails():
        os.write(2, b"the reason\n")
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert capfd.readouterr().err == "the reason\n"


def test_a_process_without_standard_error_runs(monkeypatch):
    monkeypatch.setattr(console.sys, "stderr", None)
    with console.errors_held_back():
        reached = True
    assert reached
