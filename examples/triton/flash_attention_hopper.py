"""Flash attention in Gluon for Hopper: the softmax of one warpgroup runs under the MMAs of another, and of its own.

A block of 128 keys costs a warpgroup of 64 queries 1024 clocks of the SM's tensor cores at D = 128, and 512 clocks of
its exponential units: run one after the other, the tensor cores idle for a third of the time. What overlaps them:

  a producer  one warp loads Q, and K and V into rings of their own, as in gluon_matmul.py. The kernel is persistent, so
              the first K and V of the next tile are loaded while this one ends.
  ping-pong   two consumers take turns to start MMAs. Each starts all of a block's before the other starts its own, so
              the softmax of one runs under the MMAs of the other.
  in flight   a consumer starts Q K^T of the next block before P V of this one: its softmax runs under its own P V too.

K and V are walked from the last block to the first. Only the last can need a mask, and it is the one before the loop.
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

CONSUMERS = gl.constexpr(2)
ROWS, BLOCK_N, STAGES = 64, 128, 2  # queries of a consumer, keys of a block, slots of each ring
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # of a thread: 64 for scores, 64 for the result, 32 for weights
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _tile(tile, sizes, TILE_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, GROUP_H: gl.constexpr):
    """Batch, head, first query and number of blocks of keys of a tile, in flash_attention_kernel's order."""
    H, S, S_KV, heads = sizes
    tiles = gl.cdiv(S, TILE_M)
    first = tile // (GROUP_H * tiles) * GROUP_H
    in_group = min(heads - first, GROUP_H)
    bh = first + tile % (GROUP_H * tiles) % in_group
    start = tile % (GROUP_H * tiles) // in_group * TILE_M
    if CAUSAL:
        start = (tiles - 1) * TILE_M - start
    end = min(S_KV, start + TILE_M) if CAUSAL else S_KV
    return bh // H, bh % H, start, gl.cdiv(end, BLOCK_N)


@gluon.jit
def _load(desc, bufs, full, empty, slot, phase, b, h, row):
    """Load a block into a slot, once it is empty."""
    mbarrier.wait(empty.index(slot), phase)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    async_load(desc, [b, h, row, 0], full.index(slot), bufs.index(slot))


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, q_per_kv, sizes, CAUSAL: gl.constexpr, GROUP_H: gl.constexpr
):
    """One warp: the queries of every tile, and its keys and values in the order in which they are multiplied."""
    ROWS: gl.constexpr = q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    STAGES: gl.constexpr = k_ring[0].shape[0]
    q_phase = 1  # a wait for parity 1 passes at a new barrier
    k_slot = 0
    k_phase = 1
    v_slot = 0
    v_phase = 1
    tiles = gl.cdiv(sizes[1], CONSUMERS * ROWS) * sizes[3]
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, start, blocks = _tile(tile, sizes, CONSUMERS * ROWS, BLOCK_N, CAUSAL, GROUP_H)
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
def _start_scores(q, k_bufs, slot, LAYOUT: gl.constexpr):
    """Start Q K^T of a block; nothing is added to, so the zeros are never read."""
    ROWS: gl.constexpr = q.shape[0]
    BLOCK_N: gl.constexpr = k_bufs.shape[3]
    k = k_bufs.index(slot).reshape([BLOCK_N, q.shape[1]]).permute((1, 0))
    zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, LAYOUT)
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_values(weights, v_bufs, slot, acc):
    """Start acc += P V of a block. P, the weights, comes from registers."""
    v = v_bufs.index(slot).reshape([v_bufs.shape[3], acc.shape[1]])
    return warpgroup_mma(weights, v, acc, is_async=True)


@gluon.jit
def _consume(
    q_ring, k_ring, v_ring, o_desc, o_bufs, lse_ptr, turns, sizes, scale, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
    GROUP_H: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A warpgroup: ROWS queries of every tile. Why no partition waits for ever: docs/memory_ordering.md."""
    k_bufs, k_full, k_empty = k_ring
    v_bufs, v_full, v_empty = v_ring
    STAGES: gl.constexpr = k_bufs.shape[0]
    BLOCK_N: gl.constexpr = k_bufs.shape[3]
    ROWS: gl.constexpr = o_desc.block_shape[2]
    D: gl.constexpr = o_desc.block_shape[3]
    OTHER: gl.constexpr = (CONSUMER + 1) % CONSUMERS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)  # P stays in its registers: the scores' layout, packed
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OUT)  # each thread has the same rows of scores and result
    q = q_ring[0].index(CONSUMER).reshape([ROWS, D])
    o_buf = o_bufs.index(CONSUMER)
    q_phase = 0
    k_slot = 0
    k_phase = 0
    v_slot = 0
    v_phase = 0
    turn = 1 - CONSUMER  # the parity that it waits for: the first consumer begins
    tiles = gl.cdiv(sizes[1], CONSUMERS * ROWS) * sizes[3]
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, start, blocks = _tile(tile, sizes, CONSUMERS * ROWS, BLOCK_N, CAUSAL, GROUP_H)
        rows = start + CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        # The last block alone, masked. Rows of K and V beyond the end arrive as zeros, so 0 * v is 0 there, not NaN.
        mbarrier.wait(q_ring[1].index(CONSUMER), q_phase)
        mbarrier.wait(k_full.index(k_slot), k_phase)
        mbarrier.wait(turns.index(CONSUMER), turn)
        scores = _start_scores(q, k_bufs, k_slot, SCORES)
        mbarrier.arrive(turns.index(OTHER))
        turn ^= 1
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
        row_sum = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(o_desc.dtype), WEIGHTS)
        acc = gl.zeros((ROWS, D), gl.float32, OUT)
        for _step in range(1, blocks):
            mbarrier.wait(k_full.index(k_slot), k_phase)
            mbarrier.wait(turns.index(CONSUMER), turn)
            scores = _start_scores(q, k_bufs, k_slot, SCORES)
            mbarrier.wait(v_full.index(v_slot), v_phase)
            acc = _start_values(p, v_bufs, v_slot, acc)
            mbarrier.arrive(turns.index(OTHER))
            turn ^= 1
            scores = warpgroup_mma_wait(1, deps=(scores,))
            mbarrier.arrive(k_empty.index(k_slot))
            k_slot, k_phase = next_slot(k_slot, k_phase, STAGES)
            new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
            weights = gl.exp2(scores * scale - new_max[:, None])
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
            p = gl.convert_layout(weights.to(o_desc.dtype), WEIGHTS)
        mbarrier.arrive(q_ring[2].index(CONSUMER))  # the next tile's queries may be loaded
        q_phase ^= 1
        mbarrier.wait(v_full.index(v_slot), v_phase)
        acc = _start_values(p, v_bufs, v_slot, acc)
        if lse_ptr is not None:
            lse = (row_max + gl.log2(row_sum)) * LN_2
            gl.store(lse_ptr + ((b * sizes[0] + h) * sizes[1] + rows), lse, mask=rows < sizes[1])
        tma.store_wait(0)  # the result of the tile before has left o_buf
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(v_slot))
        v_slot, v_phase = next_slot(v_slot, v_phase, STAGES)
        acc = acc / gl.convert_layout(row_sum, BY_ROW)[:, None]
        o_buf.reshape([ROWS, D]).store(acc.to(o_desc.dtype))
        fence_async_shared()
        async_store(o_desc, [b, h, start + CONSUMER * ROWS, 0], o_buf)  # TMA drops rows beyond S
    tma.store_wait(0)  # shared memory must outlive its last reader


@gluon.jit
def flash_attention_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, scale, H, q_per_kv, S, S_KV, heads, CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr, GROUP_H: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles p, p + programs, ... of 2 * ROWS queries; lse_ptr is None or float32 [B, H, S]."""
    q_ring = (buffers(q_desc, CONSUMERS), barriers(CONSUMERS), barriers(CONSUMERS))  # a slot for each consumer
    k_ring = (buffers(k_desc, STAGES), barriers(STAGES), barriers(STAGES))
    v_ring = (buffers(v_desc, STAGES), barriers(STAGES), barriers(STAGES))
    o_bufs = buffers(o_desc, CONSUMERS)
    turns = barriers(CONSUMERS)
    init_ring(q_ring[1], q_ring[2], CONSUMERS, 1)
    init_ring(k_ring[1], k_ring[2], STAGES, CONSUMERS)
    init_ring(v_ring[1], v_ring[2], STAGES, CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    sizes = (H, S, S_KV, heads)
    gl.warp_specialize([
        (_consume, (q_ring, k_ring, v_ring, o_desc, o_bufs, lse_ptr, turns, sizes, scale, CAUSAL, RAGGED, GROUP_H, 0)),
        (_consume, (q_ring, k_ring, v_ring, o_desc, o_bufs, lse_ptr, turns, sizes, scale, CAUSAL, RAGGED, GROUP_H, 1)),
        (_produce, (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, q_per_kv, sizes, CAUSAL, GROUP_H)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def launch_hopper(q, k, v, o, lse, scale: float, causal: bool, group_h: int) -> None:
    """Attention of operands that are checked, on sm_90; `scale` includes log2(e), lse is None or float32 [B, H, S]."""
    (B, H, S, D), (_, H_kv, S_kv, _) = q.shape, k.shape
    programs = min(triton.cdiv(S, CONSUMERS.value * ROWS) * B * H, device_limits(q.device).sms)
    flash_attention_hopper_kernel[(programs,)](
        gluon_descriptor(q, [1, 1, ROWS, D]), gluon_descriptor(k, [1, 1, BLOCK_N, D]),
        gluon_descriptor(v, [1, 1, BLOCK_N, D]), gluon_descriptor(o, [1, 1, ROWS, D]), lse,
        scale, H, H // H_kv, S, S_kv, B * H, CAUSAL=causal, RAGGED=S_kv % BLOCK_N > 0, GROUP_H=group_h,
        STAGES=STAGES, CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
    )  # fmt: skip
