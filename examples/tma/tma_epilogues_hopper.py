"""The layers of tma_epilogues in Gluon for Hopper, warp-specialized: the epilogue is overlapped with the next tile.

A producer, one warp, loads operands into a ring. Two consumers, a warpgroup each, multiply half of the rows of every
tile, leave their accumulators in shared memory, rounded to 16 bits as two kernels would, and go on. An epilogue
partition, two warps, finishes and stores them while the consumers multiply the next tile; where K is only a few
hundred, the consumers wait for it. One kernel makes all layers: linear, swiglu (ACT), linear_fp8 (PER). gluon_matmul.py
explains the ring.
"""

from __future__ import annotations

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

from examples.common.activations import activate
from examples.common.device import device_limits
from examples.common.fp8 import E4M3, fp8_max
from examples.common.gluon import async_load, barriers, buffers, init_ring, next_slot, store_tile, view_as
from examples.common.tiles import split_columns, tile_coords
from examples.common.tma import gluon_descriptor
from examples.tma.tma_epilogues_shared import GROUP, GROUP_M, scale_and_inverse

# The tile, stages of K in the ring, rows and columns that the epilogue stores at a time, buffers it stores from, its
# warps, and the registers of a thread of the consumers and of the epilogue. With 4 warps for it all threads would start
# with 128 registers, and the assembler refuses the consumers' instruction, which needs 154. Shared memory also holds a
# tile of 16-bit accumulators on their way from the consumers to the epilogue.
HOPPER_TILE, HOPPER_STAGES, HOPPER_STORE, HOPPER_BUFFERS = (128, 256, 64), 3, [32, 64], 2
EPILOGUE_WARPS, HOPPER_REGISTERS = 2, (168, 168)
HOPPER_FAST = False  # nobody waits for the epilogue where K is long


@gluon.jit
def _produce(ring, x_desc, w_desc, up_desc, M, N, K, GLU: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr):
    """One warp: the operands of every step of every tile. A box that is partly out of bounds is filled
    with zeros and still signals its full byte count."""
    x_bufs, w_bufs, _, _, full, empty = ring
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    HALF_N: gl.constexpr = w_desc.block_shape[0]
    COLUMNS: gl.constexpr = HALF_N if GLU else 2 * HALF_N
    slot = 0
    phase = 1  # of a new barrier, at which nobody has arrived: every slot is empty
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, COLUMNS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, BLOCK_M, COLUMNS, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, 2 * (BLOCK_M + 2 * HALF_N) * BLOCK_K)
            async_load(w_desc, [col, k], ready, w_bufs.index(2 * slot))
            if GLU:
                async_load(up_desc, [col, k], ready, w_bufs.index(2 * slot + 1))
            else:
                async_load(w_desc, [col + HALF_N, k], ready, w_bufs.index(2 * slot + 1))
            async_load(x_desc, [row, k], ready, x_bufs.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _add_steps(acc, ring, slot, phase, start, stop, BLOCK_K: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr):
    """Add the MMAs of K from start to stop. A slot is empty when both consumers have arrived."""
    _, _, x_halves, w_tiles, full, empty = ring
    for _ in range(start, stop, BLOCK_K):
        mbarrier.wait(full.index(slot), phase)
        w = w_tiles.index(slot).permute((1, 0))
        acc = warpgroup_mma(x_halves.index(2 * slot + HALF), w, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(slot))
        slot, phase = next_slot(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def _leave(acc_bufs, acc, FIRST: gl.constexpr, PARTS: gl.constexpr):
    """acc, rounded to 16 bits, in PARTS buffers from FIRST on."""
    if PARTS > 1:
        left, right = split_columns(acc)
        _leave(acc_bufs, left, FIRST, PARTS // 2)
        _leave(acc_bufs, right, FIRST + PARTS // 2, PARTS // 2)
    else:
        acc_bufs.index(FIRST).store(acc.to(acc_bufs.dtype))


@gluon.jit
def _consume(
    ring, passed, lead, M, N, K, GLU: gl.constexpr, STAGES: gl.constexpr, STAGGER: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """A warpgroup: one half of the rows of every tile. With STAGGER the second is a step behind the first, so that one
    multiplies while the other leaves its accumulator."""
    _, _, x_halves, w_tiles, _, _ = ring
    acc_bufs, filled, taken = passed
    HALF_M: gl.constexpr = x_halves.shape[1]
    BLOCK_K: gl.constexpr = x_halves.shape[2]
    BLOCK_N: gl.constexpr = w_tiles.shape[1]
    PARTS: gl.constexpr = BLOCK_N // acc_bufs.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    slot = 0
    phase = 0
    tile_phase = 0
    tiles = gl.cdiv(M, 2 * HALF_M) * gl.cdiv(N, BLOCK_N // 2 if GLU else BLOCK_N)
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros((HALF_M, BLOCK_N), gl.float32, MMA)
        start = 0
        if STAGGER:
            if HALF == 0:
                acc, slot, phase = _add_steps(acc, ring, slot, phase, 0, BLOCK_K, BLOCK_K, HALF, STAGES)
                mbarrier.arrive(lead)
                start = BLOCK_K
            else:
                mbarrier.wait(lead, tile_phase)
        acc, slot, phase = _add_steps(acc, ring, slot, phase, start, K, BLOCK_K, HALF, STAGES)
        mbarrier.wait(taken.index(HALF), tile_phase ^ 1)
        _leave(acc_bufs, acc, PARTS * HALF, PARTS)
        mbarrier.arrive(filled.index(HALF))
        tile_phase ^= 1


@gluon.jit
def _columns_of(bias, first, N, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """WIDTH numbers of the bias from column `first` on, as a row; 0 without one."""
    if bias is None:
        return 0.0
    else:
        cols = first + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
        return gl.load(bias + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _value(pieces, piece, up_piece, bias, ACT: gl.constexpr, FAST: gl.constexpr, LAYOUT: gl.constexpr):
    """A piece of the result before its scale, in float32."""
    y = activate(pieces.index(piece).load(LAYOUT).to(gl.float32) + bias, ACT, FAST)
    if ACT == "swiglu":
        y *= pieces.index(up_piece).load(LAYOUT).to(gl.float32)
    return y


@gluon.jit
def _send(y_desc, y_buf, y, row, col, BUFFERS: gl.constexpr):
    tma.store_wait(BUFFERS - 1)  # all but the latest have been read: this buffer too
    store_tile(y_desc, y_buf, y, row, col)


@gluon.jit
def _epilogue(
    passed, y_desc, y_bufs, bias, scale_ptr, M, N, ACT: gl.constexpr, PER: gl.constexpr, MOST: gl.constexpr,
    FAST: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The epilogue of every tile, from the halves of the consumers, a few rows of two parts (a group) at a time.

    In loops, though all counts are known: unrolled, it would take the instruction cache from the consumers.
    """
    acc_bufs, filled, taken = passed
    HALF_M: gl.constexpr = acc_bufs.shape[1]
    WIDTH: gl.constexpr = acc_bufs.shape[2]
    PARTS: gl.constexpr = acc_bufs.shape[0] // 2
    COLUMNS: gl.constexpr = WIDTH * PARTS // 2 if ACT == "swiglu" else WIDTH * PARTS
    ROWS: gl.constexpr = y_desc.block_shape[0]
    PIECES: gl.constexpr = HALF_M // ROWS  # of a part
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    BUFFERS: gl.constexpr = y_bufs.shape[0]
    pieces = view_as(acc_bufs, [2 * PARTS * PIECES, ROWS, WIDTH])
    inverse = gl.div_rn(1.0, gl.load(scale_ptr)) if PER == "tensor" else 1.0
    tile_phase = 0
    tiles = gl.cdiv(M, 2 * HALF_M) * gl.cdiv(N, COLUMNS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_row, first_col = tile_coords(tile, M, N, 2 * HALF_M, COLUMNS, GROUP_M)
        for half in range(2):
            mbarrier.wait(filled.index(half), tile_phase)
            for part in range(0, COLUMNS // WIDTH, 2):
                col = first_col + part * WIDTH
                left_bias = _columns_of(bias, col, N, WIDTH, LAYOUT)
                right_bias = _columns_of(bias, col + WIDTH, N, WIDTH, LAYOUT)
                for above in range(PIECES):
                    row = first_row + half * HALF_M + above * ROWS
                    at = (half * PARTS + part) * PIECES + above
                    up = at + PARTS // 2 * PIECES  # the second half of a consumer's parts, for swiglu
                    left = _value(pieces, at, up, left_bias, ACT, FAST, LAYOUT)
                    if PER != "group":
                        _send(y_desc, y_bufs.index(0), left * inverse, row, col, BUFFERS)
                    right = _value(pieces, at + PIECES, up + PIECES, right_bias, ACT, FAST, LAYOUT)
                    if PER == "group":
                        largest = gl.max(gl.abs(left).to(gl.int32, bitcast=True), 1)
                        largest = gl.maximum(largest, gl.max(gl.abs(right).to(gl.int32, bitcast=True), 1))
                        scale, by_row = scale_and_inverse(largest, MOST)
                        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
                        to = scale_ptr + (col // GROUP).to(gl.int64) * M + rows
                        gl.store(to, scale, mask=(rows < M) & (col < N))
                        right *= by_row[:, None]
                        _send(y_desc, y_bufs.index(0), left * by_row[:, None], row, col, BUFFERS)
                    else:
                        right *= inverse
                    _send(y_desc, y_bufs.index(BUFFERS - 1), right, row, col + WIDTH, BUFFERS)
            mbarrier.arrive(taken.index(half))
        tile_phase ^= 1
    tma.store_wait(0)


@gluon.jit
def linear_warp_specialized_kernel(
    x_desc, w_desc, up_desc, y_desc, bias, scale_ptr, M, N, K, ACT: gl.constexpr, PER: gl.constexpr,
    MOST: gl.constexpr, FAST: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, STAGGER: gl.constexpr,
    EPILOGUE_WARPS: gl.constexpr, REGISTERS: gl.constexpr, EPILOGUE_REGISTERS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """w_desc and up_desc have boxes of half a tile's columns: both halves of w, or one of w and one of up."""
    GLU: gl.constexpr = ACT == "swiglu"
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    HALF_N: gl.constexpr = w_desc.block_shape[0]
    HALF_M: gl.constexpr = BLOCK_M // 2
    WIDTH: gl.constexpr = y_desc.block_shape[1]
    ACC: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_M, WIDTH], x_desc.dtype)
    # A buffer of x is two halves of rows, one for each consumer; two of w are a tile's columns, for both.
    x_bufs = buffers(x_desc, STAGES)
    w_bufs = buffers(w_desc, 2 * STAGES)
    x_halves = view_as(x_bufs, [2 * STAGES, HALF_M, BLOCK_K])
    w_tiles = view_as(w_bufs, [STAGES, 2 * HALF_N, BLOCK_K])
    acc_bufs = gl.allocate_shared_memory(x_desc.dtype, [4 * HALF_N // WIDTH, HALF_M, WIDTH], ACC)
    y_bufs = buffers(y_desc, BUFFERS)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    filled = barriers(2)
    taken = barriers(2)
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    init_ring(full, empty, STAGES, 2)
    for i in gl.static_range(2):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    mbarrier.init(lead, count=1)
    fence_async_shared()
    ring = (x_bufs, w_bufs, x_halves, w_tiles, full, empty)
    passed = (acc_bufs, filled, taken)
    gl.warp_specialize([
        (_consume, (ring, passed, lead, M, N, K, GLU, STAGES, STAGGER, 0)),
        (_consume, (ring, passed, lead, M, N, K, GLU, STAGES, STAGGER, 1)),
        (_epilogue, (passed, y_desc, y_bufs, bias, scale_ptr, M, N, ACT, PER, MOST, FAST, GROUP_M)),
        (_produce, (ring, x_desc, w_desc, up_desc, M, N, K, GLU, STAGES, GROUP_M)),
    ], [4, EPILOGUE_WARPS, 1], [REGISTERS, EPILOGUE_REGISTERS, 24])  # fmt: skip  # of all but the first


def launch_warp_specialized(x, w, up, y, bias, scale, activation: str, per: str) -> None:
    """A layer, all of it checked: up is w but for "swiglu"; per is "none", "tensor" or "group"."""
    (M, K), N = x.shape, y.shape[1]
    block_m, block_n, block_k = HOPPER_TILE
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n // 2 if activation == "swiglu" else block_n)
    linear_warp_specialized_kernel[(min(tiles, device_limits(x.device).sms),)](
        gluon_descriptor(x, [block_m, block_k]), gluon_descriptor(w, [block_n // 2, block_k]),
        gluon_descriptor(up, [block_n // 2, block_k]), gluon_descriptor(y, HOPPER_STORE), bias, scale, M, N, K,
        ACT=activation, PER=per, MOST=fp8_max(E4M3), FAST=HOPPER_FAST, STAGES=HOPPER_STAGES, BUFFERS=HOPPER_BUFFERS,
        # The first consumer must not signal its next tile before the second has seen the signal of this one. A tile of
        # at least as many steps as the ring holds keeps it from that.
        STAGGER=triton.cdiv(K, block_k) >= HOPPER_STAGES, EPILOGUE_WARPS=EPILOGUE_WARPS,
        REGISTERS=HOPPER_REGISTERS[0], EPILOGUE_REGISTERS=HOPPER_REGISTERS[1], GROUP_M=GROUP_M, num_warps=4,
    )  # fmt: skip
