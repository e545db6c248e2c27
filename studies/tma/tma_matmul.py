"""tma_matmul, measured: what each step takes of an SM, and its speed on more sizes.

1. sm_90's code of each step: copies by threads and by TMA, registers, shared memory.
2. Each step's speed over the one before, also on a larger square and a transformer's layer, and the chapter's claim
   judged by all cases whose tiles are whole.
"""

from __future__ import annotations

import itertools

from harness import Harness, Table, geomean

import torch

from examples.tma.tma_matmul import RAGGED, STEPS, compare, tma_matmul

CLAIM = (1.20, 1.30)  # the chapter's, for loads by TMA
SIZES = [(8192, 8192, 8192), (4096, 14336, 4096)]


def each_step(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """a @ b once by every step."""
    return tuple(tma_matmul(a, b, step) for step in STEPS)


def show_code(h: Harness) -> None:
    x, counted = h.meta(4096, 4096), ("cp.async", "cp.async.bulk.tensor", "mbarrier", "wgmma", "st.global.v4")
    rows = {
        step: {name: kernel.found.get(name, 0) for name in counted}
        | {"registers": kernel.registers, "spilled bytes": kernel.spills, "shared bytes": kernel.shared}
        for step, kernel in zip(STEPS, h.codegen(each_step, x, x, find={90: counted}), strict=False)
    }
    h.table("each step on sm_90; a loop's instructions counted once", rows)


def gains(table: Table) -> dict[str, float]:
    """Each step's speed as a multiple of the step before, both ratios of the same rounds."""
    return {after: round(table.over(before, after), 4) for before, after in itertools.pairwise(STEPS)}


def judge_claim(ratios: list[float]) -> str:
    """What was measured for the loads, beside the claim."""
    within = sum(CLAIM[0] <= ratio <= CLAIM[1] for ratio in ratios)
    return (
        f"loads by TMA: {min(ratios):.3f}x to {max(ratios):.3f}x the speed of pointers; of {len(ratios)} cases, "
        f"{within} are within the {CLAIM[0]:.2f}x to {CLAIM[1]:.2f}x that the chapter claims"
    )


def study(h: Harness) -> None:
    show_code(h)
    tables = [*h.lesson, *(compare(h, *size) for size in h.pick(interpreted=[], quick=[], full=SIZES))]
    if not all(tables):
        return
    h.table("speed of each step over the one before", {table.case: gains(table) for table in tables})
    whole = [table for table in tables if table.case != "x".join(map(str, RAGGED))]
    means = {after: round(geomean(whole, before, after), 4) for before, after in itertools.pairwise(STEPS)}
    h.fact("geometric mean of each step over the one before, whole tiles", means)
    h.say(judge_claim([table.over("pointers", "loads") for table in whole]))
