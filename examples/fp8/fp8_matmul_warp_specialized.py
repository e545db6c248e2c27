"""fp8_matmul in Gluon for Hopper: a producer loads, one consumer stores a half of a tile while the other multiplies.

The producer, one warp, brings operands into a ring of buffers, and each tile's scales and bias into a buffer beside it,
as soon as those are free. Two consumers, a warpgroup each, multiply a half of every tile and store it, the second
always after the first: scaling and storing one half is hidden under the MMAs of the other, and one buffer for results
serves both in turn. In fp8_matmul_persistent.py all warps scale and store together, while the tensor cores idle.

A consumer starts the MMAs of a step before it waits for those of the step before, so the tensor cores do not idle
between steps. Near the end of a tile the second waits for the first; before that it finishes what it has in flight and
releases the slot; otherwise the producer would be a slot short for as long as it waits. examples/tma/gluon_matmul.py
explains the ring step by step, in 16 bits.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from examples.common.device import device_limits
from examples.common.gluon import (
    async_load,
    barriers,
    buffers,
    init_ring,
    next_slot,
    release_previous,
    store_tile,
)
from examples.common.tiles import split_columns, tile_coords
from examples.common.tma import gluon_descriptor
from examples.fp8.fp8_matmul_persistent import GROUP_M

# BLOCK_M, BLOCK_N, BLOCK_K; slots of the ring; steps of every tile that the second consumer does after the first has
# done its last (no more than the ring holds). With half a tile of two bytes an element for results, nearly all of
# Hopper's shared memory.
HOPPER_TILE, HOPPER_STAGES, HOPPER_BEHIND = (128, 256, 128), 4, 3


@gluon.jit
def _produce(
    operands, last, a_desc, bt_desc, scale_a, scale_b, bias, M, N, K,
    ROWS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warp: the operands of every step of every tile, then what the epilogue of the tile needs. A box that is
    partly out of bounds is filled with zeros and still signals its full byte count."""
    a_bufs, b_bufs, full, empty = operands
    scale_a_bufs, scale_b_buf, bias_buf, last_full, last_empty = last
    HALF_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    BLOCK_N: gl.constexpr = bt_desc.block_shape[0]
    LAST: gl.constexpr = (4 * (2 * HALF_M + BLOCK_N) if ROWS else 0) + (
        BLOCK_N * bias.dtype.primitive_bitwidth // 8 if bias is not None else 0
    )
    slot = 0
    phase = 1  # a new barrier counts as past the phase of parity 1: every slot is empty
    last_phase = 1
    tiles = gl.cdiv(M, 2 * HALF_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, 2 * HALF_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, (2 * HALF_M + BLOCK_N) * BLOCK_K)
            async_load(bt_desc, [col, k], ready, b_bufs.index(slot))
            for half in gl.static_range(2):
                async_load(a_desc, [row + half * HALF_M, k], ready, a_bufs.index(2 * slot + half))
            slot, phase = next_slot(slot, phase, STAGES)
        if LAST > 0:
            mbarrier.wait(last_empty, last_phase)
            mbarrier.expect(last_full, LAST)
            if ROWS:
                async_load(scale_b, [0, col], last_full, scale_b_buf)
                for half in gl.static_range(2):
                    async_load(scale_a, [0, row + half * HALF_M], last_full, scale_a_bufs.index(half))
            if bias is not None:
                async_load(bias, [0, col], last_full, bias_buf)
            last_phase ^= 1


@gluon.jit
def _store_parts(
    c_desc, c_buf, free, phase, acc, row, col, scale_a, scale_b, bias, ROWS: gl.constexpr, BIAS: gl.constexpr,
    HALF: gl.constexpr, FIRST: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Scale a consumer's half of a tile and store it through c_buf, in PARTS parts of its columns. The first consumer
    knows that c_buf is free."""
    width: gl.constexpr = acc.shape[1]
    if PARTS > 1:
        left, right = split_columns(acc)
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
        store_tile(c_desc, c_buf, out, row, col)


@gluon.jit
def _add_steps(
    acc, operands, slot, phase, start, stop, FRESH: gl.constexpr, BLOCK_K: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Add the MMAs of K from start to stop. Each step waits for the one before it and releases that one's slot; with
    FRESH no step was in flight before the first. The last is left in flight."""
    a_bufs, b_bufs, full, empty = operands
    for k in range(start, stop, BLOCK_K):
        mbarrier.wait(full.index(slot), phase)
        b = b_bufs.index(slot).permute((1, 0))
        acc = warpgroup_mma(a_bufs.index(2 * slot + HALF), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        fresh = FRESH and k == start  # nothing else is in flight
        release_previous(empty, slot, STAGES, pred=not fresh)
        slot, phase = next_slot(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def _consume(
    operands, last, c_desc, c_buf, scale_a, scale_b, read, done, M, N, K, ROWS: gl.constexpr, BIAS: gl.constexpr,
    STAGES: gl.constexpr, BEHIND: gl.constexpr, GROUP_M: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup: one half of the rows of every tile. Left alone, the second would catch up with the first, and both
    would store while the tensor cores idle; so it waits for `done`, BEHIND steps before the end of a tile.

    Why no partition waits for ever, and when c_buf is free: docs/memory_ordering.md.
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
        row, col = tile_coords(tile, M, N, 2 * HALF_M, BLOCK_N, GROUP_M)
        acc = gl.zeros((HALF_M, BLOCK_N), gl.float32, MMA)
        mbarrier.wait(full.index(slot), phase)
        b = b_bufs.index(slot).permute((1, 0))
        acc = warpgroup_mma(a_bufs.index(2 * slot + HALF), b, acc, use_acc=False, is_async=True)
        tma.store_wait(0)
        if HALF == 1:
            mbarrier.arrive(read.index(1))
        else:
            mbarrier.arrive(read.index(0), pred=tile >= gl.num_programs(0))  # of the tile before, if there was one
        acc = warpgroup_mma_wait(1, deps=(acc,))  # waits for nothing: makes a tensor of the MMAs in flight
        slot, phase = next_slot(slot, phase, STAGES)
        left = True  # in flight
        if HALF == 1:
            acc, slot, phase = _add_steps(acc, operands, slot, phase, BLOCK_K, pause, False, BLOCK_K, HALF, STAGES)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            release_previous(empty, slot, STAGES)
            mbarrier.wait(done, tile_phase)
            left = pause < K
        acc, slot, phase = _add_steps(
            acc, operands, slot, phase, pause if HALF == 1 else BLOCK_K, K, HALF == 1, BLOCK_K, HALF, STAGES
        )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release_previous(empty, slot, STAGES, pred=left)
        if HALF == 0:
            mbarrier.wait(read.index(1), tile_phase)
            mbarrier.arrive(done)
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
    gl.static_assert(STAGES >= 2, "a consumer holds one slot while it waits for the next")
    gl.static_assert(BEHIND <= STAGES, "the first consumer needs the ring while the second pauses")
    HALF_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_N: gl.constexpr = bt_desc.block_shape[0]
    a_bufs = buffers(a_desc, 2 * STAGES)
    b_bufs = buffers(bt_desc, STAGES)
    c_buf = gl.allocate_shared_memory(c_desc.dtype, [HALF_M, c_desc.block_shape[1]], c_desc.layout)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    scale_a_bufs, scale_b_buf, bias_buf = full, full, full  # stand-ins for what a launch does not have
    if ROWS:
        scale_a_bufs = buffers(scale_a, 2)
        scale_b_buf = gl.allocate_shared_memory(gl.float32, [1, BLOCK_N], scale_b.layout)
    if bias is not None:
        bias_buf = gl.allocate_shared_memory(bias.dtype, [1, BLOCK_N], bias.layout)
    last_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    last_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    read = barriers(2)
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    init_ring(full, empty, STAGES, 2)
    mbarrier.init(last_full, count=1)
    mbarrier.init(last_empty, count=2)
    for i in gl.static_range(2):
        mbarrier.init(read.index(i), count=1)
    mbarrier.init(done, count=1)
    fence_async_shared()
    BIAS: gl.constexpr = bias is not None
    operands = (a_bufs, b_bufs, full, empty)
    last = (scale_a_bufs, scale_b_buf, bias_buf, last_full, last_empty)
    gl.warp_specialize([
        (_consume, (operands, last, c_desc, c_buf, scale_a, scale_b, read, done, M, N, K,
                    ROWS, BIAS, STAGES, BEHIND, GROUP_M, 0)),
        (_consume, (operands, last, c_desc, c_buf, scale_a, scale_b, read, done, M, N, K,
                    ROWS, BIAS, STAGES, BEHIND, GROUP_M, 1)),
        (_produce, (operands, last, a_desc, bt_desc, scale_a, scale_b, bias, M, N, K, ROWS, STAGES, GROUP_M)),
    ], [4, 1], [240, 24])  # fmt: skip  # warps of the last two, and registers of their threads


def tma_vector(x: torch.Tensor, n: int, block: int):
    """A descriptor of n numbers as one row, copied first unless they are contiguous and start at a multiple of 16
    bytes, or where one stands for all."""
    x = x.reshape(1, -1).expand(1, n)
    if (n > 1 and x.stride(1) != 1) or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return gluon_descriptor(x, [1, block])


def launch_warp_specialized(a, b, c, scale_a, scale_b, bias) -> None:
    """c = (a * scale_a) @ (b * scale_b) + bias, all of them checked by fp8_matmul."""
    (M, K), N = a.shape, b.shape[1]
    block_m, block_n, block_k = HOPPER_TILE
    parts = c.element_size() // 2
    rows = max(scale_a.numel(), scale_b.numel()) > 1
    if rows:
        scale_a, scale_b = tma_vector(scale_a, M, block_m // 2), tma_vector(scale_b, N, block_n)
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    fp8_matmul_warp_specialized_kernel[(min(tiles, device_limits(a.device).sms),)](
        gluon_descriptor(a, [block_m // 2, block_k]), gluon_descriptor(b.t(), [block_n, block_k]),
        gluon_descriptor(c, [block_m // 2, block_n // parts]), scale_a, scale_b,
        None if bias is None else tma_vector(bias, N, block_n), M, N, K,
        ROWS=rows, STAGES=HOPPER_STAGES, BEHIND=HOPPER_BEHIND, GROUP_M=GROUP_M, num_warps=4,
    )  # fmt: skip
