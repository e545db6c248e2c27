"""Tables: every variant checked before any is timed, honest ratios, and nothing timed that has no speed."""

import os
import time
from pathlib import Path

from harness.check import CheckError, VacuousCheck
from harness.compare import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    Comparison,
    Row,
    Work,
    _quantile,
    is_ours,
    time_rounds,
    time_variants,
)
from harness.hardware import Ceilings, gpu_round_ms, interpreted
from harness.report import best_row
from harness.session import Harness
from harness.settings import get_caches

import pytest
import torch
from rich.console import Console


def reference(x):
    return x.double() * 2


@pytest.fixture
def timed():
    """A harness of a technique that needs torch alone, which is timed everywhere."""
    return Harness("timed", console=Console(quiet=True))


def test_a_table_times_every_variant(timed):
    x = torch.randn(512, 512, device=timed.device)
    variants = {"torch": lambda x: x * 2, "ours": lambda x: x + x, "ours in three": lambda x: (x + x + 1) - 1}
    table = timed.compare(variants, reference, x, baseline="torch", work=Work(bytes=2 * x.nbytes), terms=4)
    rows = {row.variant: row for row in table.rows}
    assert list(rows) == list(variants)
    assert all(row.p20 <= row.ms <= row.p80 for row in table.rows)
    assert rows["torch"].speedup == 1.0
    assert rows["ours in three"].speedup < 1.0  # a ratio below 1 is shown like any other
    assert [row.ours for row in table.rows] == [False, True, True]
    assert rows["ours"].tbps == pytest.approx(2 * x.nbytes / rows["ours"].ms / 1e9)
    assert timed.record.comparisons[0]["rows"][1]["ms"] == rows["ours"].ms


def test_a_comparator_is_checked_timed_and_marked(timed):
    x = torch.randn(512, 512, device=timed.device)
    variants = {"torch": lambda x: x * 2, "ours": lambda x: x + x, "another technique's": lambda x: 2 * x}
    work, comparators = Work(bytes=2 * x.nbytes), ["another technique's"]
    timed.compare(variants, reference, x, baseline="torch", work=work, comparators=comparators)
    rows = timed.record.comparisons[0]["rows"]
    assert [(row["ours"], row["comparator"]) for row in rows] == [(False, False), (True, False), (True, True)]
    assert all(row["ms"] for row in rows)
    assert best_row(timed.record.comparisons[0])["variant"] == "ours"


@pytest.mark.parametrize("name", ["nobody", "torch"])
def test_a_comparator_is_one_of_our_variants(timed, name):
    variants = {"torch": lambda x: x * 2, "ours": lambda x: x + x}
    with pytest.raises(ValueError, match=rf"comparators \['{name}'\] are not among .* variants, \['ours'\]"):
        timed.compare(variants, reference, torch.ones(8, 8), baseline="torch", work=Work(), comparators=[name])


def test_a_wrong_variant_stops_the_table_before_any_timing(h, monkeypatch):
    timed = []
    monkeypatch.setattr("harness.session.time_variants", lambda *args: timed.append(args))
    variants = {"torch": lambda x: x * 2, "triton": lambda x: x * 3}
    with pytest.raises(CheckError, match="triton"):
        h.compare(variants, reference, h.randn(8, 8), baseline="torch", work=Work(bytes=1))
    assert not timed


def test_a_wrong_baseline_stops_the_table_too(h):
    with pytest.raises(CheckError, match="torch"):
        h.compare(
            {"torch": lambda x: x * 3, "triton": lambda x: x * 2},
            reference,
            h.randn(8, 8),
            baseline="torch",
            work=Work(),
        )


def drop_half(x):
    return x * (torch.rand_like(x) > 0.5) * 2


def drop_half_reference(x):
    """Draws what drop_half drew, because it finds the same random state."""
    return x.double() * (torch.rand_like(x) > 0.5) * 2


def test_a_variant_with_random_numbers_of_its_own_has_a_reference_of_its_own(h):
    x = h.randn(64, 64)
    variants = {"torch": drop_half, "triton": lambda x: x * 2}
    options = {"baseline": "torch", "work": Work(bytes=1)}
    table = h.compare(variants, reference, x, references={"torch": drop_half_reference}, **options)
    assert [row.variant for row in table.rows] == ["torch", "triton"]
    with pytest.raises(CheckError, match="torch"):  # the common reference does not fit it
        h.compare(variants, reference, x, **options)
    wrong = {"torch": drop_half, "triton": lambda x: drop_half(x) * 1.5}
    with pytest.raises(CheckError, match="triton"):
        h.compare(wrong, reference, x, references=dict.fromkeys(wrong, drop_half_reference), **options)
    with pytest.raises(ValueError, match=r"references for \['cuBLAS'\], but the variants are"):
        h.compare(variants, reference, x, references={"cuBLAS": reference}, **options)


def test_such_a_variant_is_called_once_before_its_reference_and_that_call_is_the_first(timed):
    """A reference may ask what it checks, and what the first call compiles is then compiled already."""
    calls = []

    def slow_at_first(x):
        calls.append("variant")
        if len(calls) == 1:
            time.sleep(0.2)
        return drop_half(x)

    def asks(x):
        calls.append("reference")
        return x.double() * slow_at_first(torch.ones_like(x))

    timed.timing = False
    x = torch.randn(64, 64, device=timed.device)
    table = timed.compare(
        {"torch": slow_at_first}, reference, x, references={"torch": asks}, baseline="torch", work=Work()
    )
    assert calls == ["variant", "reference", "variant", "variant"]
    assert table.rows[0].first_call_s >= 0.2


def test_memory_is_poisoned_for_ours_unless_it_is_compiled(h, monkeypatch):
    poisoned = {}

    def fake(fn, reference, *inputs, what, poison, **budget):
        poisoned[what.rsplit(": ", 1)[1]] = poison
        return 0.0

    monkeypatch.setattr("harness.compare.check", fake)
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    h.timing = False
    variants = {"torch": lambda x: x * 2, "triton": lambda x: x * 2, "triton compiled": compiled}
    h.compare(variants, reference, h.randn(8), baseline="torch", work=Work())
    assert poisoned == {"torch": False, "triton": True, "triton compiled": False}


def test_the_interpreter_checks_ours_and_the_baseline_and_times_nothing(h):
    if not interpreted():
        pytest.skip("kernels are compiled here")
    called = []

    def not_the_baseline(x):
        called.append(x)
        return x * 2

    variants = {"torch": lambda x: x * 2, "torch.compile": not_the_baseline, "triton": lambda x: x + x}
    table = h.compare(variants, reference, h.randn(8, 8), baseline="torch", work=Work(bytes=1))
    assert [row.variant for row in table.rows] == ["torch", "triton"]
    assert all(row.ms is None and row.speedup is None for row in table.rows)
    assert not called


def test_an_unknown_baseline_and_flops_without_a_dtype_are_refused(h):
    with pytest.raises(ValueError, match="baseline 'cuBLAS' is not one of the variants"):
        h.compare({"torch": reference}, reference, h.randn(2), baseline="cuBLAS", work=Work())
    with pytest.raises(ValueError, match="flops need a dtype"):
        Work(flops=1)


def test_the_ratio_is_the_median_of_the_ratios_of_each_round(monkeypatch):
    """A machine that slows down from round to round must not bend the ratio."""

    cost = {"torch": 3.0, "ours": 1.0}
    calls = []

    def fake(fn):
        calls.append(fn())
        return [cost[fn()] * (1 + (len(calls) - 1) // 2)] * 3

    monkeypatch.setattr("harness.compare.cpu_ms", fake)
    table = Comparison("t", "c", "torch", rows=[Row("torch", False, 0, 0), Row("ours", True, 0, 0)])
    time_variants(table, {"torch": lambda: "torch", "ours": lambda: "ours"}, (), Work(), Ceilings())
    assert table.rows[1].speedup == pytest.approx(3.0)
    rounds = [tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert set(rounds) == {("torch", "ours"), ("ours", "torch")}  # each is first now and then


def test_quantiles():
    assert _quantile([1.0], 0.8) == 1.0
    assert _quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert _quantile([0.0, 10.0], 0.2) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "name", ["torch", "torch.compile", "cuBLAS", "cuDNN", "_scaled_mm", "FlexAttention", "CUDA graph"]
)
def test_library_names(name):
    assert not is_ours(name)
    assert is_ours(f"triton like {name}")


# --- tables of whole models


def rounded(digits):
    """x * 2, off by about as much as that many bits of it."""
    return lambda x: (x.double() * 2 * (1 + torch.linspace(-1, 1, x.numel()).reshape(x.shape) * 2**-digits)).float()


def test_beside_holds_each_to_the_baselines_own_error(timed):
    timed.timing = False
    x = torch.randn(64, 64)
    variants = {"torch eager": rounded(12), "torch.compile": rounded(11.5), "better": rounded(14), "exact": rounded(60)}
    table = timed.compare(variants, reference, x, baseline="torch eager", work=Work(), beside=2.0)
    errors = {row.variant: row.error for row in table.rows}
    assert errors["torch eager"] == pytest.approx(0.5)  # of what is allowed
    assert errors["torch.compile"] == pytest.approx(0.5 * 2**0.5, rel=1e-3)
    assert errors["better"] == pytest.approx(0.125, rel=1e-3)
    assert 0 < errors["exact"] < 0.01  # one rounding to its dtype at least


def test_beside_stops_what_is_further_off_and_names_it(timed):
    x = torch.randn(64, 64)
    variants = {"torch eager": rounded(12), "torch.compile": rounded(10)}
    message = r"torch.compile: off by 4\.0 times what torch eager is, 2 allowed"
    with pytest.raises(CheckError, match=message):
        timed.compare(variants, reference, x, baseline="torch eager", work=Work(), beside=2.0)
    assert not timed.record.comparisons


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros_like, "off by"),
        (lambda x: (x * 2).double(), "torch.float64"),
        (lambda x: (x * 2)[:1], r"expected torch.float32 \(64, 64\)"),
        (lambda x: torch.where(x > 2, torch.nan, x * 2), "off by nan"),
        (lambda x: torch.where(x > 2, torch.inf, x * 2), "off by inf"),
        (lambda x: (x * 2, x), "returned 2 tensors, expected 1"),
    ],
)
@pytest.mark.parametrize("where", ["torch eager", "torch.compile"])
def test_beside_refuses_what_no_error_describes(timed, wrong, message, where):
    """In the baseline too, whose error would otherwise allow everything."""
    x = torch.randn(64, 64)
    variants = {"torch eager": rounded(12), "torch.compile": rounded(12)} | {where: wrong}
    with pytest.raises(CheckError, match=rf"{where}.*{message}"):
        timed.compare(variants, reference, x, baseline="torch eager", work=Work(), beside=2.0)


def test_beside_is_told_what_it_needs(timed):
    x = torch.randn(8, 8)
    variants = {"torch.compile": rounded(12), "torch eager": rounded(12)}
    with pytest.raises(ValueError, match=r"beside=2.0 needs the baseline first, got \['torch.compile', 'torch eager'"):
        timed.compare(variants, reference, x, baseline="torch eager", work=Work(), beside=2.0)
    with pytest.raises(ValueError, match=r"takes the place of a budget; leave out \['terms'\]"):
        timed.compare(variants, reference, x, baseline="torch.compile", work=Work(), beside=2.0, terms=4)
    with pytest.raises(VacuousCheck, match="zero everywhere"):
        timed.compare(variants, reference, torch.zeros(8), baseline="torch.compile", work=Work(), beside=2.0)


def test_beside_with_a_reference_of_its_own(timed):
    timed.timing = False
    x = torch.randn(64, 64)
    variants = {"torch eager": lambda x: x * 2, "torch dropout": drop_half}
    references = {"torch dropout": drop_half_reference}
    table = timed.compare(
        variants, reference, x, references=references, baseline="torch eager", work=Work(), beside=2.0
    )
    assert [row.error for row in table.rows] == [0.5, pytest.approx(0.5, rel=0.5)]


def test_a_cold_first_call_finds_an_empty_cache_and_only_that(timed):
    def cache_folder():
        return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/nowhere"))

    folders, usual = [], cache_folder()

    def look(x):
        folder = cache_folder()
        folders.append((folder, folder.is_dir() and not list(folder.iterdir())))
        return x * 2

    timed.timing = False
    before = get_caches()
    variants = {"torch": look, "torch again": lambda x: look(x)}
    options = {"baseline": "torch", "work": Work(), "beside": 2.0}
    timed.compare(variants, reference, torch.randn(8, 8), cold=True, **options)
    (one, empty), (other, also_empty) = folders
    assert empty
    assert also_empty
    assert len({one, other, usual}) == 3  # each has one of its own
    assert not one.exists()
    assert get_caches() == before
    folders.clear()
    timed.compare(variants, reference, torch.randn(8, 8), **options)
    assert {folder for folder, _ in folders} == {usual}


def test_first_calls_that_the_technique_timed_itself(timed):
    timed.timing = False
    variants = {"torch": lambda x: x * 2, "torch.compile": lambda x: x + x}
    table = timed.compare(
        variants, reference, torch.randn(8, 8), baseline="torch", work=Work(), first_calls={"torch.compile": 12.5}
    )
    assert table.rows[0].first_call_s < 5
    assert table.rows[1].first_call_s == 12.5


def test_a_variant_that_was_compiled_before_has_no_first_call(capsys):
    h = Harness("test")
    variants = {"torch": lambda x: x * 2, "torch.compile": lambda x: x + x}
    table = h.compare(
        variants, reference, torch.randn(8, 8), baseline="torch", work=Work(), first_calls={"torch.compile": None}
    )
    assert table.rows[1].first_call_s is None
    shown = next(line for line in capsys.readouterr().out.splitlines() if "torch.compile" in line)
    assert shown.split()[-1] == f"{table.rows[1].error:.2f}"


class _Limits:
    """Ceilings without a GPU: 1 TB/s and 1 TFLOP/s."""

    def copy_tbps(self):
        return 1.0

    def gemm_tflops(self, dtype):
        return 1.0


def test_work_in_steps_adds_up_and_so_do_the_floors():
    steps = [(10**9, 0), (10**9, 3 * 10**9), (0, 10**9)]  # 1 ms; 3 ms, of which the bytes take 1; 1 ms
    work = Work.in_steps(iter(steps), torch.bfloat16)
    assert (work.bytes, work.flops, work.dtype) == (2 * 10**9, 4 * 10**9, torch.bfloat16)
    assert work.floor_ms(_Limits()) == pytest.approx(5.0)
    assert Work(work.bytes, work.flops, work.dtype).floor_ms(_Limits()) == pytest.approx(4.0)  # if they overlapped
    assert Work.in_steps([], torch.float32).floor_ms(_Limits()) is None


class OnGpu(torch.Tensor):
    """What a table takes for a tensor on a GPU."""

    is_cuda = True


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU of paper: fake_gpu({variant's result: (ms on the GPU, ms of a whole call, ms to launch)})."""
    calls = []

    def install(costs):
        def whole(fn, budget):
            calls.append("whole")
            return [costs[fn()][1]] * 3

        def rounds(timed, enqueue, orders):
            calls.append("gpu")
            return [{name: costs[timed[name]()][0] for name in order} for order in orders]

        monkeypatch.setattr("harness.compare.gpu_round_ms", rounds)
        monkeypatch.setattr("harness.compare.whole_call_ms", whole)
        monkeypatch.setattr("harness.compare.enqueue_ms", lambda fn: costs[fn()][2])
        monkeypatch.setattr("harness.compare.power_watch", lambda: lambda: 0.0)
        return calls

    return install


def paper_table(whole_calls):
    table = Comparison("t", "c", "torch eager", [Row("torch eager", False, 0, 0), Row("torch.compile", False, 0, 0)])
    variants = {"torch eager": lambda x: "eager", "torch.compile": lambda x: "compiled"}
    x = torch.ones(2).as_subclass(OnGpu)
    time_variants(table, variants, (x,), Work(bytes=10**9), _Limits(), whole_calls)
    return table


def test_whole_calls_are_timed_as_their_caller_waits(fake_gpu):
    calls = fake_gpu({"eager": (2.0, 10.0, 9.5), "compiled": (2.0, 2.5, 0.5)})
    whole = paper_table(True)
    assert "gpu" not in calls
    assert [row.ms for row in whole.rows] == [10.0, 2.5]
    assert whole.rows[1].speedup == pytest.approx(4.0)
    assert whole.rows[1].of_ceiling == pytest.approx(0.4)
    assert [row.enqueue_us for row in whole.rows] == [9500, 500]
    assert whole.notes == ["launch-bound: the host spends this share of the call on launching (torch eager 95%)"]
    calls.clear()
    gpu_alone = paper_table(False)
    assert "whole" not in calls
    assert gpu_alone.rows[1].speedup == pytest.approx(1.0)  # launching does not show, and is noted
    assert gpu_alone.notes == [
        "launch-bound, where nothing is queued before: the host takes longer than the GPU (torch eager 9500 us)"
    ]


def test_a_model_that_keeps_the_gpu_busy_gets_no_note(fake_gpu):
    fake_gpu({"eager": (9.0, 10.0, 2.0), "compiled": (7.0, 8.0, 1.0)})
    assert paper_table(True).notes == []


def test_a_whole_call_is_a_batch_between_two_synchronizations(monkeypatch):
    from harness.hardware import whole_call_ms

    happened = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))

    def fn():
        happened.append("call")
        time.sleep(0.002)

    times = whole_call_ms(fn, budget=30)
    assert len(times) == 3
    assert all(ms >= 2 for ms in times)
    batches = "".join(name[0] for name in happened).strip("w").split("ww")
    assert batches[0] == "c"  # one to see how long it takes
    assert len({len(batch) for batch in batches[1:]}) == 1
    assert 1 <= len(batches[1]) <= 5
    happened.clear()
    whole_call_ms(lambda: time.sleep(0.02), budget=3)  # one call is longer than its share
    assert happened == ["wait"] * 8


def test_whole_calls_on_a_cpu_are_what_is_timed_anyway(timed):
    x = torch.randn(64, 64)
    table = timed.compare(
        {"torch": lambda x: x * 2, "torch add": lambda x: x + x}, reference, x,
        baseline="torch", work=Work(bytes=2 * x.nbytes), whole_calls=True,
    )  # fmt: skip
    assert all(row.ms > 0 and row.enqueue_us is None for row in table.rows)
    assert table.notes == []


@pytest.mark.gpu
def test_a_slow_host_does_not_count_as_gpu_time(h):
    """A wrapper that dawdles in Python for a millisecond launches the same kernel as one that does not."""
    x = h.randn(1 << 20)

    def dawdling(x):
        until = time.perf_counter() + 1e-3
        while time.perf_counter() < until:
            pass
        return x * 2

    variants = {"torch": lambda x: x * 2, "slow wrapper": dawdling}
    table = h.compare(variants, reference, x, baseline="torch", work=Work(bytes=2 * x.nbytes))
    quick, slow = table.rows
    assert slow.ms < 3 * quick.ms
    assert slow.ms < 0.1
    assert slow.enqueue_us > 1000
    assert any("slow wrapper 1" in note for note in table.notes)


def test_variants_alternate_call_by_call_on_a_gpu(monkeypatch):
    """Clocks that wander from call to call bend neither the ratio nor the choice of rounds."""
    cost, clock, rounds = {"torch": 3.0, "ours": 1.0}, iter(range(1, 10**6)), []

    def timer(calls, enqueue, orders):
        assert enqueue == {"torch": 0.01, "ours": 0.02}
        rounds.append([list(order) for order in orders])
        return [{name: slow * cost[calls[name]()] for name in order} for order in rounds[-1] for slow in [next(clock)]]

    monkeypatch.setattr("harness.compare.gpu_round_ms", timer)
    calls = {"torch": lambda: "torch", "ours": lambda: "ours"}
    samples = time_rounds(calls, {"torch": 0.01, "ours": 0.02})
    warm, timed = rounds
    assert warm == [["torch", "ours"]] * 3
    assert len(timed) == 75  # 2 variants of 300 ms each, by 8 ms a round: the warm ones took 4, 8 and 12
    assert {tuple(order) for order in timed} == {("torch", "ours"), ("ours", "torch")}
    assert all(ours[0] * 3 == torch[0] for torch, ours in zip(samples["torch"], samples["ours"], strict=True))
    cost |= {"torch": 3e3, "ours": 1e3}
    assert len(time_rounds(calls, {"torch": 0.01, "ours": 0.02})["ours"]) == LEAST_ROUNDS
    cost |= {"torch": 3e-9, "ours": 1e-9}
    assert len(time_rounds(calls, {"torch": 0.01, "ours": 0.02})["ours"]) == MOST_ROUNDS


@pytest.mark.gpu
def test_a_round_times_each_call_by_itself(h):
    x = h.randn(1 << 24)
    calls = {"once": lambda: x.mul_(1), "four times": lambda: [x.mul_(1) for _ in range(4)]}
    rounds = gpu_round_ms(calls, dict.fromkeys(calls, 0.05), [["once", "four times"], ["four times", "once"]] * 5)
    assert len(rounds) == 10
    assert all(2 < each["four times"] / each["once"] < 6 for each in rounds)


@pytest.mark.gpu
def test_the_timer_leaves_the_driver_as_it_was():
    from harness.hardware import gpu_ms

    from triton.runtime import driver

    gpu_ms(lambda: torch.zeros(10, device="cuda"))
    assert "clear_cache" not in vars(driver.active)


@pytest.mark.gpu
def test_ceilings_are_plausible_and_measured_once():
    ceilings = Ceilings()
    copy = ceilings.copy_tbps()
    assert 0.05 < copy < 50
    started = time.perf_counter()
    assert ceilings.copy_tbps() == copy
    assert time.perf_counter() - started < 0.01
    assert ceilings.gemm_tflops(torch.bfloat16) > ceilings.gemm_tflops(torch.float32)
    assert ceilings.gemm_tflops(torch.int8) is None


@pytest.mark.gpu
def test_the_floor_is_the_slower_of_moving_and_computing(h):
    ceilings = Ceilings()
    n = 4096
    gemm = Work(bytes=3 * n * n * 2, flops=2 * n**3, dtype=torch.bfloat16)
    copy = Work(bytes=2**30)
    assert gemm.floor_ms(ceilings) == pytest.approx(2 * n**3 / ceilings.gemm_tflops(torch.bfloat16) / 1e9)
    assert copy.floor_ms(ceilings) == pytest.approx(2**30 / ceilings.copy_tbps() / 1e9)


def test_a_profiler_in_the_process_sees_one_warm_call_of_each_variant(h, monkeypatch):
    from contextlib import contextmanager

    calls, seen = [], []

    @contextmanager
    def capture(name, on_gpu):
        before = len(calls)
        yield
        seen.append((name, calls[before:]))

    monkeypatch.setattr("harness.compare.capture", capture)
    h.profile = True
    variants = {name: lambda x, name=name: calls.append(name) for name in ("torch", "triton")}
    work = Work(bytes=64, flops=8, dtype=torch.float16)
    table = h.compare(variants, reference, h.randn(4, 4), baseline="torch", work=work, title="t", case="4x4")
    assert table is None
    assert seen == [("t 4x4: torch", ["torch"]), ("t 4x4: triton", ["triton"])]
    assert calls.count("triton") > 1  # it was warm
    assert h.record.profiled == {name: work.record() for name, _ in seen}


@pytest.mark.parametrize(
    "work",
    [
        Work(),
        Work(bytes=12),
        Work(bytes=12, flops=3, dtype=torch.float8_e4m3fn),
        Work.in_steps([(1, 2), (3, 4)], torch.bfloat16),
    ],
)
def test_work_comes_back_from_a_record(work):
    import json

    assert Work.load(json.loads(json.dumps(work.record()))) == work
