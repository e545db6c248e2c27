"""Flash attention in Gluon for Hopper: the softmax of one warpgroup runs under the MMAs of others.

A block of 128 keys costs a warpgroup of 64 queries 1024 clocks of the SM's tensor cores at D = 128 and 512 at 64, and
512 clocks of its exponential units: if these run one after the other, the tensor cores idle for a third or half of the
time. What overlaps them:

  a producer  one warp loads Q, and K and V into rings of their own, as in gluon_matmul.py. The kernel is persistent, so
              the first K and V of the next tile are loaded while this one ends.
  consumers   two warpgroups. Each starts Q K^T of the next block before P V of this one. Its next softmax then runs
              under that P V, so the two need not take turns.
  or three    at D = 64 from 2048 queries on. To fit the registers, each waits for P V before it starts Q K^T, whose
              scores then reuse P's. They take turns (examples/common/turns.py): one multiplies while others do softmax.
              Sums of the weights are an MMA of P by 8 columns of ones, in place of 64 additions per thread and block.
              These are sums of the rounded weights, so a call that returns their logarithms, as training does, adds up
              the exact ones instead.

K and V are walked from the last block to the first: only the last that a consumer sees can need a mask.
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

ROWS, BLOCK_N = 64, 128  # queries of a consumer, keys of a block
# Consumers -> registers of a consumer's thread and of the producer's. A thread holds 64 scores, D / 2 of the result and
# 32 registers of weights.
REGISTERS = {2: (240, 24), 3: (160, 32)}
LONG = 2048  # from so many queries on, tiles of three consumers waste few rows of the last one
# Causal: K and V of the heads whose tiles run side by side, which L2 is to hold. Chosen by timing on an H100.
GROUP_BYTES = 32 * 2**20
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def tile_of(tile, sizes, TILE_M: gl.constexpr, CAUSAL: gl.constexpr, group_h):
    """Batch, head and first query of a tile, in flash_attention_kernel's order."""
    H, S, _, heads = sizes
    tiles = gl.cdiv(S, TILE_M)
    first = tile // (group_h * tiles) * group_h
    in_group = min(heads - first, group_h)
    bh = first + tile % (group_h * tiles) % in_group
    start = tile % (group_h * tiles) // in_group * TILE_M
    if CAUSAL:
        start = (tiles - 1) * TILE_M - start
    return bh // H, bh % H, start


@gluon.jit
def blocks_before(end, S_KV, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many blocks of keys the queries before `end` see."""
    return gl.cdiv(min(S_KV, end) if CAUSAL else S_KV, BLOCK_N)


@gluon.jit
def _load(desc, bufs, full, empty, slot, phase, b, h, row):
    """Load a block into a slot, once it is empty."""
    mbarrier.wait(empty.index(slot), phase)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    async_load(desc, [b, h, row, 0], full.index(slot), bufs.index(slot))


@gluon.jit
def _produce(rings, q_desc, k_desc, v_desc, q_per_kv, sizes, CAUSAL: gl.constexpr, group_h):
    """One warp: the queries of every tile, and its keys and values in the order in which they are multiplied."""
    q_ring, k_ring, v_ring = rings
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
        b, h, start = tile_of(tile, sizes, CONSUMERS * ROWS, CAUSAL, group_h)
        blocks = blocks_before(start + CONSUMERS * ROWS, sizes[2], BLOCK_N, CAUSAL)
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
                _load(v_desc, v_ring[0], v_ring[1], v_ring[2], v_slot, v_phase, b, h_kv, row + BLOCK_N)
                v_slot, v_phase = next_slot(v_slot, v_phase, STAGES)
        q_phase ^= 1


@gluon.jit
def start_scores(q, k_bufs, slot, LAYOUT: gl.constexpr):
    """Start Q K^T of a block; nothing is added to, so the zeros are never read."""
    ROWS: gl.constexpr = q.shape[0]
    BLOCK_N: gl.constexpr = k_bufs.shape[3]
    k = k_bufs.index(slot).reshape([BLOCK_N, q.shape[1]]).permute((1, 0))
    zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, LAYOUT)
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def start_values(weights, v_bufs, slot, acc):
    """Start acc += P V of a block. P, the weights, comes from registers."""
    v = v_bufs.index(slot).reshape([v_bufs.shape[3], acc.shape[1]])
    return warpgroup_mma(weights, v, acc, is_async=True)


@gluon.jit
def _consume(
    rings, ones, o_desc, o_bufs, lse_ptr, sizes, scale, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, group_h,
    CONSUMER: gl.constexpr,
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
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)  # P stays in its registers: the scores' layout, packed
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OUT)  # each thread has the same rows of scores, sums and result
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 8, 16])
    TURNS: gl.constexpr = CONSUMERS == 3
    ROUNDED: gl.constexpr = TURNS and lse_ptr is None  # the sums are those of the rounded weights
    q = q_ring[0].index(CONSUMER).reshape([ROWS, D])
    o_buf = o_bufs.index(CONSUMER)
    q_phase = 0
    k_slot = 0
    k_phase = 0
    v_slot = 0
    v_phase = 0
    if TURNS and CONSUMER == CONSUMERS - 1:
        pass_turn(CONSUMER, CONSUMERS)  # the first turn is the first consumer's
    tiles = gl.cdiv(sizes[1], CONSUMERS * ROWS) * sizes[3]
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, start = tile_of(tile, sizes, CONSUMERS * ROWS, CAUSAL, group_h)
        start += CONSUMER * ROWS
        blocks = blocks_before(start + ROWS, sizes[2], BLOCK_N, CAUSAL)
        if TURNS:  # only other consumers see the first blocks: their queries are later, or ours all lie beyond the end
            blocks = gl.where(start < sizes[1], blocks, 1)
            for _step in range(blocks, blocks_before(start + (CONSUMERS - CONSUMER) * ROWS, sizes[2], BLOCK_N, CAUSAL)):
                mbarrier.wait(k_full.index(k_slot), k_phase)
                mbarrier.arrive(k_empty.index(k_slot))
                k_slot, k_phase = next_slot(k_slot, k_phase, STAGES)
                mbarrier.wait(v_full.index(v_slot), v_phase)
                mbarrier.arrive(v_empty.index(v_slot))
                v_slot, v_phase = next_slot(v_slot, v_phase, STAGES)
                take_turn(CONSUMER)
                pass_turn(CONSUMER, CONSUMERS)
        rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        # The last block alone, masked. Rows of K and V beyond the end arrive as zeros, so 0 * v is 0 there, not NaN.
        mbarrier.wait(q_ring[1].index(CONSUMER), q_phase)
        mbarrier.wait(k_full.index(k_slot), k_phase)
        scores = start_scores(q, k_bufs, k_slot, SCORES)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(k_slot))
        k_slot, k_phase = next_slot(k_slot, k_phase, STAGES)
        if CAUSAL or RAGGED:
            cols = (blocks - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
            seen = (cols[None, :] <= rows[:, None]) if CAUSAL else (cols < sizes[2])[None, :]
            scores = gl.where(seen, scores, -float("inf"))
        # Clamped: where all scores of a row are -inf, -inf - -inf would be NaN.
        row_max = gl.maximum(gl.max(scores, 1) * scale, -3.4e38)
        weights = gl.exp2(scores * scale - row_max[:, None])
        row_sum = gl.zeros((ROWS, 8), gl.float32, SUMS) if ROUNDED else gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(o_desc.dtype), WEIGHTS)
        acc = gl.zeros((ROWS, D), gl.float32, OUT)
        for _step in range(1, blocks):
            mbarrier.wait(k_full.index(k_slot), k_phase)
            if TURNS:
                mbarrier.wait(v_full.index(v_slot), v_phase)
                take_turn(CONSUMER)
                acc = start_values(p, v_bufs, v_slot, acc)
                if ROUNDED:
                    row_sum = warpgroup_mma(p, ones.permute((1, 0)), row_sum, is_async=True)
                    acc, row_sum = warpgroup_mma_wait(0, deps=(acc, row_sum))
                else:
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                scores = start_scores(q, k_bufs, k_slot, SCORES)
                pass_turn(CONSUMER, CONSUMERS)
                mbarrier.arrive(v_empty.index(v_slot))
                scores = warpgroup_mma_wait(0, deps=(scores,))
            else:
                scores = start_scores(q, k_bufs, k_slot, SCORES)
                mbarrier.wait(v_full.index(v_slot), v_phase)
                acc = start_values(p, v_bufs, v_slot, acc)
                scores = warpgroup_mma_wait(1, deps=(scores,))
            mbarrier.arrive(k_empty.index(k_slot))
            k_slot, k_phase = next_slot(k_slot, k_phase, STAGES)
            new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
            weights = gl.exp2(scores * scale - new_max[:, None])
            alpha = gl.exp2(row_max - new_max)
            row_max = new_max
            if ROUNDED:
                row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
            else:
                row_sum = row_sum * alpha + gl.sum(weights, 1)
            if not TURNS:
                # That phase is complete, so nothing waits; but a branch lies here, and the assembler, which would move
                # the wait for P V in front of the exponentials, moves nothing across it.
                mbarrier.wait(v_full.index(v_slot), v_phase)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(v_slot))
            v_slot, v_phase = next_slot(v_slot, v_phase, STAGES)
            acc = acc * gl.convert_layout(alpha, BY_ROW)[:, None]
            p = gl.convert_layout(weights.to(o_desc.dtype), WEIGHTS)
        mbarrier.arrive(q_ring[2].index(CONSUMER))  # the next tile's queries may be loaded
        q_phase ^= 1
        mbarrier.wait(v_full.index(v_slot), v_phase)
        acc = start_values(p, v_bufs, v_slot, acc)
        if ROUNDED:
            row_sum = warpgroup_mma(p, ones.permute((1, 0)), row_sum, is_async=True)
        if lse_ptr is not None:
            lse = (row_max + gl.log2(row_sum)) * LN_2
            gl.store(lse_ptr + ((b * sizes[0] + h) * sizes[1] + rows), lse, mask=rows < sizes[1])
        tma.store_wait(0)  # the result of the tile before has left o_buf
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(v_slot))
        v_slot, v_phase = next_slot(v_slot, v_phase, STAGES)
        if ROUNDED:
            row_sum = gl.max(warpgroup_mma_wait(0, deps=(row_sum,)), 1)  # of 8 equal ones
        acc = acc * gl.convert_layout(1.0 / row_sum, BY_ROW)[:, None]
        o_buf.reshape([ROWS, D]).store(acc.to(o_desc.dtype))
        fence_async_shared()
        async_store(o_desc, [b, h, start, 0], o_buf)  # TMA drops rows beyond S
    if TURNS and CONSUMER == 0:
        take_turn(CONSUMER)  # nobody is left at a barrier
    tma.store_wait(0)  # shared memory must outlive its last reader


@gluon.jit
def flash_attention_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, scale, H, q_per_kv, S, S_KV, heads, CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr, group_h, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles p, p + programs, ... of CONSUMERS * ROWS queries; lse_ptr is None or float32 [B, H, S]."""
    q_ring = (buffers(q_desc, CONSUMERS), barriers(CONSUMERS), barriers(CONSUMERS))  # a slot for each consumer
    k_ring = (buffers(k_desc, STAGES), barriers(STAGES), barriers(STAGES))
    v_ring = (buffers(v_desc, STAGES), barriers(STAGES), barriers(STAGES))
    o_bufs = buffers(o_desc, CONSUMERS)
    init_ring(q_ring[1], q_ring[2], CONSUMERS, 1)
    init_ring(k_ring[1], k_ring[2], STAGES, CONSUMERS)
    init_ring(v_ring[1], v_ring[2], STAGES, CONSUMERS)
    if CONSUMERS == 3:
        SHAPE: gl.constexpr = [8, k_desc.block_shape[2]]
        ones = gl.allocate_shared_memory(q_desc.dtype, SHAPE, gl.NVMMASharedLayout.get_default_for(SHAPE, q_desc.dtype))
        ones.store(gl.full(SHAPE, 1.0, q_desc.dtype, gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])))
    fence_async_shared()
    sizes = (H, S, S_KV, heads)
    rings = (q_ring, k_ring, v_ring)
    if CONSUMERS == 3:
        gl.warp_specialize([
            (_consume, (rings, ones, o_desc, o_bufs, lse_ptr, sizes, scale, CAUSAL, RAGGED, group_h, 0)),
            (_consume, (rings, ones, o_desc, o_bufs, lse_ptr, sizes, scale, CAUSAL, RAGGED, group_h, 1)),
            (_consume, (rings, ones, o_desc, o_bufs, lse_ptr, sizes, scale, CAUSAL, RAGGED, group_h, 2)),
            (_produce, (rings, q_desc, k_desc, v_desc, q_per_kv, sizes, CAUSAL, group_h)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (rings, None, o_desc, o_bufs, lse_ptr, sizes, scale, CAUSAL, RAGGED, group_h, 0)),
            (_consume, (rings, None, o_desc, o_bufs, lse_ptr, sizes, scale, CAUSAL, RAGGED, group_h, 1)),
            (_produce, (rings, q_desc, k_desc, v_desc, q_per_kv, sizes, CAUSAL, group_h)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def launch_hopper(q, k, v, o, lse, scale: float, causal: bool) -> None:
    """Attention of operands that are checked, on sm_90; `scale` includes log2(e), lse is None or float32 [B, H, S]."""
    (B, H, S, D), (_, H_kv, S_kv, _) = q.shape, k.shape
    consumers = 3 if D == 64 and S >= LONG else 2
    stages = 4 if D == 64 else 2
    group_h = max(1, GROUP_BYTES // (4 * S_kv * D)) * (H // H_kv) if causal else 1
    programs = min(triton.cdiv(S, consumers * ROWS) * B * H, device_limits(q.device).sms)
    flash_attention_hopper_kernel[(programs,)](
        gluon_descriptor(q, [1, 1, ROWS, D]), gluon_descriptor(k, [1, 1, BLOCK_N, D]),
        gluon_descriptor(v, [1, 1, BLOCK_N, D]), gluon_descriptor(o, [1, 1, ROWS, D]), lse,
        scale, H, H // H_kv, S, S_kv, B * H, causal, S_kv % BLOCK_N > 0, group_h, consumers, stages,
        *REGISTERS[consumers], num_warps=4,
    )  # fmt: skip
