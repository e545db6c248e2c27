"""FP8 flash attention: both products in e4m3, and what it takes to keep them fed.

softmax(scale * Q K^T) V with Q, K and V in e4m3, one float32 scale for each head or tensor. Scales cost nothing inside
the loop: those of Q and K are folded into the softmax's, that of V into the final division. The softmax stays in
float32, and its weights are rounded to e4m3 for the second product:

  range       as exp2(s - max + 8), weights lie in (0, 256], where e4m3 has 4 significant bits down to 2**-14 of the
              largest weight; in (0, 1] it would have them down to 2**-6. The division by the sum removes the factor;
  layout      FP8 tensor cores read both operands along the summed dimension, for V the keys: V is stored transposed,
              which is part of the price of quantizing (prepare() in the variant);
  order       a thread holds the scores of keys 0 1 8 9 where the second product wants the weights of 0 1 2 3. The order
              of the keys is free, so V stores every 16 as 0 1 8 9 2 3 10 11 ...: no weight moves;
  overlap     in FP8 the MMAs take no longer than the exponentials. Here the second product of a block is issued after
              the scores of the next one, and runs while the weights of that one are computed;
  sums        Hopper's tensor cores keep about 14 bits of a sum and cut off the rest. Where V has a mean of 0 the sum is
              small; where its mean is as large as its spread, long rows lose accuracy (study).

Question   How much faster is attention in FP8 than in bfloat16, and what does it cost in accuracy?
Needs      triton, sm_90
Wins when  K and V are quantized once and read often (a cache), or their producer writes FP8. Where bfloat16 must be
           quantized for each call, that pass over memory is part of the price: the study times it.
Variants   fp8_attention_hopper.py (in Gluon, the default on sm_90), fp8_attention_operands.py (how Q, K and V are
           quantized and V is packed)
Study      studies/fp8/fp8_attention.py
Source     goes beyond the chapter; Shah et al. 2024 (FlashAttention-3); Dao et al. 2022
"""

from __future__ import annotations

import functools
import math

from harness import Harness, Work, geomean, run

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend

from examples.common.attention import attention_budget, attention_flops, attention_reference, check_attention, sdpa
from examples.common.compiled import over_library
from examples.common.device import require_triton_device
from examples.common.fp8 import E4M3
from examples.common.gluon import gluon_architecture, require_wgmma
from examples.common.operands import check_choice
from examples.common.tma import tma_descriptor
from examples.common.untraced import untraced
from examples.fp8.fp8_attention_hopper import launch_hopper
from examples.fp8.fp8_attention_operands import check_dtypes, check_operands, dequantize, off_by, prepare, reference

OUT_DTYPES, VARIANTS = (torch.bfloat16, torch.float16), ("tiles", "warp specialized")
# Head dim -> BLOCK_M, BLOCK_N (causal: a multiple of it), warps, stages, by timing on an H200: two programs an SM.
TILES = {64: (64, 64, 4, 3), 128: (64, 128, 4, 3)}
HEADS = 8  # causal: heads whose tiles run side by side; K and V of 8 heads of 4096 x 128 are 8 MiB of L2


@triton.jit
def _weights(scores, row_max, scale):
    """The weights of a block times 2**8, the new maximum of each row, and the factor for the old accumulator."""
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - (new_max - 8.0)[:, None])
    return weights, new_max, tl.exp2(row_max - new_max)


@triton.jit
def _operand(weights, dtype: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The weights in FP8, with the keys in V's order: no value moves from its thread."""
    pairs = weights.to(dtype).reshape(BLOCK_M, BLOCK_N // 16, 2, 4, 2)
    return pairs.permute(0, 1, 3, 2, 4).reshape(BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["S", "S_KV"])  # a constant S_KV of 1 makes all weights equal: see pack_weights()
def fp8_attention_kernel(
    q_desc, k_desc, v_desc, o_desc, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    stride_qsb, stride_qsh, stride_ksb, stride_ksh, stride_vsb, stride_vsh, scale, H, GROUP_SIZE, S, S_KV,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Groups of HEADS heads; in a group all heads' longest tile first, then all heads' second longest, and so on.
    pid = tl.program_id(0)
    tiles = tl.cdiv(S, BLOCK_M)
    first = pid // (HEADS * tiles) * HEADS
    heads = min(tl.num_programs(0) // tiles - first, HEADS)
    head = first + pid % (HEADS * tiles) % heads
    tile = pid % (HEADS * tiles) // heads
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
    # No value changes; without the casts wgmma reads Q from shared memory for every block of keys.
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
        # Before the scores, so no product is in flight when a pass begins. Triton 3.9 copies Q's registers there, for
        # which ptxas would serialize the products; and the first K's shared memory is free, so two programs fit an SM.
        acc *= shrink[:, None]
        k = k_desc.load([b, h_kv, n, 0]).reshape(BLOCK_N, D)
        scores = tl.dot(q, k.T)
        v = v_desc.load([b, h_kv, 0, tl.where(n == begin, opening, n - BLOCK_N)]).reshape(D, BLOCK_N)
        acc = tl.dot(_operand(weights, v.dtype, BLOCK_M, BLOCK_N), v.T, acc)
        weights, row_max, shrink = _weights(scores, row_max, scale)
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
    v = v_desc.load([b, h_kv, 0, tl.where(whole > begin, whole - BLOCK_N, opening)]).reshape(D, BLOCK_N)
    acc = tl.dot(_operand(weights, v.dtype, BLOCK_M, BLOCK_N), v.T, acc * shrink[:, None])

    o = (acc * (1.0 / row_sum)[:, None] * v_scale).to(o_desc.dtype)
    o_desc.store([b, h, start_m, 0], o.reshape(1, 1, BLOCK_M, D))  # TMA drops rows beyond S


@untraced
def fp8_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    q_scale: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor,
    causal: bool = False, scale: float | None = None,
    *, out_dtype: torch.dtype = torch.bfloat16, check_scales: bool = True, variant: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention over what q, k and v stand for, q * q_scale and so on; prepare() makes all six from 16-bit data.

    q [B, H, S, D], k [B, H_kv, S_kv, D], v [B, H_kv, D, S_kv rounded up to 16] as pack_values() makes it, all
    float8_e4m3fn, H a multiple of H_kv; float32 scales [] or [B, H] for q, [] or [B, H_kv] for k and v. D is 64 or 128;
    any S and S_kv from 1 up; causal needs S == S_kv. Returns [B, H, S, D], contiguous, in bfloat16 or float16.
    `scale` is 1 / sqrt(D) unless given, `variant` "tiles" or "warp specialized", which is the default on sm_90.

    Raises TypeError for another dtype, or a causal that is no bool; ValueError for sizes that do not fit, an unknown
    variant, a layout of V or one that TMA cannot load, and what require_scales refuses (check_scales=True reads the
    scales, which waits for the GPU); RuntimeError for no Triton, an input that requires grad and, warp specialized,
    any architecture but sm_90, and the interpreter.
    """
    name = "fp8_attention"
    require_triton_device(name, q, k, v)
    check_dtypes(name, q, k, v)
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {OUT_DTYPES}")
    scale = check_attention(name, q, k, v, TILES, causal, scale) * math.log2(math.e)
    (B, H, S, D), (_, H_kv, S_kv, _) = q.shape, k.shape
    check_operands(name, q, k, v, q_scale, k_scale, v_scale, check_scales)
    variant = variant or VARIANTS[gluon_architecture(q.device) == 90]
    check_choice(name, VARIANTS, variant=variant)
    if variant == "warp specialized":
        require_wgmma(name, q.device, "the variant 'tiles'")
    q_scale, k_scale, v_scale = q_scale.expand(B, H), k_scale.expand(B, H_kv), v_scale.expand(B, H_kv)  # or 0 apart
    o = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    if variant == "warp specialized" and o.numel():
        launch_hopper(q, k, v, o, q_scale, k_scale, v_scale, scale, causal)
    elif o.numel():
        block_m, block_n, num_warps, stages = TILES[D]
        fp8_attention_kernel[(triton.cdiv(S, block_m) * B * H,)](
            tma_descriptor(q, [1, 1, block_m, D]), tma_descriptor(k, [1, 1, block_n, D]),
            tma_descriptor(v, [1, 1, D, block_n]), tma_descriptor(o, [1, 1, block_m, D]), q_scale, k_scale, v_scale,
            *q_scale.stride(), *k_scale.stride(), *v_scale.stride(),
            scale, H, H // H_kv, S, S_kv,
            BLOCK_M=block_m, BLOCK_N=block_n, D=D, CAUSAL=causal, RAGGED=S_kv % block_n > 0,
            HEADS=HEADS if causal else 1, STAGES=stages, num_warps=num_warps,
        )  # fmt: skip
    return o


def compare(h: Harness, bf16, B: int, H: int, S: int, D: int, causal: bool):
    """FP8 beside attention in bfloat16. The ceiling is FP8's, for every row."""
    # Scales of powers of two: then bfloat16 holds what the FP8 stands for, and all variants compute the same.
    data = prepare(*(h.randn(B, H, S, D, dtype=h.half) for _ in range(3)), power_of_two=True)
    exact = [x.to(h.half) for x in dequantize(*data)]
    peer, best = "triton bf16", "cuDNN bf16"  # torch has no FP8 attention
    in_half = {
        peer: functools.partial(bf16, causal=causal),
        best: sdpa(SDPBackend.CUDNN_ATTENTION, causal),
        "torch flash bf16": sdpa(SDPBackend.FLASH_ATTENTION, causal),
    }
    variants = {name: lambda *data, fn=fn: fn(*data[6:]) for name, fn in in_half.items()}
    ours = functools.partial(fp8_attention, causal=causal, out_dtype=h.half, check_scales=False)
    variants["triton"] = lambda *data: ours(*data[:6])
    if h.machine.sm == 90 and not h.interpreted:
        variants["tiles"] = lambda *data: ours(*data[:6], variant="tiles")
    moved = sum(x.nbytes for x in data) + exact[0].nbytes
    half = attention_budget(h.half, S)
    return h.compare(
        variants, lambda *data: reference(*data[:6], causal), *data, *exact, baseline=peer if h.interpreted else best,
        default="triton", case=f"{B}x{H}x{S}x{D}{' causal' * causal}", peers=[peer], dtype=h.half,
        work=Work(bytes=moved, flops=attention_flops(*data[:2], causal), dtype=E4M3), **attention_budget(E4M3, S),
        library=half, budgets={peer: half}, references={peer: lambda *data: attention_reference(*data[6:], causal)},
        wrong={"without its last keys": lambda q, k, *x: reference(q, k[:, :, : -(S // 32 + 96)], *x[:4], causal)},
    )  # fmt: skip


def answer(tables: list, error: float, error_bf16: float) -> str:
    beside = [over_library([table]) for table in tables]
    cases = " and ".join(dict.fromkeys(table.case.split()[0] for table in tables))
    return (
        f"At BxHxSxD {cases} {min(beside):.2f} to {max(beside):.2f}x the fastest bf16 library, "
        f"{geomean(tables, 'triton bf16', 'triton'):.2f}x our bf16 kernel; quantizing Q, K and V comes on top. "
        f"Relative rms error on normal data: {error:.1%}, in bf16 {error_bf16:.1%}."
    )


def demo(h: Harness) -> None:
    # One query and key, primes, one tile plus one; fewer keys than queries; heads that share keys; every head dim.
    for D in TILES:
        for S, S_kv, causal in [(1, 1, False), (130, 67, False), (129, 129, True)]:
            q = h.randn(1, 2, S, D, dtype=h.half)
            k, v = (h.randn(1, 1, S_kv, D, dtype=h.half) for _ in range(2))
            for variant in VARIANTS[: 1 + (h.machine.sm == 90 and not h.interpreted)]:
                ours = functools.partial(fp8_attention, out_dtype=h.half, variant=variant)
                how = {"what": f"{variant} {S}x{S_kv}x{D}{' causal' * causal}", "dtype": h.half}
                h.check(ours, reference, *prepare(q, k, v), causal, **how | attention_budget(E4M3, S_kv))
    x, s = h.meta(4, 32, 4096, 128, dtype=E4M3), h.meta(4, 32, dtype=torch.float32)
    tma, data = ("cp.async.bulk.tensor", "mbarrier", "mma f8"), (x, x, x.transpose(2, 3).contiguous(), s, s, s)
    find = {90: (*tma, "wgmma"), 100: (*tma, "tcgen05.mma"), 120: (*tma, "mma.sync")}
    h.codegen(fp8_attention, *data, variant="tiles", find=find)
    h.codegen(fp8_attention, *data, find={90: (*tma, "wgmma", "setmaxnreg")})

    bf16 = h.peer("triton/flash_attention").flash_attention
    quick, full = [(1, 16, 4096, 128), (1, 16, 4096, 64)], [(4, 32, 4096, 128), (1, 32, 16384, 128)]
    cases = h.pick(interpreted=[(1, 2, 200, 64)], quick=quick, full=full)
    tables = [compare(h, bf16, *case, causal) for case in cases for causal in (False, True)]
    q, k, v = (h.randn(*h.pick((1, 4, 2048, 128), (1, 4, 4096, 128), (1, 3, 70, 64)), dtype=h.half) for _ in range(3))
    if not h.profile:
        want, ours = attention_reference(q, k, v), fp8_attention(*prepare(q, k, v), out_dtype=h.half)
        errors = off_by(ours, want), off_by(bf16(q, k, v), want)
    h.answer(lambda: answer(tables, *errors))


if __name__ == "__main__":
    run(demo)
