"""The tables of docs/: every recorded table, what a user gets as its row, and what that is put next to."""

from dataclasses import asdict

from harness.bench import Row, Table
from harness.catalog import ROOT
from harness.record import ExampleRecord, Record, load
from harness.sources import sources_hash

import pytest

from companion.readme import (
    answer_cell,
    elsewhere_table,
    newest_ceilings,
    parts_table,
    results_tables,
    told_rows,
    versions_table,
)


def row(variant, ms, ours=False, tbps=1.0, **more):
    spread = {"p20": ms and 0.99 * ms, "p80": ms and 1.01 * ms, "enqueue_us": 5.0}
    known = {"tbps": tbps, "of_ceiling": tbps and 0.5, "speedup": ms and 10 / ms} | spread | more
    return Row(variant, ours, None, 0.1, ms, **known)


def table(*rows, baseline="torch eager", title="made"):
    return Table(title, "8x8", baseline, list(rows))


EAGER = row("torch eager", 10)
PEER = {"ours": True, "peer": True}  # a kernel of this repository that the technique is put next to
LIBRARY = table(EAGER, row("torch.compile", 5), row("CUDA graph", 40))


@pytest.fixture
def lines(tmp_path):
    """The rows that results_tables() tells of a record with these tables."""

    def of(*tables, study=False, gpu="a GPU"):
        limits = {"copy_tbps": None, "gemm_tflops": {}}
        known = {"gpu": gpu, "torch": "2", "triton": "3", "torch_xla": "2", "host": {"cpu": "x", "cores": 4}}
        part = ExampleRecord(
            "made", "passed", tables=[asdict(each) for each in tables], machine=known | {"ceilings": limits}
        )
        example = ExampleRecord("made", "passed", machine=part.machine, study=part) if study else part
        made = Record(tmp_path / "r.json", "topic", gpu)
        made.put(example)
        made.save()
        told = results_tables(sorted(tmp_path.glob("*.json")), study)
        return [line for line in told.splitlines() if line.startswith("| made")]

    return of


def test_the_row_of_a_case_is_what_a_user_gets():
    two = [row("triton", 3, ours=True), row("triton two", 2, ours=True)]
    for rows, told in (
        (LIBRARY.rows, ["torch.compile", "CUDA graph"]),  # nothing of ours: all that is put beside the baseline
        ([row("torch eager", 1), row("torch.compile", 5), row("triton", 9, ours=True)], ["triton"]),
        ([EAGER, *two], ["triton"]),  # not the fastest: the first
        ([EAGER], ["torch eager"]),
        ([EAGER, row("triton", 1, **PEER), row("gluon", 3, ours=True)], ["gluon"]),
        ([EAGER, row("triton", 1, **PEER)], ["triton"]),
    ):
        assert [each.variant for each in told_rows(table(*rows))] == told, rows
    assert [each.variant for each in told_rows(table(*two, baseline="triton"))] == ["triton two"]  # our own variants


def test_every_table_is_listed_and_where_it_loses_it_is_bold(lines):
    """Library calls next to their baseline; our kernels next to it, every library, and the fastest peer."""
    ours = table(row("cuBLAS", 10), row("torch", 8), row("triton", 9, ours=True), baseline="cuBLAS")
    peers = [row("triton tile", 6, **PEER), row("triton split", 4, **PEER)]
    compared = table(EAGER, *peers, row("gluon", 5, ours=True), row("gluon two", 2, ours=True))
    launches = table(EAGER, row("triton", 20, ours=True, tbps=None), title="made: no bytes are counted")
    untimed = table(row("torch eager", None), row("triton", None, ours=True))
    own = table(row("old", 5, ours=True), row("new", 8, ours=True), baseline="old")
    tables = (LIBRARY, ours, compared, launches, untimed, own)
    assert [line.split("8x8 |")[1].strip() for line in lines(*tables)] == [
        "torch.compile | 5 | 1.00 TB/s | 50.0% | 2.00x torch eager |  |",
        "CUDA graph | 40 | 1.00 TB/s | 50.0% | **0.25x** torch eager |  |",
        "triton | 9 | 1.00 TB/s | 50.0% | 1.11x cuBLAS; **0.89x** torch |  |",
        "gluon | 5 | 1.00 TB/s | 50.0% | 2.00x torch eager; **0.80x** triton split | gluon two: 2.50x |",
        "triton | 20 |  |  | **0.50x** torch eager |  |",
        "new | 8 | 1.00 TB/s | 50.0% | **0.62x** old | old: 1.60x |",
    ]
    assert [line.split("8x8 |")[1].strip() for line in lines(LIBRARY, compared, study=True)] == [
        "torch eager | 10 | 2.00x torch.compile; **0.25x** CUDA graph |",
        "torch eager | 10 | 1.67x triton tile; 2.50x triton split; 2.00x gluon; 5.00x gluon two |",
    ]


def test_of_whole_calls_both_sides_times_are_told_and_what_a_faster_host_makes_of_them(lines):
    eager, graph = row("torch eager", 10, gpu_ms=2.0, enqueue_us=9900.0), row("CUDA graph", 2, gpu_ms=1.9)
    for study in (False, True):
        found = lines(table(eager, graph), study=study)
        assert [line.split("8x8 |")[1].strip() for line in found] == [
            "torch eager | 10 | 2 | 9900 |  |  |",
            "CUDA graph | 2 | 1.9 | 5 | 5.00x | 2.63x |",  # 10 / 2, and (10 / 2) / 1.9: the GPU's part stays
        ]


def test_a_ratio_of_uneven_times_has_a_question_mark(lines):
    cpu = {"enqueue_us": None}
    eager = row("torch eager", 10, **cpu)
    rows = [
        eager,
        row("torch near", 10.1, **cpu),
        row("torch uneven", 5, p80=9.0, enqueue_us=None),
        row("torch", 5, **cpu),
    ]
    marked = [line.split(" | ")[-2] for line in lines(table(*rows), gpu=None)]
    assert marked == ["**0.99x?** torch eager", "2.00x? torch eager", "2.00x torch eager"]


def test_an_answer_is_the_recorded_one_or_why_there_is_none(tmp_path, lines):
    lines(LIBRARY)
    (example,) = load(tmp_path / "r.json")["examples"]
    assert answer_cell(example) == "recorded before it gave an answer"
    assert answer_cell(example | {"answer": "Twice as fast."}) == "Twice as fast."
    assert answer_cell(example | {"status": "failed", "reason": "CheckError: wrong"}) == "failed: CheckError: wrong"


def test_another_machine_is_told_of_where_its_answer_differs():
    """Of a technique whose own rows are over 5 % away, beyond the spread of both (a library's say nothing of it), or
    whose answer has other words by the same code; of what other code answered in other words only the name is told."""

    class Named:
        def __init__(self, name, techniques=()):
            self.name, self.techniques = name, techniques
            self.path, self.studies = ROOT / "examples/triton/softmax.py", ()

    today = sources_hash(Named("").path)

    def record(gpu, says="{:.1f}x (host twice as fast: {:.1f}x)", sources=today, **ours):
        tables = {
            name: asdict(table(EAGER, row("torch.compile", 5 * ms), row("triton", ms, ours=True)))
            for name, ms in ours.items()
        }
        examples = [{"name": name, "status": "passed", "answer": says.format(20 / ms, 2.5), "tables": [tables[name]],
                     "sources": sources, "peers": []} for name, ms in ours.items()]  # fmt: skip
        return {"machine": {"gpu": gpu, "triton": "3.9.0"}, "examples": examples}

    topic = Named("topic", [Named("softmax"), Named("matmul")])
    reference = record("an H200", softmax=4, matmul=4)
    assert elsewhere_table([topic], {"topic": [reference]}) == "No other GPU is recorded yet, and no other Triton."
    same = {"topic": [reference, record("an H100", softmax=4.1, matmul=4)]}
    assert elsewhere_table([topic], same) == "Every other machine that is recorded answers the same."

    def rows(**other):
        return elsewhere_table([topic], {"topic": [reference, record("an H100", **other)]}).splitlines()[2:]

    slower = "| matmul | an H100, Triton 3.9.0 | 4.2x (host twice as fast: 2.5x)"
    assert rows(softmax=4, matmul=4.8) == [f"{slower} | 1 | 1 |"]
    assert rows(says="{:.1f}x: slower", matmul=4) == ["| matmul | an H100, Triton 3.9.0 | 5.0x: slower | 0 | 1 |"]
    assert rows(says="{:.1f}x", matmul=4) == []
    told = ["", "By other code than above, so that only ratios are compared (an H100, Triton 3.9.0): softmax."]
    assert rows(sources="0", softmax=4, matmul=4.8) == [f"{slower} *(older code)* | 1 | 1 |", *told]


def test_what_another_triton_makes_slower_is_told_where_the_code_is_the_same(tmp_path):
    def record(folder: str, triton: str, **times: float):
        """A record of techniques that take so many ms beside a library's 10."""
        path = tmp_path / "results" / folder / "topic.json"
        path.parent.mkdir(parents=True)
        made = Record(path, "topic", "A GPU")
        for name, ms in times.items():
            machine = {"gpu": "A GPU", "triton": triton, "host": {"cpu": "x", "cores": 4}}
            tables = [asdict(table(EAGER, row("triton", ms, ours=True)))]
            code = triton if name == "changed" else "0"
            made.put(ExampleRecord(name, "passed", answer="A", tables=tables, machine=machine, sources=code))
        made.save()

    record("gpu", "3.6.0", one=5.0, two=5.0, changed=5.0)
    assert versions_table(tmp_path) == "No machine is recorded with two versions of Triton yet."
    record("gpu-triton-3.9", "3.9.0", one=8.0, two=5.1, changed=8.0)
    told = versions_table(tmp_path).splitlines()
    assert told[0] == "A GPU, Triton 3.6.0 and 3.9.0: 1 of 2 rows are over 5 % away."
    assert told[4:] == ["| one *(older code)* | made 8x8 | triton | 5 | 8 | 0.62x |"]


def test_the_newest_of_each_ceiling_is_told_though_the_newest_run_has_none():
    measured = [
        ("b", {"copy_tbps": 4.2, "gemm_tflops": {"bfloat16": 700.0}}),
        ("a", {"copy_tbps": 4.0, "gemm_tflops": {"bfloat16": 600.0, "float16": 500.0}}),
        ("c", {"copy_tbps": None, "gemm_tflops": {}}),
    ]
    record = {"examples": [{"when": when, "machine": {"ceilings": held}} for when, held in measured]}
    assert newest_ceilings(record) == {"copy_tbps": 4.2, "gemm_tflops": {"bfloat16": 700.0, "float16": 500.0}}
    assert newest_ceilings({"examples": [{"machine": {}}]}) == {"copy_tbps": None, "gemm_tflops": {}}


def test_a_part_of_older_code_is_marked():
    """The parts of triton_compiler's benchmark are of benchmark.py, whatever else has their name."""
    sources = sources_hash(ROOT / "triton_compiler/benchmark.py")
    parts = [ExampleRecord("models", "passed", question="Q", answer="a|b", sources=sources).as_dict(),
             ExampleRecord("graphs", "failed", "why", question="R", sources="0").as_dict()]  # fmt: skip
    record = {"topic": "triton_compiler", "machine": {"gpu": "GPU"}, "examples": parts}
    text = parts_table("It", "part", [record], ROOT).splitlines()
    assert text[0] == "It, recorded on an GPU (*(older code)*: before the code was changed):"
    assert text[-2:] == ["| `models` | Q | a\\|b |", "| `graphs` | R | failed: why *(older code)* |"]
    assert "older" not in parts_table("It", "part", [record | {"examples": parts[:1]}], ROOT)
    there = record | {"machine": {"gpu": "H100"}, "examples": parts[:1]}
    both = parts_table("It", "part", [record, there], ROOT)
    assert both.startswith("\n".join(text))
    assert both.endswith("| part | what it answered there |\n| --- | --- |\n| `models` | a\\|b |")
    assert "\n\nRecorded on an H100:\n\n| part" in both
    assert parts_table("It", "part", [], ROOT) == "No run is recorded yet."
