"""FP8 flash attention: both products in e4m3, and what it takes to keep them fed.

Technique  softmax(scale * Q K^T) V with Q, K and V in e4m3 and one float32 scale for each head (or each tensor). Scales
           cost nothing inside the loop: those of Q and K join the scale of the softmax, that of V the division at the
           end. The softmax stays in float32; its weights are rounded to e4m3 for the second product.
           Weights of at most 1 would use e4m3 badly: below 2**-6 it has fewer bits, below 2**-10 none. So they are
           computed as exp2(s - max + 8), which is free, and lie in (0, 256] of the 448 there are: a weight of 2**-14
           of the largest is still rounded to 4 bits. The sum has the same factor, so the division removes it. (Hopper's
           FP8 accumulator keeps about 14 bits: beside one large weight, many small ones lose part of what they add.)
           FP8 tensor cores read both operands along the dimension that is summed over, for V along the keys. So V is
           stored transposed, [D, keys], when it is quantized, as a cache of keys and values would hold it.
           And in an order. A thread gets its scores in pairs of neighbours, 8 keys apart, and must hand over weights in
           fours of neighbours: a shuffle, a selection and a permutation of bytes for each four. But the order of the
           keys in a sum is free. If V holds the keys of every 16 in the order 0 1 8 9 2 3 10 11 ..., the weights lie
           where they belong from the start.
           At twice the rate of bfloat16 the products take no longer than the exponentials (16 a clock and SM), so the
           two must overlap inside one program: the second product of a block is started after the scores of the next
           block, and the tensor cores work on it while the weights of that next block are computed.
           Q is passed through registers, which takes its reading off shared memory.
Question   How much faster is attention in FP8 than in bfloat16, and what does it cost in accuracy?
Needs      triton, sm_90
Shapes     q [B, H, S, D], k [B, H_kv, S_kv, D], v [B, H_kv, D, S_kv rounded up to 16] as pack_values() makes it, H a
           multiple of H_kv; scales [] or [B, H] for q, [] or [B, H_kv] for k and v -> [B, H, S, D], contiguous.
           D is 64 or 128; any S and S_kv from 1 up; causal needs S == S_kv. prepare() makes all six from 16-bit data.
Dtypes     float8_e4m3fn, scales float32 -> bfloat16 (or out_dtype=torch.float16); softmax and sums are float32.
Errors     TypeError for another dtype of data, scales or output, or a causal that is no bool; ValueError for rank,
           sizes that do not fit together, another head dim, no keys, V in another layout, a scale of the wrong shape
           or device or that is not positive and finite (check_scales=False does not read their values, which waits for
           the GPU), a layout TMA cannot load (last dimension contiguous, other strides and the start multiples of 16
           bytes); RuntimeError for a device without Triton or an input that requires grad.
Wins when  K and V are quantized once and read often (a cache), or the producer of Q, K and V writes FP8 itself. Where
           bfloat16 has to be quantized for each call, that pass over memory belongs to the price: the run times it.
Source     Shah et al. 2024 (FlashAttention-3: FP8, overlap of products and softmax); Dao et al. 2022.
Run        python examples/fp8/fp8_attention.py
"""

from __future__ import annotations

import functools
import math
import statistics

from harness import (
    Harness,
    Work,
    quantize_reference,
    require_fp8,
    require_scales,
    require_tma_layout,
    require_triton_device,
    run,
    tma_descriptor,
)

import torch
import triton
import triton.language as tl

E4M3 = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float16)
# Head dim -> BLOCK_M, BLOCK_N, warps, stages. Causal: BLOCK_N a multiple of BLOCK_M.
# Chosen by timing on an H200: two programs share an SM.
TILES = {64: (64, 64, 4, 3), 128: (64, 128, 4, 3)}
HEADS = 8  # causal: heads whose tiles run side by side; K and V of 8 heads of 4096 x 128 are 8 MiB of L2
GROUP = 16  # keys that share one order in V


@triton.jit
def _weights(scores, row_max, scale):
    """2**8 times the weights of a block under the new maximum, that maximum, and what the old weights shrink by."""
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - (new_max - 8.0)[:, None])
    return weights, new_max, tl.exp2(row_max - new_max)


@triton.jit
def _operand(weights, dtype: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The weights in FP8, with the keys in V's order: no value moves from its thread."""
    pairs = weights.to(dtype).reshape(BLOCK_M, BLOCK_N // 16, 2, 4, 2)
    return pairs.permute(0, 1, 3, 2, 4).reshape(BLOCK_M, BLOCK_N)


@triton.jit
def fp8_attention_kernel(
    q_desc, k_desc, v_desc, o_desc, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    stride_qsb, stride_qsh, stride_ksb, stride_ksh, stride_vsb, stride_vsh, scale, H, GROUP_SIZE, S, S_KV,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    HEADS: tl.constexpr, STAGES: tl.constexpr,
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

    q_scale = tl.load(q_scale_ptr + b * stride_qsb + h * stride_qsh)
    k_scale = tl.load(k_scale_ptr + b * stride_ksb + h_kv * stride_ksh)
    v_scale = tl.load(v_scale_ptr + b * stride_vsb + h_kv * stride_vsh)
    # Not below the smallest normal number: 0 times the -inf of a masked score would be NaN.
    scale = tl.maximum(scale * q_scale * k_scale, 1.1754944e-38, propagate_nan=tl.PropagateNan.ALL)
    q = q_desc.load([b, h, start_m, 0]).reshape(BLOCK_M, D)
    # There and back changes no value. But what was only loaded the tensor cores read from shared memory, in every
    # block, and what was computed with stays in registers. Besides, where eight warps read it from shared memory ptxas
    # waits for each wgmma by itself (its remark C7515), and then nothing overlaps.
    q = q.to(tl.float16).to(q.dtype)

    # The one block that needs a mask comes first: the one on the diagonal, or the last one when it is not full. Every
    # row sees a key in it, so its maximum is finite. Without such a block, block 0 comes first.
    tl.static_assert(BLOCK_N % BLOCK_M == 0 or not CAUSAL, "causal: the diagonal would cross several blocks of keys")
    MASKED: tl.constexpr = CAUSAL or RAGGED
    whole = (start_m if CAUSAL else S_KV) // BLOCK_N * BLOCK_N
    opening = whole if MASKED else 0
    k = k_desc.load([b, h_kv, opening, 0]).reshape(BLOCK_N, D)
    scores = tl.dot(q, k.T)
    if MASKED:
        cols = opening + tl.arange(0, BLOCK_N)
        rows = start_m + tl.arange(0, BLOCK_M)
        seen = (cols[None, :] <= rows[:, None]) if CAUSAL else (cols < S_KV)[None, :]
        scores = tl.where(seen, scores, -float("inf"))
    row_max = tl.full((BLOCK_M,), -3.4e38, tl.float32)
    weights, row_max, shrink = _weights(scores, row_max, scale)
    row_sum = tl.sum(weights, axis=1)
    acc = tl.zeros((BLOCK_M, D), tl.float32)

    begin = 0 if MASKED else BLOCK_N
    for n in tl.range(begin, whole, BLOCK_N, num_stages=STAGES):
        k = k_desc.load([b, h_kv, n, 0]).reshape(BLOCK_N, D)
        scores = tl.dot(q, k.T)
        # The second product of the block before. Nothing in this pass waits for it, so it runs beside what follows.
        v = v_desc.load([b, h_kv, 0, tl.where(n == begin, opening, n - BLOCK_N)]).reshape(D, BLOCK_N)
        acc = tl.dot(_operand(weights, v.dtype, BLOCK_M, BLOCK_N), v.T, acc * shrink[:, None])
        weights, row_max, shrink = _weights(scores, row_max, scale)
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
    v = v_desc.load([b, h_kv, 0, tl.where(whole > begin, whole - BLOCK_N, opening)]).reshape(D, BLOCK_N)
    acc = tl.dot(_operand(weights, v.dtype, BLOCK_M, BLOCK_N), v.T, acc * shrink[:, None])

    o = (acc * (1.0 / row_sum)[:, None] * v_scale).to(o_desc.dtype)
    o_desc.store([b, h, start_m, 0], o.reshape(1, 1, BLOCK_M, D))  # TMA drops rows beyond S


def fp8_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    q_scale: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor,
    causal: bool = False, scale: float | None = None,
    *, out_dtype: torch.dtype = torch.bfloat16, check_scales: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Attention over what q, k and v stand for, q * q_scale and so on; limits are in the module docstring."""
    name = "fp8_attention"
    require_triton_device(name, q, k, v)
    require_fp8(name, q=q, k=k, v=v)
    if not q.dtype == k.dtype == v.dtype == E4M3:
        raise TypeError(f"{name}: dtypes {q.dtype}, {k.dtype}, {v.dtype}; quantize all three to {E4M3}")
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {OUT_DTYPES}")
    if not isinstance(causal, bool):
        raise TypeError(f"{name}: causal is {causal!r}; pass True or False")
    shapes = f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"{name}: {shapes}; need q [B, H, S, D], k [B, H_kv, S_kv, D], v [B, H_kv, D, S_kv]")
    B, H, S, D = q.shape
    H_kv, S_kv = k.shape[1:3]
    if k.shape[0] != B or k.shape[3] != D or not H_kv or H % H_kv:
        raise ValueError(f"{name}: {shapes}; k needs q's B and D and a number of heads dividing H")
    if D not in TILES:
        raise ValueError(f"{name}: head dim {D} is not one of {tuple(TILES)}; pad with zeros to the next")
    if S_kv == 0:
        raise ValueError(f"{name}: {shapes}; without a key there is nothing to attend to")
    packed = (B, H_kv, D, triton.cdiv(S_kv, GROUP) * GROUP)
    if v.shape != packed:
        raise ValueError(f"{name}: {shapes}; v must be {packed}, as pack_values() makes it of [B, H_kv, S_kv, D]")
    if causal and S_kv != S:
        raise ValueError(f"{name}: causal with {S} queries and {S_kv} keys; which key a query ends at is not defined")
    if scale is None:
        scale = D**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 2**-126 <= scale < 2**127:
        raise ValueError(f"{name}: scale is {scale!r}; pass a number above 0 that is finite and normal in float32")
    require_scales(
        name, q, check_scales,
        q_scale=(q_scale, [(), (B, H)]), k_scale=(k_scale, [(), (B, H_kv)]), v_scale=(v_scale, [(), (B, H_kv)]),
    )  # fmt: skip
    require_tma_layout(name, q=q, k=k, v=v)
    o = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    if o.numel():
        block_m, block_n, num_warps, stages = TILES[D]
        # A scale of the whole tensor is one of every head, 0 apart.
        q_scale, k_scale, v_scale = q_scale.expand(B, H), k_scale.expand(B, H_kv), v_scale.expand(B, H_kv)
        fp8_attention_kernel[(triton.cdiv(S, block_m) * B * H,)](
            tma_descriptor(q, [1, 1, block_m, D]), tma_descriptor(k, [1, 1, block_n, D]),
            tma_descriptor(v, [1, 1, D, block_n]), tma_descriptor(o, [1, 1, block_m, D]), q_scale, k_scale, v_scale,
            *q_scale.stride(), *k_scale.stride(), *v_scale.stride(),
            scale * math.log2(math.e), H, H // H_kv, S, S_kv,
            BLOCK_M=block_m, BLOCK_N=block_n, D=D, CAUSAL=causal, RAGGED=S_kv % block_n > 0,
            HEADS=HEADS if causal else 1, STAGES=stages, num_warps=num_warps,
        )  # fmt: skip
    return o


def pack_values(v: torch.Tensor) -> torch.Tensor:
    """[B, H_kv, S_kv, D] -> [B, H_kv, D, S_kv rounded up to 16 with zeros], each 16 keys as 0 1 8 9 2 3 10 11 ..."""
    groups = torch.nn.functional.pad(v, (0, 0, 0, -v.shape[2] % GROUP)).unflatten(2, (-1, 2, 4, 2))
    return groups.permute(0, 1, 6, 2, 4, 3, 5).flatten(3).contiguous()


def unpack_values(v: torch.Tensor, S_kv: int) -> torch.Tensor:
    """What pack_values() was given."""
    return v.unflatten(3, (-1, 4, 2, 2)).permute(0, 1, 3, 5, 4, 6, 2).flatten(2, 5)[:, :, :S_kv]


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, per_head: bool = True, power_of_two: bool = False
) -> tuple[torch.Tensor, ...]:
    """q, k, v [B, heads, rows, D] of 16 or 32 bits -> the first six arguments of fp8_attention. Plain torch.

    `power_of_two` rounds each scale up to one: what comes out, times its scale, is then exact in bfloat16.
    """
    data, scales = [], []
    for x in (q, k, pack_values(v)):
        rows = x.reshape(x.shape[0] * x.shape[1] if per_head else 1, -1)
        if not x.numel():  # no amax
            quantized, scale = x.to(E4M3), torch.ones(len(rows), device=x.device)
        elif power_of_two:
            _, scale = quantize_reference(rows, (1, rows.shape[1]), E4M3)
            mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
            scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
            quantized = (rows.float() / scale).to(E4M3)
        else:
            quantized, scale = quantize_reference(rows, (1, rows.shape[1]), E4M3)
        data.append(quantized.view(x.shape))
        scales.append(scale.view(x.shape[:2]) if per_head else scale.view(()))
    return (*data, *scales)


def dequantize(q, k, v, q_scale, k_scale, v_scale) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the six stand for: q, k, v [B, heads, rows, D] in float64."""
    data = (q, k, unpack_values(v, k.shape[2]))
    return tuple(
        x.double() * (s if s.ndim == 0 else s[..., None, None]).double()
        for x, s in zip(data, (q_scale, k_scale, v_scale), strict=True)
    )


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale * q @ k^T) @ v in float64, one head at a time: the scores of all of them would fill a GPU."""
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


def reference(q, k, v, q_scale, k_scale, v_scale, causal: bool = False, scale: float | None = None) -> torch.Tensor:
    return attention(*dequantize(q, k, v, q_scale, k_scale, v_scale), causal, scale)


def budget(keys: int) -> dict:
    """Weights are rounded to e4m3, each by half an eps of its own; then `keys` products are summed."""
    return {"terms": keys, "operand_eps": torch.finfo(E4M3).eps / 2}


def flops(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
    """Two products of 2 * S * S_kv * D operations a head; a causal mask leaves half of them."""
    B, H, S, D = q.shape
    return 4 * B * H * S * k.shape[2] * D // (2 if causal else 1)


def library_variants(h: Harness, causal: bool) -> dict:
    """What a user of torch has in 16 bits; of FP8 attention there is none in torch."""
    if h.device.type == "cpu":
        return {}
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(backend, *data):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*data[6:], is_causal=causal)

    return {
        "cuDNN bf16": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        "torch flash bf16": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    }


def off_by(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square of a head's error over that of its answer, the mean over heads."""
    ratios = (got.double() - want).square().sum((2, 3)).sqrt() / want.square().sum((2, 3)).sqrt()
    return float(f"{ratios.mean().item():.3g}")


def show_accuracy(h: Harness, flash_attention) -> None:
    """What FP8 costs, apart: quantizing the inputs, and the arithmetic after it."""
    B, H, S, D = h.pick(interpreted=(1, 3, 70, 64), quick=(1, 4, 2048, 128), full=(1, 4, 4096, 128))
    for kind in ("normal data", "outlier channels", "heads of unequal size"):
        q, k, v = (h.randn(B, H, S, D, dtype=h.half) for _ in range(3))
        if kind == "outlier channels":  # one of 32, ten times as large
            k[..., ::32] *= 10
            v[..., ::32] *= 10
        elif kind == "heads of unequal size":  # each 1/30 of the one before
            v *= (30.0 ** -torch.arange(H, device=v.device)).to(v.dtype)[:, None, None]
        want = attention(q, k, v)
        errors = {f"{str(h.half).removeprefix('torch.')} attention": off_by(flash_attention(q, k, v), want)}
        for label, per_head in (("a scale a head", True), ("one scale", False)):
            data = prepare(q, k, v, per_head)
            inputs = errors[f"FP8 inputs, exact arithmetic, {label}"] = off_by(reference(*data), want)
            whole = errors[f"FP8 attention, {label}"] = off_by(fp8_attention(*data, out_dtype=h.half), want)
            if per_head:
                share = inputs / whole
        h.fact(f"error over the answer, {kind}", errors)
        h.say(f"exact arithmetic on those inputs would leave {share:.0%} of the error of FP8 attention, a scale a head")


def show_preparation(h: Harness, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_ms: float) -> None:
    from harness.hardware import ceilings, gpu_ms

    ms = statistics.median(gpu_ms(lambda: prepare(q, k, v)))
    moved = sum(x.numel() * (2 * x.element_size() + 1) for x in (q, k, v))  # read for amax, read again, write
    least = moved / ceilings().copy_tbps() / 1e9
    h.fact("prepare() in eager torch, ms", round(ms, 3))
    h.say(
        f"quantizing Q, K and V for one call costs {ms:.2f} ms that way, {ms / attention_ms:.1f} times the attention; "
        f"at the speed of a copy its bytes would take {least:.2f} ms, {least / attention_ms:.0%} of it"
    )


def demo(h: Harness) -> None:
    from examples.triton.flash_attention import flash_attention

    # One query and key, primes, one tile plus one; fewer keys than queries; heads that share keys; every head dim.
    for D in TILES:
        for S, S_kv, causal in [(1, 1, False), (130, 67, False), (129, 129, True)]:
            q = h.randn(1, 2, S, D, dtype=h.half)
            k, v = (h.randn(1, 1, S_kv, D, dtype=h.half) for _ in range(2))
            what = f"fp8_attention {S}x{S_kv}x{D}{' causal' if causal else ''}"
            ours = functools.partial(fp8_attention, out_dtype=h.half)
            h.check(ours, reference, *prepare(q, k, v), causal, what=what, dtype=h.half, **budget(S_kv))

    x, s = h.meta(4, 32, 4096, 128, dtype=E4M3), h.meta(4, 32, dtype=torch.float32)
    tma = ("cp.async.bulk.tensor", "mbarrier")
    find = {90: (*tma, "mma f8", "wgmma"), 100: (*tma, "mma f8", "tcgen05.mma"), 120: (*tma, "mma f8", "mma.sync")}
    h.codegen(fp8_attention, x, x, x.transpose(2, 3).contiguous(), s, s, s, find=find)

    cases = h.pick(
        interpreted=[(1, 2, 200, 64)],
        quick=[(1, 16, 4096, 128), (1, 16, 4096, 64)],
        full=[(4, 32, 4096, 128), (1, 32, 16384, 128)],
    )
    ours, best = [], []
    for B, H, S, D in cases:
        # Scales of powers of two: then bfloat16 holds what the FP8 stands for, and all variants compute the same.
        data = prepare(*(h.randn(B, H, S, D, dtype=h.half) for _ in range(3)), power_of_two=True)
        exact = [x.to(h.half) for x in dequantize(*data)]
        for causal in (False, True):
            case = f"{B}x{H}x{S}x{D} {'causal' if causal else ''}".strip()
            libraries = library_variants(h, causal)
            fp8 = functools.partial(fp8_attention, causal=causal, out_dtype=h.half, check_scales=False)
            variants = {
                "triton bf16": lambda *data, causal=causal: flash_attention(*data[6:], causal),
                **libraries,
                "triton FP8": lambda *data, fp8=fp8: fp8(*data[:6]),
            }
            work = Work(
                bytes=sum(x.nbytes for x in data) + exact[0].nbytes, flops=flops(*data[:2], causal), dtype=E4M3
            )  # the percentage is of the FP8 ceiling, for every row
            table = h.compare(
                variants, lambda *data, causal=causal: reference(*data[:6], causal), *data, *exact,
                baseline="triton bf16", case=case, work=work, dtype=h.half, **budget(S),
            )  # fmt: skip
            if table and table.rows[-1].ms:
                ours.append(table.rows[-1].speedup)
                library_ms = min(row.ms for row in table.rows if not row.ours)
                best.append(library_ms / table.rows[-1].ms)
                h.say(
                    f"FP8 took 1/{table.rows[-1].speedup:.2f} of the time of the same attention in bf16 of this "
                    f"repository, 1/{best[-1]:.2f} of that of the faster library"
                )
                if not causal:
                    show_preparation(h, *exact, table.rows[-1].ms)
    if not h.profile:
        show_accuracy(h, flash_attention)
    if ours:
        h.fact("geometric mean over triton bf16", round(statistics.geometric_mean(ours), 4))
        h.fact("least over triton bf16", round(min(ours), 4))
        h.fact("geometric mean over the faster library", round(statistics.geometric_mean(best), 4))


if __name__ == "__main__":
    run(demo)
