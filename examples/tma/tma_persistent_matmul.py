"""Persistent TMA matmul: one program per SM, and each tile is stored under the MMAs of the next.

A persistent program runs one pipeline through all of its tiles: while a tile is stored, the loads of the next are in
flight. But the tensor cores idle until the store, 64 KiB through shared memory, is done. Schedule `late` stores later:
a finished tile is rounded to 16 bits, which halves its registers, and the next one starts; in each of its first four
steps a quarter of the old tile is stored while the tensor cores multiply. A store moves the same bytes for every K, and
the MMAs of a tile are 2 * 128 * 256 * K FLOP: the shorter K, the more there is to win.

TMA needs a descriptor of each matrix, 128 bytes that say where it lies. Checking three tensors, describing them and
looking up the compiled kernel takes the host about 100 us a call, over 3 times as long as the kernel for n = 2048.
`prepare_matmul` does that once, for tensors that stay.

`matmul_tma_persistent` chooses the schedule by plan(): late for more than one wave of tiles on sm_90, if K is not too
short; otherwise smaller tiles, one for each program, or split.

Question   What does a persistent matmul still lose at the end of a tile, and how much does a later store win back?
Needs      triton, sm_90
Wins when  there are several tiles per SM, and K is short but has more steps than the store has parts.
Variants   tma_persistent_matmul_schedules.py (one program per tile; persistent, stored between tiles;
           plan(), checks, descriptors)
Study      studies/tma/tma_persistent_matmul.py
Source     goes beyond the chapter, whose section "Persistent Kernels" has no TMA; tile order as in Triton tutorial 03,
           loops as in tutorial 09
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.operands import short_of_k
from examples.common.tiles import tile_coords
from examples.common.tma import prepare_launch
from examples.common.untraced import untraced
from examples.tma.tma_persistent_matmul_schedules import launch_of, runnable


@triton.jit
def _store_part(c_desc, x, row, col, part, PARTS: tl.constexpr):
    """Store one of PARTS parts of x's columns; which one may be known only when it runs."""
    if PARTS > 1:
        width: tl.constexpr = x.shape[1] // 2
        left, right = x.reshape(x.shape[0], 2, width).permute(0, 2, 1).split()
        if part < PARTS // 2:
            _store_part(c_desc, left, row, col, part, PARTS // 2)
        else:
            _store_part(c_desc, right, row, col + width, part - PARTS // 2, PARTS // 2)
    else:
        c_desc.store([row, col], x.to(c_desc.dtype))


@triton.jit
def matmul_late_kernel(
    a_desc, b_desc, c_desc, M, N, K, B_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)  # more than PARTS, or the last part would never be stored
    own = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    tile = tl.program_id(0) - tl.num_programs(0)
    step = -1
    row, col = 0, 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Until the first tile is finished, "the tile before" lies below the matrix, where TMA stores nothing. (Above would
    # not do: on an H200 a store to a negative row ends as an illegal instruction.)
    done = tl.zeros((BLOCK_M, BLOCK_N), dtype=c_desc.dtype)
    done_row, done_col = M, 0
    # The two loops written as one: flatten=True would move the rounding next to the stores, and hold its result twice.
    for _ in tl.range(0, own * steps, num_stages=STAGES):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += tl.num_programs(0)
            row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        k = step * BLOCK_K
        # With B_COLUMNS memory holds b's transpose, which the tensor cores read from shared memory just as well.
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([col, k]).T if B_COLUMNS else b_desc.load([k, col]), acc)
        if step == steps - 1:
            done = acc.to(c_desc.dtype)  # the only thing for which the tensor cores wait
            done_row, done_col = row, col
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        elif step < PARTS:
            _store_part(c_desc, done, done_row, done_col, step, PARTS)
    for part in tl.static_range(PARTS):
        _store_part(c_desc, done, done_row, done_col, part, PARTS)


@untraced
def matmul_tma_persistent(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, schedule: str | None = None
) -> torch.Tensor:
    """a [M, K] @ b [K, N] -> c [M, N], contiguous; schedule: "tile", "pair", "whole", "split", "late" or None (plan()).

    float16 or bfloat16, both the same, with a float32 accumulator. a has contiguous rows, b contiguous rows or columns
    (weight.t()); K and N are multiples of 8, M is any (0 too). `out` is contiguous, of the same dtype, and overlaps
    neither.

    Raises TypeError for another dtype or two dtypes; ValueError for rank, inner sizes that differ, a layout that TMA
    cannot load, an unknown schedule, late elsewhere than on sm_90 or with K of 256 or less, or an `out` of another
    dtype, shape or layout or that overlaps a or b; RuntimeError for a device without Triton or with too little shared
    memory, or for an input that requires grad.
    """
    c, launch = launch_of("matmul_tma_persistent", matmul_late_kernel, a, b, out, schedule)
    if launch is None:
        return c.zero_()
    kernel, programs, arguments, options = launch
    kernel[(programs,)](*arguments, **options)
    return c


@untraced
def prepare_matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, schedule: str | None = None
) -> Callable[[], torch.Tensor]:
    """A function that computes a @ b into `out` at each call, from what a and b then hold; it keeps all three alive.

    Without `out`, c is allocated once, here: each call overwrites it and returns the same tensor. The function launches
    on the current stream, and raises RuntimeError where the current device is not that of a. prepare_matmul itself
    raises what matmul_tma_persistent does. (matmul_tma_persistent could not cache its descriptors by data_ptr: memory
    that is freed may since hold another tensor.)
    """
    c, launch = launch_of("prepare_matmul", matmul_late_kernel, a, b, out, schedule)
    run_again = c.zero_ if launch is None else prepare_launch(*launch)

    @untraced
    def again() -> torch.Tensor:
        if c.is_cuda and c.device.index != torch.cuda.current_device():
            raise RuntimeError(
                f"prepare_matmul: the operands are on {c.device}, and the current device is "
                f"cuda:{torch.cuda.current_device()}; call it within torch.cuda.device({c.device.index})"
            )
        run_again()
        return c

    return again


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def compare(h: Harness, M: int, N: int, K: int, ours: dict[str, Callable], **options):
    """The table of one size: `ours`, functions of a and b, beside the library."""
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    library = "cuBLAS" if a.is_cuda else "torch"
    work = Work(bytes=2 * (M * K + K * N + M * N), flops=2 * M * N * K, dtype=h.half)
    return h.compare(
        {library: torch.matmul} | ours, reference, a, b, baseline=library, work=work, terms=K,
        case=f"{M}x{N}x{K}", wrong=short_of_k(reference), **options,
    )  # fmt: skip


def answer(tables: list) -> str:
    def over(other: str, name: str = "triton") -> str:
        ratios = [table.over(other, name) for table in tables]
        return f"{min(ratios):.2f} to {max(ratios):.2f}x" if len(tables) > 1 else f"{ratios[0]:.2f}x"

    library = tables[0].baseline
    dispatcher = f"the dispatcher is {over(library)} {library}, {over('tile')} one program per tile"
    if "late" not in tables[0]:
        return f"Over {len(tables)} sizes {dispatcher}; a later store needs accumulators in registers (sm_90)."
    pays = [table.case for table in tables if table.over("split", "late") > 1.02]
    where = "all" if len(pays) == len(tables) else ", ".join(pays) or "none"
    return (
        f"Storing a tile under the next one's MMAs is {over('split', 'late')} as fast as before them; it pays at "
        f"{where} of {len(tables)} sizes. Over all, {dispatcher}."
    )


def demo(h: Harness) -> None:
    # One row; tails in each dimension and more tiles than SMs (the interpreter plays a GPU of four); nothing to add up.
    for M, N, K in [(1, 8, 8), (257, 264, 328), (5, 16, 0)]:
        a, w = h.randn(M, K, dtype=h.half), h.randn(N, K, dtype=h.half)
        for b in (w.t(), w.t().contiguous()):
            h.check(matmul_tma_persistent, reference, a, b, terms=K)

    x, tma = h.meta(8192, 8192), ("cp.async.bulk.tensor", "mbarrier")
    # Without TMA descriptor loads become ordinary ones: it compiles for sm_80 and sm_89, and shows what is not there.
    find = {80: (), 89: (), 90: (*tma, "wgmma"), 100: (*tma, "tcgen05.mma"), 120: (*tma, "mma.sync")}
    h.codegen(matmul_tma_persistent, x, x, find=find)

    shown = [name for name in ("tile", "split", "late") if name in runnable(h.device)]
    ours = {"triton": matmul_tma_persistent}
    ours |= {name: functools.partial(matmul_tma_persistent, schedule=name) for name in shown}
    sizes = [(8192, 8192, 512), (4096, 4096, 4096)]
    tables = [
        compare(h, *size, ours)
        for size in h.pick(interpreted=[(257, 264, 328)], quick=sizes, full=[*sizes, (8192, 8192, 8192)])
    ]
    h.answer(lambda: answer(tables))


if __name__ == "__main__":
    run(demo)
