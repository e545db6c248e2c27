"""Skinny matmul: a linear layer of few rows, which is as fast as its weights are read.

M rows by weights [N, K] are M FLOPs for each byte, of which an H200 does about 200 while it reads one: up to 200 rows,
reading the weights takes longest, 32 us for 8192 x 8192. One row takes FMAs; MMAs meet four obstacles:
  few tiles      28672 outputs are 448 tiles of 64, 3.4 waves of 132 SMs. Stream-K (examples/common/stream_k.py) gives
                 each SM an equal share of all steps along K, and merges the float32 parts of a tile in order.
  idle starts    one loop runs over the steps of all tiles, so the next tile is loaded while this one is stored.
  padded rows    Hopper's wgmma has 64 rows or more. In y^T = w x^T these are outputs, and M is padded only to 16.
  rows of zeros  TMA takes longer to fill a row with zeros than to load one: halves of tiles overlap (overlapping_rows).

Question   How close to the speed of memory is a linear layer of 1 to 256 rows, and how far ahead of cuBLAS?
Needs      triton
Wins when  x has one row: max-autotune's speed without its search. Else cuBLAS is as fast, from 65 rows on mostly faster
Variants   skinny_matmul_gemv.py (one row, without MMAs)
Study      studies/triton/skinny_matmul.py
Source     goes beyond the chapter; stream-K as Osama et al. (2023) have it, merged by a second kernel
"""

from __future__ import annotations

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.compiled import SEARCH, over_library
from examples.common.device import architecture, device_limits
from examples.common.overlapping_rows import load_rows, rows_descriptor, spare_rows
from examples.common.stream_k import first_unit, fit_tile, launch_stream_k, load_block, start_dependents, store_share
from examples.common.tma import tma_descriptor, tma_takes
from examples.common.untraced import untraced
from examples.triton.skinny_matmul_gemv import DTYPES, check_linear, skinny_matmul_gemv

# BLOCK_M, BLOCK_N, BLOCK_K, warps. x is read again, from L2, for every BLOCK_N outputs.
TILES = [(16, 64, 256, 4), (32, 64, 128, 4), (64, 64, 128, 4), (128, 128, 64, 8), (256, 128, 64, 8)]
ONE_WAVE = [(128, 64, 128, 4), (128, 128, 64, 4)]
STAGES, PER_SM = 8, 1  # steps along K in shared memory, at most; programs on an SM
linear = torch.nn.functional.linear


@triton.jit(do_not_specialize=["steps", "spare"])
def skinny_matmul_stream_k_kernel(
    x, w, y_ptr, parked_ptr, M, N, K, stride_xm, stride_wn, steps, units, spare,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    start_dependents(EARLY)
    program, programs, tiles_m = tl.program_id(0), tl.num_programs(0), tl.cdiv(M, BLOCK_M)
    first, end = first_unit(program, units, programs), first_unit(program + 1, units, programs)
    tile, step, count = (first // steps).to(tl.int32), (first % steps).to(tl.int32), (end - first).to(tl.int32)
    begun = step  # of this tile, the first step that is ours
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        row, col, k = tile // tiles_m * BLOCK_N, tile % tiles_m * (BLOCK_M - spare), step * BLOCK_K
        w_block = load_block(w, row, k, N, K, stride_wn, BLOCK_N, BLOCK_K, TMA)
        x_block = load_rows(x, col, k, M, K, stride_xm, BLOCK_M, BLOCK_K, TMA)
        acc = tl.dot(w_block, x_block.T, acc)
        last = step == steps - 1
        if last | (i == count - 1):
            whole, slot = last & (begun == 0), 2 * program + (begun == 0)
            store_share(y_ptr, parked_ptr, acc, whole, slot, row, col, 0, M, N, BLOCK_M, spare)
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        begun = tl.where(last, 0, begun)
        tile = tl.where(last, tile + 1, tile)
        step = tl.where(last, 0, step + 1)


def tiles_for(M: int, N: int, device: torch.device) -> list:
    """Beyond 64 rows those that the SMs hold all at once, so that weights come from memory only once. Else TILES."""
    sms = device_limits(device).sms
    return [t for t in ONE_WAVE if M > 64 and triton.cdiv(M, t[0]) * triton.cdiv(N, t[1]) <= sms] or TILES


@untraced
def skinny_matmul_stream_k(x: torch.Tensor, w: torch.Tensor, programs: int | None = None) -> torch.Tensor:
    """skinny_matmul by stream-K, for any M; `programs` share the steps, as many as share_out finds unless given."""
    M, N, K = check_linear("skinny_matmul_stream_k", x, w, DTYPES)
    if not (M and N and K):
        return torch.zeros((M, N), dtype=x.dtype, device=x.device)  # nothing to sum, or nothing to write
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    m, n, k, num_warps, stages = fit_tile(tiles_for(M, N, x.device), M, STAGES, x.device, PER_SM)
    tma = architecture(x.device) >= 90 and tma_takes(x) and tma_takes(w)
    spare, blocks = (spare_rows(M, m), (rows_descriptor(x, m, k), tma_descriptor(w, [n, k]))) if tma else (0, (x, w))

    def launch(programs: int, parked: torch.Tensor, steps: int, units: int, early: bool) -> None:
        skinny_matmul_stream_k_kernel[(programs,)](
            *blocks, y, parked, M, N, K, x.stride(0), w.stride(0), steps, units, spare,
            BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, STAGES=stages, TMA=tma, EARLY=early, num_warps=num_warps,
        )  # fmt: skip

    launch_stream_k(launch, y, K, (m, n, k), programs, PER_SM, spare)
    return y


@untraced
def skinny_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [M, K] times w [N, K] transposed, as torch.nn.functional.linear(x, w): y [M, N], contiguous, in their dtype.

    float16 or bfloat16, any sizes (0 too), K contiguous and any row strides; the accumulator is float32. One row takes
    skinny_matmul_gemv, which is compiled for each K, and more take skinny_matmul_stream_k. Raises TypeError for another
    dtype or two; ValueError for rank, inner sizes or layout; RuntimeError for no Triton or an input that requires grad.
    """
    M, _, _ = check_linear("skinny_matmul", x, w, DTYPES)
    return (skinny_matmul_gemv if M == 1 else skinny_matmul_stream_k)(x, w)


def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.double() @ w.double().t()


def compare(h: Harness, M: int, N: int, K: int, more: dict | None = None, title: str | None = None):
    """skinny_matmul, `more` of ours, and the calls of a library that a user could make, at one size."""
    x, w, library = h.randn(M, K, dtype=h.half), h.randn(N, K, dtype=h.half), "torch" if h.interpreted else "cuBLAS"
    variants = {library: linear, "torch.compile max-autotune": h.compiled(linear, options=SEARCH)}
    variants |= {"triton": skinny_matmul} | (more or {})
    work = Work(bytes=x.nbytes + w.nbytes + x.element_size() * M * N, flops=2 * M * N * K, dtype=h.half)
    return h.compare(
        variants, reference, x, w, baseline=library, work=work, title=title, case=f"{M}x{N}x{K}",
        terms=K, wrong={"without its last 32 of K": lambda x, w: reference(x[:, :-32], w[:, :-32])},
    )  # fmt: skip


def demo(h: Harness) -> None:
    # One row, its K less than a block or more; tails in each dimension; a tile for several programs; nothing to sum.
    for M, N, K in [(1, 1, 1), (1, 517, 1131), (5, 264, 1032), (17, 72, 136), (70, 3, 65), (3, 7, 0)]:
        h.check(skinny_matmul, reference, h.randn(M, K, dtype=h.half), h.randn(N, K, dtype=h.half), terms=K)
    w, tma = h.meta(8192, 8192), ("cp.async.bulk.tensor", "mbarrier")
    find = {80: ("cp.async", "mma.sync"), 90: (*tma, "wgmma"), 100: (*tma, "tcgen05.mma"), 120: (*tma, "mma.sync")}
    h.codegen(skinny_matmul, h.meta(16, 8192), w, find=find)
    h.codegen(skinny_matmul_gemv, h.meta(1, 8192), w, find=dict.fromkeys(find, ("ld.global.v4", "fma.f32")))

    rows = h.pick(interpreted=(1, 16), quick=(1, 16, 64), full=(1, 16, 64, 256))
    sizes = h.pick(interpreted=[(72, 264)], quick=[(4096, 4096)], full=[(8192, 8192), (28672, 8192)])
    tables = {(M, s): compare(h, M, *s, {"MMAs": skinny_matmul_stream_k} if M < 2 else {}) for s in sizes for M in rows}

    def answer() -> str:
        one, some = tables[1, sizes[-1]], tables[16, sizes[-1]]
        ahead = ", ".join(f"{over_library([tables[M, size] for size in sizes]):.2f}x with {M}" for M in rows)
        return (
            f"Rows: {ahead}, over the faster of {one.baseline} and max-autotune. Weights of {one.case[2:]} come at "
            f"{one['triton'].tbps:.2f} TB/s for one row, {some['triton'].tbps:.2f} for 16; for one row FMAs are "
            f"{one.over('MMAs', 'triton'):.2f}x as fast as MMAs."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
