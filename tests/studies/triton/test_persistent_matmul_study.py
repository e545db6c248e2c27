"""persistent_matmul's study: what it says of a wave follows from the times."""

from types import SimpleNamespace

from harness import Table
from harness.bench import Row

import torch

from examples.common.device import SHARED_LIMIT, Limits
from examples.triton import persistent_matmul as lesson
from studies.triton.persistent_matmul import explain


def test_what_it_says_follows_from_the_times(monkeypatch):
    """16 by 32 tiles on 132 SMs are 3.88 waves, paid as 4; each of them 100 us shorter is 25 us a wave."""
    said, device = [], torch.device("cpu")
    h = SimpleNamespace(device=device, half=torch.bfloat16, machine=SimpleNamespace(sms=132), say=said.append)
    monkeypatch.setattr(lesson, "device_limits", lambda device: Limits(132, SHARED_LIMIT[90]))
    rows = [Row(name, True, None, 0.0, ms=ms) for name, ms in zip(lesson.VARIANTS, (1.0, 0.9, 0.8, 0.85), strict=True)]
    explain(h, Table("", "4096x4096x4096", "cuBLAS", rows))
    assert "512 tiles on 132 SMs are 3.88 waves, paid as 4" in said[0]
    assert said[0].endswith("250.0 us by each step: persistent +25.00 us, flattened +25.00 us, split -12.50 us")
