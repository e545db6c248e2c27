"""`python -m harness compare`: the reader's record next to the reference, and as a regression check."""

import copy
import json
import os
import re
import subprocess
import sys
import time

from harness import __main__ as command
from harness.catalog import ROOT
from harness.compare_records import match, read

import pytest
from hypothesis import given
from hypothesis import strategies as st

RECORDS = sorted((ROOT / "results").glob("*/*.json"))
REFERENCE = ROOT / "results" / "h200" / "triton_examples.json"
GPU = "NVIDIA H100 80GB HBM3"


def row(variant, ms, base=None, spread=0.01, ours=False, **more):
    return {
        "variant": variant, "ours": ours, "first_call_s": 0.1, "error": 0.5, "ms": ms, "p20": ms * (1 - spread),
        "p80": ms * (1 + spread), "tbps": 1.0, "tflops": None, "of_ceiling": 0.5 / ms, "speedup": (base or ms) / ms,
        "enqueue_us": 9.0, **more,
    }  # fmt: skip


def table(*rows, title="softmax", case="64x64 bfloat16", baseline="torch"):
    return {"title": title, "case": case, "baseline": baseline, "rows": list(rows), "notes": []}


def example(name, *tables, status="passed", reason=None, facts=None):
    return {
        "name": name, "status": status, "reason": reason, "seconds": 1.0, "checks": [], "comparisons": list(tables),
        "codegen": [], "facts": facts or {}, "profiled": {},
    }  # fmt: skip


MACHINE = {
    "gpu": "NVIDIA H200", "power_limit_w": 700.0, "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0",
    "python": "3.12.3", "cpu": "Some CPU", "cores": 16, "torch_xla": None, "mode": "gpu",
    "ceilings": {"copy_tbps": 4.0, "gemm_tflops": {"bfloat16": 700.0}, "launch_us": None},
}  # fmt: skip


def made(*examples, machine=None, **more):
    return {
        "schema": 1, "topic": "triton_examples", "command": "python triton_examples.py --json x.json",
        "when": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef", "dirty": False, "seed": 0, "sizes": "full",
        "machine": {**MACHINE, **(machine or {})}, "examples": list(examples), **more,
    }  # fmt: skip


def softmax(**more):
    return example(
        "softmax", table(row("torch", 4.0), row("torch.compile", 3.0, 4.0), row("triton", 2.0, 4.0, ours=True)), **more
    )


def matmul(**more):
    return example("matmul", table(row("torch", 8.0), row("triton", 10.0, 8.0, ours=True), title="matmul"), **more)


def slower(record, name, variant, factor):
    """A copy in which one variant takes `factor` times as long, wherever `name` times it."""
    record = copy.deepcopy(record)
    for found in record["examples"]:
        for recorded in found["comparisons"] if found["name"] == name else ():
            for each in recorded["rows"]:
                if each["variant"] == variant:
                    for key in ("ms", "p20", "p80"):
                        each[key] *= factor
                    each["speedup"] /= factor
                    each["of_ceiling"] = each["of_ceiling"] and each["of_ceiling"] / factor
    return record


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """compare(reference, mine, *options): the exit status, what was printed as one line, and as it was (or what went
    to stderr). A record is a path, or what is to be written into one."""

    def run(reference, mine, *options, columns="80"):
        paths = []
        for name, record in (("reference.json", reference), ("mine.json", mine)):
            path = record
            if isinstance(record, dict):
                path = tmp_path / name
                path.write_text(json.dumps(record))
            paths.append(str(path))
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr(sys, "argv", ["harness", "compare", *paths, *map(str, options)])
        try:
            status = command.main()
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, " ".join(out.split()), err or out

    return run


# --- records of this repository ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_agrees_with_itself(compare, path):
    status, text, lines = compare(path, path, "--fail-under", 1, "--all")
    assert status == 0
    rows = [r for e in read(path).examples.values() for t in e.tables.values() for r in t.rows]
    assert f"all {len(rows)} rows agree" in text
    assert re.search(r"HELD: none of [1-9]\d* ratios over the baseline under 1 of the reference's", text)
    assert "facts that differ" not in text
    assert not re.search(r"\d [+-]( |$)", lines.split("─" * 20, 1)[1], re.MULTILINE)
    assert all(name in text for name in read(path).examples)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
@pytest.mark.parametrize("columns", ["20", "132", "400"])
def test_lines_keep_to_the_terminal(compare, path, columns):
    record = json.loads(path.read_text())
    machine = {**record["machine"], "gpu": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"}
    for other in (record, {**record, "machine": machine}):
        for options in ([], ["--all"], ["--fail-under", "1.5"]):
            _, _, lines = compare(record, other, *options, columns=columns)
            room = min(max(int(columns), 80), 140)
            for line in lines.splitlines()[1:]:  # the first names two files
                assert len(line) <= room or max(map(len, line.split())) > room - 20  # a word is not broken


def test_what_is_printed_of_a_slower_row(compare):
    record = json.loads(REFERENCE.read_text())
    changed = slower(record, "vector_add", "triton", 1.25)
    (timed,) = next(example for example in record["examples"] if example["name"] == "vector_add")["comparisons"]
    tables = [table for example in record["examples"] for table in example["comparisons"]]
    rows = [row for table in tables for row in table["rows"] if row["ms"]]
    held = sum(  # the ratios of this repository's variants, and of tables of library calls all but the baseline's
        row["ours"] or (row["variant"] != table["baseline"] and not any(row["ours"] for row in table["rows"]))
        for table in tables
        for row in table["rows"]
        if row["ms"]
    )
    ours = next(row for row in timed["rows"] if row["variant"] == "triton")

    def columns(*values: str) -> str:
        return " +".join(map(re.escape, values))

    ratios = f"{ours['speedup']:.3f}", f"{ours['speedup'] / 1.25:.3f}"
    times = f"{ours['ms']:.4f}", f"{1.25 * ours['ms']:.4f}"
    shares = f"{100 * ours['of_ceiling']:.1f}", f"{100 * ours['of_ceiling'] / 1.25:.1f}"
    status, text, lines = compare(REFERENCE, changed)
    assert status == 0
    assert f"1 of {len(rows)} rows differ by more than the spread of both runs (--all: every row)" in text
    assert re.search(rf"\n{columns('vector_add', '2 of 3 agree', '0.928', *ratios)}\n", lines)
    assert "\n  268435456 float32 over torch\n" in lines
    assert re.search(rf"\n    {columns('triton', *times, '0.800 -', *ratios)} - +{columns(*shares)}\n", lines)
    assert re.search(r"\nsoftmax +28 of 28 agree ", lines)
    assert "torch.compile" not in text
    assert re.search(r"GPU +NVIDIA H200, 700 W limit +NVIDIA H200, 700 W limit\n", lines)
    assert re.search(r"copy +(\d\.\d\d TB/s) +\1 +1\.000x\n", lines)
    status, text, _ = compare(REFERENCE, changed, "--fail-under", 0.9)
    assert status == 1
    assert f"FAILED: 1 of {held} ratios over the baseline under 0.9 of the reference's" in text
    told = f"triton {ratios[0]} -> {ratios[1]}; its speed 0.800, torch's 1.000"
    assert f"0.800 vector_add 268435456 float32 over torch: {told}" in text
    assert compare(REFERENCE, changed, "--fail-under", 0.79)[0] == 0


# --- what differs, and what is held ------------------------------------------------------------------------------


BOTH = made(softmax(), matmul())


@pytest.mark.parametrize(
    ("factor", "ratio", "status"),
    [
        (1.0, 1.0, 0),
        (1.015, 1.0, 0),  # by less than the spread of both
        (1.10, 0.95, 1),
        (1.10, 0.90, 0),  # by more than the spread, but not under it
        (0.5, 1.0, 0),  # a gain
        (1.0, 1.001, 1),  # a gain is asked for: no spread excuses that there is none
        (0.5, 1.9, 0),
    ],
)
def test_the_ratio_and_the_spread(compare, factor, ratio, status):
    both = made(example("softmax", softmax()["comparisons"][0]))
    found, text, _ = compare(both, slower(both, "softmax", "triton", factor), "--fail-under", ratio)
    assert found == status
    assert ("FAILED: 1 of 1" in text) == bool(status)


def test_what_is_under_it_within_the_spread_is_counted(compare):
    status, text, _ = compare(BOTH, slower(BOTH, "softmax", "triton", 1.015), "--fail-under", 0.99)
    assert status == 0
    assert "HELD: none of 2 ratios over the baseline under 0.99 of the reference's; 1 within the spread" in text
    assert "all 5 rows agree" in text


def test_a_library_beside_ours_differs_but_is_not_held(compare):
    status, text, lines = compare(BOTH, slower(BOTH, "softmax", "torch.compile", 2), "--fail-under", 0.95)
    assert status == 0
    assert re.search(r"\n    torch\.compile +3\.0000 +6\.0000 +0\.500 - +1\.333 +0\.667 - ", lines)
    assert "1 of 5 rows differ" in text


def test_a_table_of_library_calls_holds_all_but_the_baseline(compare):
    calls = made(example("softmax", table(row("torch", 4.0), row("torch.compile", 2.0, 4.0))))
    status, text, _ = compare(calls, slower(calls, "softmax", "torch.compile", 1.5), "--fail-under", 0.95)
    assert status == 1
    assert "FAILED: 1 of 1 ratios" in text


def test_a_faster_baseline_is_told_from_a_slower_variant(compare):
    mine = copy.deepcopy(BOTH)
    for each in mine["examples"][0]["comparisons"][0]["rows"]:
        each["speedup"] /= 2
    base = mine["examples"][0]["comparisons"][0]["rows"][0]
    base.update({key: base[key] / 2 for key in ("ms", "p20", "p80")}, speedup=1.0)
    status, text, _ = compare(BOTH, mine, "--fail-under", 0.95)
    assert status == 1
    assert "0.500 softmax 64x64 bfloat16 over torch: triton 2.000 -> 1.000; its speed 1.000, torch's 2.000" in text


def test_the_worst_comes_first(compare):
    mine = slower(slower(BOTH, "softmax", "triton", 1.2), "matmul", "triton", 2)
    text = compare(BOTH, mine, "--fail-under", 0.95)[1]
    assert text.index("0.500 matmul") < text.index("0.833 softmax")


@given(
    scales=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=2),
    spread=st.floats(0, 0.2),
    recorded=st.booleans(),
)
def test_a_common_factor_keeps_the_ratios(tmp_path_factory, scales, spread, recorded):
    """As a GPU that is faster throughout: every time differs, no ratio does."""
    folder = tmp_path_factory.mktemp("records")
    records = []
    for factors in ([1.0, 1.0], scales):
        tables = [
            table(row("torch", 4.0 * f, spread=spread), row("triton", 3.0 * f, 4.0 * f, spread, ours=True), title=title)
            for title, f in zip(("softmax", "other"), factors, strict=True)
        ]
        for each in tables if not recorded else ():
            for one in each["rows"]:
                del one["speedup"]
        path = folder / f"{len(records)}.json"
        path.write_text(json.dumps(made(example("softmax", *tables))))
        records.append(read(path))
    pairs = list(match(*records, []).pairs("softmax"))
    assert len(pairs) == 4
    for pair, scale in zip(pairs, [scales[0]] * 2 + [scales[1]] * 2, strict=True):
        assert pair.kept == pytest.approx(1)
        assert not pair.fails(0.999)
        assert pair.speed == pytest.approx(1 / scale)
        apart = scale * (1 - spread) > 1 + spread or scale * (1 + spread) < 1 - spread
        if abs(scale * (1 - spread) / (1 + spread) - 1) > 1e-6 and abs(scale * (1 + spread) / (1 - spread) - 1) > 1e-6:
            assert (pair.time_sign != " ") == apart


@given(factor=st.floats(0.2, 5), ratio=st.floats(0.1, 1), spread=st.floats(0, 0.3))
def test_a_row_fails_when_it_is_under_the_ratio_beyond_the_spread(tmp_path_factory, factor, ratio, spread):
    folder = tmp_path_factory.mktemp("records")
    records = []
    for name, ms in (("reference", 2.0), ("mine", 2.0 * factor)):
        path = folder / name
        rows = [row("torch", 4.0, spread=spread), row("triton", ms, 4.0, spread, ours=True)]
        path.write_text(json.dumps(made(example("softmax", table(*rows)))))
        records.append(read(path))
    _, pair = match(*records, []).pairs("softmax")
    width = (1 + spread) / (1 - spread)
    if abs(factor * ratio - 1) > 1e-6 and abs(factor / width**2 - 1) > 1e-6:
        assert pair.fails(ratio) == (1 / factor < ratio and factor > width**2)


# --- machines ---------------------------------------------------------------------------------------------------


def test_another_gpu_is_compared_by_its_ratios(compare):
    mine = made(softmax(), matmul(), machine={"gpu": GPU, "ceilings": {"copy_tbps": 3.0, "gemm_tflops": {}}})
    for name in ("torch", "torch.compile", "triton"):
        mine = slower(mine, "softmax", name, 1.4)
    for each in mine["examples"][0]["comparisons"][0]["rows"]:
        each["speedup"] *= 1.4
    status, text, lines = compare(BOTH, mine, "--fail-under", 0.95)
    assert status == 0
    assert "Another GPU: times are not comparable" in text
    assert "all 3 rows agree" in text  # without the baselines
    assert re.search(r"\nsoftmax +2 of 2 agree +0\.714 ", lines)
    assert re.search(r"copy +4\.00 TB/s +3\.00 TB/s +0\.750x\n", lines)
    assert re.search(r"GEMM bfloat16 +700 TFLOP/s +not measured\n", lines)
    status, text, lines = compare(BOTH, slower(mine, "softmax", "triton", 2), "--fail-under", 0.95)
    assert status == 1
    assert re.search(r"\n    triton +2\.0000 +5\.6000 +0\.357 +2\.000 +1\.000 - ", lines)  # no sign at the time
    assert "its speed" not in text


def test_another_cpu_is_another_machine(compare):
    none = {"gpu": None, "driver": None, "power_limit_w": None, "ceilings": {"copy_tbps": None, "gemm_tflops": {}}}
    one, other = made(softmax(), machine=none), made(softmax(), machine={**none, "cores": 2})
    status, text, _ = compare(one, other)
    assert status == 0
    assert "Another CPU: times are not comparable" in text
    assert "host Some CPU, 16 cores Some CPU, 2 cores" in text
    assert "driver" not in text
    assert "Another" not in compare(one, one)[1]
    assert "Another GPU" in compare(one, BOTH)[1]


# --- what is in one of the two ---------------------------------------------------------------------------------


def test_a_technique_that_is_missing(compare):
    status, text, _ = compare(BOTH, made(softmax()))
    assert (status, "matmul only in the reference: passed" in text) == (0, True)
    status, text, _ = compare(BOTH, made(softmax()), "--fail-under", 0.5)
    assert status == 1
    assert "FAILED: none of 1 ratios over the baseline under 0.5 of the reference's, and what is absent" in text
    assert re.search(r"not in \S+mine\.json: matmul$", text)
    assert compare(BOTH, made(softmax()), "softmax", "--fail-under", 0.5)[0] == 0  # it is not asked for
    status, text, _ = compare(made(softmax()), BOTH, "--fail-under", 0.5)
    assert (status, "matmul only in mine: passed" in text) == (0, True)


@pytest.mark.parametrize(
    ("status", "reason", "told"),
    [
        ("skipped", "needs sm_90 (this is sm_80)", "skipped: needs sm_90 (this is sm_80)"),
        ("failed", "CheckError: wrong\nmore of it", "failed: CheckError: wrong"),
        ("running", None, "running"),
    ],
)
def test_a_technique_that_did_not_pass(compare, status, reason, told):
    mine = made(softmax(), example("matmul", status=status, reason=reason, facts={"x": 1}))
    found, text, _ = compare(BOTH, mine)
    assert found == 0
    assert "only in" not in text
    assert "facts" not in text
    assert f"matmul mine {told}" in text
    assert "more of it" not in text
    found, text, _ = compare(BOTH, mine, "--fail-under", 0.5)
    assert found == 1
    assert text.endswith(f"matmul {told}")
    found, text, _ = compare(mine, mine, "--fail-under", 0.5)  # that it failed before excuses nothing
    assert found == (status == "failed")
    assert f"matmul {told} in both" in text


def test_a_failed_technique_keeps_the_rows_that_it_timed(compare):
    mine = made(softmax(status="failed", reason="CheckError: the second table"), matmul())
    status, text, _ = compare(BOTH, mine, "--fail-under", 0.5)
    assert status == 1
    assert "all 5 rows agree" in text
    assert "mine failed: CheckError: the second table" in text


def test_an_interrupted_run(compare):
    for last in (example("softmax", status="failed", reason="interrupted"), example("softmax", status="running")):
        mine = made(last)
        status, text, _ = compare(BOTH, mine)
        assert status == 0
        assert "The run of mine ended in softmax: what came after it is missing." in text
        assert "no row was timed in both" in text
        status, text, _ = compare(BOTH, mine, "--fail-under", 0.5)
        assert status == 1
        assert "FAILED: none of 0 ratios" in text


def test_cases_and_variants_of_one_record(compare):
    first, second = (
        table(row("torch", 1.0), row("triton", 1.0, ours=True)),
        table(row("torch", 1.0), case="8x8 float32"),
    )
    third = table(row("torch", 1.0), row("triton", 1.0, ours=True), title="backward")
    more = table(row("torch", 1.0), row("triton", 1.0, ours=True), row("triton loop", 1.0, ours=True))
    one, other = made(example("softmax", first, second, third)), made(example("softmax", more))
    status, text, _ = compare(one, other)
    assert status == 0
    assert "only in the reference: 8x8 float32 over torch; backward 64x64 bfloat16 over torch" in text
    assert "only in mine: triton loop (64x64 bfloat16 over torch)" in text
    status, text, _ = compare(one, other, "--fail-under", 0.5)
    assert status == 1
    assert "softmax backward 64x64 bfloat16 over torch: not measured" in text
    assert "8x8 float32 over torch: not measured" not in text  # of a baseline alone nothing is held
    status, text, _ = compare(other, one, "--fail-under", 0.5)
    assert status == 1
    assert "softmax 64x64 bfloat16 over torch: triton loop: not measured" in text


def test_tables_of_one_name_meet_in_their_order(compare):
    tables = [table(row("torch", 4.0), row("triton", ms, 4.0, ours=True)) for ms in (1.0, 2.0)]
    status, text, _ = compare(made(example("softmax", *tables)), made(example("softmax", *tables)), "--fail-under", 1)
    assert status == 0
    assert "all 4 rows agree" in text


def test_facts_that_differ_are_named(compare):
    facts = {"a bar": 1.0, "same": [1, 2], "gone": {}, "by case": {"one": {"x": 1}, "two": {"x": 2}}}
    other = {"a bar": 0.9, "same": [1, 2], "by case": {"one": {"x": 1}, "two": {"x": [3]}}, "new": {"y": None}}
    one, mine = made(softmax(facts=facts)), made(softmax(facts=other))
    status, text, _ = compare(one, mine, "--fail-under", 1)
    assert status == 0
    assert "facts that differ: a bar; gone; by case; and 1 more" in text
    text = compare(one, mine, "--all")[1]
    for line in ("a bar: 1.0 -> 0.9", "gone: {} -> absent", "by case: two: x: 2 -> [3]", "new: y: absent -> None"):
        assert line in text
    assert "one: x" not in text
    assert "same" not in text


def test_only_the_techniques_that_are_named(compare):
    mine = slower(BOTH, "matmul", "triton", 2)
    for options in (["softmax", "--fail-under", 0.9], ["--fail-under", 0.9, "softmax"], ["--all", "softmax"]):
        status, text, _ = compare(BOTH, mine, *options)
        assert status == 0
        assert "matmul" not in text
    assert compare(BOTH, mine, "--fail-under", 0.9, "softmax", "matmul")[0] == 1


def test_the_record_of_one_technique_file(compare):
    """python examples/triton/softmax.py --json mine.json names its record after itself."""
    alone = made(softmax(), topic="softmax")
    for one, other in ((BOTH, alone), (alone, BOTH), (alone, alone)):
        status, text, _ = compare(one, other, "--fail-under", 1)
        assert status == 0
        assert "all 3 rows agree" in text
        assert "matmul" not in text


# --- older and odd records ----------------------------------------------------------------------------------------


def test_a_record_that_lacks_what_came_later(compare):
    """Of a row, its name and its median; the spread is then nothing, and the ratio that of the medians."""
    bare = made(softmax(), matmul())
    for key in ("command", "when", "commit", "dirty", "seed", "sizes"):
        del bare[key]
    bare["machine"] = {"gpu": "NVIDIA H200"}
    for found in bare["examples"]:
        for key in ("reason", "seconds", "checks", "codegen", "facts", "profiled"):
            del found[key]
        for recorded in found["comparisons"]:
            del recorded["notes"]
            recorded["rows"] = [{"variant": r["variant"], "ours": r["ours"], "ms": r["ms"]} for r in recorded["rows"]]
    for one, other in ((bare, bare), (bare, BOTH), (BOTH, bare)):
        status, text, _ = compare(one, other, "--fail-under", 1)
        assert status == 0
        assert "all 5 rows agree" in text
    assert (
        compare(BOTH, slower(bare | {"examples": BOTH["examples"]}, "matmul", "triton", 2), "--fail-under", 1)[0] == 1
    )


def untimed(record, **more):
    record = copy.deepcopy(record) | more
    for found in record["examples"]:
        for recorded in found["comparisons"]:
            for each in recorded["rows"]:
                each.update(ms=None, p20=None, p80=None, speedup=None, of_ceiling=None)
    return record


CHECKED = untimed(BOTH, command="python triton_examples.py --check-only --json x.json")
ABBREVIATED = untimed(BOTH, command="python triton_examples.py --check --json x.json")
INTERPRETED = untimed(made(softmax(), matmul(), machine={"gpu": None, "mode": "interpreted"}), sizes="interpreted")
PROFILED = made(example("softmax"), example("matmul"), command="python triton_examples.py --profile --json x.json")


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (CHECKED, "it was run with --check-only; run it without"),
        (ABBREVIATED, "it was run with --check-only; run it without"),
        (INTERPRETED, "Triton's kernels were interpreted, and an interpreted kernel has no speed; run it on a GPU"),
        (PROFILED, "it was run with --profile; run it without"),
        (untimed(BOTH), "no row of it has a time; run it again"),
    ],
)
def test_a_record_without_times_says_so_and_holds_nothing(compare, record, why):
    for one, other, which in ((BOTH, record, "mine"), (record, BOTH, "the reference")):
        status, text, _ = compare(one, other)
        assert status == 0
        assert f"Nothing was timed in {which} (" in text
        assert f".json): {why}." in text
        assert "softmax passed in both, with no row that both have timed" in text
        status, _, err = compare(one, other, "--fail-under", 0.9)
        assert status == 2
        assert re.search(
            rf"error: --fail-under 0\.9: there is nothing to hold in \S+\.json: {re.escape(why)}, as ", err
        )


def test_some_rows_without_times(compare):
    mine = copy.deepcopy(BOTH)
    mine["examples"][0]["comparisons"][0]["rows"][1].update(ms=None, p20=None, p80=None, speedup=None)
    status, text, _ = compare(BOTH, mine, "--fail-under", 0.9)
    assert status == 0  # what is not timed is a library's
    assert "timed only in the reference: torch.compile (64x64 bfloat16 over torch)" in text


def test_other_sizes_have_no_case_in_common(compare):
    quick = copy.deepcopy(BOTH) | {"sizes": "quick"}
    for found in quick["examples"]:
        found["comparisons"][0]["case"] = "8x8 bfloat16"
    status, text, _ = compare(BOTH, quick)
    assert status == 0
    assert "sizes full quick" in text
    assert "no row was timed in both" in text
    status, _, err = compare(BOTH, quick, "--fail-under", 0.9)
    assert status == 2
    assert "no ratio over a baseline is in both records" in err
    assert "mine.json has sizes quick" in err


# --- wrong usage -----------------------------------------------------------------------------------------------


def malformed(**row_values):
    record = made(softmax())
    record["examples"][0]["comparisons"][0]["rows"][0].update(row_values)
    return record


@pytest.mark.parametrize(
    ("mine", "options", "message"),
    [
        ("no/such.json", [], "no/such.json: No such file or directory; name a record that python TOPIC.py --json"),
        (str(ROOT / "results"), [], "results: Is a directory; name a record"),
        (str(ROOT / "README.md"), [], "README.md: not JSON ("),
        (str(ROOT / "pyproject.toml"), [], "expected what --json writes"),
        (sys.executable, [], "not JSON ('utf-8' codec can't decode"),
        ({"schema": 99}, [], "mine.json: not a record of schema 1; expected what --json writes"),
        ({"schema": 1}, [], "mine.json: not a whole record of a run (no 'examples')"),
        ({"schema": 1, "examples": []}, [], "not a whole record of a run (no 'machine')"),
        (made("softmax"), [], "not a whole record of a run ('str' object has no attribute 'get')"),
        (made({"name": "softmax"}), [], "not a whole record of a run (no 'status')"),
        (made(machine={"ceilings": {"copy_tbps": "fast"}}), [], "(copy_tbps is 'fast', and not a number above 0)"),
        (made(machine={"ceilings": [1]}), [], "not a whole record of a run"),
        (malformed(ms="1"), [], "(ms of 'torch' is '1', and not a number above 0)"),
        (malformed(p20=-1.0), [], "(p20 of 'torch' is -1.0, and not a number above 0)"),
        (malformed(speedup=0), [], "(speedup of 'torch' is 0, and not a number above 0)"),
        (malformed(ms=float("nan")), [], "(ms of 'torch' is nan, and not a number above 0)"),
        (made(), [], "mine.json has no technique; run python triton_examples.py --json"),
        (made(example("other")), [], "nothing in common: "),
        (made(softmax()), ["matmul"], "nothing in common of those named: "),
        (BOTH, ["sofmax"], "there is no technique 'sofmax' to compare; did you mean softmax?"),
        (BOTH, ["xyz"], "there is no technique 'xyz' to compare; there are: softmax, matmul"),
        (made(softmax(), topic="triton_fp8_advanced"), [], "mine.json of triton_fp8_advanced; compare two records of"),
        (made(example("other"), topic="other"), [], "mine.json of other; compare two records of one topic"),
        (BOTH, ["--fail-under", "0"], "'0' is not a number above 0"),
        (BOTH, ["--fail-under", "-0.5"], "'-0.5' is not a number above 0"),
        (BOTH, ["--fail-under", "nan"], "'nan' is not a number above 0"),
        (BOTH, ["--fail-under", "inf"], "'inf' is not a number above 0"),
        (BOTH, ["--fail-under", "95%"], "'95%' is not a number above 0; 0.95 lets a ratio be 5 % lower"),
        (BOTH, ["--fail-under"], "expected one argument"),
        (BOTH, ["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (BOTH, ["softmax", "--frobnicate", "x"], "unrecognized arguments: --frobnicate x"),
    ],
)
def test_wrong_usage(compare, mine, options, message):
    status, _, err = compare(BOTH, mine, *options)
    assert status == 2
    assert message in err
    assert "error: " in err
    assert "Traceback" not in err
    if not options:  # whichever of the two it is
        assert compare(mine, BOTH)[0] == 2


def test_a_record_of_techniques_without_tables_holds_nothing(compare):
    alone = made(example("debugging", facts={"x": 1}))
    assert compare(alone, alone)[0] == 0
    status, _, err = compare(alone, alone, "--fail-under", 0.9)
    assert (status, "there is nothing to hold" in err) == (2, True)


def test_a_record_is_named(compare, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["harness", "compare", str(REFERENCE)])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "the following arguments are required: MINE" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["doctor", "extra"], ["readme", "--check", "extra"]])
def test_the_other_commands_take_no_more_words(monkeypatch, capsys, argv):
    monkeypatch.setattr(sys, "argv", ["harness", *argv])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "unrecognized arguments: extra" in capsys.readouterr().err


# --- the process -------------------------------------------------------------------------------------------------


def test_it_is_fast_and_imports_no_torch(cli):
    def seconds():
        started = time.perf_counter()
        done = cli(("-m", "harness"), "compare", REFERENCE, REFERENCE, "--fail-under", 1)
        elapsed = time.perf_counter() - started
        assert done.returncode == 0
        assert "HELD" in done.stdout
        assert "\x1b" not in done.stdout
        return elapsed

    assert min(seconds() for _ in range(5)) < 0.3
    done = cli(("-X", "importtime", "-m", "harness"), "compare", REFERENCE, REFERENCE)
    assert "harness.compare_records" in done.stderr
    assert " torch" not in done.stderr
    assert " triton" not in done.stderr


def test_a_reader_who_closes_the_pipe_gets_the_exit_status(tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(slower(json.loads(REFERENCE.read_text()), "softmax", "triton rows", 2)))
    command = (
        f"set -o pipefail; {sys.executable} -m harness compare {REFERENCE} {mine} --all --fail-under 0.9 | head -1"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == ""
    assert done.stdout == f"{mine} beside {REFERENCE}\n"


def test_where_only_ascii_can_be_printed(cli):
    done = cli(("-m", "harness"), "compare", REFERENCE, REFERENCE, "--fail-under", 1, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "-" * 80 in done.stdout


def test_the_help_says_what_the_exit_status_means(cli):
    said = " ".join(cli(("-m", "harness"), "compare", "--help").stdout.split())
    assert "--fail-under RATIO" in said
    assert "Exit status: 0 nothing is under RATIO, or none was given; 1 something fails; 2 wrong usage" in said
    assert "compare" in cli(("-m", "harness"), "--help").stdout
