"""modes: the facts of each mode, and what counts as settled."""

import sys

import pytest
import torch

from examples.compiler import modes
from examples.compiler.modes import CALLS, MODES, calls_until_stable


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
    assert set(modes.start(fn, x)) == {"first call s", "calls until stable"}
    assert len(seen) == CALLS
    assert capfd.readouterr().err == ""


@pytest.mark.gpu
def test_which_modes_launch_cuda_graphs(h):
    model, x = torch.nn.Linear(8, 8, device=h.device).requires_grad_(False), h.randn(4, 8)
    for mode in MODES:
        fact = modes.start(h.compiled(model, mode=mode), x)
        assert (fact["CUDA graphs"], fact["kernels"] > 0) == (mode in ("reduce-overhead", "max-autotune"), True)
