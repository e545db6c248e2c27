"""pipelined_matmul's study: how many programs share an SM, and what follows from the times."""

from types import SimpleNamespace

import pytest
import torch

from examples.common.device import SHARED_LIMIT, Limits
from examples.triton.pipelined_matmul import STAGES, shared_bytes
from studies.triton import pipelined_matmul as technique
from studies.triton.pipelined_matmul import programs_per_sm, show_gains


def test_stages_cost_the_second_program_its_place():
    """On sm_90, with the registers that the compiler uses: shared memory of 228 KiB, 65536 registers."""
    limit = SHARED_LIMIT[90]
    assert [programs_per_sm(shared_bytes(s, 90), 112, limit) for s in STAGES] == [2, 2, 2, 1, 1]
    assert programs_per_sm(shared_bytes(2, 90), 64, limit) == 3  # then shared memory is what counts
    assert programs_per_sm(1024, 129, limit) == 1  # 129 registers are handed out as 136


# 32 tiles an SM, 128 steps each: ms * 1e6 / 4096 ns a step. 1 stage: 700 ns, two programs: 1000 ns to wait.
@pytest.mark.parametrize(("ms", "load", "stages"), [((2.8672, 1.8, 1.6384, 1.7, 1.7), 1000, 3), ([1.6384] * 5, 400, 2)])
def test_what_it_says_follows_from_the_times(monkeypatch, ms, load, stages):
    said = []
    h = SimpleNamespace(device=torch.device("cpu"), say=said.append)
    monkeypatch.setattr(technique, "device_limits", lambda device: Limits(132, SHARED_LIMIT[90]))
    show_gains(h, 8192, dict(zip(STAGES, ms, strict=True)), dict(zip(STAGES, (2, 2, 2, 1, 1), strict=True)))
    assert said == [f"n = 8192: a load of {load} ns is covered by {stages} stages in SM steps of 400 ns"]
