"""Tables: every variant checked before any is timed, honest ratios, nothing timed that has no speed; the answers."""

import json
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

from harness import Table, Timing, Work, bench, geomean, hardware, interpreted, near, ranks
from harness.bench import Row, is_ours, on_host, time_rounds, time_variants
from harness.check import CheckError, VacuousCheck
from harness.hardware import Ceilings
from harness.session import Harness

import pytest
import torch
from rich.console import Console


def reference(x):
    return x.double() * 2


def double(x):
    return x * 2


ONCE = {"baseline": "torch", "work": Work()}
PAIR = {"torch": double, "triton": double}


@pytest.fixture
def timed(monkeypatch):
    """A harness of a technique that needs torch alone, which is timed everywhere."""
    monkeypatch.setattr("harness.bench.CPU_BUDGET_S", 0.002)
    return Harness("timed", console=Console(quiet=True))


@pytest.fixture
def checked(timed):
    timed.timing = False
    return timed


# --- what is checked and timed


def test_a_table_times_every_variant(timed):
    x = torch.randn(64, 64, device=timed.device)
    variants = PAIR | {"slow": lambda x: [x + x for _ in range(20)][-1], "other": double}
    options = {"baseline": "torch", "work": Work(bytes=2 * x.nbytes), "peers": ["other"], "terms": 4}
    table = timed.compare(variants, reference, x, **options)
    assert timed.timed
    assert [row.variant for row in table.rows] == list(variants)
    assert all(0 < row.p20 <= row.ms <= row.p80 for row in table.rows)
    assert table["torch"].speedup == 1.0
    assert table["slow"].speedup < 1.0  # a ratio below 1 is shown like any other
    assert [(row.ours, row.peer) for row in table.rows] == [(False, False), (True, False), (True, False), (True, True)]
    assert table["triton"].tbps == pytest.approx(2 * x.nbytes / table["triton"].ms / 1e9)
    whole = timed.compare(PAIR, reference, torch.randn(8), timing=Timing(end_to_end=True), **ONCE)
    assert all(row.ms > 0 and row.enqueue_us is None for row in whole.rows)  # on a CPU that is what is timed anyway
    assert timed.record.tables == [table.record() for table in timed.tables] == [table.record(), whole.record()]


def test_all_variants_of_a_table_are_timed_after_the_same_number_of_flushes(monkeypatch):
    """As many as the slowest launch needs: under a power limit what ran before a kernel counts."""
    seen = []

    def round_ms(calls, enqueue, orders, written):
        seen.append(enqueue)
        return [dict.fromkeys(calls, 1.0) for _ in orders]

    monkeypatch.setattr(bench, "gpu_round_ms", round_ms)
    calls = dict.fromkeys(("quick to launch", "slow to launch"), lambda: torch.ones(8))
    time_rounds(calls, dict(zip(calls, (0.01, 0.4), strict=True)))
    assert set(seen) == {0.4}


def test_the_hosts_part_of_a_whole_call_ends_where_it_waits_for_the_gpu(monkeypatch):
    """And in a loop: alone, after a pause, launching takes longer."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.02))
    for ms, launched in hardware.whole_call_ms(lambda: time.sleep(0.002), budget=25):
        assert 1.9 < launched < 12 < ms
    times = iter([(3.0, 1.0), (3.0, 1.5), (3.0, 1.2)] * bench.BLOCKS)
    monkeypatch.setattr(bench, "whole_call_ms", lambda *_, **__: [next(times) for _ in range(3)])
    enqueue = {"one": 2.0}
    assert time_rounds({"one": double}, enqueue, end_to_end=True) == {"one": [[3.0] * 3] * bench.BLOCKS}
    assert enqueue == {"one": 1.2}


def test_bad_options_are_refused(checked):
    backwards = dict(reversed(PAIR.items()))
    for variants, options, message in [
        ({"torch": reference}, {"baseline": "cuBLAS"}, "baseline 'cuBLAS' is not one of the variants"),
        (PAIR, {"peers": ["torch"]}, r"peers \['torch'\] are not among .* variants, \['triton'\]"),
        (PAIR, {"references": {"cuBLAS": reference}}, r"references for \['cuBLAS'\], but the variants are"),
        (backwards, {"max_error_ratio": 2.0}, r"needs the baseline first, got \['triton', 'torch'\]"),
        (PAIR, {"max_error_ratio": 2.0, "terms": 4}, r"leave out \['terms'\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            checked.compare(variants, reference, torch.randn(8, 8), **(ONCE | options))
    with pytest.raises(ValueError, match="flops need a dtype"):
        Work(flops=1)


def test_a_wrong_variant_stops_the_table_before_any_timing(h, monkeypatch):
    monkeypatch.setattr("harness.bench.time_variants", lambda *args: pytest.fail("timed"))
    for wrong in PAIR:
        with pytest.raises(CheckError, match=wrong):
            h.compare(PAIR | {wrong: lambda x: x * 3}, reference, h.randn(8, 8), **ONCE)
    assert not h.record.tables
    assert not any(h.tables)


def test_a_variant_with_random_numbers_of_its_own_has_a_reference_of_its_own(h):
    def drop_half(x):
        return x * (torch.rand_like(x) > 0.5) * 2

    def drop_half_reference(x):  # draws what drop_half drew, because it finds the same random state
        return x.double() * (torch.rand_like(x) > 0.5) * 2

    x, variants = h.randn(64, 64), {"torch": drop_half, "triton": double}
    table = h.compare(variants, reference, x, references={"torch": drop_half_reference}, **ONCE)
    assert [row.variant for row in table.rows] == ["torch", "triton"]
    with pytest.raises(CheckError, match="torch"):  # the common reference does not fit it
        h.compare(variants, reference, x, **ONCE)
    wrong = {"torch": drop_half, "triton": lambda x: drop_half(x) * 1.5}
    with pytest.raises(CheckError, match="triton"):
        h.compare(wrong, reference, x, references=dict.fromkeys(wrong, drop_half_reference), **ONCE)
    variants = {"torch": double, "torch dropout": drop_half}
    own = {"torch dropout": drop_half_reference}
    table = h.compare(variants, reference, x, references=own, max_error_ratio=2.0, **ONCE)
    assert table["torch"].error == 0.5


def test_memory_is_poisoned_for_ours_unless_it_is_compiled(checked, monkeypatch):
    poisoned = {}

    def fake(fn, reference, *inputs, what, poison, **budget):
        poisoned[what.rsplit(": ", 1)[1]] = poison
        return 0.0

    monkeypatch.setattr("harness.bench.check", fake)
    compiled = torch.compile(double, backend="eager")
    checked.compare(PAIR | {"triton compiled": compiled}, reference, torch.randn(8), **ONCE)
    assert poisoned == {"torch": False, "triton": True, "triton compiled": False}


@pytest.mark.skipif(not interpreted(), reason="kernels are compiled here")
def test_the_interpreter_checks_ours_and_the_baseline_and_times_nothing(h):
    table = h.compare({"torch": double, "torch.compile": None, "triton": double}, reference, h.randn(8, 8), **ONCE)
    assert [(row.variant, row.ms, row.speedup) for row in table.rows] == [("torch", None, None), ("triton", None, None)]
    assert (bool(table), h.timed) == (False, False)


def test_libraries_are_told_by_their_names():
    for name in ("torch", "torch.compile", "cuBLAS", "cuDNN", "_scaled_mm", "FlexAttention", "CUDA graph", "JAX"):
        assert (is_ours(name), is_ours(f"triton like {name}")) == (False, True)


# --- tables of whole models


def rounded(digits):
    """x * 2, off by about as much as that many bits of it."""
    return lambda x: (x.double() * 2 * (1 + torch.linspace(-1, 1, x.numel()).reshape(x.shape) * 2**-digits)).float()


MODEL = {"torch": rounded(12), "torch.compile": rounded(12)}
RATIO = ONCE | {"max_error_ratio": 2.0}


def test_a_model_is_held_to_the_baselines_own_error(checked):
    x = torch.randn(64, 64)
    variants = MODEL | {"torch.compile": rounded(11.5), "better": rounded(14), "exact": rounded(60)}
    table = checked.compare(variants, reference, x, **RATIO)
    assert table["torch"].error == pytest.approx(0.5)  # of what is allowed
    assert table["torch.compile"].error == pytest.approx(0.5 * 2**0.5, rel=1e-3)
    assert table["better"].error == pytest.approx(0.125, rel=1e-3)
    assert 0 < table["exact"].error < 0.01  # one rounding to its dtype at least
    with pytest.raises(CheckError, match=r"torch.compile: off by 4\.0 times what torch is, 2 allowed"):
        checked.compare(MODEL | {"torch.compile": rounded(10)}, reference, x, **RATIO)
    with pytest.raises(VacuousCheck, match="zero everywhere"):
        checked.compare(MODEL, reference, torch.zeros(8), **RATIO)
    assert len(checked.record.tables) == 1
    for wrong, message in (
        (torch.zeros_like, "off by"), (lambda x: (x * 2)[:1], r"expected torch.float32 \(64, 64\)"),
        (lambda x: torch.where(x > 2, torch.nan, x * 2), "off by nan"),
    ):  # fmt: skip
        for where in MODEL:  # in the baseline too, whose error would otherwise allow everything
            with pytest.raises(CheckError, match=rf"{where}.*{message}"):
                checked.compare(MODEL | {where: wrong}, reference, x, **RATIO)


def test_first_calls_are_cold_or_timed_by_the_technique_itself(checked, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def look(x):
        folders.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        assert list(folders[-1].iterdir()) == []
        return x * 2

    folders, variants, x = [], {"torch": look, "torch again": lambda x: look(x)}, torch.randn(8, 8)
    checked.compare(variants, reference, x, timing=Timing(cold=True), **RATIO)
    assert len({*folders, tmp_path}) == 3  # each has one of its own
    assert not folders[0].exists()
    checked.compare(variants, reference, x, **RATIO)
    assert set(folders[2:]) == {tmp_path}
    timing = Timing(first_calls={"torch.compile": 12.5, "triton": None})  # None: it was before
    table = checked.compare(PAIR | {"torch.compile": double}, reference, x, timing=timing, **ONCE)
    assert table["torch"].first_call_s < 5
    assert [table[name].first_call_s for name in ("torch.compile", "triton")] == [12.5, None]


# --- work, and the clock


def test_work_in_steps_adds_up_and_so_do_the_floors():
    limits = SimpleNamespace(copy_tbps=lambda: 1.0, gemm_tflops=lambda dtype: 1.0)
    steps = [(10**9, 0), (10**9, 3 * 10**9), (0, 10**9)]  # 1 ms; 3 ms, of which the bytes take 1; 1 ms
    work = Work.in_steps(iter(steps), torch.bfloat16)
    assert (work.bytes, work.flops, work.dtype) == (2 * 10**9, 4 * 10**9, torch.bfloat16)
    assert work.floor_ms(limits) == pytest.approx(5.0)
    assert Work(work.bytes, work.flops, work.dtype).floor_ms(limits) == pytest.approx(4.0)  # if they overlapped
    assert Work.in_steps([], torch.float32).floor_ms(limits) is None
    for each in (Work(), Work(bytes=12), Work(bytes=12, flops=3, dtype=torch.float8_e4m3fn), work):
        assert Work.load(json.loads(json.dumps(each.record()))) == each


def test_the_ratio_is_the_median_of_the_ratios_of_each_round(monkeypatch):
    """A machine that slows down from round to round must not bend the ratio."""
    cost, calls = {"torch": 3.0, "ours": 1.0}, []

    def fake(fn):
        calls.append(fn())
        return [cost[fn()] * (1 + (len(calls) - 1) // 2) * part for part in (0.9, 1.0, 1.1)]

    monkeypatch.setattr("harness.bench.cpu_ms", fake)
    table = Table("t", "c", "torch", rows=[Row(name, name == "ours", 0, 0) for name in cost])
    time_variants(table, {name: lambda name=name: name for name in cost}, (), Work(), Ceilings())
    assert table["ours"].speedup == pytest.approx(3.0)
    pooled = sorted(n * part for n in range(1, 8) for part in (0.9, 1.0, 1.1))
    fifths = statistics.quantiles(pooled, n=5, method="inclusive")
    own = table["ours"]
    assert (own.p20, own.ms, own.p80) == pytest.approx((fifths[0], statistics.median(pooled), fifths[3]))
    rounds = [tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert set(rounds) == {("torch", "ours"), ("ours", "torch")}  # each is first now and then


# --- what a table answers


def made(baseline="cuBLAS", **ms):
    """A table of these times; `lib_`, `peer_` before a name say whose it is."""
    table = Table("made", "8x8", baseline, [])
    for name, t in ms.items():
        whose, _, variant = name.rpartition("_")
        table.rows.append(Row(variant, whose != "lib", 0.1, 0.5, t, peer=whose == "peer"))
        table.rows[-1].speedup = t and table[baseline].ms / t  # the baseline comes first
    return table


def test_a_table_is_asked_by_name():
    table = made(lib_cuBLAS=4.0, lib_torch=8.0, ours=5.0, split=2.5, peer_other=1.0)
    assert table.timed
    assert (table["split"].ms, "split" in table, "none" in table) == (2.5, True, False)
    assert table.best.variant == "split"
    ratios = [table.over(*names) for names in (("cuBLAS",), ("torch",), ("cuBLAS", "ours"), ("split", "other"))]
    assert ratios == pytest.approx([1.6, 3.2, 0.8, 2.5])
    with pytest.raises(KeyError, match="made 8x8 has no row 'none'; it has"):
        table.over("none")
    library = made(baseline="torch", lib_torch=4.0, lib_compiled=5.0, lib_graph=8.0)
    assert library.best.variant == "compiled", "the best of what is put beside the baseline, even when it is slower"
    assert made(baseline="other", peer_other=1.0, ours=3.0).best.variant == "ours", "the baseline may be a peer"
    untimed = made(lib_cuBLAS=None, ours=None)
    for table in (Table("t", "c", "torch"), untimed):
        assert not table
        for ask in (lambda t: t.best, lambda t: t.over("cuBLAS"), lambda t: geomean([t], over="cuBLAS")):
            with pytest.raises(ValueError, match=r"h\.answer|no timed table"):
                ask(table)
    near_ones = made(lib_cuBLAS=4.0, ours=4.05, slow=5.0)
    assert [near(near_ones[name], near_ones["ours"]) for name in ("cuBLAS", "slow")] == [True, False]
    assert [near(100, other) for other in (98, 102.04, 97.9)] == [True, True, False]  # of the larger one
    tables = [untimed, made(lib_cuBLAS=4.0, ours=2.0), made(lib_cuBLAS=9.0, ours=9.0, split=1.0), made("x", x=1.0)]
    assert geomean(tables[:3], over="cuBLAS") == pytest.approx(18**0.5)
    assert geomean(iter(tables), over="cuBLAS", of="ours") == pytest.approx(2**0.5)
    with pytest.raises(ValueError, match="geomean: no timed table has a row"):
        geomean(tables, over="cuBLAS", of="none")


def test_a_ratio_on_a_faster_host():
    table = made("torch", torch=4.0, graph=1.0, compiled=2.0)
    for name, gpu_ms in (("torch", 1.5), ("graph", 0.9), ("compiled", 2.0)):
        table[name].gpu_ms = gpu_ms
    assert [on_host(table[name], 2) for name in ("torch", "graph", "compiled")] == [2.0, 0.9, 2.0]
    assert on_host({"ms": 3.0}, 2) == 3.0  # the GPU's part is unknown: an older record, or a CPU
    assert table.over("torch", "graph", host=2) == pytest.approx(2 / 0.9)
    assert table.by_host("torch", "graph") == "4.00x (host twice as fast: 2.22x)"
    assert table.by_host("compiled", "compiled") == "1.00x"
    table = made("torch", torch=4.0, graph=1.0)  # on a CPU: a faster one is faster for both, whatever the rounds say
    table["graph"].speedup = 3.5
    assert table.by_host("torch", "graph") == "3.50x"


def test_a_library_is_allowed_more_than_ours(checked):
    """Two stores and what `library` adds; `budgets` for one variant."""
    x = checked.randn(64, 64)

    def twice(x):
        return x / 3 * 6

    variants = {"torch": twice, "ours": double}
    checked.compare(variants, reference, x, **ONCE, terms=0)
    with pytest.raises(CheckError, match="ours"):
        checked.compare({"torch": double, "ours": twice}, reference, x, **ONCE, terms=0)
    checked.compare({"torch": double, "ours": twice}, reference, x, **ONCE, terms=0, budgets={"ours": {"stores": 2}})

    def rough(x):
        return x * 2 * (1 + 1e-5)

    checked.compare({"torch": rough, "ours": double}, reference, x, **ONCE, terms=0, library={"roundings": 100})
    with pytest.raises(CheckError, match="ours"):
        checked.compare({"torch": rough, "ours": rough}, reference, x, **ONCE, terms=0, library={"roundings": 100})


@pytest.mark.parametrize("fault", ["zeros later", "the first result kept"])
def test_ours_is_checked_again_after_it_was_timed(timed, fault):
    kept = []

    def faulty(x):
        if kept:
            return torch.zeros_like(x) if fault == "zeros later" else kept[0].clone()
        kept.append(x * 2)
        return kept[0].clone()

    x = timed.randn(8, 8)
    before = x.clone()
    with pytest.raises(CheckError, match="ours, after it was timed"):
        timed.compare({"torch": double, "ours": faulty}, reference, x, **ONCE, terms=0)
    assert torch.equal(x, before)


# --- on a GPU


@pytest.mark.gpu
def test_a_slow_host_does_not_count_as_gpu_time(h, alone):
    """A wrapper that dawdles in Python for a millisecond launches the same kernel as one that does not."""
    if not alone:
        pytest.skip("times: pytest -n 0")

    def dawdling(x):
        until = time.perf_counter() + 1e-3
        while time.perf_counter() < until:
            pass
        return x * 2

    x = h.randn(1 << 20)
    variants = {"torch": double, "slow wrapper": dawdling}
    table = h.compare(variants, reference, x, baseline="torch", work=Work(bytes=2 * x.nbytes))
    quick, slow = table.rows
    assert slow.ms < min(3 * quick.ms, 0.1)
    assert slow.enqueue_us > 1000
    assert any("slow wrapper 1" in note for note in table.notes)


@pytest.mark.gpu
def test_a_call_that_only_reads_does_not_pay_for_what_the_flush_wrote(h, alone):
    """It does where L2 holds what waits to be written, as after the call of a kernel that writes."""
    if not alone:
        pytest.skip("times: pytest -n 0")
    x = h.randn(1 << 24)
    out = torch.empty((), device=h.device)
    calls = {"read": lambda: torch.amax(x, 0, out=out)}
    times = {
        written: statistics.median(
            each["read"] for each in hardware.gpu_round_ms(calls, 0.02, [["read"]] * 30, written)
        )
        for written in (0, 2**30)
    }
    assert 0 < times[0] < times[2**30]


# --- with ranks


def test_of_several_ranks_the_slowest_is_the_time(monkeypatch):
    mine, its = {"one": [[1.0, 4.0], [2.0]]}, {"one": [[3.0, 2.0], [2.5]]}
    assert ranks.slowest(mine) == mine
    assert ranks.gathered(3) == [3]
    monkeypatch.setattr(ranks, "gathered", lambda value: [value, its])
    assert ranks.slowest(mine) == {"one": [[3.0, 4.0], [2.5]]}


def test_the_bytes_that_a_call_writes_are_those_of_the_tensors_it_returns():
    x = torch.ones(6, dtype=torch.bfloat16)
    assert [hardware.written_bytes(each) for each in (x, (x, x.float(), None), [x, 3], None)] == [12, 36, 12, 0]
