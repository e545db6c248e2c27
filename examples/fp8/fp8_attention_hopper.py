"""FP8 attention in Gluon for Hopper: flash_attention_hopper.py, with weights that stay in registers as FP8.

In FP8 a block of 128 keys costs a warpgroup of 64 queries 512 clocks of the SM's tensor cores at D = 128 and 256 at 64,
and 512 clocks of its exponential units in both cases: so the exponentials must never wait. What is not as there:

  weights     are packed into four bytes of an int32 by one instruction for each two, after P V of the block before is
              done, and so become the operand of the next without a move; V has its keys in the order that this needs.
  exp2        is a polynomial for a share of the scores at D = 64: the FMA units have room (fp8_attention_weights.py).
  registers   P takes a quarter of the scores' and not half, but three consumers at D = 128 would still spill.
  V           is transposed, with the keys as columns, so the producer is one of its own.
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
from examples.fp8.fp8_attention_weights import exp2, pack_weights, unpack_weights
from examples.triton.flash_attention_hopper import _blocks, _load, _start_scores, _tile

ROWS, BLOCK_N = 64, 128  # queries of a consumer, keys of a block
# Consumers -> registers of a consumer's thread and of the producer's.
REGISTERS = {2: (240, 24), 3: (160, 32)}
CONSUMERS = {64: 3, 128: 2}
STAGES = {64: 4, 128: 3}
EMULATED = {64: 8, 128: 0}
# Causal: K and V of the heads whose tiles run side by side, which L2 is to hold.
GROUP_BYTES = 32 * 2**20


@gluon.jit
def _produce(rings, q_desc, k_desc, v_desc, q_per_kv, sizes, CAUSAL: gl.constexpr, group_h):
    """As in flash_attention_hopper.py, but for V, whose keys are its columns."""
    q_ring, k_ring, v_ring = rings
    v_bufs, v_full, v_empty = v_ring
    ROWS: gl.constexpr = q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    STAGES: gl.constexpr = k_ring[0].shape[0]
    CONSUMERS: gl.constexpr = q_ring[0].shape[0]
    q_phase = 1  # a wait for parity 1 passes at a new barrier
    k_slot = 0
    k_phase = 1
    v_slot = 0
    v_phase = 1
    tiles = gl.cdiv(sizes[1], CONSUMERS * ROWS) * sizes[3]
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, start = _tile(tile, sizes, CONSUMERS * ROWS, CAUSAL, group_h)
        blocks = _blocks(start + CONSUMERS * ROWS, sizes[2], BLOCK_N, CAUSAL)
        h_kv = h // q_per_kv
        for step in range(blocks + 1):
            row = (blocks - 1 - step) * BLOCK_N
            if step < blocks:
                _load(k_desc, k_ring[0], k_ring[1], k_ring[2], k_slot, k_phase, b, h_kv, row)
                k_slot, k_phase = next_slot(k_slot, k_phase, STAGES)
            if step == 0:  # after K, whose slot is free before the queries of the tile before are done
                for i in gl.static_range(CONSUMERS):
                    _load(q_desc, q_ring[0], q_ring[1], q_ring[2], i, q_phase, b, h, start + i * ROWS)
            else:
                mbarrier.wait(v_empty.index(v_slot), v_phase)
                mbarrier.expect(v_full.index(v_slot), v_desc.block_type.nbytes)
                async_load(v_desc, [b, h_kv, 0, row + BLOCK_N], v_full.index(v_slot), v_bufs.index(v_slot))
                v_slot, v_phase = next_slot(v_slot, v_phase, STAGES)
        q_phase ^= 1


@gluon.jit
def _start_values(p, v_bufs, slot, acc):
    """Start acc += P V of a block. P, the weights, comes from registers."""
    v = v_bufs.index(slot).reshape([acc.shape[1], v_bufs.shape[4]]).permute((1, 0))
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _head_scale(scale, b, h):
    return gl.load(scale[0] + (b * scale[1] + h * scale[2]))


@gluon.jit
def _consume(
    rings, o_desc, o_bufs, scales, sizes, scale, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, group_h,
    EMULATED: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A warpgroup: ROWS queries of every tile. Why no partition waits for ever: docs/memory_ordering.md."""
    q_ring, k_ring, v_ring = rings
    k_bufs, k_full, k_empty = k_ring
    v_bufs, v_full, v_empty = v_ring
    STAGES: gl.constexpr = k_bufs.shape[0]
    BLOCK_N: gl.constexpr = k_bufs.shape[3]
    ROWS: gl.constexpr = o_desc.block_shape[2]
    D: gl.constexpr = o_desc.block_shape[3]
    CONSUMERS: gl.constexpr = q_ring[0].shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 32])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)  # P stays in its registers: the scores' layout, packed
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OUT)  # each thread has the same rows of scores and result
    q = q_ring[0].index(CONSUMER).reshape([ROWS, D])
    o_buf = o_bufs.index(CONSUMER)
    q_phase = 0
    k_slot = 0
    k_phase = 0
    v_slot = 0
    v_phase = 0
    tiles = gl.cdiv(sizes[1], CONSUMERS * ROWS) * sizes[3]
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, start = _tile(tile, sizes, CONSUMERS * ROWS, CAUSAL, group_h)
        h_kv = h // scales[3]
        # Not below the smallest normal number: 0 times the -inf of a masked score would be NaN.
        factor = scale * _head_scale(scales[0], b, h) * _head_scale(scales[1], b, h_kv)
        factor = gl.where(factor < 1.1754944e-38, 1.1754944e-38, factor)
        start += CONSUMER * ROWS
        blocks = _blocks(start + ROWS, sizes[2], BLOCK_N, CAUSAL)
        if CAUSAL:  # what only consumers of later queries see: of two none, of three one block at most
            for _step in range(blocks, _blocks(start + (CONSUMERS - CONSUMER) * ROWS, sizes[2], BLOCK_N, CAUSAL)):
                mbarrier.wait(k_full.index(k_slot), k_phase)
                mbarrier.arrive(k_empty.index(k_slot))
                k_slot, k_phase = next_slot(k_slot, k_phase, STAGES)
                mbarrier.wait(v_full.index(v_slot), v_phase)
                mbarrier.arrive(v_empty.index(v_slot))
                v_slot, v_phase = next_slot(v_slot, v_phase, STAGES)
        # The last block alone, masked. Rows of K and V beyond the end arrive as zeros, so 0 * v is 0 there, not NaN.
        mbarrier.wait(q_ring[1].index(CONSUMER), q_phase)
        mbarrier.wait(k_full.index(k_slot), k_phase)
        scores = _start_scores(q, k_bufs, k_slot, SCORES)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(k_slot))
        k_slot, k_phase = next_slot(k_slot, k_phase, STAGES)
        if CAUSAL or RAGGED:
            cols = (blocks - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
            rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            seen = (cols[None, :] <= rows[:, None]) if CAUSAL else (cols < sizes[2])[None, :]
            scores = gl.where(seen, scores, -float("inf"))
        row_max = gl.maximum(gl.max(scores, 1) * factor, -3.4e38)
        weights = gl.exp2(scores * factor - (row_max - 8.0)[:, None])
        row_sum = gl.sum(weights, 1)
        p = pack_weights(weights)
        acc = gl.zeros((ROWS, D), gl.float32, OUT)
        for _step in range(1, blocks):
            mbarrier.wait(k_full.index(k_slot), k_phase)
            scores = _start_scores(q, k_bufs, k_slot, SCORES)
            mbarrier.wait(v_full.index(v_slot), v_phase)
            acc = _start_values(unpack_weights(p, WEIGHTS), v_bufs, v_slot, acc)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            mbarrier.arrive(k_empty.index(k_slot))
            k_slot, k_phase = next_slot(k_slot, k_phase, STAGES)
            new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
            weights = exp2(scores * factor - (new_max - 8.0)[:, None], EMULATED)
            alpha = gl.exp2(row_max - new_max)
            row_sum = row_sum * alpha + gl.sum(weights, 1)
            row_max = new_max
            # That phase is complete, so nothing waits; but a branch lies here, and the assembler, which would move the
            # wait for P V in front of the exponentials, moves nothing across it.
            mbarrier.wait(v_full.index(v_slot), v_phase)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_empty.index(v_slot))
            v_slot, v_phase = next_slot(v_slot, v_phase, STAGES)
            acc = acc * gl.convert_layout(alpha, BY_ROW)[:, None]
            p = pack_weights(weights)
        mbarrier.arrive(q_ring[2].index(CONSUMER))  # the next tile's queries may be loaded
        q_phase ^= 1
        mbarrier.wait(v_full.index(v_slot), v_phase)
        acc = _start_values(unpack_weights(p, WEIGHTS), v_bufs, v_slot, acc)
        v_scale = _head_scale(scales[2], b, h_kv)
        tma.store_wait(0)  # the result of the tile before has left o_buf
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(v_slot))
        v_slot, v_phase = next_slot(v_slot, v_phase, STAGES)
        acc = acc * gl.convert_layout(1.0 / row_sum, BY_ROW)[:, None] * v_scale
        o_buf.reshape([ROWS, D]).store(acc.to(o_desc.dtype))
        fence_async_shared()
        async_store(o_desc, [b, h, start, 0], o_buf)  # TMA drops rows beyond S
    tma.store_wait(0)  # shared memory must outlive its last reader


@gluon.jit
def fp8_attention_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    stride_qsb, stride_qsh, stride_ksb, stride_ksh, stride_vsb, stride_vsh, scale, H, q_per_kv, S, S_KV, heads,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, group_h, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    EMULATED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles p, p + programs, ... of CONSUMERS * ROWS queries."""
    q_ring = (buffers(q_desc, CONSUMERS), barriers(CONSUMERS), barriers(CONSUMERS))  # a slot for each consumer
    k_ring = (buffers(k_desc, STAGES), barriers(STAGES), barriers(STAGES))
    v_ring = (buffers(v_desc, STAGES), barriers(STAGES), barriers(STAGES))
    o_bufs = buffers(o_desc, CONSUMERS)
    init_ring(q_ring[1], q_ring[2], CONSUMERS, 1)
    init_ring(k_ring[1], k_ring[2], STAGES, CONSUMERS)
    init_ring(v_ring[1], v_ring[2], STAGES, CONSUMERS)
    fence_async_shared()
    sizes = (H, S, S_KV, heads)
    rings = (q_ring, k_ring, v_ring)
    q_scale = (q_scale_ptr, stride_qsb, stride_qsh)
    k_scale = (k_scale_ptr, stride_ksb, stride_ksh)
    v_scale = (v_scale_ptr, stride_vsb, stride_vsh)
    scales = (q_scale, k_scale, v_scale, q_per_kv)
    if CONSUMERS == 3:
        gl.warp_specialize([
            (_consume, (rings, o_desc, o_bufs, scales, sizes, scale, CAUSAL, RAGGED, group_h, EMULATED, 0)),
            (_consume, (rings, o_desc, o_bufs, scales, sizes, scale, CAUSAL, RAGGED, group_h, EMULATED, 1)),
            (_consume, (rings, o_desc, o_bufs, scales, sizes, scale, CAUSAL, RAGGED, group_h, EMULATED, 2)),
            (_produce, (rings, q_desc, k_desc, v_desc, q_per_kv, sizes, CAUSAL, group_h)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (rings, o_desc, o_bufs, scales, sizes, scale, CAUSAL, RAGGED, group_h, EMULATED, 0)),
            (_consume, (rings, o_desc, o_bufs, scales, sizes, scale, CAUSAL, RAGGED, group_h, EMULATED, 1)),
            (_produce, (rings, q_desc, k_desc, v_desc, q_per_kv, sizes, CAUSAL, group_h)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def launch_hopper(q, k, v, o, q_scale, k_scale, v_scale, scale: float, causal: bool) -> None:
    """Attention of operands that are checked, on sm_90; `scale` includes log2(e), scales are expanded to heads."""
    (B, H, S, D), (_, H_kv, S_kv, _) = q.shape, k.shape
    consumers, stages = CONSUMERS[D], STAGES[D]
    group_h = max(1, GROUP_BYTES // (2 * S_kv * D)) * (H // H_kv) if causal else 1
    programs = min(triton.cdiv(S, consumers * ROWS) * B * H, device_limits(q.device).sms)
    fp8_attention_hopper_kernel[(programs,)](
        gluon_descriptor(q, [1, 1, ROWS, D]), gluon_descriptor(k, [1, 1, BLOCK_N, D]),
        gluon_descriptor(v, [1, 1, D, BLOCK_N]), gluon_descriptor(o, [1, 1, ROWS, D]), q_scale, k_scale, v_scale,
        *q_scale.stride(), *k_scale.stride(), *v_scale.stride(),
        scale, H, H // H_kv, S, S_kv, B * H, causal, S_kv % BLOCK_N > 0, group_h, consumers, stages, EMULATED[D],
        *REGISTERS[consumers], num_warps=4,
    )  # fmt: skip
