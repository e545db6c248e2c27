"""Flash attention: the scores never leave the chip, so long attention is compute-bound and not memory-bound.

One head of S = 16384, D = 128 in bfloat16 is 4 S^2 D = 137 GFLOP of MMAs: 0.18 ms of an H200, at measured rates. Its
S^2 scores, written out, are 0.5 GB, which are written, read by the softmax, written as weights and read again: 0.5 ms
of memory. Q, K, V and O are 17 MB: 4 us. So one kernel does it all. A program owns BLOCK_M rows of Q and walks over K
and V in blocks of BLOCK_N rows, with an online softmax. For each row it keeps

    m = max of the scores s_j seen,   l = sum of exp(s_j - m),   acc = sum of exp(s_j - m) * v_j.

A block may raise the maximum to m'. Multiplied by alpha = exp(m - m'), l and acc are what they would have been under
m', and the block is added. At the end acc / l is the exact answer, whatever the order of the blocks.

At D = 128 a score costs 512 FLOPs of MMAs, 1/8 clock of a Hopper SM, and an exponential, 1/16 clock. Within a program
these do not overlap, so two programs (of 4 warps) share an SM: one can multiply while the other exponentiates.

Question   How fast is attention without stored scores in Triton, by length and mask, beside the fastest library?
Needs      triton, sm_90
Wins when  the GPU is a Hopper and attention is long, or cuDNN has no kernel for the variant; FlexAttention states most
           variants in two lines. In training cuDNN is a little faster (study); for decoding see decode_attention.
Variants   flash_attention_hopper.py (in Gluon, the default on sm_90), flash_attention_backward.py (the gradients),
           flash_attention_hopper_backward.py (the same in Gluon)
Study      studies/triton/flash_attention.py
Source     goes beyond the chapter; FlashAttention (Dao et al. 2022), 3 (Shah et al. 2024); Milakov, Gimelshein 2018.
"""

from __future__ import annotations

import functools
import math

from harness import Harness, Table, Work, run

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from examples.common.attention import attention_budget, attention_flops, check_attention, sdpa
from examples.common.attention import attention_reference as reference
from examples.common.device import require_triton_device
from examples.common.gluon import gluon_architecture, require_wgmma
from examples.common.operands import check_choice
from examples.common.tma import require_tma_layout, tma_descriptor
from examples.common.untraced import untraced
from examples.triton.flash_attention_backward import FlashAttention
from examples.triton.flash_attention_hopper import launch_hopper

DTYPES = (torch.float16, torch.bfloat16)
# Head dim -> BLOCK_M, BLOCK_N, warps, stages, and whether V is loaded before K: chosen by timing on an H200.
TILES = {64: (128, 64, 4, 3, True), 128: (128, 64, 4, 2, False)}
# Causal: heads whose tiles run side by side. K and V of 8 heads are 4 KiB a key at D = 128: 16 MiB at S = 4096, which
# fits L2 (60 MiB), 64 MiB at S = 16384, which does not.
GROUP_H = 8
VARIANTS, LN_2 = ("tiles", "warp specialized"), tl.constexpr(math.log(2))


@triton.jit
def _online_softmax(scores, row_max, row_sum, scale):
    """Fold a block of raw scores into the running maximum and sum: weights, new maximum, new sum, alpha.

    The hardware has 2^x and not e^x: `scale` includes log2(e), so that exp2 needs no multiplication of its own. Since
    scale > 0 keeps the order, the maximum is scaled after the reduction, once a row; a score takes one FMA and exp2.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    return weights, new_max, row_sum * alpha + tl.sum(weights, axis=1), alpha


@triton.jit
def flash_attention_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, scale, H, Q_PER_KV, S, S_KV,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    GROUP_H: tl.constexpr, STAGES: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    # Causal tiles have unequal work. The longest of GROUP_H heads start first, then their second longest, and so on.
    pid = tl.program_id(0)
    tiles = tl.cdiv(S, BLOCK_M)
    first = pid // (GROUP_H * tiles) * GROUP_H
    in_group = min(tl.num_programs(0) // tiles - first, GROUP_H)
    bh = first + pid % (GROUP_H * tiles) % in_group
    tile = pid % (GROUP_H * tiles) // in_group
    if CAUSAL:
        tile = tiles - 1 - tile
    b, h = bh // H, bh % H
    h_kv = h // Q_PER_KV
    start_m = tile * BLOCK_M

    q = q_desc.load([b, h, start_m, 0]).reshape(BLOCK_M, D)
    if D == 64:
        # wgmma takes its left operand from shared memory or from registers. Triton leaves a loaded q in shared memory,
        # and every block would read it again; after an addition it is in registers. (-0.0 becomes 0.0, which no score
        # shows.) At D = 128 it would take 64 of a thread's 255, and a causal kernel would spill more than it does.
        q = q + 0.0
    # Not -inf: with infinite inputs all scores of a row's first block may be -inf, and -inf - -inf is NaN.
    row_max = tl.full((BLOCK_M,), -3.4e38, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)

    # Blocks in which every score counts: left of the diagonal, and not beyond the last key.
    tl.static_assert(BLOCK_M % BLOCK_N == 0 or not CAUSAL, "causal: the last whole block would cross the diagonal")
    first_masked = start_m if CAUSAL else S_KV // BLOCK_N * BLOCK_N
    for n in tl.range(0, first_masked, BLOCK_N, num_stages=STAGES):
        if V_FIRST:  # right before k, one barrier serves both
            v = v_desc.load([b, h_kv, n, 0]).reshape(BLOCK_N, D)
        k = k_desc.load([b, h_kv, n, 0]).reshape(BLOCK_N, D)
        weights, row_max, row_sum, alpha = _online_softmax(tl.dot(q, k.T), row_max, row_sum, scale)
        if not V_FIRST:
            v = v_desc.load([b, h_kv, n, 0]).reshape(BLOCK_N, D)
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None])
    # The rest needs a mask. Rows of K and V beyond the end arrive as zeros, so 0 * v is 0 there and not NaN. A hidden
    # key has weight 0 too, but its v may be NaN or infinite, which reaches the rows of its block that do not see it.
    if CAUSAL or RAGGED:
        rows = start_m + tl.arange(0, BLOCK_M)
        end = min(S_KV, start_m + BLOCK_M) if CAUSAL else S_KV
        for n in tl.range(first_masked, end, BLOCK_N, num_stages=1):  # one block or two: nothing to pipeline
            k = k_desc.load([b, h_kv, n, 0]).reshape(BLOCK_N, D)
            cols = n + tl.arange(0, BLOCK_N)
            seen = (cols[None, :] <= rows[:, None]) if CAUSAL else (cols < S_KV)[None, :]
            scores = tl.where(seen, tl.dot(q, k.T), -float("inf"))
            weights, row_max, row_sum, alpha = _online_softmax(scores, row_max, row_sum, scale)
            v = v_desc.load([b, h_kv, n, 0]).reshape(BLOCK_N, D)
            acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None])

    o = (acc / row_sum[:, None]).to(o_desc.dtype)
    o_desc.store([b, h, start_m, 0], o.reshape(1, 1, BLOCK_M, D))  # TMA drops rows beyond S
    if lse_ptr is not None:
        rows = start_m + tl.arange(0, BLOCK_M)
        lse = (row_max + tl.log2(row_sum)) * LN_2
        tl.store(lse_ptr + bh.to(tl.int64) * S + rows, lse, mask=rows < S)


@untraced
def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None,
    return_lse: bool = False, variant: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(scale * q @ k^T) @ v per head, like q, contiguous, scale 1 / sqrt(D) unless given. `variant`: "tiles" or
    (default on sm_90) "warp specialized". Once differentiable in q, k and v; every run gives the same bits.

    q [B, H, S, D], k and v [B, H_kv, S_kv, D], with H a multiple of H_kv (grouped queries); D is 64 or 128, any S and
    S_kv from 1 up, and causal needs S == S_kv. float16 or bfloat16, all three the same; scores, sums and the
    accumulator are float32, the weights are rounded to the input dtype for the second product. With return_lse also
    the logarithm of the sum of e^score of each row, float32 [B, H, S] and without a gradient, to merge parts by. With
    it, and in training, the result may differ in its last bit from that of a call without.

    Raises TypeError for another dtype; ValueError for an unknown variant and a layout that TMA cannot load; what
    check_attention does for sizes, causal and scale; RuntimeError for a device without Triton, a second derivative and,
    warp specialized, any architecture but sm_90, and the interpreter.
    """
    name = "flash_attention"
    with torch.no_grad():  # this one has a backward
        require_triton_device(name, q, k, v)
    variant = variant or VARIANTS[gluon_architecture(q.device) == 90]
    check_choice(name, VARIANTS, variant=variant)
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"{name}: dtypes {q.dtype}, {k.dtype}, {v.dtype}; all must be the same one of {DTYPES}")
    scale = check_attention(name, q, k, v, TILES, causal, scale) * math.log2(math.e)
    if k.shape != v.shape:
        raise ValueError(f"{name}: shapes {tuple(k.shape)} and {tuple(v.shape)}; k and v must have the same shape")
    require_tma_layout(name, q=q, k=k, v=v)
    if variant == "warp specialized":
        require_wgmma(name, q.device, "the variant 'tiles'")
    forward = functools.partial(_forward, causal=causal, scale=scale, variant=variant)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        o, lse = FlashAttention.apply(q, k, v, scale, causal, forward, variant == VARIANTS[1])
    else:
        o, lse = forward(q, k, v, return_lse)
    return (o, lse) if return_lse else o


def _forward(q, k, v, return_lse: bool = True, *, causal: bool, scale: float, variant: str):
    (B, H, S, D), (_, H_kv, S_kv, _) = q.shape, k.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    if variant == "warp specialized" and o.numel():
        launch_hopper(q, k, v, o, lse, scale, causal)
    elif o.numel():
        block_m, block_n, num_warps, stages, v_first = TILES[D]
        flash_attention_kernel[(triton.cdiv(S, block_m) * B * H,)](
            tma_descriptor(q, [1, 1, block_m, D]), tma_descriptor(k, [1, 1, block_n, D]),
            tma_descriptor(v, [1, 1, block_n, D]), tma_descriptor(o, [1, 1, block_m, D]),
            lse, scale, H, H // H_kv, S, S_kv, BLOCK_M=block_m, BLOCK_N=block_n, D=D, CAUSAL=causal, STAGES=stages,
            RAGGED=S_kv % block_n > 0, GROUP_H=GROUP_H if causal else 1, V_FIRST=v_first, num_warps=num_warps,
        )  # fmt: skip
    return o, lse


def runs_gluon(h: Harness) -> bool:
    return not h.interpreted and h.machine.sm == 90


def variants(h: Harness, S: int, causal: bool) -> dict:
    """cuDNN (on a GPU), torch's flash attention, FlexAttention (on a GPU) and ours; the first is the baseline."""
    libraries = {"torch flash (FA2)": sdpa(SDPBackend.FLASH_ATTENTION, causal)}
    ours = {"triton": functools.partial(flash_attention, causal=causal)}
    if runs_gluon(h):
        ours["tiles"] = functools.partial(ours["triton"], variant="tiles")
    if h.device.type == "cpu":
        return libraries | ours
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device=h.device) if causal else None
    libraries["FlexAttention"] = h.compiled(functools.partial(flex_attention, block_mask=mask))
    return {"cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, causal)} | libraries | ours


def compare(h: Harness, B: int, H: int, S: int, D: int, causal: bool) -> Table:
    q, k, v = (h.randn(B, H, S, D, dtype=h.half) for _ in range(3))
    calls = variants(h, S, causal)
    return h.compare(
        calls, functools.partial(reference, causal=causal), q, k, v, baseline=next(iter(calls)), default="triton",
        case=f"{B}x{H}x{S}x{D}{' causal' * causal}",
        work=Work(bytes=4 * q.nbytes, flops=attention_flops(q, k, causal), dtype=h.half), **attention_budget(h.half, S),
    )  # fmt: skip


def beside_fastest(table: Table) -> str:
    library = min((row for row in table.rows if not row.ours), key=lambda row: row.ms).variant
    name = library.split()[0].strip(",").removesuffix("Attention")  # cuDNN, Flex, or torch's own
    return f"{table['triton'].tflops:.0f} ({table.over(library, 'triton'):.2f}x {name})"


def answer(pairs: list[list[Table]]) -> str:
    cases = "; ".join(f"{each.case} {beside_fastest(each)}, causal {beside_fastest(causal)}" for each, causal in pairs)
    return f"TFLOP/s by BxHxSxD (speed against the fastest library): {cases}."


def demo(h: Harness) -> None:
    # One query and key; parts of a tile and of a block; one tile plus one; heads that share keys; every head dim.
    for D in TILES:
        for S, S_kv, causal in [(1, 1, False), (130, 67, False), (129, 129, True)]:
            q = h.randn(1, 2, S, D, dtype=h.half)
            k, v = (h.randn(1, 1, S_kv, D, dtype=h.half) for _ in range(2))
            what = f"{S} queries, {S_kv} keys, head dim {D}{', causal' * causal}"
            for variant in VARIANTS if runs_gluon(h) else VARIANTS[:1]:
                fn = functools.partial(flash_attention, variant=variant)
                h.check(fn, reference, q, k, v, causal, what=f"{variant}: {what}", **attention_budget(h.half, S_kv))
    x, tma = h.meta(4, 32, 4096, 128), ("cp.async.bulk.tensor", "mbarrier")
    find = {90: (*tma, "wgmma"), 100: (*tma, "tcgen05.mma"), 120: (*tma, "mma.sync")}
    h.codegen(flash_attention, x, x, x, variant="tiles", find=find)
    h.codegen(flash_attention, x, x, x, find={90: (*tma, "wgmma", "setmaxnreg")})

    full = [(4, 32, 4096, 64), (4, 32, 4096, 128), (1, 32, 16384, 128)]
    cases = h.pick(interpreted=[(1, 2, 200, 128)], quick=[(1, 16, 4096, 128)], full=full)
    tables = [[compare(h, *case, causal) for causal in (False, True)] for case in cases]
    h.answer(lambda: answer(tables))


if __name__ == "__main__":
    run(demo)
