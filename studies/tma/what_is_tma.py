"""what_is_tma, measured: what a thread of each kernel holds, and what the hint is for.

1. sm_90's code of each kernel: registers of a thread and shared memory of a program.
2. The hint where it could help: x is read with each hint, then much else, then x again.
"""

from __future__ import annotations

import random
import statistics

from harness import Harness

import torch

from examples.tma.what_is_tma import EVICTIONS, scale_descriptors, scale_pointers


def show_code(h: Harness) -> None:
    x = h.meta(8192, 8192, dtype=torch.float16)
    kernels = [
        *h.codegen(scale_pointers, x, 2.5, find={90: ("ld.global.v4",)}),
        *h.codegen(scale_descriptors, x, 2.5, find={90: ("cp.async.bulk.tensor",)}),
    ]
    rows = {each.kernel: {"registers": each.registers, "shared bytes": each.shared} for each in kernels}
    h.table("each kernel on sm_90", rows)


def show_hint(h: Harness) -> None:
    cache = torch.cuda.get_device_properties(h.device).L2_cache_size
    x = h.randn(cache // 4 // 2 // 4096, 4096, dtype=h.half)
    other = torch.zeros(cache, dtype=torch.float32, device=h.device)  # four bytes each: four times the cache
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def again_us(eviction: str, at_once: bool = False) -> float:
        scale_pointers(x, 1.5, eviction)
        other.mul_(1.0)  # long enough for the host to launch the rest meanwhile
        if at_once:
            x.sum()
        start.record()
        x.sum()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end)

    cases = {eviction or "no hint": (eviction,) for eviction in EVICTIONS} | {"at once": ("", True)}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(30):
        for name in random.Random(turn).sample(list(cases), len(cases)):
            times[name].append(again_us(*cases[name]))
    us = {name: round(statistics.median(each), 2) for name, each in times.items()}
    h.fact("us to read x again after the other data", us)
    h.say(hints(us))


def hints(us: dict[str, float]) -> str:
    """What each hint saves of the time that reading from memory again takes longer than from L2."""
    lost = us["no hint"] - us["at once"]
    rows = []
    for hint in filter(None, EVICTIONS):
        gained = us["no hint"] - us[hint]
        saved = f"{gained / lost:.0%} of what there is to save" if min(lost, gained) > 0 else "nothing saved"
        rows.append(f"{us[hint]:.1f} us after {hint} ({saved})")
    return (
        f"data read again: {us['no hint']:.1f} us without a hint, {', '.join(rows)}, {us['at once']:.1f} us straight "
        f"after itself"
    )


def study(h: Harness) -> None:
    show_code(h)
    if h.device.type == "cuda" and h.timing and not h.profile:
        show_hint(h)
