"""Decode attention: one to 16 new queries read all keys and values of a sequence, split over the whole GPU.

A query over 16384 cached keys, with 8 heads of keys and values of D = 128 in bfloat16, reads 64 MiB: 16 us of an H200's
memory. A query head does 2 FLOPs with each value that is read, 4 heads that share it do 8; in the time a value takes to
arrive the tensor cores could do 360 (measured rates). So this is memory-bound, if each is read once and every SM reads.

All new positions of the query heads that share a head of keys (GQA) are the rows of one tile. mma.sync takes 16 rows:
until these are full, more rows cost nothing. But then a sequence is only H_kv programs on 132 SMs, so its keys are
split too (flash decoding). Each part has its own maximum m, sum l and accumulator acc, as in flash_attention, and a
second kernel merges them: with M the largest m, o = (sum of exp(m - M) * acc) / (sum of exp(m - M) * l).

Equal parts end together, so their number fills the GPU, or a whole number of waves. Lengths are on the GPU, and the
host does not wait for them: every sequence has the same number of parts, and a program finds its keys, if any.

Question   How close to the speed of memory is a decoding step, contiguous or paged, and how far ahead of libraries?
Needs      triton
Wins when  keys are few, in a CUDA graph: launching the two kernels one by one takes the host longer than cuDNN's call
           takes. Or the cache is in pages, which cuDNN's call does not take. Else use cuDNN, which is about as fast.
Variants   decode_attention_merge.py (the second kernel), decode_attention_operands.py (no kernel: what is timed)
Study      studies/triton/decode_attention.py
Source     goes beyond the chapter; Flash-Decoding (Dao et al. 2023), pages as in PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

import math

from harness import Harness, Table, Work, run

import torch
import triton
import triton.language as tl

from examples.common.attention import attention_budget, attention_flops
from examples.common.compiled import over_library
from examples.common.device import device_limits
from examples.common.kv_cache import cached, check_cache
from examples.triton.decode_attention_merge import LN_2, launch_merge, merges_early, part_of_keys
from examples.triton.decode_attention_operands import any_order, in_pages, inputs, libraries

DTYPES = (torch.float16, torch.bfloat16)
# Head dim -> keys of a block, warps for 16 rows, buffers of K and V. A block is 16 KiB, and two or three are in flight.
TILES = {64: (64, 2, 3), 128: (32, 2, 3)}
# Rows of a tile -> shared memory of a program. With more rows there are more tiles, which find K and V in L2.
SHARED_KIB = {16: 56, 32: 60, 64: 82}
AT_ONCE = 2  # programs of an SM: they saturate memory; with more, parts are shorter, and more of them are to merge
# Keys of a part: fewer are not worth a program; with more, where lengths differ, the longest sequence would end alone.
PART_MIN, PART_MAX = 128, 4096
START = 64  # keys that a program could read in the time of its start and its end


@triton.jit
def decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, table_ptr, o_ptr, lse_ptr, stats_ptr, scale, keys, splits,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_table,
    H_KV: tl.constexpr, TILES_M: tl.constexpr, GROUP: tl.constexpr, S_Q: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # once every program has started, the merge's may
    pid = tl.program_id(0)  # tiles of the same keys vary fastest, then heads, parts, sequences; long ones use many SMs
    tile, h_kv, item = pid % TILES_M, (pid // TILES_M % H_KV).to(tl.int64), pid // (TILES_M * H_KV)
    part, b = item % splits, (item // splits).to(tl.int64)
    n, size = part_of_keys(lengths_ptr, b, keys, splits, BLOCK_N)
    if SPLIT and part * size >= n:
        return

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # of the GROUP * S_Q that share h_kv
    inside = row < GROUP * S_Q
    last = n - S_Q + row % S_Q  # the key at a query's own position is the last that it sees
    dims = tl.arange(0, D)
    q_rows = b * stride_qb + (h_kv * GROUP + row // S_Q) * stride_qh + (row % S_Q).to(tl.int64) * stride_qs
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=inside[:, None], other=0.0)

    k_ptr += h_kv * stride_kh
    v_ptr += h_kv * stride_vh
    row_max = tl.full((BLOCK_M,), -3.4e38, tl.float32)  # not -inf: -inf - -inf is NaN
    lane_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # summed once, at the end: warps need not meet for it
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    end = tl.minimum(part * size + size, n)
    for first in tl.range(part * size, end, BLOCK_N, num_stages=STAGES):
        key = first + tl.arange(0, BLOCK_N)
        there = (key < end)[:, None]  # beyond the end of a sequence a cache holds anything, NaN too
        if PAGE > 0 and PAGE % BLOCK_N > 0:  # a block is in several pages, and begins with one if they divide it
            page = tl.load(table_ptr + b * stride_table + key // PAGE, mask=key < end, other=0).to(tl.int64)
            slot, lane = ((tl.arange(0, BLOCK_N) if BLOCK_N % PAGE == 0 else key) % PAGE).to(tl.int64), 0
        else:  # one address, and offsets from it that stay in registers
            page, slot, lane = b, tl.cast(first, tl.int64), tl.arange(0, BLOCK_N).to(tl.int64)
            if PAGE > 0:
                page, slot = tl.load(table_ptr + b * stride_table + first // PAGE).to(tl.int64), slot % PAGE
        k_rows = page * stride_kb + slot * stride_kt + lane * stride_kt
        v_rows = page * stride_vb + slot * stride_vt + lane * stride_vt
        k = tl.load(k_ptr + k_rows[:, None] + dims[None, :], mask=there, other=0.0)
        scores = tl.dot(q, k.T) * tl.cast(scale, tl.float32)  # torch.compile passes a float in 64 bits
        scores = tl.where(key[None, :] <= last[:, None], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights, alpha = tl.exp2(scores - new_max[:, None]), tl.exp2(row_max - new_max)[:, None]
        lane_sums = lane_sums * alpha + weights
        v = tl.load(v_ptr + v_rows[:, None] + dims[None, :], mask=there, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha)
        row_max = new_max
    row_sum = tl.sum(lane_sums, axis=1)

    o_row = (b * H_KV + h_kv) * (GROUP * S_Q) + row
    if SPLIT:
        o_row = o_row * splits + part
        tl.store(stats_ptr + o_row, row_max, mask=inside)
        sums_ptr = stats_ptr + (tl.num_programs(0) // TILES_M).to(tl.int64) * (GROUP * S_Q)
        tl.store(sums_ptr + o_row, row_sum, mask=inside)
    else:
        acc = tl.where((last >= 0)[:, None], acc / row_sum[:, None], 0.0)  # no key is seen: 0
        if lse_ptr is not None:
            tl.store(lse_ptr + o_row, (row_max + tl.log2(row_sum)) * LN_2, mask=inside)
    tl.store(o_ptr + o_row[:, None] * D + dims[None, :], acc.to(o_ptr.dtype.element_ty), mask=inside[:, None])


def count_splits(device: torch.device, programs: int, keys: int, ragged: bool = False, block_m: int = 16) -> int:
    """Parts of each sequence of `keys` keys, if the unsplit grid has `programs` programs: few waves, and nearly full.

    `ragged`: some have fewer keys. Then the number of waves is unknown, and parts of at most PART_MAX even them out.
    """
    sms, shared_bytes = device_limits(device)
    slots = sms * min(AT_ONCE, shared_bytes // (SHARED_KIB[block_m] * 1024))
    least, most = triton.cdiv(keys, PART_MAX) if ragged else 1, triton.cdiv(keys, PART_MIN)

    def time(splits: int) -> int:  # in keys
        return triton.cdiv(programs * splits, slots) * (triton.cdiv(keys, splits) + START)

    best, fewest = least, triton.cdiv(programs, slots)
    for waves in range(fewest, fewest + 8):
        splits = max(least, min(waves * slots // programs, most))
        best = splits if time(splits) < time(best) else best
    return best


def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, scale: float | None = None, return_lse: bool = False,
    splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(scale * q @ k^T) @ v of the last 1 to 16 positions of each sequence, scale 1 / sqrt(D) unless given.

    q [B, H, S_q, D]: the queries of positions n - S_q to n - 1 of a sequence of n keys; each sees the keys up to its
    own. A query that sees none (n < S_q) gives 0. H is a multiple of H_kv; D is 64 or 128; float16 or bfloat16.
    k and v [B, H_kv, S_kv, D], n = S_kv or, with `lengths` (int32 [B]), lengths[b], taken as 0 to S_kv.
    Paged: k and v [pages, H_kv, page, D], and position i of sequence b is at i % page of page block_table[b, i // page]
    (int32 [B, max_pages]; entries beyond n are not read, the others must be pages, which nobody checks). D contiguous,
    other strides any: pass a cache [pages, page, H_kv, D] as its .transpose(1, 2). float32 sums; weights are rounded
    to q's dtype. Returns o like q, contiguous, and with return_lse the logarithms of the sums of e^score, float32
    [B, H, S_q], -inf where no key is seen. Every run gives the same bits. `splits` is the number of parts of a
    sequence: given, the bits of a sequence are the same in any batch; else count_splits fills the GPU.

    Raises what check_cache does: TypeError for dtypes; ValueError for sizes, strides, scale and splits; RuntimeError
    for a device without Triton or an input that requires grad.
    """
    (B, H, H_kv, S_q, D, keys, page), scale = check_cache(
        "decode_attention", DTYPES, TILES, q, k, v, lengths, block_table, scale
    )
    if splits is not None and (type(splits) is not int or not 1 <= splits <= 1024):
        raise ValueError(f"decode_attention: splits is {splits!r}; pass an int from 1 to 1024, or None")
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    if o.numel():
        rows = H // H_kv * S_q
        block_m = max(16, min(max(SHARED_KIB), triton.next_power_of_2(rows)))
        tiles_m = triton.cdiv(rows, block_m)
        block_n, num_warps, buffers = TILES[D]
        splits = splits or count_splits(q.device, B * H_kv * tiles_m, keys, lengths is not None, block_m)
        parts, stats, early = o, None, splits > 1 and merges_early(q.device)
        if splits > 1:
            parts = torch.empty((*q.shape[:3], splits, D), dtype=torch.float32, device=q.device)
            stats = torch.empty((2, *q.shape[:3], splits), dtype=torch.float32, device=q.device)
        decode_attention_kernel[(B * H_kv * tiles_m * splits,)](
            q, k, v, lengths, block_table, parts, lse, stats, scale * math.log2(math.e), keys, splits,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], block_table.stride(0) if page else 0,
            H_KV=H_kv, TILES_M=tiles_m, GROUP=H // H_kv, S_Q=S_q, D=D, PAGE=page, SPLIT=splits > 1,
            BLOCK_M=block_m, BLOCK_N=block_n, EARLY=early, num_warps=num_warps * (1 if block_m == 16 else 2),
            STAGES=1 + buffers * (2 if page else 1),  # a page's number is loaded before K and V: each takes a stage
        )  # fmt: skip
        if splits > 1:
            launch_merge(parts, stats, lengths, o, lse, keys, splits, block_n, early)
    return (o, lse) if return_lse else o


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    (B, H, S_q, D), H_kv = q.shape, k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    most = k.shape[2] * (1 if block_table is None else block_table.shape[1])
    for b, n in enumerate([most] * B if lengths is None else lengths.clamp(0, most).tolist()):
        keys, values = (cached(x, b, n, block_table).double() for x in (k, v))
        scores = q[b].double().reshape(H_kv, -1, D) @ keys.mT * (D**-0.5 if scale is None else scale)
        last = (n - S_q + torch.arange(S_q, device=q.device)).repeat(H // H_kv)[:, None]
        scores.masked_fill_(torch.arange(n, device=q.device) > last, -math.inf)
        rows = torch.where(last >= 0, torch.softmax(scores, dim=-1) @ values, 0.0)
        out[b] = rows.reshape(H, S_q, D)
    return out


def short(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return reference(q, k[:, :, :-64], v[:, :, :-64])


def compare(h: Harness, B: int, H: int, H_kv: int, S: int, D: int = 128) -> Table:
    q, k, v = inputs(h, B, H, H_kv, 1, S, D)
    table = any_order(h, B, S // 16)
    own = {"triton": decode_attention}
    own["triton paged"] = lambda q, k, v: decode_attention(q, in_pages(k), in_pages(v), block_table=table)
    return h.compare(
        libraries(h, q, k, v) | own, reference, q, k, v, baseline="torch flash (FA2)",
        work=Work(bytes=2 * (k.nbytes + q.nbytes), flops=attention_flops(q, k, False), dtype=h.half),
        wrong={"without the last 64 keys": short}, case=f"{B}x{S} keys, {H} heads on {H_kv}",
        **attention_budget(h.half, S),
    )  # fmt: skip


def answer(tables: list[Table]) -> str:
    def one(table: Table) -> str:
        own, in_pages = (f"{table[name].of_ceiling:.0%}" for name in ("triton", "triton paged"))
        return f"{table.case.split()[0]} {own} / {in_pages} {over_library([table]):.2f}x"

    cases = "; ".join(map(one, tables))
    return f"Share of a copy's speed, contiguous / in pages of 16, and speed over the fastest library, by BxS: {cases}."


def demo(h: Harness) -> None:
    # One key; several parts; queries of which some see no key; pages that divide a block, do not, or hold one.
    for B, H, H_kv, S_q, S, D, page in [
        (1, 1, 1, 1, 1, 64, 0), (2, 4, 2, 1, 700, 128, 0), (3, 6, 2, 3, 75, 64, 16), (1, 2, 1, 5, 300, 128, 7),
        (2, 2, 1, 1, 300, 128, 64),
    ]:  # fmt: skip
        what = f"{B}x{S} keys, {S_q} queries, {H} heads on {H_kv}, head dim {D}, pages of {page}"
        operands = inputs(h, B, H, H_kv, S_q, S, D, page)
        h.check(decode_attention, reference, *operands, what=what, **attention_budget(h.half, S))
    q, k, pool = h.meta(16, 32, 1, 128), h.meta(16, 8, 16384, 128), h.meta(16384, 16, 8, 128).transpose(1, 2)
    h.codegen(decode_attention, q, k, k, find=dict.fromkeys((80, 90, 100, 120), ("cp.async", "mma.sync")))
    table = h.meta(16, 1024, dtype=torch.int32)
    h.codegen(decode_attention, q, pool, pool, None, table, find={90: ("cp.async", "mma.sync")})

    full = [(64, 32, 8, 1024), (1, 32, 8, 16384), (16, 32, 8, 16384), (1, 32, 8, 131072)]
    quick = [(1, 32, 8, 16384), (8, 32, 8, 16384)]
    tables = [compare(h, *case) for case in h.pick(interpreted=[(1, 4, 2, 320)], quick=quick, full=full)]
    h.answer(lambda: answer(tables))


if __name__ == "__main__":
    run(demo)
