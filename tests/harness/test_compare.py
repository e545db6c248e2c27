"""Tables: every variant checked before any is timed, honest ratios, and nothing timed that has no speed."""

import time

from harness.check import CheckError
from harness.compare import Comparison, Row, Work, _quantile, is_ours, time_variants
from harness.hardware import Ceilings, interpreted
from harness.session import Harness

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
    assert calls[:4] == ["torch", "ours", "ours", "torch"]  # the order rotates


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
