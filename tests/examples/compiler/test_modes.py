"""modes: the facts of each mode, what counts as settled, and on a GPU what CUDA graphs are worth."""

import sys

from harness import Timing, Work

import pytest
import torch

from compile_inspect import fresh_cache
from examples.common.transformer import ONE_BILLION, TINY, Transformer
from examples.compiler import modes
from examples.compiler.modes import EAGER, MODES, WITHOUT_GRAPHS, calls_until_stable, demo, first_calls
from tests.quiet import quiet, ran


@pytest.mark.slow
def test_every_mode_is_compiled_checked_and_counted():
    h = ran(demo, finish=False)
    facts = h.record.facts[next(name for name in h.record.facts if name.endswith("tokens"))]
    wanted = MODES if h.device.type == "cuda" else WITHOUT_GRAPHS
    assert set(facts) == {EAGER, *(f"torch {mode}" for mode in wanted)}
    for table in h.record.tables:
        assert [row["variant"] for row in table["rows"]] == list(facts)
        assert all(row["error"] <= 1 for row in table["rows"])
    for name, fact in facts.items():
        assert fact["first call s"] > 0
        assert 0 < fact["kernels"] <= facts[EAGER]["kernels"] - (name != EAGER), "fusion leaves fewer than eager has"
    rows = h.record.facts["first calls"]
    assert all(row["first call s"] > 0 and row["calls until stable"] > 0 for row in rows.values())


def test_cuda_graphs_are_skipped_on_a_cpu_and_only_there(h):
    model, x = torch.nn.Linear(8, 8, device=h.device).requires_grad_(False), h.randn(4, 8)
    for mode in MODES:
        with fresh_cache(), modes.quiet():
            fact = modes.start(h.compiled(model, mode=mode), x)
        wanted = mode in ("reduce-overhead", "max-autotune")
        assert fact["CUDA graphs skipped" if h.device.type == "cpu" else "CUDA graphs"] == int(wanted)
        assert fact["kernels"] > 0
    assert modes.start(model, x)["kernels"] == 1


@pytest.mark.parametrize(
    ("times", "calls"),
    [
        ([1.0] * 8, 0),
        ([900, 1, 1, 1, 1, 1, 1, 1], 1),
        ([900, 20, 2, 1, 1, 1, 1, 1], 3),
        ([900, 20, 1, 1, 9, 1, 1, 1], 2),  # one call that something else disturbed
        ([900, 20, 9, 8, 7, 1, 1, 1, 1, 1], 5),
        ([9, 9, 9, 9, 9, 1, 1, 1, 1], 5),  # what has settled is the later half
    ],
)
def test_calls_until_stable(times, calls):
    assert calls_until_stable(times) == calls


def test_first_calls_are_all_timed_and_nothing_reaches_the_console(h, capfd):
    model = Transformer.random(TINY, h.device, torch.float32)
    assert len(first_calls(model, h.randint(TINY.vocab, 1, 3), calls=5)) == 5
    with modes.quiet():
        print("AUTOTUNE", file=sys.stderr)
        torch._logging.warning_once(torch._logging.getArtifactLogger("torch._inductor", "fusion"), "noise")
    assert capfd.readouterr().err == ""


@pytest.mark.gpu
def test_reduce_overhead_at_one_token_on_a_gpu(gpu_gib):
    gpu_gib(8)
    h = quiet(timing=True)
    model, ids = Transformer.random(ONE_BILLION, h.device, torch.bfloat16), h.randint(ONE_BILLION.vocab, 1, 1)
    with torch.no_grad():
        table = h.compare(
            {EAGER: model, "torch reduce-overhead": h.compiled(model, mode="reduce-overhead")}, model.float64, ids,
            baseline=EAGER, work=Work(), timing=Timing(end_to_end=True), max_error_ratio=2.0, dtype=torch.bfloat16,
        )  # fmt: skip
    assert table.over(EAGER) > 1.5
