"""The GPU memory that a call needs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(fn: Callable, *inputs) -> int:
    """Bytes of GPU memory that one call needs at its peak, its results included, beyond what is allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
