"""FP8 attention in Gluon for Hopper: three warpgroups take turns at the tensor cores, which also add up the weights.

In FP8 a block of 128 keys costs a warpgroup of 64 queries 512 clocks of the SM's tensor cores at D = 128, and 512 of
its exponential units. For each block a warp also issues about 400 instructions, most of which wait for the one before,
so one warpgroup keeps those units busy for only a fraction of the time. It takes several, with few instructions each:

  consumers   are three warpgroups of 64 queries, as in flash_attention_hopper.py for long inputs at D = 64. To fit in
              registers, each waits for P V of a block before it starts Q K^T of the next, whose scores reuse P's.
  turns       they start their MMAs one after the other (examples/common/turns.py). Left alone they fall into step: all
              wait for the tensor cores, then for the exponential units.
  sums        of the weights are an MMA of P by 8 columns of ones, in place of 64 additions a thread and block. They are
              sums of the rounded weights, so an error that all weights of a row share is divided out.
  weights     are packed into the 4 bytes of an int32 by two instructions, and so become the operand without moving
              between threads: V has its keys in the order that this needs (fp8_attention_operands.py).
  the ring    holds in each slot what one step multiplies: K of a block, and V of the block before. The first step needs
              no V and the last no K: what is loaded there, zeros where it lies outside the tensor, is never read.

K and V are walked from the last block to the first: only the last can need a mask.
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

from examples.common.device import device_limits
from examples.common.gluon import async_load, async_store, barriers, buffers, init_ring, next_slot
from examples.common.tma import gluon_descriptor
from examples.common.turns import pass_turn, take_turn
from examples.triton.flash_attention_hopper import blocks_before, start_scores, tile_of

ROWS, BLOCK_N, CONSUMERS, STAGES = 64, 128, 3, 3  # queries of a consumer, keys of a block
REGISTERS = 160, 32  # of a consumer's thread, of the producer's
# Causal: K and V of the heads whose tiles run side by side, which L2 is to hold.
GROUP_BYTES = 32 * 2**20
ONE = gl.constexpr(0x38)  # 1.0 in e4m3


@gluon.jit
def _produce(rings, q_desc, k_desc, v_desc, q_per_kv, sizes, CAUSAL: gl.constexpr, group_h):
    """One warp: the queries of every tile, and in each step K of a block and V of the block before."""
    q_bufs, q_full, q_empty = rings[0]
    k_bufs, v_bufs, full, empty = rings[1]
    ROWS: gl.constexpr = q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    STAGES: gl.constexpr = k_bufs.shape[0]
    CONSUMERS: gl.constexpr = q_bufs.shape[0]
    q_phase = 1  # a wait for parity 1 passes at a new barrier
    slot = 0
    phase = 1
    tiles = gl.cdiv(sizes[1], CONSUMERS * ROWS) * sizes[3]
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, start = tile_of(tile, sizes, CONSUMERS * ROWS, CAUSAL, group_h)
        blocks = blocks_before(start + CONSUMERS * ROWS, sizes[2], BLOCK_N, CAUSAL)
        h_kv = h // q_per_kv
        for step in range(blocks + 1):
            key = (blocks - 1 - step) * BLOCK_N
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            async_load(k_desc, [b, h_kv, key, 0], full.index(slot), k_bufs.index(slot))
            async_load(v_desc, [b, h_kv, 0, key + BLOCK_N], full.index(slot), v_bufs.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)
            if step == 0:  # after K, whose slot is free before the queries of the tile before are done
                for i in gl.static_range(CONSUMERS):
                    mbarrier.wait(q_empty.index(i), q_phase)
                    mbarrier.expect(q_full.index(i), q_desc.block_type.nbytes)
                    async_load(q_desc, [b, h, start + i * ROWS, 0], q_full.index(i), q_bufs.index(i))
        q_phase ^= 1


@gluon.jit
def pack_weights(weights):
    """Four weights of a row as e4m3 in each int32, with the keys in V's order: no value moves from its thread.

    As tensors of bytes they would be unpacked where a loop carries them. Where the compiler knows that all four are
    equal, the assembler of CUDA 12.9 uses garbage for one pair: of {x, x} it computes only one half.
    """
    ROWS: gl.constexpr = weights.shape[0]
    GROUPS: gl.constexpr = weights.shape[1] // 16
    even, odd = gl.split(weights.reshape([ROWS, GROUPS, 2, 4, 2]).permute((0, 1, 3, 2, 4)))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return gl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }""",
        "=r,f,f,f,f", [w0, w1, w2, w3], gl.int32, True, 1,
    )  # fmt: skip


@gluon.jit
def unpack_weights(packed, LAYOUT: gl.constexpr):
    """The weights as an operand, whose registers are the int32, of 4 bytes each: nothing is moved between threads."""
    ROWS: gl.constexpr = packed.shape[0]
    BLOCK_N: gl.constexpr = packed.shape[1] * 16
    twice = gl.join(packed, packed)
    whole = gl.convert_layout(gl.join(twice, twice).reshape([ROWS, BLOCK_N]), LAYOUT)
    p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [whole], gl.int8, True, 4)
    return p.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _start_values(p, v_bufs, slot, acc, ones, SUMS: gl.constexpr):
    """Start acc += P V of a block, and the sums of P's rows, 8 times each."""
    v = v_bufs.index(slot).reshape([acc.shape[1], v_bufs.shape[4]]).permute((1, 0))
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = ones.shape[0]
    acc = warpgroup_mma(p, v, acc, is_async=True)
    zeros = gl.zeros((ROWS, COLUMNS), gl.float32, SUMS)
    return acc, warpgroup_mma(p, ones.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _head_scale(scale, b, h):
    return gl.load(scale[0] + (b * scale[1] + h * scale[2]))


@gluon.jit
def _consume(
    rings, ones, o_desc, o_bufs, scales, sizes, scale, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, group_h,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """A warpgroup: ROWS queries of every tile. Why no partition waits for ever: docs/memory_ordering.md."""
    q_bufs, q_full, q_empty = rings[0]
    k_bufs, v_bufs, full, empty = rings[1]
    STAGES: gl.constexpr = k_bufs.shape[0]
    BLOCK_N: gl.constexpr = k_bufs.shape[3]
    ROWS: gl.constexpr = o_desc.block_shape[2]
    D: gl.constexpr = o_desc.block_shape[3]
    CONSUMERS: gl.constexpr = q_bufs.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 32])
    COLUMNS: gl.constexpr = ones.shape[0]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 32])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)  # P stays in its registers: the scores' layout, packed
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OUT)  # each thread has the same rows of scores, sums and result
    q = q_bufs.index(CONSUMER).reshape([ROWS, D])
    o_buf = o_bufs.index(CONSUMER)
    q_phase = 0
    slot = 0
    phase = 0
    if CONSUMER == CONSUMERS - 1:
        pass_turn(CONSUMER, CONSUMERS)  # the first turn is the first consumer's
    tiles = gl.cdiv(sizes[1], CONSUMERS * ROWS) * sizes[3]
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, start = tile_of(tile, sizes, CONSUMERS * ROWS, CAUSAL, group_h)
        h_kv = h // scales[3]
        # Not below the smallest normal number: 0 times the -inf of a masked score would be NaN.
        factor = scale * _head_scale(scales[0], b, h) * _head_scale(scales[1], b, h_kv)
        factor = gl.where(factor < 1.1754944e-38, 1.1754944e-38, factor)
        start += CONSUMER * ROWS
        # Only other consumers see the first blocks: their queries are later, or all of these lie beyond the end.
        blocks = gl.where(start < sizes[1], blocks_before(start + ROWS, sizes[2], BLOCK_N, CAUSAL), 1)
        for _step in range(blocks, blocks_before(start + (CONSUMERS - CONSUMER) * ROWS, sizes[2], BLOCK_N, CAUSAL)):
            mbarrier.wait(full.index(slot), phase)
            mbarrier.arrive(empty.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)
            take_turn(CONSUMER)
            pass_turn(CONSUMER, CONSUMERS)
        # The last block alone, masked. K and V beyond the end are zeros, of TMA or pack_values(): 0 * v is 0, not NaN.
        mbarrier.wait(q_full.index(CONSUMER), q_phase)
        mbarrier.wait(full.index(slot), phase)
        scores = start_scores(q, k_bufs, slot, SCORES)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(empty.index(slot))
        slot, phase = next_slot(slot, phase, STAGES)
        if CAUSAL or RAGGED:
            cols = (blocks - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
            rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            seen = (cols[None, :] <= rows[:, None]) if CAUSAL else (cols < sizes[2])[None, :]
            scores = gl.where(seen, scores, -float("inf"))
        row_max = gl.maximum(gl.max(scores, 1) * factor, -3.4e38)
        p = pack_weights(gl.exp2(scores * factor - (row_max - 8.0)[:, None]))
        row_sum = gl.zeros((ROWS, COLUMNS), gl.float32, SUMS)
        acc = gl.zeros((ROWS, D), gl.float32, OUT)
        for _step in range(1, blocks):
            mbarrier.wait(full.index(slot), phase)
            take_turn(CONSUMER)
            acc, sums = _start_values(unpack_weights(p, WEIGHTS), v_bufs, slot, acc, ones, SUMS)
            acc, sums = warpgroup_mma_wait(0, deps=(acc, sums))
            scores = start_scores(q, k_bufs, slot, SCORES)
            pass_turn(CONSUMER, CONSUMERS)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(empty.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)
            new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
            weights = gl.exp2(scores * factor - (new_max - 8.0)[:, None])
            alpha = gl.convert_layout(gl.exp2(row_max - new_max), BY_ROW)
            row_max = new_max
            row_sum = (row_sum + sums) * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
            acc = acc * alpha[:, None]
            p = pack_weights(weights)
        mbarrier.arrive(q_empty.index(CONSUMER))  # the next tile's queries may be loaded
        q_phase ^= 1
        mbarrier.wait(full.index(slot), phase)
        acc, sums = _start_values(unpack_weights(p, WEIGHTS), v_bufs, slot, acc, ones, SUMS)
        v_scale = _head_scale(scales[2], b, h_kv)
        tma.store_wait(0)  # the result of the tile before has left o_buf
        acc, sums = warpgroup_mma_wait(0, deps=(acc, sums))
        mbarrier.arrive(empty.index(slot))
        slot, phase = next_slot(slot, phase, STAGES)
        row_sum = gl.convert_layout(gl.max(row_sum + sums, 1), BY_ROW)  # of 8 equal ones
        acc = acc * (1.0 / row_sum)[:, None] * v_scale
        o_buf.reshape([ROWS, D]).store(acc.to(o_desc.dtype))
        fence_async_shared()
        async_store(o_desc, [b, h, start, 0], o_buf)  # TMA drops rows beyond S
    if CONSUMER == 0:
        take_turn(CONSUMER)  # nobody is left at a barrier
    tma.store_wait(0)  # shared memory must outlive its last reader


# With S or S_KV a constant of 1 masked weights are one register, which pack_weights() must not be given.
@gluon.jit(do_not_specialize=["S", "S_KV"])
def fp8_attention_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    stride_qsb, stride_qsh, stride_ksb, stride_ksh, stride_vsb, stride_vsh, scale, H, q_per_kv, S, S_KV, heads,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, group_h, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles p, p + programs, ... of CONSUMERS * ROWS queries."""
    q_ring = (buffers(q_desc, CONSUMERS), barriers(CONSUMERS), barriers(CONSUMERS))  # a slot for each consumer
    kv_ring = (buffers(k_desc, STAGES), buffers(v_desc, STAGES), barriers(STAGES), barriers(STAGES))
    o_bufs = buffers(o_desc, CONSUMERS)
    init_ring(q_ring[1], q_ring[2], CONSUMERS, 1)
    init_ring(kv_ring[2], kv_ring[3], STAGES, CONSUMERS)
    SHAPE: gl.constexpr = [8, k_desc.block_shape[2]]
    ones = gl.allocate_shared_memory(q_desc.dtype, SHAPE, gl.NVMMASharedLayout.get_default_for(SHAPE, q_desc.dtype))
    # As bits: a constant that is converted would be two equal pairs too (see pack_weights).
    bits = gl.full(SHAPE, ONE, gl.int8, gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0]))
    ones.store(bits.to(q_desc.dtype, bitcast=True))
    fence_async_shared()
    sizes = (H, S, S_KV, heads)
    rings = (q_ring, kv_ring)
    q_scale = (q_scale_ptr, stride_qsb, stride_qsh)
    k_scale = (k_scale_ptr, stride_ksb, stride_ksh)
    v_scale = (v_scale_ptr, stride_vsb, stride_vsh)
    scales = (q_scale, k_scale, v_scale, q_per_kv)
    gl.warp_specialize([
        (_consume, (rings, ones, o_desc, o_bufs, scales, sizes, scale, CAUSAL, RAGGED, group_h, 0)),
        (_consume, (rings, ones, o_desc, o_bufs, scales, sizes, scale, CAUSAL, RAGGED, group_h, 1)),
        (_consume, (rings, ones, o_desc, o_bufs, scales, sizes, scale, CAUSAL, RAGGED, group_h, 2)),
        (_produce, (rings, q_desc, k_desc, v_desc, q_per_kv, sizes, CAUSAL, group_h)),
    ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def launch_hopper(q, k, v, o, q_scale, k_scale, v_scale, scale: float, causal: bool) -> None:
    """Attention of operands that are checked, on sm_90; `scale` includes log2(e), scales are expanded to heads."""
    (B, H, S, D), (_, H_kv, S_kv, _) = q.shape, k.shape
    group_h = max(1, GROUP_BYTES // (2 * S_kv * D)) * (H // H_kv) if causal else 1
    programs = min(triton.cdiv(S, CONSUMERS * ROWS) * B * H, device_limits(q.device).sms)
    fp8_attention_hopper_kernel[(programs,)](
        gluon_descriptor(q, [1, 1, ROWS, D]), gluon_descriptor(k, [1, 1, BLOCK_N, D]),
        gluon_descriptor(v, [1, 1, D, BLOCK_N]), gluon_descriptor(o, [1, 1, ROWS, D]), q_scale, k_scale, v_scale,
        *q_scale.stride(), *k_scale.stride(), *v_scale.stride(),
        scale, H, H // H_kv, S, S_kv, B * H, causal, S_kv % BLOCK_N > 0, group_h, CONSUMERS, STAGES, *REGISTERS,
        num_warps=4,
    )  # fmt: skip
