"""FP8 matmul: per-tensor and per-row scaled GEMM on the FP8 tensor cores, by pointers, by TMA, by warps with roles.

Technique  (a * scale_a) @ (b * scale_b) where a scale never varies along K: it leaves the sum, so the tensor cores
           multiply FP8 as it lies in memory, and the scales cost one pass over the accumulator. Casting first gives
           the same products at the rate of the wider format. Three kernels, the same sums:
           pointers    one program per tile, operands by tl.load with masks, any K and N;
           persistent  one program per SM, operands and result by TMA, the loops over tiles and K flattened into one
                       so that the loads of the next tile run while this one is stored (persistent_matmul.py has the
                       steps);
           warp specialized  the same in Gluon, on Hopper, with roles for warps. A producer, one warp, brings operands
                       into a ring of buffers, and each tile's scales and bias into a buffer beside it, as soon as
                       those are free. Two consumers, a warpgroup each, multiply a half of every tile and store it,
                       the second always after the first: what one spends on scaling and storing, the tensor cores
                       spend on the other, and one buffer for results serves both in turn, where all warps of a
                       persistent program do the same at the same time. A consumer starts the products of a step
                       before it waits for those of the step before, so the tensor cores do not idle between steps.
                       Near the end of a tile the second waits for the first; before that it finishes what it has in
                       flight and hands the buffer back, or the producer would lack one for as long as it waits.
           FP8 tensor cores take both operands with K contiguous: a row-major, b column-major, as x @ weight.t().
           On Hopper they sum in a format of about 14 bits; blockwise_matmul.py has what that means for long K.
Question   What does an FP8 GEMM need to run at twice the speed of bf16, and to keep up with cuBLASLt?
Needs      triton, sm_89
Shapes     a [M, K] with contiguous rows, b [K, N] with contiguous columns -> [M, N], contiguous. scale_a [], [1] or
           [M, 1]; scale_b [], [1] or [1, N]; bias [N] or None. pointers: any M, N, K (0 too). By TMA: K a multiple
           of 16, N one of 16 bytes of the result.
Dtypes     a, b: float8_e4m3fn or float8_e5m2, also one of each; scales float32; out_dtype bfloat16, float16, float32;
           bias as out_dtype, added in float32 after scaling. The two scales of an element are multiplied first: what
           their float32 product loses (below 2**-126) is lost.
Errors     TypeError for another FP8 variant or dtype, scales that are not float32, a bias of another dtype; ValueError
           for rank, inner sizes that differ, a layout that the tensor cores or TMA cannot take, scales or bias of
           another shape or device, a scale that is not positive and finite (looked for with check_scales, which waits
           for the GPU), a variant that does not exist; RuntimeError for a device without Triton, an architecture
           without FP8, TMA or (warp specialized: sm_90 alone, nor is Gluon interpreted) Hopper's tensor cores, too
           little shared memory, or an input that requires grad.
Wins when  the scales are per tensor or per row. Finer scales along K need partial sums: blockwise_matmul.py.
Source     chapter section "FP8"; layouts and arguments as torch._scaled_mm has them.
Run        python examples/fp8/fp8_matmul.py
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

from harness import (
    Harness,
    Work,
    device_limits,
    gluon_descriptor,
    hardware,
    quantize_reference,
    require_fp8,
    require_scales,
    require_tma_layout,
    require_triton_device,
    run,
    tma_descriptor,
)
from harness.codegen import CodegenError

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# BLOCK_M, BLOCK_N, BLOCK_K, warps, and for TMA in how many parts a tile is stored: a part needs shared memory of its
# own, as the loads of the next tile already own the rest. The first that fits is taken, with as many steps of K in
# shared memory as it holds. BLOCK_K is 128 bytes of a row, the widest swizzle of shared memory. GROUP_M is the rows of
# tiles in a band.
POINTER_TILES = [(128, 256, 128, 8), (128, 128, 128, 8), (64, 128, 128, 4)]
TMA_TILES = [(128, 256, 128, 8, 4), (128, 128, 128, 8, 2)]
BUFFERS = (4, 3, 2)
GROUP_M = 16
# Warp specialized: BLOCK_M, BLOCK_N, BLOCK_K, steps of K in the ring; steps of every tile that the second consumer
# does after the first has done its last (no more than the ring holds). With half a tile of two bytes an element for
# results, nearly all of Hopper's shared memory.
HOPPER_TILE, HOPPER_STAGES, HOPPER_BEHIND = (128, 256, 128), 4, 3


def _tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M):
    """Rows and columns at which a tile starts, in bands of GROUP_M rows of tiles, so that L2 serves most loads."""
    tiles_m, tiles_n = (M + BLOCK_M - 1) // BLOCK_M, (N + BLOCK_N - 1) // BLOCK_N
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    band = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + tile % (GROUP_M * tiles_n) % band
    tile_n = tile % (GROUP_M * tiles_n) // band
    return tile_m * BLOCK_M, tile_n * BLOCK_N


_triton_tile_of, _gluon_tile_of = triton.jit(_tile_of), gluon.jit(_tile_of)  # the same arithmetic in both languages


@triton.jit
def fp8_matmul_pointers_kernel(
    a_ptr, b_ptr, c_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, M, N, K,
    stride_am, stride_bn, stride_cm, stride_sa, stride_sb,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    row, col = _triton_tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows, cols, inner = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Rows and columns past the edge wrap around: they load something valid, and the store drops what it makes.
    a_ptrs = a_ptr + (rows % M)[:, None].to(tl.int64) * stride_am + inner[None, :]
    b_ptrs = b_ptr + inner[:, None] + (cols % N)[None, :].to(tl.int64) * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
            b = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc)  # FP8 goes in as it is
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    # A stride of 0 makes one scale serve all.
    scale_a = tl.load(scale_a_ptr + rows.to(tl.int64) * stride_sa, mask=rows < M, other=0.0)
    scale_b = tl.load(scale_b_ptr + cols.to(tl.int64) * stride_sb, mask=cols < N, other=0.0)
    acc = acc * (scale_a[:, None] * scale_b[None, :])
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def _store(c_desc, acc, row, col, scale_a, scale_b, bias, ROWS: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr):
    """Scale a tile and store it, PARTS times a part of its columns; without ROWS scale_a is the product of both."""
    if PARTS > 1:
        rows: tl.constexpr = acc.shape[0]
        width: tl.constexpr = acc.shape[1] // 2
        left, right = acc.reshape(rows, 2, width).permute(0, 2, 1).split()
        scale_left, scale_right = scale_b, scale_b
        if ROWS:
            scale_left, scale_right = scale_b.reshape(2, width).permute(1, 0).split()
        bias_left, bias_right = bias, bias
        if BIAS:
            bias_left, bias_right = bias.reshape(2, width).permute(1, 0).split()
        _store(c_desc, left, row, col, scale_a, scale_left, bias_left, ROWS, BIAS, PARTS // 2)
        _store(c_desc, right, row, col + width, scale_a, scale_right, bias_right, ROWS, BIAS, PARTS // 2)
    else:
        acc = acc * (scale_a[:, None] * scale_b[None, :]) if ROWS else acc * scale_a
        if BIAS:
            acc += bias[None, :].to(tl.float32)
        c_desc.store([row, col], acc.to(c_desc.dtype))


@triton.jit
def fp8_matmul_persistent_kernel(
    a_desc, bt_desc, c_desc, scale_a_ptr, scale_b_ptr, bias_ptr, M, N, K, stride_sa, stride_sb, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    BIAS: tl.constexpr = bias_ptr is not None
    scale = 1.0 if ROWS else tl.load(scale_a_ptr) * tl.load(scale_b_ptr)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, col = _triton_tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            acc = tl.dot(a_desc.load([row, k]), bt_desc.load([col, k]).T, acc)
        rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        scale_a, scale_b, bias = scale, scale, scale
        if ROWS:
            scale_a = tl.load(scale_a_ptr + rows.to(tl.int64) * stride_sa, mask=rows < M, other=0.0)
            scale_b = tl.load(scale_b_ptr + cols.to(tl.int64) * stride_sb, mask=cols < N, other=0.0)
        if BIAS:
            bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
        _store(c_desc, acc, row, col, scale_a, scale_b, bias, ROWS, BIAS, PARTS)


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The next buffer of the ring; the phase that its barriers wait for changes with every round."""
    slot += 1
    again = slot == STAGES
    return gl.where(again, 0, slot), gl.where(again, phase ^ 1, phase)


@gluon.jit
def _produce(
    operands, last, a_desc, bt_desc, scale_a, scale_b, bias, M, N, K,
    ROWS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warp: the operands of every step of every tile, then what the tile needs last. Boxes count whole at their
    barrier; what lies past the edge is filled with zeros."""
    a_bufs, b_bufs, full, empty = operands
    scale_a_bufs, scale_b_buf, bias_buf, last_full, last_empty = last
    HALF_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    BLOCK_N: gl.constexpr = bt_desc.block_shape[0]
    LAST: gl.constexpr = (4 * (2 * HALF_M + BLOCK_N) if ROWS else 0) + (
        BLOCK_N * bias.dtype.primitive_bitwidth // 8 if bias is not None else 0
    )
    slot = 0
    phase = 1  # of a barrier at which nobody has arrived: all is empty
    last_phase = 1
    tiles = gl.cdiv(M, 2 * HALF_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = _gluon_tile_of(tile, M, N, 2 * HALF_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, (2 * HALF_M + BLOCK_N) * BLOCK_K)
            tma.async_copy_global_to_shared(bt_desc, [col, k], ready, b_bufs.index(slot))
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(a_desc, [row + half * HALF_M, k], ready, a_bufs.index(2 * slot + half))
            slot, phase = _next(slot, phase, STAGES)
        if LAST > 0:
            mbarrier.wait(last_empty, last_phase)
            mbarrier.expect(last_full, LAST)
            if ROWS:
                tma.async_copy_global_to_shared(scale_b, [0, col], last_full, scale_b_buf)
                for half in gl.static_range(2):
                    at = [0, row + half * HALF_M]
                    tma.async_copy_global_to_shared(scale_a, at, last_full, scale_a_bufs.index(half))
            if bias is not None:
                tma.async_copy_global_to_shared(bias, [0, col], last_full, bias_buf)
            last_phase ^= 1


@gluon.jit
def _store_parts(
    c_desc, c_buf, free, phase, acc, row, col, scale_a, scale_b, bias, ROWS: gl.constexpr, BIAS: gl.constexpr,
    HALF: gl.constexpr, FIRST: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """_store of a consumer's half of a tile, through c_buf. The first consumer knows that c_buf is free."""
    width: gl.constexpr = acc.shape[1]
    if PARTS > 1:
        left, right = acc.reshape(acc.shape[0], 2, width // 2).permute(0, 2, 1).split()
        _store_parts(
            c_desc, c_buf, free, phase, left, row, col, scale_a, scale_b, bias, ROWS, BIAS, HALF, FIRST, PARTS // 2
        )
        _store_parts(
            c_desc, c_buf, free, phase, right, row, col + width // 2, scale_a, scale_b, bias, ROWS, BIAS,
            HALF, FIRST + PARTS // 2, PARTS // 2,
        )  # fmt: skip
    else:
        columns: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
        if ROWS:
            by_row = gl.convert_layout(scale_a, gl.SliceLayout(1, acc.type.layout))
            acc = acc * (by_row[:, None] * scale_b.slice(FIRST * width, width).load(columns)[None, :])
        else:
            acc = acc * scale_a
        if BIAS:
            acc += bias.slice(FIRST * width, width).load(columns)[None, :].to(gl.float32)
        out = acc.to(c_desc.dtype)
        if FIRST > 0:
            tma.store_wait(0)  # the part before has been read
        elif HALF == 1:
            mbarrier.wait(free, phase)
        c_buf.store(out)
        fence_async_shared()
        tma.async_copy_shared_to_global(c_desc, [row, col], c_buf)


@gluon.jit
def _before(slot, STAGES: gl.constexpr):
    return gl.where(slot == 0, STAGES - 1, slot - 1)


@gluon.jit
def _sum_products(
    acc, operands, slot, phase, start, stop, FRESH: gl.constexpr, BLOCK_K: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """acc and the products of K from start to stop. Each step waits for the one before it and releases that one's
    buffer; before the first there is none with FRESH. The last is left in flight."""
    a_bufs, b_bufs, full, empty = operands
    for k in range(start, stop, BLOCK_K):
        mbarrier.wait(full.index(slot), phase)
        b = b_bufs.index(slot).permute((1, 0))
        acc = warpgroup_mma(a_bufs.index(2 * slot + HALF), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        fresh = FRESH and k == start  # nothing else is in flight
        mbarrier.arrive(empty.index(_before(slot, STAGES)), pred=not fresh)
        slot, phase = _next(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def _consume(
    operands, last, c_desc, c_buf, scale_a, scale_b, read, summed, M, N, K, ROWS: gl.constexpr, BIAS: gl.constexpr,
    STAGES: gl.constexpr, BEHIND: gl.constexpr, GROUP_M: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup: one half of the rows of every tile.

    The products of a step are started before those of the step before are waited for, so the tensor cores have the next
    ones while the consumer waits, releases and comes round. A buffer is released a step later for that, and empty when
    both consumers have released it.

    Left alone, the second would catch up with the first, and both would store while the tensor cores idle. So it waits,
    BEHIND steps before the end of a tile, until the first has summed its half (`summed`). Before that it waits for what
    it has in flight and releases it: else it would hold, all that time, a buffer that the producer could fill.

    No role waits for ever. Count steps over all tiles. The load of step g needs g - STAGES released by both. A consumer
    that waits for it has itself released all up to g - 2, and STAGES >= 2. If the other is behind, it waits for an
    earlier load, or is the second, at `summed` of tile t. With S steps a tile it has then released all up to
    (t + 1) S - BEHIND - 1, or more where S <= BEHIND, so all of tile t is loaded as BEHIND <= STAGES: the first can sum
    it. No barrier of the ring is two phases ahead of who waits: a buffer is loaded when both have released it, and
    released, once, by who has waited for its load.

    c_buf belongs to the first, then to the second, in every tile. Who has written waits in the first step of its next
    tile, or at the end, until TMA has read it, and says so: completion number t of read[0] means that what the first
    stored for its tile number t is out of c_buf, number t of read[1] what the second stored before its tile number t
    (nothing, before tile 0). The first needs number t of read[1] for its tile t, the second number t of read[0]; of
    these only the last of read[1] is waited for by nobody. The first waits before it arrives at `summed`, for which the
    second waits in the same tile: so neither of the two is two phases ahead of who waits for it.
    """
    a_bufs, b_bufs, full, empty = operands
    scale_a_bufs, scale_b_buf, bias_buf, last_full, last_empty = last
    HALF_M: gl.constexpr = a_bufs.shape[1]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    BLOCK_N: gl.constexpr = b_bufs.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    PARTS: gl.constexpr = BLOCK_N // c_buf.shape[1]
    slot = 0
    phase = 0
    tile_phase = 0
    scale = 1.0 if ROWS else gl.load(scale_a) * gl.load(scale_b)
    pause = gl.maximum(BLOCK_K, gl.cdiv(K, BLOCK_K) * BLOCK_K - BEHIND * BLOCK_K)
    tiles = gl.cdiv(M, 2 * HALF_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = _gluon_tile_of(tile, M, N, 2 * HALF_M, BLOCK_N, GROUP_M)
        acc = gl.zeros((HALF_M, BLOCK_N), gl.float32, MMA)
        mbarrier.wait(full.index(slot), phase)
        b = b_bufs.index(slot).permute((1, 0))
        acc = warpgroup_mma(a_bufs.index(2 * slot + HALF), b, acc, use_acc=False, is_async=True)
        tma.store_wait(0)
        if HALF == 1:
            mbarrier.arrive(read.index(1))
        else:
            mbarrier.arrive(read.index(0), pred=tile >= gl.num_programs(0))  # of the tile before, if there was one
        acc = warpgroup_mma_wait(1, deps=(acc,))  # for nothing: makes a tensor of the sums in flight
        slot, phase = _next(slot, phase, STAGES)
        left = True  # in flight
        if HALF == 1:
            acc, slot, phase = _sum_products(acc, operands, slot, phase, BLOCK_K, pause, False, BLOCK_K, HALF, STAGES)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(_before(slot, STAGES)))
            mbarrier.wait(summed, tile_phase)
            left = pause < K
        acc, slot, phase = _sum_products(
            acc, operands, slot, phase, pause if HALF == 1 else BLOCK_K, K, HALF == 1, BLOCK_K, HALF, STAGES
        )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(_before(slot, STAGES)), pred=left)
        if HALF == 0:
            mbarrier.wait(read.index(1), tile_phase)
            mbarrier.arrive(summed)
        by_row, by_column, bias = scale, scale, scale
        if ROWS or BIAS:
            mbarrier.wait(last_full, tile_phase)
        if ROWS:
            by_row = scale_a_bufs.index(HALF).reshape([HALF_M]).load(gl.SliceLayout(1, MMA))
            by_column = scale_b_buf.reshape([BLOCK_N])
        if BIAS:
            bias = bias_buf.reshape([BLOCK_N])
        row += HALF * HALF_M
        _store_parts(
            c_desc, c_buf, read.index(0), tile_phase, acc, row, col, by_row, by_column, bias, ROWS, BIAS,
            HALF, 0, PARTS,
        )  # fmt: skip
        if ROWS or BIAS:
            mbarrier.arrive(last_empty)
        tile_phase ^= 1
    tma.store_wait(0)
    mbarrier.arrive(read.index(HALF))


@gluon.jit
def fp8_matmul_warp_specialized_kernel(
    a_desc, bt_desc, c_desc, scale_a, scale_b, bias, M, N, K,
    ROWS: gl.constexpr, STAGES: gl.constexpr, BEHIND: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """scale_a and scale_b are descriptors with ROWS, else pointers to one scale each; bias is a descriptor or None."""
    gl.static_assert(STAGES >= 2, "a consumer holds one buffer while it waits for the next")
    gl.static_assert(BEHIND <= STAGES, "the first consumer needs the ring while the second pauses")
    HALF_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_N: gl.constexpr = bt_desc.block_shape[0]
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, HALF_M, a_desc.block_shape[1]], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(bt_desc.dtype, [STAGES, BLOCK_N, bt_desc.block_shape[1]], bt_desc.layout)
    c_buf = gl.allocate_shared_memory(c_desc.dtype, [HALF_M, c_desc.block_shape[1]], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scale_a_bufs, scale_b_buf, bias_buf = full, full, full  # stand-ins for what a launch does not have
    if ROWS:
        scale_a_bufs = gl.allocate_shared_memory(gl.float32, [2, 1, HALF_M], scale_a.layout)
        scale_b_buf = gl.allocate_shared_memory(gl.float32, [1, BLOCK_N], scale_b.layout)
    if bias is not None:
        bias_buf = gl.allocate_shared_memory(bias.dtype, [1, BLOCK_N], bias.layout)
    last_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    last_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(last_full, count=1)
    mbarrier.init(last_empty, count=2)
    for i in gl.static_range(2):
        mbarrier.init(read.index(i), count=1)
    mbarrier.init(summed, count=1)
    fence_async_shared()
    BIAS: gl.constexpr = bias is not None
    operands = (a_bufs, b_bufs, full, empty)
    last = (scale_a_bufs, scale_b_buf, bias_buf, last_full, last_empty)
    gl.warp_specialize([
        (_consume, (operands, last, c_desc, c_buf, scale_a, scale_b, read, summed, M, N, K,
                    ROWS, BIAS, STAGES, BEHIND, GROUP_M, 0)),
        (_consume, (operands, last, c_desc, c_buf, scale_a, scale_b, read, summed, M, N, K,
                    ROWS, BIAS, STAGES, BEHIND, GROUP_M, 1)),
        (_produce, (operands, last, a_desc, bt_desc, scale_a, scale_b, bias, M, N, K, ROWS, STAGES, GROUP_M)),
    ], [4, 1], [240, 24])  # fmt: skip  # warps of the last two, and registers of their threads


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU, or of that compiled for; None where kernels are interpreted."""
    if hardware.OFFLINE_SM:
        return divmod(hardware.OFFLINE_SM, 10)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _validate(name, a, b, scale_a, scale_b, bias, out_dtype, check_scales) -> None:
    """The checks that all variants share: see Errors in the module docstring."""
    require_triton_device(name, a, b, *([] if bias is None else [bias]))
    require_fp8(name, a=a, b=b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    M, K, N = *a.shape, b.shape[1]
    if K > 1 and a.stride(1) != 1:
        raise ValueError(
            f"{name}: a has strides {a.stride()}; FP8 tensor cores take operands with K contiguous: a.contiguous()"
        )
    if K > 1 and b.stride(0) != 1:
        raise ValueError(
            f"{name}: b has strides {b.stride()}; FP8 tensor cores take operands with K contiguous, so b must be "
            f"column-major: keep weights as [N, K] and pass weights.t(), or b.t().contiguous().t()"
        )
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {OUT_DTYPES}")
    scales = {"scale_a": (scale_a, ((), (1,), (M, 1))), "scale_b": (scale_b, ((), (1,), (1, N)))}
    require_scales(name, a, check_scales, **scales)
    require_triton_device(name, a, scale_a, scale_b)
    if bias is not None and bias.dtype is not out_dtype:
        raise TypeError(f"{name}: bias is {bias.dtype}; it must be that of the result, {out_dtype}")
    if bias is not None and (tuple(bias.shape) != (N,) or (N > 1 and bias.stride(0) != 1)):
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}, strides {bias.stride()}; need [{N}], contiguous")
    if (have := capability(a.device)) and have < (8, 9):
        raise RuntimeError(f"{name}: this GPU is sm_{have[0]}{have[1]}; FP8 tensor cores come with sm_89")


def _scale_strides(scale_a: torch.Tensor, scale_b: torch.Tensor) -> tuple[int, int]:
    """How far apart the scales of two rows of a and of two columns of b are; 0 where one serves all."""
    return scale_a.stride(0) if scale_a.numel() > 1 else 0, scale_b.stride(1) if scale_b.numel() > 1 else 0


def fitting_tile(device: torch.device, tiles: list, out_itemsize: int) -> tuple[int, ...]:
    """The first of `tiles` that shared memory holds, and stages for as many steps of K as it holds: (*tile, stages).

    A tile of four numbers stores its result without shared memory of its own.
    """
    limit = device_limits(device).shared_bytes
    # FP8 GPUs with little shared memory multiply by mma.sync, from registers: one stage more than there are buffers.
    # wgmma and tcgen05.mma read the buffers themselves.
    in_registers = 1 if limit < 128 * 1024 else 0
    for m, n, k, warps, *parts in tiles:
        stored = out_itemsize * m * n // parts[0] if parts else 0
        for buffers in BUFFERS:
            if buffers * (m + n) * k + stored + 2048 <= limit:  # and scales on their way to registers, barriers
                return m, n, k, warps, *parts, buffers + in_registers
    raise RuntimeError(f"fp8_matmul: no tile fits the {limit} bytes of shared memory of {device}")


def _launch_pointers(a, b, c, scale_a, scale_b, bias) -> None:
    (M, K), N = a.shape, b.shape[1]
    block_m, block_n, block_k, num_warps, stages = fitting_tile(a.device, POINTER_TILES, c.element_size())
    fp8_matmul_pointers_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
        a, b, c, scale_a, scale_b, bias, M, N, K,
        a.stride(0), b.stride(1), c.stride(0), *_scale_strides(scale_a, scale_b),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=K % block_k == 0, GROUP_M=GROUP_M,
        num_warps=num_warps, num_stages=stages,
    )  # fmt: skip


def _launch_persistent(a, b, c, scale_a, scale_b, bias) -> None:
    (M, K), N = a.shape, b.shape[1]
    block_m, block_n, block_k, num_warps, parts, stages = fitting_tile(a.device, TMA_TILES, c.element_size())
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    fp8_matmul_persistent_kernel[(min(tiles, device_limits(a.device).sms),)](
        tma_descriptor(a, [block_m, block_k]), tma_descriptor(b.t(), [block_n, block_k]),
        tma_descriptor(c, [block_m, block_n // parts]), scale_a, scale_b, bias, M, N, K,
        *_scale_strides(scale_a, scale_b), ROWS=max(scale_a.numel(), scale_b.numel()) > 1,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PARTS=parts, GROUP_M=GROUP_M,
        num_warps=num_warps, num_stages=stages,
    )  # fmt: skip


def _tma_vector(x: torch.Tensor, n: int, block: int):
    """A descriptor of n numbers as one row, copied first where they do not lie side by side from a multiple of 16
    bytes on, or where one stands for all."""
    x = x.reshape(1, -1).expand(1, n)
    if (n > 1 and x.stride(1) != 1) or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return gluon_descriptor(x, [1, block])


def _launch_warp_specialized(a, b, c, scale_a, scale_b, bias) -> None:
    (M, K), N = a.shape, b.shape[1]
    block_m, block_n, block_k = HOPPER_TILE
    parts = c.element_size() // 2
    rows = max(scale_a.numel(), scale_b.numel()) > 1
    if rows:
        scale_a, scale_b = _tma_vector(scale_a, M, block_m // 2), _tma_vector(scale_b, N, block_n)
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    fp8_matmul_warp_specialized_kernel[(min(tiles, device_limits(a.device).sms),)](
        gluon_descriptor(a, [block_m // 2, block_k]), gluon_descriptor(b.t(), [block_n, block_k]),
        gluon_descriptor(c, [block_m // 2, block_n // parts]), scale_a, scale_b,
        None if bias is None else _tma_vector(bias, N, block_n), M, N, K,
        ROWS=rows, STAGES=HOPPER_STAGES, BEHIND=HOPPER_BEHIND, GROUP_M=GROUP_M, num_warps=4,
    )  # fmt: skip


LAUNCH: dict[str, Callable] = {
    "pointers": _launch_pointers,
    "persistent": _launch_persistent,
    "warp specialized": _launch_warp_specialized,
}
VARIANTS = tuple(LAUNCH)


def fp8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    variant: str = "persistent",
    check_scales: bool = True,
) -> torch.Tensor:
    """(a * scale_a) @ (b * scale_b) + bias by one of VARIANTS; limits and errors are in the module docstring.

    check_scales reads the scales, which waits for the GPU; pass False where they are known to be good.
    """
    name = "fp8_matmul"
    _validate(name, a, b, scale_a, scale_b, bias, out_dtype, check_scales)
    if not isinstance(variant, str) or variant not in VARIANTS:
        raise ValueError(f"{name}: variant {variant!r} is not one of {VARIANTS}")
    (M, K), N = a.shape, b.shape[1]
    if variant != "pointers":
        if K % 16 or N * out_dtype.itemsize % 16:
            raise ValueError(
                f"{name}: K is {K} and N {N}; TMA needs rows of 16-byte multiples: pad K to a multiple of 16 and N to "
                f"one of {16 // out_dtype.itemsize}, or use variant='pointers'"
            )
        require_tma_layout(name, a=a, **{"b.t()": b.t()})
        if (have := capability(a.device)) and have < (9, 0):
            raise RuntimeError(f"{name}: TMA comes with sm_90 (this is sm_{have[0]}{have[1]}): use variant='pointers'")
        if variant == "warp specialized" and have != (9, 0):
            here = f"this is sm_{have[0]}{have[1]}" if have else "and Gluon kernels are not interpreted"
            raise RuntimeError(f"{name}: {variant!r} needs sm_90's wgmma ({here}): use variant='persistent'")
    c = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if c.numel():
        # TMA cannot describe a matrix without columns; the pointer kernel then writes the bias.
        LAUNCH[variant if K else "pointers"](a, b, c, scale_a, scale_b, bias)
    return c


def reference(a, b, scale_a, scale_b, bias=None) -> torch.Tensor:
    want = (a.double() * scale_a.double()) @ (b.double() * scale_b.double())
    return want if bias is None else want + bias.double()


# What each variant must hold in its PTX; `demo` also counts that no other tensor-core instruction is there.
CODE = {
    "pointers": {89: ("mma f8", "mma.sync", "cp.async"), 90: ("mma f8", "wgmma", "cp.async")},
    "persistent": {
        90: ("mma f8", "wgmma", "cp.async.bulk.tensor"),
        100: ("mma f8", "tcgen05.mma", "cp.async.bulk.tensor"),
        120: ("mma f8", "mma.sync", "cp.async.bulk.tensor"),
    },
    "warp specialized": {90: ("mma f8", "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg")},
}
SQUARES = [(n, n, n) for n in (2048, 4096, 8192, 16384)]
LAYERS = [(4096, 14336, 4096), (4096, 4096, 14336), (8192, 28672, 8192)]


def runnable(h: Harness) -> tuple[str, ...]:
    """The variants that this machine can run."""
    if h.interpreted or h.machine.sm != 90:
        return VARIANTS[:2] if h.interpreted or h.machine.sm > 90 else VARIANTS[:1]
    return VARIANTS


def budget(h: Harness, K: int) -> dict:
    """On Hopper an FP8 instruction cuts 32 products and the sum so far to about 14 bits; the interpreter does not."""
    return {"terms": K} if h.interpreted else {"terms": K, "acc": 2.0**-13, "roundings": K // 32}


def operands(h: Harness, M: int, N: int, K: int, rows: bool, dtypes=(E4M3, E4M3)) -> tuple[torch.Tensor, ...]:
    """a, b, scale_a and scale_b of a layer: activations, and weights as [N, K]; rows of different sizes."""
    quantized = []
    for n, dtype in zip((M, N), dtypes, strict=True):
        x = h.randn(n, K).mul_(h.randn(n, 1, scale=0.5).exp_())
        q, scale = quantize_reference(x, (1, K) if rows else (n, K), dtype)
        quantized += [q, scale if rows else scale.reshape(())]
    a, scale_a, w, scale_w = quantized
    return a, w.t(), scale_a, scale_w.t()


def torch_dequantized(a, b, scale_a, scale_b) -> torch.Tensor:
    return ((a.float() * scale_a) @ (b.float() * scale_b)).bfloat16()


def libraries(h: Harness, *inputs: torch.Tensor) -> dict[str, Callable]:
    """torch._scaled_mm with and without fast accumulation, where it takes these inputs; else torch on floats."""
    found = {}
    for name, fast in (("_scaled_mm fast", True), ("_scaled_mm", False)):
        if h.interpreted:
            break
        fn = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=fast)
        try:
            fn(*inputs)
            found[name] = fn
        except (RuntimeError, ValueError) as error:
            h.say(f"no {name} for scales of {tuple(inputs[2].shape)} here: {str(error).splitlines()[0]}")
    return found or {"torch": torch_dequantized}


def show_code(h: Harness, n: int = 4096) -> None:
    """The FP8 instruction of every variant, for e4m3 by e5m2 and scales per row; raises where any other multiplies."""
    a, b = h.meta(n, n, dtype=E4M3), h.meta(n, n, dtype=E5M2).t()
    scales = h.meta(n, 1, dtype=torch.float32), h.meta(1, n, dtype=torch.float32)
    for variant, find in CODE.items():
        for kernel in h.codegen(fp8_matmul, a, b, *scales, variant=variant, find=find):
            used = {x: kernel.found[x] for x in ("mma.sync", "wgmma", "tcgen05.mma") if x in kernel.found}
            if sum(used.values()) != kernel.found["mma f8"]:
                raise CodegenError(f"{variant} on sm_{kernel.sm}: {used}, but FP8 only in {kernel.found['mma f8']}")


def compare(h: Harness, M: int, N: int, K: int, rows: bool) -> dict[str, float]:
    """One table; how many times as fast as the faster library call each variant is."""
    inputs = operands(h, M, N, K, rows)
    known = libraries(h, *inputs)
    ours = {
        f"triton {variant}": functools.partial(fp8_matmul, variant=variant, check_scales=False)
        for variant in runnable(h)
    }
    work = Work(bytes=M * K + K * N + 2 * M * N, flops=2 * M * N * K, dtype=E4M3)
    table = h.compare(
        known | ours, reference, *inputs, baseline=next(iter(known)), work=work, dtype=torch.bfloat16,
        case=f"{M}x{N}x{K} e4m3 {'per row' if rows else 'per tensor'}", **budget(h, K),
    )  # fmt: skip
    if not table or table.rows[-1].ms is None:
        return {}
    faster = max(row.speedup for row in table.rows if not row.ours)
    return {row.variant: row.speedup / faster for row in table.rows if row.ours}


def compare_with_bf16(h: Harness, n: int) -> dict[str, float]:
    """The same numbers, which bfloat16 holds exactly, in both formats; how many times as fast FP8 is.

    Against the fastest of this repository's kernels in 16 bits, whichever technique it comes from.
    """
    from examples.tma import gluon_matmul
    from examples.tma.tma_persistent_matmul import matmul_tma_persistent
    from examples.triton.persistent_matmul import VARIANTS as STEPS
    from examples.triton.persistent_matmul import matmul_persistent

    a, b, one = h.randn(n, n, dtype=E4M3), h.randn(n, n, dtype=E4M3).t(), torch.ones((), device=h.device)
    wide_a, wide_b = a.to(h.half), b.to(h.half).contiguous()
    half = str(h.half).removeprefix("torch.")
    variants = {f"triton {half} {step}": lambda a, b, s=step: matmul_persistent(wide_a, wide_b, s) for step in STEPS}
    if "warp specialized" in runnable(h):
        variants[f"triton {half} tma_persistent_matmul"] = lambda a, b: matmul_tma_persistent(wide_a, wide_b)
        variants[f"gluon {half} gluon_matmul"] = lambda a, b: gluon_matmul.gluon_matmul(wide_a, wide_b)
    variants |= {
        f"triton fp8 {v}": lambda a, b, v=v: fp8_matmul(a, b, one, one, None, h.half, v, check_scales=False)
        for v in runnable(h)
    }
    table = h.compare(
        variants, lambda a, b: reference(a, b, one, one), a, b, baseline=next(iter(variants)), dtype=h.half,
        work=Work(flops=2 * n**3, dtype=E4M3), case=f"{n}x{n}x{n} e4m3 and {half}",
        comparators=[name for name in variants if half in name], **budget(h, n),
    )  # fmt: skip
    if not table or table.rows[-1].ms is None:
        return {}
    best = max(row.speedup for row in table.rows if row.comparator)
    return {row.variant: round(row.speedup / best, 3) for row in table.rows if not row.comparator}


def demo(h: Harness) -> None:
    # One row; tails in each dimension and more tiles than SMs (the interpreter plays a GPU of four); nothing to sum.
    for M, N, K in [(1, 16, 16), (129, 520, 272), (5, 16, 0)]:
        for variant in runnable(h):
            for dtypes, rows, out in [((E4M3, E4M3), False, torch.bfloat16), ((E5M2, E4M3), True, torch.float16)]:
                inputs = operands(h, M, N, K or 16, rows, dtypes)
                inputs = (inputs[0][:, :K], inputs[1][:K], *inputs[2:], h.randn(N, dtype=out) if rows else None)
                fn = functools.partial(fp8_matmul, out_dtype=out, variant=variant)
                what = f"{variant} {M}x{N}x{K} {' by '.join(str(d)[6:] for d in dtypes)} {'row' if rows else 'tensor'}"
                h.check(fn, reference, *inputs, what=what, dtype=out, **budget(h, K))

    show_code(h)

    ratios = {"per tensor": {}, "per row": {}}
    for M, N, K in h.pick(interpreted=[(260, 264, 656)], quick=SQUARES[:2], full=SQUARES + LAYERS):
        for scales, found in ratios.items():
            for variant, ratio in compare(h, M, N, K, rows=scales == "per row").items():
                found.setdefault(variant, {})[f"{M}x{N}x{K}"] = ratio
    for scales, found in ratios.items():
        if found:
            names, first = list(found), next(iter(found))
            found["best of each case"] = {case: max(found[name][case] for name in names) for case in found[first]}
            means = {name: round(statistics.geometric_mean(cases.values()), 4) for name, cases in found.items()}
            h.fact(f"geometric mean over the faster _scaled_mm, {scales}", means)
            least = {name: round(min(cases.values()), 4) for name, cases in found.items()}
            h.fact(f"least over the faster _scaled_mm, {scales}", least)
            steps = ", ".join(f"{name} {means[name] / means[first]:.3f}x" for name in names[1:])
            h.say(f"{scales}, over {first}, geometric mean of {len(found[first])}: {steps}")

    sizes = h.pick(interpreted=(272,), quick=(4096,), full=(4096, 8192))
    over = {f"{n}x{n}x{n}": compare_with_bf16(h, n) for n in sizes}
    if all(over.values()):
        h.fact("FP8 over the best bf16 GEMM of this repository", over)


if __name__ == "__main__":
    run(demo)
