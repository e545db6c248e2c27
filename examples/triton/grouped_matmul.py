"""Grouped matmul: the experts of a layer in one launch, each with as many tokens as were routed to it.

64 experts of 7168 x 2048 share 8,192 tokens: 240 GFLOP, and 1.9 GB of weights in 16 bits. By an H200's data sheet that
is 0.25 ms of MMAs and 0.4 ms of memory: neither is short enough for the other to hide its losses. A loop over experts
launches 64 GEMMs, each too small for the GPU, and the host waits to learn their sizes. Here the GPU reads them:

  find       each program adds up the tiles of all groups, and finds the group that its own tile lies in. There are as
             many programs as there can be tiles; those left over end at once.
  order      tiles of the same weights are neighbours: one reads them from memory, the others from L2.
  fit        the last tile of a group has half the rows where they suffice, to multiply fewer rows of the next group.

Question   How far ahead of torch's grouped GEMM, and of a loop over the experts, is one launch over uneven groups?
Needs      triton
Wins when  groups are uneven: a group's last few rows take a small tile. Even groups gain less, on an H100 nothing.
Variants   grouped_matmul_operands.py (checks, routing, torch's calls)
Study      studies/triton/grouped_matmul.py
Source     goes beyond the chapter; arguments as torch._grouped_mm and torch._scaled_grouped_mm have them
"""

from __future__ import annotations

from functools import partial

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.compiled import over_library
from examples.common.device import architecture, device_limits
from examples.common.tma import tma_descriptor
from examples.common.untraced import untraced
from examples.triton import grouped_matmul_operands as cases
from examples.triton.grouped_matmul_operands import check_operands, reference

BLOCK_M, ROW_BYTES, STAGES = 128, 128, 4  # rows of a tile; bytes of each in a step along K; steps in shared memory


@triton.jit
def ends_of(offs_ptr, group, GROUPS, T):
    """The first row of a group and the one after its last, within 0 to T whatever offs holds."""
    begin = tl.load(offs_ptr + group - 1, mask=(group > 0) & (group < GROUPS), other=0)
    end = tl.load(offs_ptr + group, mask=group < GROUPS, other=0)
    return tl.minimum(tl.maximum(begin, 0), T), tl.minimum(tl.maximum(end, 0), T)


@triton.jit
def grouped_matmul_tile(
    a_desc, w_desc, y_ptr, scale_a_ptr, scale_b_ptr, group, row, end, col, N, K,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = w_desc.load([group, col, k]).reshape(BLOCK_N, BLOCK_K)
        acc = tl.dot(a_desc.load([row, k]), w.T, acc)
    rows, cols = row + tl.arange(0, ROWS), col + tl.arange(0, BLOCK_N)
    if scale_a_ptr is not None:  # FP8
        scale_a = tl.load(scale_a_ptr + rows, mask=rows < end, other=0.0)
        scale_b = tl.load(scale_b_ptr + group.to(tl.int64) * N + cols, mask=cols < N, other=0.0)
        acc *= scale_a[:, None] * scale_b[None, :]
    y_ptrs = y_ptr + rows[:, None].to(tl.int64) * N + cols[None, :]  # a TMA store would write the next group's rows
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (cols < N)[None, :])


@triton.jit
def grouped_matmul_kernel(
    a_desc, a_half_desc, w_desc, y_ptr, scale_a_ptr, scale_b_ptr, offs_ptr, T, N, K, GROUPS,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    begins, ends = ends_of(offs_ptr, tl.arange(0, SLOTS), GROUPS, T)
    tiles_m, tiles_n = tl.maximum(tl.cdiv(ends - begins, BLOCK_M), 0), tl.cdiv(N, BLOCK_N)
    before = tl.cumsum(tiles_m.to(tl.int64)) * tiles_n <= tl.program_id(0)  # the groups whose tiles come before ours
    group = tl.sum(before.to(tl.int32))
    if group < GROUPS:
        tile = tl.program_id(0) - tl.sum(tl.where(before, tiles_m, 0)) * tiles_n
        begin, end = ends_of(offs_ptr, group, GROUPS, T)
        own_m = tl.cdiv(end - begin, BLOCK_M)
        row, col = begin + tile % own_m * BLOCK_M, tile // own_m * BLOCK_N
        if end - row > BLOCK_M // 2:
            grouped_matmul_tile(a_desc, w_desc, y_ptr, scale_a_ptr, scale_b_ptr, group, row, end, col, N, K,
                                BLOCK_M, BLOCK_N, BLOCK_K, STAGES)  # fmt: skip
        else:
            grouped_matmul_tile(a_half_desc, w_desc, y_ptr, scale_a_ptr, scale_b_ptr, group, row, end, col, N, K,
                                BLOCK_M // 2, BLOCK_N, BLOCK_K, STAGES)  # fmt: skip


@untraced
def grouped_matmul(a, b, offs, scale_a=None, scale_b=None, check_scales: bool = True) -> torch.Tensor:
    """a [T, K] @ b [E, K, N] -> [T, N], contiguous: rows offs[e - 1] (or 0) to offs[e] of a, times b[e].

    float16 or bfloat16; or float8_e4m3fn with scale_a [T] and scale_b [E, N], float32, and the result bfloat16. K is
    contiguous in both (b is weights.transpose(1, 2)), rows are multiples of 16 bytes; T, E, N, K or a group may be 0.
    The accumulator is float32. offs [E], int32, E up to 4096, must not decrease, unchecked: if it does, rows are wrong
    or unwritten, but no access is out of bounds. Rows from offs[-1] on are unwritten. check_scales waits for the GPU.

    Raises what check_operands does: TypeError for dtypes; ValueError for shapes, layouts and scales; RuntimeError for a
    device without Triton, FP8 before sm_89 or an input that requires grad.
    """
    T, E, N, K = check_operands("grouped_matmul", a, b, offs, scale_a, scale_b, check_scales)
    y = torch.empty((T, N), dtype=a.dtype if scale_a is None else torch.bfloat16, device=a.device)
    if not (y.numel() and E and K):
        return y.zero_()  # nothing to sum, or nothing to write
    w, block_k, shared = b.transpose(1, 2), ROW_BYTES // a.element_size(), device_limits(a.device).shared_bytes - 1024
    block_n = 256 if architecture(a.device) // 10 in (9, 10, 11) else 128  # mma.sync's operands would spill
    programs = (T + E * (BLOCK_M - 1)) // BLOCK_M * triton.cdiv(N, block_n)  # at most, for E groups of any sizes
    grouped_matmul_kernel[(programs,)](
        tma_descriptor(a, [BLOCK_M, block_k]), tma_descriptor(a, [BLOCK_M // 2, block_k]),
        tma_descriptor(w, [1, block_n, block_k]), y, scale_a, scale_b, offs, T, N, K, E,
        BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=block_k, SLOTS=triton.next_power_of_2(E),
        STAGES=min(STAGES, shared // (ROW_BYTES * (BLOCK_M + block_n))), num_warps=8,
    )  # fmt: skip
    return y


def compare(h: Harness, operands: tuple, how: str, more: dict | None = None, title: str | None = None):
    """The table of one way of routing, for the operands of experts()."""
    a, b, *scales = operands
    (T, K), (E, _, N), offs = a.shape, b.shape, cases.routed(h, a.shape[0], b.shape[0], how)
    ours, library = {"triton": partial(grouped_matmul, check_scales=False)}, cases.libraries(h, a, b, offs, *scales)
    return h.compare(
        library | ours | (more or {}), reference, a, b, offs, *scales, baseline=next(iter(library), "triton"),
        title=title or ("FP8" if scales else "16 bits"), case=f"{how} {E}x{T}x{N}x{K}", wrong=cases.faults(offs),
        work=Work(cases.least_bytes(a, b, offs), 2 * T * N * K, a.dtype), **cases.budget(h, K, bool(scales)),
    )  # fmt: skip


def demo(h: Harness) -> None:
    find = {sm: ("cp.async.bulk.tensor", mma) for sm, mma in ((90, "wgmma"), (100, "tcgen05.mma"), (120, "mma.sync"))}
    T, E, N, K = h.pick(interpreted=(170, 5, 72, 160), quick=(2048, 16, 1024, 2048), full=(8192, 64, 2048, 7168))
    ways, tables = h.pick(interpreted=("skewed",), quick=("skewed",), full=("even", "skewed", "hot")), []
    for fp8 in (False, True) if architecture(h.device) >= 89 else (False,):
        # Groups of 0 and 1 rows, of a tile and of one row more; tails in N and K; nothing to sum.
        for ends, n, k in [((0, 1, 1, 129, 258, 300, 300), 72, 80), ((64, 129), 264, 192), ((3, 5), 8, 0)]:
            a, b, *scales = cases.experts(h, ends[-1], len(ends), n, k or 16, fp8)
            inputs = (a[:, :k], b[:, :k], torch.tensor(ends, dtype=torch.int32, device=h.device), *scales)
            h.check(grouped_matmul, reference, *inputs, what=f"groups to {ends} {n}x{k}", **cases.budget(h, k, fp8))
        # Without TMA, descriptor loads become ordinary ones: this compiles for sm_80, and shows what is missing there.
        h.codegen(grouped_matmul, *cases.described(h, fp8), find=find | ({} if fp8 else {80: ("mma.sync",)}))
        tables += [compare(h, operands, how) for operands in [cases.experts(h, T, E, N, K, fp8)] for how in ways]

    def cell(table) -> str:
        ratio = over_library([table])
        return f"{table.title} {table.case.split()[0]} {ratio:.2f}x ({table['triton'].tbps:.2f})"

    h.answer(lambda: f"Over torch's faster call, by routing (TB/s): {', '.join(map(cell, tables))}.")


if __name__ == "__main__":
    run(demo)
