"""skinny_matmul, measured: every number of rows, what stream-K is worth, and which tile is best for how many rows.

Where the tiles are one wave, or several full ones, stream-K gives every program what a program per tile gets. 28672
outputs are 448 tiles up to 64 rows, whose last wave leaves 3 of 5 SMs idle. A wave that is not full costs less than its
share of time: each SM still at work gets more of the memory's speed, if it has enough bytes in flight.
"""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

from harness import Harness, Work

import torch
import triton

from examples.common.stream_k import fit_tile
from examples.triton import skinny_matmul as lesson
from examples.triton.skinny_matmul import compare, reference, skinny_matmul, skinny_matmul_stream_k


def study(h: Harness) -> None:
    every_number_of_rows(h)
    whole_tiles(h)
    tiles(h)


def every_number_of_rows(h: Harness) -> None:
    rows = h.pick(interpreted=(2, 33), quick=(2, 128), full=(1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 192, 256))
    found = []
    for N, K in h.pick(interpreted=[(72, 264)], quick=[(4096, 4096)], full=[(8192, 8192), (28672, 8192)]):
        found += [compare(h, M, N, K, title="every number of rows") for M in rows]
    if all(found):
        h.say(f"geometric mean {lesson.over_library(found):.2f}x the faster of {found[0].baseline} and max-autotune")
        behind = [table.case for table in found if lesson.over_library([table]) < 1]
        h.say(f"a library is faster at MxNxK of {', '.join(behind) or 'none'}")


def whole_tiles(h: Harness) -> None:
    """Stream-K beside one program per tile: the same kernel, tile and loop, but tiles that nobody shares."""
    found = []
    for M, N in h.pick(
        interpreted=[(5, 200)], quick=[(16, 1024)], full=[(16, 1024), (16, 8192), (16, 28672), (256, 28672)]
    ):
        K = h.pick(interpreted=1100, quick=8192, full=8192)
        x, w = h.randn(M, K, dtype=h.half), h.randn(N, K, dtype=h.half)
        m, n, *_ = fit_tile(lesson.tiles_for(M, N, x.device), M, lesson.STAGES, x.device)
        one_each = partial(skinny_matmul_stream_k, programs=triton.cdiv(M, m) * triton.cdiv(N, n))
        variants = {"a program per tile": one_each, "stream-K": skinny_matmul_stream_k}
        found.append(timed(h, variants, x, w, "whole tiles", default="stream-K"))
    if all(found):
        gains = ", ".join(f"{t.over('a program per tile', 'stream-K'):.2f}x at {t.case}" for t in found)
        h.say(f"stream-K over a program per tile: {gains}")


def tiles(h: Harness) -> None:
    """Every tile with at least M rows or 128, with the stages that fit: what TILES and ONE_WAVE were chosen from."""
    for M in h.pick(interpreted=(5,), quick=(16,), full=(1, 16, 32, 64, 128, 256)):
        N, K = h.pick(interpreted=(72, 264), quick=(4096, 4096), full=(8192, 8192))
        x, w = h.randn(M, K, dtype=h.half), h.randn(N, K, dtype=h.half)
        first = fit_tile(lesson.tiles_for(M, N, x.device), M, lesson.STAGES, x.device)[0]
        candidates = {
            f"{m}x{n}x{k}": (m, n, k, warps) for m, n, k, warps in CANDIDATES if min(M, 128) <= m <= 4 * first
        }
        variants = {name: partial(with_tile, tile) for name, tile in candidates.items()}
        if table := timed(h, variants | {"triton": skinny_matmul}, x, w, "tiles", default="triton"):
            h.say(f"{M} rows: {table.best.variant} is fastest, {table.over('triton'):.2f}x as fast as what is chosen")


# BLOCK_M, BLOCK_N, BLOCK_K, warps.
CANDIDATES = [
    (m, n, k, 8 if m * n > 8192 else 4)
    for m in (16, 32, 64, 128, 256) for n in (64, 128, 256) for k in (64, 128, 256)
    if m * n <= 32768 and (m + n) * k <= 40960
]  # fmt: skip


def with_tile(tile: tuple, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with patch.object(lesson, "tiles_for", lambda *_: [tile]):
        return skinny_matmul_stream_k(x, w)


def timed(h: Harness, variants: dict, x, w, title: str, default: str):
    (M, K), N = x.shape, w.shape[0]
    work = Work(bytes=x.nbytes + w.nbytes + x.element_size() * M * N, flops=2 * M * N * K, dtype=h.half)
    return h.compare(
        variants, reference, x, w, baseline=next(iter(variants)), work=work, title=title, case=f"{M}x{N}x{K}",
        terms=K, default=default,
    )  # fmt: skip
