"""numerics, measured: float32 and its emulation, random numbers."""

from __future__ import annotations

from collections.abc import Callable

from harness import Harness

import torch
import torch.nn.functional as F

from examples.compiler.numerics import measure, share_differing


def study(h: Harness) -> None:
    if h.profile:
        return
    # What is left in float32 is the order of sums and the fused multiply-add, a single GPU instruction that Triton uses
    # unless it emulates; g++ is told to contract nothing.
    h.table("float32: rms error from float64, share of bits that differ from eager's", measure(h, torch.float32))
    show_random(h)


def show_random(h: Harness) -> None:
    """Dropout from one seed: whether compiled code drops what eager drops."""
    ones, keep = torch.ones(256, 256, device=h.device), 0.75

    def drop(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 1 - keep)

    def seeded(fn: Callable) -> torch.Tensor:
        torch.manual_seed(h.seed % 2**32)
        return fn(ones)

    eager, facts = seeded(drop), {}
    for fallback in (False, True):
        compiled = h.compiled(drop, options={"fallback_random": fallback})
        got = seeded(compiled)
        facts[f"fallback_random {fallback}"] = {
            "kept": round((got != 0).double().mean().item(), 3),
            "same as eager": round(1 - share_differing(got, eager), 3),
            "same again": torch.equal(got, seeded(compiled)),
        }
    h.fact("dropout from one seed", facts)
