"""README's tables: which row of a recorded table is the technique's own, and what it is put next to."""

from harness.record import ExampleRecord, Record, load

from companion.readme import answer_cell, best_row, results_tables


def row(variant, ms, ours=False, tbps=1.0, tflops=None, peer=False):
    return {
        "variant": variant, "ours": ours, "ms": ms, "tbps": tbps, "tflops": tflops, "of_ceiling": 0.5,
        "speedup": None if ms is None else 10 / ms, "peer": peer,
    }  # fmt: skip


def table(*rows, baseline="torch eager"):
    return {"title": "made", "case": "8x8", "baseline": baseline, "rows": list(rows)}


EAGER = row("torch eager", 10)
PEER = {"ours": True, "peer": True}  # a kernel of this repository that the technique is put next to
LIBRARY = table(EAGER, row("torch.compile", 5), row("CUDA graph", 4))


def test_the_best_row_of_a_case():
    for rows, best in (
        (LIBRARY["rows"], "CUDA graph"),  # nothing of ours: the best of what is put next to the baseline
        ([EAGER, row("torch.compile", 12)], "torch.compile"),  # even when it is slower
        ([row("torch eager", 1), row("torch.compile", 5), row("triton", 9, ours=True)], "triton"),  # ours, if there is
        ([EAGER, row("triton", 3, ours=True), row("triton two", 2, ours=True)], "triton two"),
        ([EAGER], None),
        ([EAGER, row("torch.compile", None)], None),  # not timed
        ([EAGER, row("torch.compile", 5, tbps=None)], None),  # no work is counted: its times are those of launches
        ([EAGER, row("torch.compile", 5, tbps=None, tflops=3.0)], "torch.compile"),
        ([EAGER, row("torch.compile", 5), row("triton", None, ours=True)], None),
        ([EAGER, row("triton", 1, **PEER), row("gluon", 3, ours=True)], "gluon"),
        ([EAGER, row("triton", 1, **PEER)], None),  # not the library's row: this is no table of library calls
    ):
        found = best_row(table(*rows))
        assert (found and found["variant"]) == best, rows


def test_what_each_case_is_put_next_to(tmp_path):
    """Library calls next to their baseline, our kernels next to every library and to the fastest peer."""
    ours = table(row("cuBLAS", 10), row("torch", 8), row("triton", 5, ours=True), baseline="cuBLAS")
    peers = [row("triton tile", 6, **PEER), row("triton split", 4, **PEER), row("triton late", None, **PEER)]
    compared = table(EAGER, *peers, row("gluon", 5, ours=True))
    limits = {"copy_tbps": None, "gemm_tflops": {}}
    known = {"gpu": None, "torch": "2", "torch_xla": None, "host": {"cpu": "x", "cores": 4}, "ceilings": limits}
    made = Record(tmp_path / "r.json", "topic", None)
    for name, tables in {"modes": [LIBRARY, ours], "by_hand": [compared]}.items():
        made.put(ExampleRecord(name, "passed", tables=tables, machine=known))
    made.save()
    lines = [line for line in results_tables(tmp_path).splitlines() if line.startswith(("| modes", "| by_hand"))]
    assert [line.split("8x8 |")[1].strip() for line in lines] == [
        "CUDA graph | 4.000 | 1.00 TB/s | 50.0% | 2.50x torch eager |",
        "triton | 5.000 | 1.00 TB/s | 50.0% | 2.00x cuBLAS, 1.60x torch |",
        "gluon | 5.000 | 1.00 TB/s | 50.0% | 2.00x torch eager, 0.80x triton split |",
    ]
    by_hand = load(tmp_path / "r.json")["examples"][1]
    assert answer_cell(by_hand) == "recorded before it gave an answer"
    assert answer_cell(by_hand | {"answer": "Twice as fast."}) == "Twice as fast."
    assert answer_cell(by_hand | {"status": "failed", "reason": "CheckError: wrong"}) == "failed: CheckError: wrong"
