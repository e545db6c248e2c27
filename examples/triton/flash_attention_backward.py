"""The backward pass of flash attention: the weights are computed again from Q, K and the logarithm of each row's sum.

With S = scale * Q K^T, P = exp(S - lse), and delta, the sum of o * do over each row:

    dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale * dS K,   dK = scale * dS^T Q.

dQ sums over keys, dK and dV over queries. One kernel for all three would add to dQ from many programs, in any order:
either results differ from run to run, or programs wait for each other. So there are two kernels, one for dQ, which also
stores delta, and one for dK and dV. Each computes S and dO V^T for itself: 7 MMAs where one kernel needs 5, and every
run gives the same bits. Gradients of heads that share keys are summed by the program of those keys. By default on
sm_90, those of flash_attention_hopper_backward.py are launched instead: the same two in Gluon, and a third for delta.
"""

from __future__ import annotations

import itertools
import math

import torch
import triton
import triton.language as tl

from examples.common.gluon import gluon_architecture
from examples.common.tma import require_tma_layout, tma_descriptor
from examples.triton.flash_attention_hopper_backward import launch_hopper_backward

LOG2_E, LN_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
# Head dim -> BLOCK_M (queries), BLOCK_N (keys) and warps, of the kernel for dQ and of that for dK and dV.
DQ_TILES = {64: (128, 64, 8), 128: (128, 64, 8)}
DKDV_TILES = {64: (64, 128, 8), 128: (64, 128, 8)}
STAGES = 2


@triton.jit
def _dq_block(
    dq, q, do, lse, delta, rows, k_desc, v_desc, b, h, n, S_KV, scale, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to dQ / scale."""
    k = k_desc.load([b, h, n, 0]).reshape(BLOCK_N, D)
    weights = tl.exp2(tl.dot(q, k.T) * scale - lse[:, None])
    v = v_desc.load([b, h, n, 0]).reshape(BLOCK_N, D)
    dscores = weights * (tl.dot(do, v.T) - delta[:, None])
    if MASKED:
        cols = n + tl.arange(0, BLOCK_N)
        seen = (cols[None, :] <= rows[:, None]) if CAUSAL else (cols < S_KV)[None, :]
        dscores = tl.where(seen, dscores, 0.0)
    return tl.dot(dscores.to(k.dtype), k, dq)


@triton.jit
def flash_attention_dq_kernel(
    q_desc, k_desc, v_desc, o_desc, do_desc, dq_desc, lse_ptr, delta_ptr, scale, H, Q_PER_KV, S, S_KV,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries, all keys; and delta of those queries. Causal: the longest tiles of a head first."""
    tiles = tl.cdiv(S, BLOCK_M)
    bh, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    b, h, start_m = bh // H, bh % H, tile * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    at = bh.to(tl.int64) * S + rows
    q = q_desc.load([b, h, start_m, 0]).reshape(BLOCK_M, D)
    do = do_desc.load([b, h, start_m, 0]).reshape(BLOCK_M, D)
    o = o_desc.load([b, h, start_m, 0]).reshape(BLOCK_M, D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    tl.store(delta_ptr + at, delta, mask=rows < S)
    lse = tl.load(lse_ptr + at, mask=rows < S, other=0.0) * LOG2_E
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    tl.static_assert(BLOCK_M % BLOCK_N == 0 or not CAUSAL, "causal: the last whole block would cross the diagonal")
    first_masked = start_m if CAUSAL else S_KV // BLOCK_N * BLOCK_N
    for n in tl.range(0, first_masked, BLOCK_N, num_stages=STAGES):
        dq = _dq_block(
            dq, q, do, lse, delta, rows, k_desc, v_desc, b, h // Q_PER_KV, n, S_KV, scale, CAUSAL, False, BLOCK_N, D
        )
    if CAUSAL or RAGGED:
        end = min(S_KV, start_m + BLOCK_M) if CAUSAL else S_KV
        for n in tl.range(first_masked, end, BLOCK_N, num_stages=1):
            dq = _dq_block(
                dq, q, do, lse, delta, rows, k_desc, v_desc, b, h // Q_PER_KV, n, S_KV, scale, CAUSAL, True, BLOCK_N, D
            )
    dq = (dq * (scale * LN_2)).to(dq_desc.dtype)
    dq_desc.store([b, h, start_m, 0], dq.reshape(1, 1, BLOCK_M, D))


@triton.jit
def _dkdv_block(
    dk, dv, k, v, cols, q_desc, do_desc, lse_ptr, delta_ptr, b, h, at, m, S, scale, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Add a block of queries to dK / scale and dV; scores and weights are transposed, keys by queries."""
    rows = m + tl.arange(0, BLOCK_M)
    q = q_desc.load([b, h, m, 0]).reshape(BLOCK_M, D)
    lse = tl.load(lse_ptr + at + rows, mask=rows < S, other=float("inf")) * LOG2_E  # beyond S all weights are 0
    weights = tl.exp2(tl.dot(k, q.T) * scale - lse[None, :])
    do = do_desc.load([b, h, m, 0]).reshape(BLOCK_M, D)
    delta = tl.load(delta_ptr + at + rows, mask=rows < S, other=0.0)
    dscores = weights * (tl.dot(v, do.T) - delta[None, :])
    if MASKED:
        seen = cols[:, None] <= rows[None, :]
        weights = tl.where(seen, weights, 0.0)
        dscores = tl.where(seen, dscores, 0.0)
    dv = tl.dot(weights.to(do.dtype), do, dv)
    return tl.dot(dscores.to(q.dtype), q, dk), dv


@triton.jit
def flash_attention_dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, lse_ptr, delta_ptr, scale, H, Q_PER_KV, S, S_KV,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N keys, and all queries of all heads that share them. Causal: the first keys have the most queries."""
    blocks = tl.cdiv(S_KV, BLOCK_N)
    bh, start_n = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_N
    b, h_kv = bh // (H // Q_PER_KV), bh % (H // Q_PER_KV)
    cols = start_n + tl.arange(0, BLOCK_N)
    k = k_desc.load([b, h_kv, start_n, 0]).reshape(BLOCK_N, D)
    v = v_desc.load([b, h_kv, start_n, 0]).reshape(BLOCK_N, D)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    tl.static_assert(BLOCK_N % BLOCK_M == 0)
    first_whole = start_n + BLOCK_N if CAUSAL else 0
    for i in range(Q_PER_KV):
        h = h_kv * Q_PER_KV + i
        at = (b * H + h).to(tl.int64) * S
        if CAUSAL:
            for m in tl.range(start_n, min(first_whole, S), BLOCK_M, num_stages=1):
                dk, dv = _dkdv_block(
                    dk, dv, k, v, cols, q_desc, do_desc, lse_ptr, delta_ptr, b, h, at, m, S, scale, True, BLOCK_M, D
                )
        for m in tl.range(first_whole, S, BLOCK_M, num_stages=STAGES):
            dk, dv = _dkdv_block(
                dk, dv, k, v, cols, q_desc, do_desc, lse_ptr, delta_ptr, b, h, at, m, S, scale, False, BLOCK_M, D
            )
    dk_desc.store([b, h_kv, start_n, 0], (dk * (scale * LN_2)).to(dk_desc.dtype).reshape(1, 1, BLOCK_N, D))
    dv_desc.store([b, h_kv, start_n, 0], dv.to(dv_desc.dtype).reshape(1, 1, BLOCK_N, D))


def launch_backward(
    q, k, v, o, lse, do, scale: float, causal: bool, hopper: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, contiguous, of operands that are checked: q, o and do [B, H, S, D], k and v [B, H_kv, S_kv, D] and
    lse float32 [B, H, S]; o, do and lse are contiguous, and `scale` includes log2(e). `hopper`: whether to launch the
    kernels of flash_attention_hopper_backward.py; None: on sm_90."""
    (B, H, S, D), (_, H_kv, S_kv, _) = q.shape, k.shape
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not q.numel():  # no query asks for a key
        return dq, dk.zero_(), dv.zero_()
    if hopper or (hopper is None and gluon_architecture(q.device) == 90):
        launch_hopper_backward(q, k, v, o, lse, do, dq, dk, dv, scale, causal)
        return dq, dk, dv
    delta = torch.empty_like(lse)
    (dq_m, dq_n, dq_warps), (kv_m, kv_n, kv_warps) = DQ_TILES[D], DKDV_TILES[D]
    of_q, of_kv = (lambda x: tma_descriptor(x, [1, 1, dq_m, D])), (lambda x: tma_descriptor(x, [1, 1, dq_n, D]))
    sizes = scale, H, H // H_kv, S, S_kv
    flash_attention_dq_kernel[(triton.cdiv(S, dq_m) * B * H,)](
        of_q(q), of_kv(k), of_kv(v), of_q(o), of_q(do), of_q(dq), lse, delta, *sizes,
        BLOCK_M=dq_m, BLOCK_N=dq_n, D=D, CAUSAL=causal, RAGGED=S_kv % dq_n > 0, STAGES=STAGES, num_warps=dq_warps,
    )  # fmt: skip
    of_q, of_kv = (lambda x: tma_descriptor(x, [1, 1, kv_m, D])), (lambda x: tma_descriptor(x, [1, 1, kv_n, D]))
    flash_attention_dkdv_kernel[(triton.cdiv(S_kv, kv_n) * B * H_kv,)](
        of_q(q), of_kv(k), of_kv(v), of_q(do), of_kv(dk), of_kv(dv), lse, delta, *sizes,
        BLOCK_M=kv_m, BLOCK_N=kv_n, D=D, CAUSAL=causal, STAGES=STAGES, num_warps=kv_warps,
    )  # fmt: skip
    return dq, dk, dv


class FlashAttention(torch.autograd.Function):
    """What autograd calls; `forward` is flash_attention's own, on operands that need no gradient."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, forward, hopper):
        o, lse = forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = scale, causal, hopper
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        return *FlashAttentionBackward.apply(do, *ctx.saved_tensors, *ctx.options), None, None, None, None


class FlashAttentionBackward(torch.autograd.Function):
    """A node of its own, so that differentiating again is an error, as LayerNormBackward is."""

    @staticmethod
    def forward(ctx, do, q, k, v, o, lse, scale, causal, hopper):
        do = do.contiguous()  # the gradient of a sum is one number expanded, which TMA cannot load
        require_tma_layout("flash_attention", do=do)
        return launch_backward(q, k, v, o, lse, do, scale, causal, hopper)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("flash_attention: its gradient has no derivative; use torch's attention for that")


def reference_backward(q, k, v, do, causal: bool = False, scale: float | None = None) -> tuple[torch.Tensor, ...]:
    """o, dq, dk and dv in float64, one head at a time: the scores of all of them would fill a GPU."""
    (B, H, S, D), (_, H_kv, S_kv, _) = q.shape, k.shape
    scale = D**-0.5 if scale is None else scale
    o, dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, q, k, v))
    hidden = torch.ones(S, S_kv, dtype=torch.bool, device=q.device).triu(1) if causal else None
    for b, h in itertools.product(range(B), range(H)):
        h_kv = h // (H // H_kv)
        query, key, value, grad = (x.double() for x in (q[b, h], k[b, h_kv], v[b, h_kv], do[b, h]))
        scores = query @ key.T * scale
        weights = torch.softmax(scores.masked_fill_(hidden, -math.inf) if causal else scores, -1)
        o[b, h] = weights @ value
        dscores = weights * (grad @ value.T - (o[b, h] * grad).sum(-1, keepdim=True)) * scale
        dq[b, h] = dscores @ key
        dk[b, h_kv] += dscores.T @ query
        dv[b, h_kv] += weights.T @ grad
    return o, dq, dk, dv
