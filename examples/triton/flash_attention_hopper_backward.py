"""The backward pass of flash attention in Gluon for Hopper: scores and their gradients stay in registers.

The two kernels of flash_attention_backward.py with the partitions of flash_attention_hopper.py: a producer loads, two
or three consumers of 64 rows multiply. A tile owns the rows of its consumers, which are queries for dQ and keys for dK
and dV, and walks over blocks of the other kind:

  tile of    owns     walks over   scores   adds
  queries    Q, dO    K, V         Q K^T    dQ += dS K
  keys       K, V     Q, dO        K Q^T    dV += P^T dO,  dK += dS^T Q

A tile of keys computes its scores transposed, so the left operands of what is added, dS and P^T, are results of the
same warpgroup, and wgmma takes them from its registers: neither is ever written to shared memory. The exponentials of a
block run under its dO V^T, dS of a tile of keys under its P^T dO, and the rest under the MMAs of the other consumers.

Two numbers of each query, lse * log2(e) and delta (flash_attention_backward.py), come from a small kernel that runs
first; TMA loads them with the queries.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from examples.common.device import device_limits
from examples.common.gluon import async_load, async_store, barriers, buffers, init_ring, next_slot
from examples.common.tma import gluon_descriptor
from examples.triton.flash_attention_hopper import (
    GROUP_BYTES,
    LN_2,
    LONG,
    REGISTERS,
    ROWS,
    start_scores,
    start_values,
    tile_of,
)

# Head dim -> rows of a block and stages of the ring; of keys, for dQ, and of queries, for dK and dV: chosen by timing
# on an H200. A tile is a multiple of a block.
DQ_BLOCKS = {64: (64, 6), 128: (128, 2)}
DKDV_BLOCKS = {64: (64, 6), 128: (64, 3)}
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def flash_attention_rows_kernel(o_ptr, do_ptr, lse_ptr, rows_ptr, S, PADDED, ROWS: tl.constexpr, D: tl.constexpr):
    """For each query lse * log2(e), infinite beyond S, so that weights are 0 there; and delta, the sum of o * do.

    rows_ptr: float32 [2 * B * H, PADDED], first every lse, then every delta.
    """
    blocks = PADDED // ROWS
    heads = tl.num_programs(0) // blocks
    bh, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    at = (bh * S + rows)[:, None] * D + tl.arange(0, D)[None, :]
    o = tl.load(o_ptr + at, mask=(rows < S)[:, None], other=0.0).to(tl.float32)
    do = tl.load(do_ptr + at, mask=(rows < S)[:, None], other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + bh * S + rows, mask=rows < S, other=float("inf"))
    tl.store(rows_ptr + bh * PADDED + rows, lse * LOG2_E)
    tl.store(rows_ptr + (heads + bh) * PADDED + rows, tl.sum(o * do, axis=1))


@gluon.jit
def _walk(start, h, sizes, TILE: gl.constexpr, BLOCK: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """What a tile walks over: the first head, how many heads, the first row, and blocks of each head."""
    _, q_per_kv, S, S_KV, _ = sizes
    if KEYS:
        first = start if CAUSAL else 0
        return h * q_per_kv, q_per_kv, first, gl.cdiv(S - first, BLOCK)
    else:
        return h // q_per_kv, 1, 0, gl.cdiv(min(S_KV, start + TILE) if CAUSAL else S_KV, BLOCK)


@gluon.jit
def _row(first, step, blocks, BLOCK: gl.constexpr, KEYS: gl.constexpr):
    """First row of a block: keys go from the last block to the first, queries from the first on, so that blocks with a
    mask come first."""
    return first + (step if KEYS else blocks - 1 - step) * BLOCK


@gluon.jit
def _load(descs, ring, slot, phase, b, h, row, rows, heads, QUERIES: gl.constexpr):
    """Load a block of both tensors into a slot, once it is empty; of queries their lse and delta too."""
    x_bufs, y_bufs, full, empty = ring
    rows_desc, row_bufs = rows
    at, ready = [b, h, row, 0], full.index(slot)
    mbarrier.wait(empty.index(slot), phase)
    mbarrier.expect(ready, 2 * descs[0].block_type.nbytes + (2 * rows_desc.block_type.nbytes if QUERIES else 0))
    async_load(descs[0], at, ready, x_bufs.index(slot))
    async_load(descs[1], at, ready, y_bufs.index(slot))
    if QUERIES:  # heads: query heads in a batch, and in all batches
        async_load(rows_desc, [b * heads[0] + h, row], ready, row_bufs.index(2 * slot))
        async_load(rows_desc, [heads[1] + b * heads[0] + h, row], ready, row_bufs.index(2 * slot + 1))


@gluon.jit
def _produce(own, ring, own_descs, ring_descs, rows, sizes, group_h, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """One warp loads what each tile owns and what it walks over."""
    H, q_per_kv, S, S_KV, tile_heads = sizes
    CONSUMERS: gl.constexpr = own[0].shape[0]
    ROWS: gl.constexpr = own_descs[0].block_shape[2]
    TILE: gl.constexpr = CONSUMERS * ROWS
    BLOCK: gl.constexpr = ring_descs[0].block_shape[2]
    STAGES: gl.constexpr = ring[0].shape[0]
    own_phase = 1  # a wait for parity 1 passes at a new barrier
    slot = 0
    phase = 1
    length = S_KV if KEYS else S
    q_heads = (H * q_per_kv, tile_heads * q_per_kv) if KEYS else (H, tile_heads)
    tiles = gl.cdiv(length, TILE) * tile_heads
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, start = tile_of(tile, (H, length, length, tile_heads), TILE, CAUSAL and not KEYS, group_h)
        head, heads, first, blocks = _walk(start, h, sizes, TILE, BLOCK, KEYS, CAUSAL)
        for step in range(heads * blocks):
            row = _row(first, step % blocks, blocks, BLOCK, KEYS)
            _load(ring_descs, ring, slot, phase, b, head + step // blocks, row, rows, q_heads, KEYS)
            slot, phase = next_slot(slot, phase, STAGES)
            if step == 0:  # after the first block, whose slot is free before the tile before is done
                for i in gl.static_range(CONSUMERS):
                    _load(own_descs, own, i, own_phase, b, h, start + i * ROWS, rows, q_heads, not KEYS)
        own_phase ^= 1


@gluon.jit
def _block(
    a, b, ring, slot, phase, row_bufs, row_slot, grads, mine, row, S_KV, scale, KEYS: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add a block to dQ, or to dK and dV; dQ and dK are scaled at the end. a and b are this consumer's rows of Q and dO
    (of K and V); the slot has a block of K and V (of Q and dO)."""
    x_bufs, y_bufs, full, empty = ring
    D: gl.constexpr = a.shape[1]
    BLOCK: gl.constexpr = x_bufs.shape[3]
    QUERIES: gl.constexpr = row_bufs.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    BY_QUERY: gl.constexpr = gl.SliceLayout(0 if KEYS else 1, SCORES)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)  # P and dS stay in their registers: the scores' layout, packed
    mbarrier.wait(full.index(slot), phase)
    scores = start_scores(a, x_bufs, slot, SCORES)
    dweights = start_scores(b, y_bufs, slot, SCORES)
    lse = row_bufs.index(2 * row_slot).reshape([QUERIES]).load(BY_QUERY)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    weights = gl.exp2(scores * scale - (lse[None, :] if KEYS else lse[:, None]))
    if MASKED:  # P and dS each, as either may be NaN where it is hidden; only tiles of keys use P
        other = row + gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
        below = (mine[:, None] <= other[None, :]) if KEYS else (other[None, :] <= mine[:, None])
        seen = below if CAUSAL else (other < S_KV)[None, :]
        if KEYS:
            weights = gl.where(seen, weights, 0.0)
    dx, dy = grads
    if KEYS:
        dy = start_values(gl.convert_layout(weights.to(a.dtype), LEFT), y_bufs, slot, dy)
        dweights = warpgroup_mma_wait(1, deps=(dweights,))
    else:
        dweights = warpgroup_mma_wait(0, deps=(dweights,))
    delta = row_bufs.index(2 * row_slot + 1).reshape([QUERIES]).load(BY_QUERY)
    dscores = weights * (dweights - (delta[None, :] if KEYS else delta[:, None]))
    if MASKED:
        dscores = gl.where(seen, dscores, 0.0)
    dx = start_values(gl.convert_layout(dscores.to(a.dtype), LEFT), x_bufs, slot, dx)
    if KEYS:
        dx, dy = warpgroup_mma_wait(0, deps=(dx, dy))
    else:
        dx = warpgroup_mma_wait(0, deps=(dx,))
    mbarrier.arrive(empty.index(slot))
    return dx, dy


@gluon.jit
def _store(desc, buf, grad, b, h, row, BUFFERS: gl.constexpr):
    """Start a TMA store of a consumer's rows from one of its BUFFERS, used in turn. TMA drops rows beyond the end."""
    tma.store_wait(BUFFERS - 1)  # of two buffers all stores but the latest have been read: this buffer is free
    buf.reshape([grad.shape[0], grad.shape[1]]).store(grad.to(desc.dtype))
    fence_async_shared()
    async_store(desc, [b, h, row, 0], buf)


@gluon.jit
def _consume(
    own, ring, row_bufs, out_descs, out_bufs, sizes, scale, group_h, KEYS: gl.constexpr, CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A warpgroup computes ROWS rows of every tile. Why no partition waits for ever: docs/memory_ordering.md."""
    H, _, S, S_KV, tile_heads = sizes
    CONSUMERS: gl.constexpr = own[0].shape[0]
    ROWS: gl.constexpr = out_descs[0].block_shape[2]
    D: gl.constexpr = out_descs[0].block_shape[3]
    TILE: gl.constexpr = CONSUMERS * ROWS
    BLOCK: gl.constexpr = ring[0].shape[3]
    STAGES: gl.constexpr = ring[0].shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    x = own[0].index(CONSUMER).reshape([ROWS, D])
    y = own[1].index(CONSUMER).reshape([ROWS, D])
    own_phase = 0
    slot = 0
    phase = 0
    length = S_KV if KEYS else S
    tiles = gl.cdiv(length, TILE) * tile_heads
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, start = tile_of(tile, (H, length, length, tile_heads), TILE, CAUSAL and not KEYS, group_h)
        _, heads, first, blocks = _walk(start, h, sizes, TILE, BLOCK, KEYS, CAUSAL)
        start += CONSUMER * ROWS
        mine = start + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        grads = (gl.zeros((ROWS, D), gl.float32, OUT), gl.zeros((ROWS, D), gl.float32, OUT))
        mbarrier.wait(own[2].index(CONSUMER), own_phase)
        for _head in range(heads):
            masked = 0
            if CAUSAL or RAGGED:  # blocks that the diagonal crosses, or the last one
                masked = min(blocks, TILE // BLOCK if CAUSAL else 1)
                for step in range(masked):
                    grads = _block(
                        x, y, ring, slot, phase, row_bufs, slot if KEYS else CONSUMER, grads, mine,
                        _row(first, step, blocks, BLOCK, KEYS), S_KV, scale, KEYS, CAUSAL, True,
                    )  # fmt: skip
                    slot, phase = next_slot(slot, phase, STAGES)
            for _step in range(masked, blocks):
                grads = _block(
                    x, y, ring, slot, phase, row_bufs, slot if KEYS else CONSUMER, grads, mine, 0, S_KV, scale, KEYS,
                    CAUSAL, False,
                )  # fmt: skip
                slot, phase = next_slot(slot, phase, STAGES)
        mbarrier.arrive(own[3].index(CONSUMER))  # what the next tile owns may be loaded
        own_phase ^= 1
        _store(out_descs[0], out_bufs.index(CONSUMER), grads[0] * (scale * LN_2), b, h, start, 2 if KEYS else 1)
        if KEYS:
            _store(out_descs[1], out_bufs.index(CONSUMERS + CONSUMER), grads[1], b, h, start, 2)
    tma.store_wait(0)  # shared memory must outlive its last reader


@gluon.jit
def flash_attention_hopper_backward_kernel(
    q_desc, do_desc, k_desc, v_desc, dx_desc, dy_desc, rows_desc, scale, H, q_per_kv, S, S_KV, tile_heads, group_h,
    KEYS: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles p, p + programs, ... of queries, for dQ in dx; or of keys, for dK in dx and dV in dy.

    H counts the heads of queries, or of keys, in a batch, tile_heads those in all batches. rows_desc is of float32
    [2 * query heads, S rounded up]; with tiles of queries dy is not used. RAGGED: the last block of keys is not full.
    """
    own_descs, ring_descs = ((k_desc, v_desc), (q_desc, do_desc)) if KEYS else ((q_desc, do_desc), (k_desc, v_desc))
    own = (buffers(own_descs[0], CONSUMERS), buffers(own_descs[1], CONSUMERS), barriers(CONSUMERS), barriers(CONSUMERS))
    ring = (buffers(ring_descs[0], STAGES), buffers(ring_descs[1], STAGES), barriers(STAGES), barriers(STAGES))
    row_bufs = buffers(rows_desc, 2 * STAGES if KEYS else 2 * CONSUMERS)
    out_descs, out_bufs = (dx_desc, dy_desc), buffers(dx_desc, 2 * CONSUMERS if KEYS else CONSUMERS)
    init_ring(own[2], own[3], CONSUMERS, 1)
    init_ring(ring[2], ring[3], STAGES, CONSUMERS)
    fence_async_shared()
    rows, sizes = (rows_desc, row_bufs), (H, q_per_kv, S, S_KV, tile_heads)
    if CONSUMERS == 3:
        gl.warp_specialize([
            (_consume, (own, ring, row_bufs, out_descs, out_bufs, sizes, scale, group_h, KEYS, CAUSAL, RAGGED, 0)),
            (_consume, (own, ring, row_bufs, out_descs, out_bufs, sizes, scale, group_h, KEYS, CAUSAL, RAGGED, 1)),
            (_consume, (own, ring, row_bufs, out_descs, out_bufs, sizes, scale, group_h, KEYS, CAUSAL, RAGGED, 2)),
            (_produce, (own, ring, own_descs, ring_descs, rows, sizes, group_h, KEYS, CAUSAL)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (own, ring, row_bufs, out_descs, out_bufs, sizes, scale, group_h, KEYS, CAUSAL, RAGGED, 0)),
            (_consume, (own, ring, row_bufs, out_descs, out_bufs, sizes, scale, group_h, KEYS, CAUSAL, RAGGED, 1)),
            (_produce, (own, ring, own_descs, ring_descs, rows, sizes, group_h, KEYS, CAUSAL)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def launch_hopper_backward(q, k, v, o, lse, do, dq, dk, dv, scale: float, causal: bool) -> None:
    """Write dq, dk and dv on sm_90, of operands that are checked; `scale` includes log2(e); o, do and lse, float32
    [B, H, S], are contiguous."""
    (B, H, S, D), (_, H_kv, S_kv, _) = q.shape, k.shape
    padded = triton.cdiv(S, ROWS) * ROWS
    rows = torch.empty(2 * B * H, padded, dtype=torch.float32, device=q.device)
    flash_attention_rows_kernel[(B * H * padded // ROWS,)](o, do, lse, rows, S, padded, ROWS, D)

    def launch(keys: bool, heads: int, length: int, in_group: int, block: int, stages: int, *out):
        consumers = 3 if D == 64 and length >= LONG else 2
        q_rows, kv_rows = (block, ROWS) if keys else (ROWS, block)
        programs = min(triton.cdiv(length, consumers * ROWS) * B * heads, device_limits(q.device).sms)
        flash_attention_hopper_backward_kernel[(programs,)](
            *(gluon_descriptor(x, [1, 1, q_rows, D]) for x in (q, do)),
            *(gluon_descriptor(x, [1, 1, kv_rows, D]) for x in (k, v)),
            *(gluon_descriptor(x, [1, 1, ROWS, D]) for x in out), gluon_descriptor(rows, [1, q_rows]),
            scale, heads, H // H_kv, S, S_kv, B * heads, in_group if causal else 1, keys, causal,
            not (keys or causal) and S_kv % block > 0, consumers, stages, *REGISTERS[consumers], num_warps=4,
        )  # fmt: skip

    # Causal: heads whose tiles run side by side. L2 is to hold what they walk over; H // H_kv of queries share K and V.
    launch(False, H, S, max(1, GROUP_BYTES // (4 * S_kv * D)) * (H // H_kv), *DQ_BLOCKS[D], dq, dq)
    launch(True, H_kv, S_kv, max(1, GROUP_BYTES // (4 * S * D * (H // H_kv))), *DKDV_BLOCKS[D], dk, dv)
