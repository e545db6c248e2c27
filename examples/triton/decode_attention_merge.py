"""Merge the parts of each query's keys: sums of weighted values, each relative to its own part's maximum.

Parts are added in order, so that every run gives the same bits. A part of -inf alone has sum 0; NaN stays in its sum.

A step of 16384 keys takes so little time that the start of this kernel counts. From sm_90 on, its programs are launched
while the first kernel's last ones run, and wait for their stores (programmatic dependent launch).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from examples.common.device import architecture, interpreted

LN_2 = tl.constexpr(math.log(2))
VALUES = 2048  # of parts that a program reads at once: 16 for each thread, all in flight
LEAST_DIMS = 32  # of a program
PDL = True


@triton.jit
def part_of_keys(lengths_ptr, b, keys, splits, BLOCK_N: tl.constexpr):
    """The length of sequence b, within the cache, and the keys of a part: whole blocks, the last part may be shorter.

    The length is on the GPU, and the host, which chooses the grid, does not wait for it: so each sequence is cut in
    `splits` parts, whatever its length.
    """
    n = keys
    if lengths_ptr is not None:
        n = tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 0), keys)
    return n, tl.maximum(tl.cdiv(tl.cdiv(n, splits), BLOCK_N), 1) * BLOCK_N


@triton.jit
def decode_attention_merge_kernel(
    parts_ptr, stats_ptr, lengths_ptr, o_ptr, lse_ptr, keys, splits, H,
    S_Q: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()  # until the first kernel has ended, and all that it stored is visible
    row = tl.program_id(0).to(tl.int64)  # of o, [B, H, S_q]
    n, size = part_of_keys(lengths_ptr, row // (H * S_Q), keys, splits, BLOCK_N)
    maxima_ptr, sums_ptr = stats_ptr, stats_ptr + tl.num_programs(0).to(tl.int64) * splits
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_max, row_sum, acc = -3.4e38, 0.0, tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, tl.cdiv(n, size), PARTS):
        part = first + tl.arange(0, PARTS)
        there, at = part < tl.cdiv(n, size), row * splits + part  # the others have written nothing
        maxima = tl.load(maxima_ptr + at, mask=there, other=-3.4e38)
        sums = tl.load(sums_ptr + at, mask=there, other=0.0)
        parts = tl.load(parts_ptr + at[:, None] * D + dims[None, :], mask=there[:, None], other=0.0)
        new_max = tl.maximum(row_max, tl.max(maxima, axis=0))
        weights, alpha = tl.exp2(maxima - new_max), tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(weights * sums, axis=0)
        acc = acc * alpha + tl.sum(weights[:, None] * parts, axis=0)
        row_max = new_max
    seen = n - S_Q + row % S_Q >= 0
    o = tl.where(seen, acc / row_sum, 0.0)
    tl.store(o_ptr + row * D + dims, o.to(o_ptr.dtype.element_ty))
    if lse_ptr is not None:
        tl.store(lse_ptr + row, (row_max + tl.log2(row_sum)) * LN_2, mask=tl.program_id(1) == 0)


def merges_early(device: torch.device) -> bool:
    """Whether the merge is launched before the first kernel ends. torch.compile does not know that option."""
    return PDL and not (interpreted() or torch.compiler.is_compiling()) and architecture(device) >= 90


def launch_merge(
    parts: torch.Tensor, stats: torch.Tensor, lengths, o: torch.Tensor, lse, keys: int, splits: int, block_n: int,
    early: bool,
) -> None:  # fmt: skip
    """o [B, H, S_q, D] and lse [B, H, S_q] (or None) of parts [B, H, S_q, splits, D] and maxima and sums in stats."""
    B, H, S_q, D = o.shape
    # Most of its time is the latency of one load, so each program loads little, and all of it at once.
    at_once = min(triton.next_power_of_2(splits), VALUES // LEAST_DIMS)
    block_d = max(LEAST_DIMS, min(D, VALUES // at_once))
    decode_attention_merge_kernel[(B * H * S_q, D // block_d)](
        parts, stats, lengths, o, lse, keys, splits, H,
        S_Q=S_q, D=D, BLOCK_N=block_n, BLOCK_D=block_d, PARTS=at_once, EARLY=early, num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
