"""modes: the facts of each mode, what counts as settled, an unknown mode, and on a GPU what CUDA graphs are worth."""

from harness import Timing, Work
from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from rich.console import Console

from compile_inspect import fresh_cache
from examples.common.transformer import TINY, Transformer
from examples.compiler import modes
from examples.compiler.modes import EAGER, MODES, WITHOUT_GRAPHS, calls_until_stable, demo, first_calls


@pytest.fixture
def h() -> Harness:
    return Harness("modes", Needs.parse("torch"), console=Console(quiet=True), timing=False)


@pytest.fixture(scope="module")
def ran():
    h = Harness("modes", Needs.parse("torch"), console=Console(quiet=True), timing=False)
    with settings_kept("modes", h.seed):
        demo(h)
    return h


def test_every_mode_is_compiled_checked_and_counted(ran):
    case = next(name for name in ran.record.facts if name.endswith("tokens"))
    facts = ran.record.facts[case]
    wanted = MODES if ran.device.type == "cuda" else WITHOUT_GRAPHS
    assert set(facts) == {EAGER, *(f"torch {mode}" for mode in wanted)}
    for table in ran.record.tables:
        assert [row["variant"] for row in table["rows"]] == list(facts)
        assert all(row["error"] <= 1 for row in table["rows"])
    for name, fact in facts.items():
        assert fact["first call s"] > 0
        assert fact["kernels"] > 0
        if name != EAGER:
            assert fact["kernels"] < facts[EAGER]["kernels"], "fusion leaves fewer kernels than eager launches"
    rows = ran.record.facts["first calls"]
    assert all(row["first call s"] > 0 and row["calls until stable"] > 0 for row in rows.values())


def test_cuda_graphs_are_skipped_on_a_cpu_and_only_there(h):
    model = torch.nn.Linear(8, 8, device=h.device).requires_grad_(False)
    for mode in MODES:
        torch.compiler.reset()
        with fresh_cache(), modes.quiet():
            fact = modes.start(torch.compile(model, mode=mode, dynamic=False), h.randn(4, 8))
        wanted = mode in ("reduce-overhead", "max-autotune")
        if h.device.type == "cpu":
            assert fact["CUDA graphs skipped"] == int(wanted)
        else:
            assert fact["CUDA graphs"] == int(wanted)


@pytest.mark.parametrize(
    ("times", "calls"),
    [
        ([1.0] * 8, 0),
        ([900, 1, 1, 1, 1, 1, 1, 1], 1),
        ([900, 20, 2, 1, 1, 1, 1, 1], 3),
        ([900, 20, 1, 1, 9, 1, 1, 1], 2),  # one call that something else disturbed
        ([900, 20, 9, 8, 7, 1, 1, 1, 1, 1], 5),
    ],
)
def test_calls_until_stable(times, calls):
    assert calls_until_stable(times) == calls


def test_first_calls_are_all_timed(h):
    model = Transformer.random(TINY, h.device, torch.float32)
    assert len(first_calls(model, h.randint(TINY.vocab, 1, 3), calls=5)) == 5


def test_tuning_tables_do_not_reach_the_console(capfd):
    with modes.quiet():
        import sys

        print("AUTOTUNE", file=sys.stderr)
        torch._logging.warning_once(torch._logging.getArtifactLogger("torch._inductor", "fusion"), "noise")
    assert capfd.readouterr().err == ""


@pytest.mark.gpu
def test_reduce_overhead_at_one_token_on_a_gpu(gpu_gib):
    gpu_gib(8)
    from examples.common.transformer import ONE_BILLION

    h = Harness("modes", Needs.parse("torch"), console=Console(quiet=True))
    model = Transformer.random(ONE_BILLION, h.device, torch.bfloat16)
    ids = h.randint(ONE_BILLION.vocab, 1, 1)
    with torch.no_grad():
        table = h.compare(
            {EAGER: model, "torch reduce-overhead": h.compiled(model, mode="reduce-overhead")}, model.float64, ids,
            baseline=EAGER, work=Work(), timing=Timing(end_to_end=True), max_error_ratio=2.0, dtype=torch.bfloat16,
        )  # fmt: skip
    assert table.over(EAGER) > 1.5
    torch.compiler.reset()
