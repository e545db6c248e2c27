"""pipelined_matmul's study: how many programs share an SM, and what follows from the times."""

from types import SimpleNamespace

import pytest
import torch

from examples.common.device import SHARED_LIMIT, Limits
from examples.triton.pipelined_matmul import STAGES, shared_bytes
from studies.triton import pipelined_matmul
from studies.triton.pipelined_matmul import programs_per_sm, show_code, show_gains


def test_stages_cost_the_second_program_its_place():
    """On sm_90, with the registers that the compiler uses: shared memory of 228 KiB, 65536 registers."""
    limit = SHARED_LIMIT[90]
    assert [programs_per_sm(shared_bytes(s, 128, 90), 112, limit) for s in STAGES] == [2, 2, 2, 1, 1]
    assert programs_per_sm(shared_bytes(2, 128, 90), 64, limit) == 3  # then shared memory is what counts
    assert programs_per_sm(1024, 129, limit) == 1  # 129 registers are handed out as 136


@pytest.mark.parametrize(
    ("ms", "covered"),
    [
        # 32 tiles an SM, 128 steps each: ms * 1e6 / 4096 ns a step. 1 stage: 700 ns, two programs: 1000 ns to wait.
        ((2.8672, 1.8, 1.6384, 1.7, 1.7), "a load of 1000 ns is covered by 3 stages"),
        ((1.6384, 1.6384, 1.6384, 1.6384, 1.6384), "a load of 400 ns is covered by 2 stages"),
    ],
)
def test_what_it_says_follows_from_the_times(monkeypatch, ms, covered):
    said, tables = [], []
    h = SimpleNamespace(device=torch.device("cpu"), say=said.append, table=lambda name, rows: tables.append(rows))
    monkeypatch.setattr(pipelined_matmul, "device_limits", lambda device: Limits(132, SHARED_LIMIT[90]))
    show_gains(h, 8192, dict(zip(STAGES, ms, strict=True)), dict(zip(STAGES, (2, 2, 2, 1, 1), strict=True)))
    assert said == [f"n = 8192: {covered} in SM steps of 400 ns"]
    assert tables[0]["1 stages"]["ns per step of an SM"] == round(ms[0] * 1e6 / 4096)
    assert tables[0]["2 stages"]["gain over one less"] == round(ms[0] / ms[1], 2)


def test_a_wrong_prediction_fails_the_study(h, monkeypatch):
    monkeypatch.setattr(pipelined_matmul, "shared_bytes", lambda *_: 1)
    with pytest.raises(AssertionError, match="32768 bytes of shared memory, predicted 1"):
        show_code(h)
