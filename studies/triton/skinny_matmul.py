"""skinny_matmul, measured: one row, every number of rows, rows of zeros, what stream-K is worth, tiles by rows.

One row by FMAs is measured beside the same kernel for a K that it does not know: a loop, and a mask on every load.

Where the tiles are one wave, or several full ones, stream-K gives every program what a program per tile gets. 28672
outputs are 448 tiles up to 64 rows, whose last wave leaves 3 of 5 SMs idle. A wave that is not full costs less than its
share of time: each SM still at work gets more of the memory's speed, if it has enough bytes in flight.

Rows of zeros: with a plain descriptor of x, TMA fills the rows of a tile that are beyond x. With 8192 outputs 72 and 96
rows then take longer than 128 in the same tile, though they read less. x copied into whole tiles shows the loss, minus
the time of the copy. The lesson's halves that overlap leave hardly a row to fill, and copy nothing.
"""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

from harness import Harness, Work

import torch
import triton
import triton.language as tl

from examples.common import overlapping_rows
from examples.common.stream_k import fit_tile
from examples.triton import skinny_matmul as lesson
from examples.triton.skinny_matmul import compare, reference, skinny_matmul, skinny_matmul_stream_k
from examples.triton.skinny_matmul_gemv import VECTOR, block_of


def study(h: Harness) -> None:
    one_row(h)
    every_number_of_rows(h)
    rows_of_zeros(h)
    whole_tiles(h)
    tiles(h)


@triton.jit
def any_k_kernel(x_ptr, w_ptr, y_ptr, stride_wn, K, BLOCK_K: tl.constexpr):
    """skinny_matmul_gemv_kernel for x [K], w [N, K] and y [N] of 16 bits, with K known at run time."""
    n, inner = tl.program_id(0), tl.arange(0, BLOCK_K)
    w_ptr += n.to(tl.int64) * stride_wn
    acc = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=1):
        w = tl.load(w_ptr + k + inner, mask=inner < K - k, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + k + inner, mask=inner < K - k, other=0.0, eviction_policy="evict_last")
        acc += w.to(tl.float32) * x.to(tl.float32)
    tl.store(y_ptr + n, tl.sum(acc, axis=0).to(y_ptr.dtype.element_ty))


def any_k(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.empty((1, w.shape[0]), dtype=x.dtype, device=x.device)
    block_k = block_of(x.shape[1])
    any_k_kernel[(w.shape[0],)](x, w, y, w.stride(0), x.shape[1], BLOCK_K=block_k, num_warps=block_k // (32 * VECTOR))
    return y


def one_row(h: Harness) -> None:
    """FMAs beside MMAs and beside a K at run time, where K is short, long, or no whole number of blocks."""
    more = {"MMAs": skinny_matmul_stream_k, "FMAs, K at run time": any_k}
    sizes = [(8192, 8192), (1024, 8192), (4096, 4096), (14336, 4096), (4096, 14336), (5120, 5120), (8192, 28672)]
    tables = [
        compare(h, 1, *size, more, title="one row")
        for size in h.pick(interpreted=[(72, 600)], quick=[(1024, 4096)], full=sizes)
    ]
    if all(tables):
        for name in ("MMAs", "FMAs, K at run time"):
            ratios = [table.over(name, "triton") for table in tables]
            h.say(f"FMAs over {name}: {min(ratios):.2f} to {max(ratios):.2f}x")


def every_number_of_rows(h: Harness) -> None:
    rows = h.pick(interpreted=(2, 33), quick=(2, 128), full=(1, 2, 4, 8, 16, 32, 64, 72, 96, 128, 160, 192, 256))
    found = []
    for N, K in h.pick(interpreted=[(72, 264)], quick=[(4096, 4096)], full=[(8192, 8192), (28672, 8192)]):
        found += [compare(h, M, N, K, title="every number of rows") for M in rows]
    if all(found):
        h.say(f"geometric mean {lesson.over_library(found):.2f}x the faster of {found[0].baseline} and max-autotune")
        behind = [table.case for table in found if lesson.over_library([table]) < 1]
        h.say(f"a library is faster at MxNxK of {', '.join(behind) or 'none'}")


def rows_of_zeros(h: Harness) -> None:
    """Tiles whose halves overlap, beside tiles that TMA fills with zeros, and beside x copied into whole tiles."""
    variants = {"zeros by TMA": zeros_by_tma, "x padded": padded, "halves overlap": skinny_matmul_stream_k}
    found = []
    for N in h.pick(interpreted=(72,), quick=(4096,), full=(8192, 28672)):
        for M in h.pick(interpreted=(12,), quick=(96,), full=(12, 24, 48, 72, 96, 128, 160, 192)):
            K = h.pick(interpreted=264, quick=4096, full=8192)
            x, w = h.randn(M, K, dtype=h.half), h.randn(N, K, dtype=h.half)
            found.append(timed(h, variants, x, w, "rows of zeros", default="halves overlap"))
    if all(found):
        gains = ", ".join(f"{t.over('zeros by TMA', 'halves overlap'):.2f}x at {t.case}" for t in found)
        h.say(f"halves that overlap over zeros by TMA: {gains}")


def zeros_by_tma(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with patch.object(lesson, "spare_rows", lambda *_: 0), patch.object(overlapping_rows, "spare_rows", lambda *_: 0):
        return skinny_matmul_stream_k(x, w)


def padded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    M, device = len(x), x.device
    m = fit_tile(lesson.tiles_for(M, len(w), device), M, lesson.STAGES, device)[0]
    whole = torch.nn.functional.pad(x, (0, 0, 0, -M % m))
    return skinny_matmul_stream_k(whole, w)[:M]


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
    """Tiles of min(M, 128) to 4 times the chosen rows, with the stages that fit: what TILES and ONE_WAVE come from."""
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


# BLOCK_M, BLOCK_N, BLOCK_K, warps. Four warps have 64 outputs. Eight would have to exchange what they store, and Triton
# would take shared memory for the whole tile.
CANDIDATES = [
    (m, n, k, 8 if n > 64 and m * n > 8192 else 4)
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
