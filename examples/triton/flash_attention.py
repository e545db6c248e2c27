"""Flash attention: the scores never leave the chip, so attention is bound by arithmetic and not by memory.

Technique  softmax(scale * Q K^T) V in one kernel. Written out, the scores of a head are S * S values that go to memory
           and come back at least twice; for S = 16384 in bfloat16 that is 0.5 GB a pass and head, against 16 MB
           of Q, K, V and O. A program owns BLOCK_M rows of Q and walks over K and V in blocks of BLOCK_N rows.
           What makes this possible is the online softmax. For a row, after some blocks, keep
               m = max of the scores s_j seen,   l = sum of exp(s_j - m),   acc = sum of exp(s_j - m) * v_j.
           A new block may raise the maximum to m'. Since exp(s - m') = exp(s - m) * exp(m - m'), multiplying l and acc
           by alpha = exp(m - m') makes them what they would have been under m'; then the new block is added. At the end
           acc / l is the exact answer, in any order of blocks. exp2 is the instruction the GPU has, so the scale
           carries the factor log2(e).
           Which tile: the tensor cores idle while a program computes exponentials, and nothing in one program fills
           that gap, because its warps meet at a barrier in every block. So a tile of 128 rows is given 4 warps and
           not 8: two such programs share an SM, and one multiplies while the other exponentiates. Causal tiles have
           unequal work, so the longest start first, a few heads at a time whose K and V fit L2.
Question   What does it take to compute attention without ever storing the scores, and how fast is that in Triton?
Needs      triton, sm_90
Shapes     q [B, H, S, D], k and v [B, H_kv, S_kv, D] with H a multiple of H_kv (grouped queries) -> [B, H, S, D],
           contiguous. D is 64 or 128; any S and S_kv from 1 up; causal needs S == S_kv.
Dtypes     float16, bfloat16, all three the same; scores, maxima, sums and the accumulator are float32; the weights are
           rounded to the input dtype for the second product.
Errors     TypeError for another dtype, or causal that is no bool; ValueError for rank, sizes that do not fit together,
           another head dim, no keys, a scale that is not positive and finite in float32, or a layout TMA cannot load
           (last dimension contiguous, other strides and the start multiples of 16 bytes); RuntimeError for a device
           without Triton or an input that requires grad.
Wins when  the library has no fused kernel for the variant wanted. cuDNN's kernel, which overlaps exponentials and
           products inside one program, stays ahead on Hopper: the table says by how much.
Source     Dao et al. 2022 and Shah et al. 2024 (FlashAttention 1 and 3); online softmax: Milakov and Gimelshein 2018.
Run        python examples/triton/flash_attention.py
"""

from __future__ import annotations

import functools
import math
import statistics

from harness import Harness, Work, require_tma_layout, require_triton_device, run, tma_descriptor

import torch
import triton
import triton.language as tl

DTYPES = (torch.float16, torch.bfloat16)
# Head dim -> BLOCK_M, BLOCK_N, warps, stages, and whether V is loaded before K: chosen by timing on an H200.
TILES = {64: (128, 64, 4, 3, True), 128: (128, 64, 4, 2, False)}
HEADS = 8  # causal: heads whose tiles run side by side; K and V of 8 heads of 4096 x 128 are 16 MiB of L2


@triton.jit
def _online_softmax(scores, row_max, row_sum, scale):
    """Fold a block of raw scores into the running maximum and sum: weights, new maximum, new sum, alpha. scale > 0."""
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    return weights, new_max, row_sum * alpha + tl.sum(weights, axis=1), alpha


@triton.jit
def flash_attention_kernel(
    q_desc, k_desc, v_desc, o_desc, scale, H, GROUP_SIZE, S, S_KV,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    HEADS: tl.constexpr, STAGES: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    # Bands of HEADS heads; in a band all heads' longest tile first, then all heads' second longest, and so on.
    pid = tl.program_id(0)
    tiles = tl.cdiv(S, BLOCK_M)
    first = pid // (HEADS * tiles) * HEADS
    band = min(tl.num_programs(0) // tiles - first, HEADS)
    head = first + pid % (HEADS * tiles) % band
    tile = pid % (HEADS * tiles) // band
    if CAUSAL:
        tile = tiles - 1 - tile
    b, h = head // H, head % H
    h_kv = h // GROUP_SIZE
    start_m = tile * BLOCK_M

    q = q_desc.load([b, h, start_m, 0]).reshape(BLOCK_M, D)
    if D == 64:
        # This changes nothing but -0.0, which no score shows. What was only loaded the tensor cores read from shared
        # memory; what was computed with stays in registers, and the first product then reads half as much from there.
        # At D = 128 it would spill.
        q = q + 0.0
    # Not -inf: a row that has seen only scores of -inf would compute -inf - -inf = NaN.
    row_max = tl.full((BLOCK_M,), -3.4e38, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)

    # Blocks in which every score counts: left of the diagonal, and not beyond the last key.
    tl.static_assert(BLOCK_M % BLOCK_N == 0 or not CAUSAL, "causal: the last whole block would cross the diagonal")
    whole = start_m if CAUSAL else S_KV // BLOCK_N * BLOCK_N
    for n in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
        if V_FIRST:  # right before k, one barrier serves both
            v = v_desc.load([b, h_kv, n, 0]).reshape(BLOCK_N, D)
        k = k_desc.load([b, h_kv, n, 0]).reshape(BLOCK_N, D)
        weights, row_max, row_sum, alpha = _online_softmax(tl.dot(q, k.T), row_max, row_sum, scale)
        if not V_FIRST:
            v = v_desc.load([b, h_kv, n, 0]).reshape(BLOCK_N, D)
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None])
    # The rest needs a mask. Rows of K and V beyond the end arrive as zeros, so 0 * v is 0 there and not NaN. A hidden
    # key has weight 0 too, but any v: NaN or infinity in it reaches the rows of its block that do not see it.
    if CAUSAL or RAGGED:
        rows = start_m + tl.arange(0, BLOCK_M)
        for n in tl.range(whole, min(S_KV, start_m + BLOCK_M) if CAUSAL else S_KV, BLOCK_N, num_stages=1):
            k = k_desc.load([b, h_kv, n, 0]).reshape(BLOCK_N, D)
            cols = n + tl.arange(0, BLOCK_N)
            seen = (cols[None, :] <= rows[:, None]) if CAUSAL else (cols < S_KV)[None, :]
            scores = tl.where(seen, tl.dot(q, k.T), -float("inf"))
            weights, row_max, row_sum, alpha = _online_softmax(scores, row_max, row_sum, scale)
            v = v_desc.load([b, h_kv, n, 0]).reshape(BLOCK_N, D)
            acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None])

    o = (acc / row_sum[:, None]).to(o_desc.dtype)
    o_desc.store([b, h, start_m, 0], o.reshape(1, 1, BLOCK_M, D))  # TMA drops rows beyond S


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale * q @ k^T) @ v per head, scale 1 / sqrt(D) unless given; limits are in the module docstring."""
    name = "flash_attention"
    require_triton_device(name, q, k, v)
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"{name}: dtypes {q.dtype}, {k.dtype}, {v.dtype}; all must be the same one of {DTYPES}")
    if not isinstance(causal, bool):
        raise TypeError(f"{name}: causal is {causal!r}; pass True or False")
    shapes = f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"{name}: {shapes}; need q [B, H, S, D] and k, v [B, H_kv, S_kv, D]")
    B, H, S, D = q.shape
    H_kv, S_kv = k.shape[1:3]
    if k.shape != v.shape or k.shape[0] != B or k.shape[3] != D or not H_kv or H % H_kv:
        raise ValueError(f"{name}: {shapes}; k and v must be alike, with q's B and D and a number of heads dividing H")
    if D not in TILES:
        raise ValueError(f"{name}: head dim {D} is not one of {tuple(TILES)}; pad q, k and v with zeros to the next")
    if S_kv == 0:
        raise ValueError(f"{name}: {shapes}; without a key there is nothing to attend to")
    if causal and S_kv != S:
        raise ValueError(f"{name}: causal with {S} queries and {S_kv} keys; which key a query ends at is not defined")
    if scale is None:
        scale = D**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 2**-126 <= scale < 2**127:
        raise ValueError(f"{name}: scale is {scale!r}; pass a number above 0 that is finite and normal in float32")
    require_tma_layout(name, q=q, k=k, v=v)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if o.numel():
        block_m, block_n, num_warps, stages, v_first = TILES[D]
        flash_attention_kernel[(triton.cdiv(S, block_m) * B * H,)](
            tma_descriptor(q, [1, 1, block_m, D]), tma_descriptor(k, [1, 1, block_n, D]),
            tma_descriptor(v, [1, 1, block_n, D]), tma_descriptor(o, [1, 1, block_m, D]),
            scale * math.log2(math.e), H, H // H_kv, S, S_kv,
            BLOCK_M=block_m, BLOCK_N=block_n, D=D, CAUSAL=causal, RAGGED=S_kv % block_n > 0,
            HEADS=HEADS if causal else 1, STAGES=stages, V_FIRST=v_first, num_warps=num_warps,
        )  # fmt: skip
    return o


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """The same in float64, one head at a time: the scores of all of them would fill a GPU."""
    B, H, S, D = q.shape
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    hidden = torch.ones(S, k.shape[2], dtype=torch.bool, device=q.device).triu(1) if causal else None
    for b in range(B):
        for h in range(H):
            h_kv = h // (H // k.shape[1])
            scores = q[b, h].double() @ k[b, h_kv].double().T * (D**-0.5 if scale is None else scale)
            if causal:
                scores.masked_fill_(hidden, -math.inf)
            out[b, h] = torch.softmax(scores, dim=-1) @ v[b, h_kv].double()
    return out


def budget(dtype: torch.dtype, keys: int) -> dict:
    """Weights are rounded to the input dtype, each by half an eps of its own; then `keys` products are summed."""
    return {"terms": keys, "operand_eps": torch.finfo(dtype).eps / 2}


def flops(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
    """Two products of 2 * S * S_kv * D operations a head; a causal mask leaves half of them."""
    B, H, S, D = q.shape
    return 4 * B * H * S * k.shape[2] * D // (2 if causal else 1)


def library_variants(h: Harness, S: int, causal: bool) -> dict:
    """The calls a user of torch has: its own flash attention, cuDNN's, and FlexAttention through the compiler."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attention = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal)
    if h.device.type == "cpu":
        return {"torch": attention}

    def sdpa(backend, q, k, v):
        with sdpa_kernel(backend):
            return attention(q, k, v)

    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device=h.device)
    return {
        "FlexAttention": h.compiled(functools.partial(flex_attention, block_mask=mask)),
        "torch flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "cuDNN": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    }


def demo(h: Harness) -> None:
    # One query and key, primes, one tile plus one; fewer keys than queries; heads that share keys; every head dim.
    for D in TILES:
        for S, S_kv, causal in [(1, 1, False), (130, 67, False), (129, 129, True)]:
            q = h.randn(1, 2, S, D, dtype=h.half)
            k, v = (h.randn(1, 1, S_kv, D, dtype=h.half) for _ in range(2))
            what = f"flash_attention {S}x{S_kv}x{D}{' causal' if causal else ''}"
            h.check(flash_attention, reference, q, k, v, causal, what=what, **budget(h.half, S_kv))
    # [B, S, H, D] in memory, as a projection leaves it, seen as [B, H, S, D].
    q, k, v = (h.randn(2, 70, 3, 64, dtype=h.half).transpose(1, 2) for _ in range(3))
    what = "flash_attention of transposed [2, 70, 3, 64]"
    h.check(flash_attention, reference, q, k, v, True, what=what, **budget(h.half, 70))

    x, tma = h.meta(4, 32, 4096, 128), ("cp.async.bulk.tensor", "mbarrier")
    find = {90: (*tma, "wgmma"), 100: (*tma, "tcgen05.mma"), 120: (*tma, "mma.sync")}
    h.codegen(flash_attention, x, x, x, find=find)

    cases = h.pick(
        interpreted=[(1, 2, 200, 64)],
        quick=[(1, 16, 4096, 128), (1, 16, 4096, 64)],
        full=[(4, 32, 4096, 128), (1, 32, 16384, 128), (4, 32, 4096, 64)],
    )
    speedups = []
    for B, H, S, D in cases:
        q, k, v = (h.randn(B, H, S, D, dtype=h.half) for _ in range(3))
        for causal in (False, True):
            libraries = library_variants(h, S, causal)
            case = f"{B}x{H}x{S}x{D} {str(h.half).removeprefix('torch.')}{' causal' if causal else ''}"
            table = h.compare(
                libraries | {"triton flash": functools.partial(flash_attention, causal=causal)},
                functools.partial(reference, causal=causal), q, k, v, baseline=next(iter(libraries)), case=case,
                work=Work(bytes=4 * q.nbytes, flops=flops(q, k, causal), dtype=h.half), **budget(h.half, S),
            )  # fmt: skip
            if table and table.rows[-1].ms:
                speedups.append(table.rows[-1].speedup)
                moved, scores = 4 * q.nbytes, B * H * S * S * q.element_size()
                h.say(
                    f"Q, K, V and O are {moved / 1e9:.2f} GB, {flops(q, k, causal) / moved:.0f} operations a byte; "
                    f"scores written and read once would make it {(moved + 2 * scores) / 1e9:.1f} GB, "
                    f"{flops(q, k, causal) / (moved + 2 * scores):.0f} operations a byte"
                )
    if speedups:
        h.fact("geometric mean over FlexAttention", round(statistics.geometric_mean(speedups), 4))


if __name__ == "__main__":
    run(demo)
