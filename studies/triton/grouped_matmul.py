"""grouped_matmul, measured: how tokens are routed, what a tile of half the rows is worth, and Inductor's own kernel.

A tile's MMAs take as long for one row as for all; so what a group's last tile multiplies in vain is time, where the
weights are not.
"""

from __future__ import annotations

from unittest.mock import patch

from harness import Harness

import torch

from examples.common.compiled import SEARCH, over_library
from examples.common.device import architecture
from examples.triton import grouped_matmul as lesson
from examples.triton.grouped_matmul import compare, grouped_matmul
from examples.triton.grouped_matmul_operands import experts


def study(h: Harness) -> None:
    T, E, N, K = h.pick(interpreted=(170, 5, 72, 160), quick=(2048, 16, 1024, 2048), full=(8192, 64, 2048, 7168))
    operands = experts(h, T, E, N, K)
    inductor(h, operands)
    tiles(h, operands)
    tokens(h, E, N, K)


def inductor(h: Harness, operands: tuple) -> None:
    """torch.compile's max-autotune, which searches tiles of a Triton kernel of its own."""

    def grouped(a, b, offs) -> torch.Tensor:
        return torch._grouped_mm(a, b, offs=offs)

    for how in h.pick(interpreted=("even",), quick=("skewed",), full=("even", "skewed")):
        more = {} if h.interpreted else {"torch.compile max-autotune": h.compiled(grouped, options=SEARCH)}
        if table := compare(h, operands, how, more, title="beside max-autotune"):
            h.say(f"{how}: {over_library([table]):.2f}x the fastest of torch's calls, max-autotune among them")


def tiles(h: Harness, operands: tuple) -> None:
    """Tiles of other heights, each with one of half its rows for the last of a group."""
    heights = h.pick(interpreted=(64,), quick=(64,), full=(64,))
    more = {f"tiles of {rows} rows": with_rows(rows) for rows in heights}
    for how in h.pick(interpreted=("hot",), quick=("skewed",), full=("even", "skewed", "hot")):
        if table := compare(h, operands, how, more, title="tiles"):
            h.say(f"{how}: {table.best.variant} is fastest, {table.over('triton'):.2f}x as fast as what is chosen")


def with_rows(rows: int):
    def call(*operands) -> torch.Tensor:
        with patch.object(lesson, "BLOCK_M", rows):
            return grouped_matmul(*operands)

    return call


def tokens(h: Harness, E: int, N: int, K: int) -> None:
    """From few tokens, where the weights are all the time, to many, where the MMAs are; FP8 too."""
    for T in h.pick(interpreted=(33,), quick=(256,), full=(512, 2048, 32768)):
        for fp8 in (False, True) if architecture(h.device) >= 89 else (False,):
            compare(h, experts(h, T, E, N, K, fp8), "skewed", title="tokens")
