"""modes: the facts of each mode, and what counts as settled."""

import sys

from harness.bench import Row, Table

import pytest
import torch

from examples.compiler import modes as modes_
from examples.compiler.modes import MODES
from examples.compiler.modes_first_calls import CALLS, calls_until_stable, start


def test_calls_until_stable():
    for times, calls in (
        ([1.0] * 8, 0),
        ([900, 1, 1, 1, 1, 1, 1, 1], 1),
        ([900, 20, 1, 1, 9, 1, 1, 1], 2),  # one call that something else disturbed
        ([900, 20, 9, 8, 7, 1, 1, 1, 1, 1], 5),
        ([9, 9, 9, 9, 9, 1, 1, 1, 1], 5),  # what has settled is the later half
    ):
        assert calls_until_stable(times) == calls, times


def test_first_calls_are_all_timed_and_nothing_reaches_the_console(h, capfd):
    def fn(x):
        seen.append(x)
        print("AUTOTUNE", file=sys.stderr)
        torch._logging.warning_once(torch._logging.getArtifactLogger("torch._inductor", "fusion"), "noise")

    seen, x = [], torch.ones(1)
    assert set(start(fn, x)) == {"first call s", "calls until stable"}
    assert len(seen) == CALLS
    assert capfd.readouterr().err == ""


def found(settled: int = 2, **modes: tuple[float, float]) -> tuple:
    """What one_size() gives, of (ms, the GPU's) for each mode."""
    times = {f"torch {name.replace('_', '-')}": each for name, each in ({"eager": (8.0, 1.0)} | modes).items()}
    rows = [Row(n, False, None, 0.0, ms=ms, speedup=8.0 / ms, gpu_ms=gpu) for n, (ms, gpu) in times.items()]
    facts = {name: {"first call s": 7.0, "calls until stable": settled} for name in times}
    return Table("modes", "1x1 tokens", modes_.EAGER, rows), facts


def test_the_answer_names_the_model_and_says_what_has_not_settled(h):
    table, facts = found(default=(4.0, 1.0), reduce_overhead=(1.25, 1.0), max_autotune=(1.22, 1.22))
    facts[modes_.TUNED] = {"first call s": 30.0, "calls until stable": 3}  # for 2 % not taken
    facts[modes_.DEFAULT]["calls until stable"] = 1  # the calls are those of the mode that is taken
    told = modes_.answer(1_240_000_000, table, facts)
    assert told == (
        "1.2 B parameters, 1x1 tokens: take reduce-overhead, settled after 2 calls; 7 s of compiling paid back in "
        "1037 calls. Over eager (host twice as fast): default 2.00x (2.00x), reduce-overhead 6.40x (4.00x), "
        "max-autotune 6.56x (3.28x)."
    )
    assert len(told) <= 235  # a ratio of two digits more fits
    modes_.report(h, table, facts)
    assert h.record.conclusions == [
        '"max-autotune for production", 1x1 tokens: 1.02x (host twice as fast: 0.82x) reduce-overhead, for 30 s of '
        "compiling against 7 s"
    ]
    told = modes_.answer(44_000_000, *found(default=(9.0, 4.0)))
    assert told == "44 M parameters, 1x1 tokens: take eager. Over eager (host twice as fast): default 0.89x (0.89x)."
    uneven = modes_.answer(44_000_000, *found(settled=CALLS, default=(4.0, 4.0)))
    assert f"take default, not settled in {CALLS} calls; 7 s of compiling paid back in 1750 calls." in uneven


@pytest.mark.gpu
def test_which_modes_launch_cuda_graphs(h):
    model, x = torch.nn.Linear(8, 8, device=h.device).requires_grad_(False), h.randn(4, 8)
    for mode in MODES:
        fact = start(h.compiled(model, mode=mode), x)
        assert (fact["CUDA graphs"], fact["kernels"] > 0) == (mode in ("reduce-overhead", "max-autotune"), True)
