"""weight_only_matmul for one row: the eight columns of an MMA are eight slices of K.

FMAs are too slow for 4-bit weights. An SM issues 128 operations a cycle while 35 weights arrive, and each weight takes
about three, to unpack, widen and multiply it; loads come on top. An MMA multiplies 256 weights at a time, but with
eight columns of x. Here the columns are eight successive steps of one row's K, and each output has a row of the MMA for
each of them. Of all products only those count in which weights meet the x of their own step: the diagonal, which is
taken once, at the end. So a program has all of K for its outputs, as in skinny_matmul_gemv: nothing is split, and
nothing is merged.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.triton.weight_only_matmul_packing import WORDS, PackedWeight, check_packed, two_parts

SLICES = tl.constexpr(8)  # columns of the smallest MMA
OUTPUTS, WARPS = 8, 2  # of a program; so small a tile is multiplied by mma.sync, whichever the version of Triton
PER_SM = 4  # fewest programs to an SM: with fewer outputs, K is better split
RESIDENT = 8  # programs to an SM that the registers of a Hopper SM allow


@triton.jit
def weight_only_matmul_gemv_kernel(
    x_ptr, words_ptr, scale_ptr, y_ptr, N, K, steps, INT4: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    PARTS: tl.constexpr = 4 if INT4 else 2
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row, column = tl.arange(0, OUTPUTS * SLICES), tl.arange(0, SLICES)
    slice, inner = row % SLICES, tl.arange(0, 2 * WORDS)
    n = tl.minimum(tl.program_id(0) * OUTPUTS + row // SLICES, N - 1)
    w_ptrs = words_ptr + (n.to(tl.int64) * steps + slice)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    acc = tl.zeros((OUTPUTS * SLICES, SLICES), tl.float32)
    for first in tl.range(0, steps, SLICES, num_stages=STAGES):  # a kilobyte of each output's words
        step = first + slice
        inside = step < steps
        words = tl.load(w_ptrs + first * WORDS, mask=inside[:, None], other=0)
        k = (first + column)[:, None] * (PARTS * WORDS) + inner[None, :]
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        if INT4:
            scales = tl.load(scale_ptr + step.to(tl.int64) * N + n, mask=inside, other=0)  # of both groups of a step
            left = scales.to(tl.int16).to(dtype, bitcast=True)
            right = (scales >> 16).to(tl.int16).to(dtype, bitcast=True)
            acc += tl.dot(two_parts(words, 0, INT4, dtype), x.T) * left.to(tl.float32)[:, None]
            x = tl.load(x_ptr + k + 2 * WORDS, mask=k + 2 * WORDS < K, other=0.0)
            acc += tl.dot(two_parts(words, 2, INT4, dtype), x.T) * right.to(tl.float32)[:, None]
        else:
            acc = tl.dot(two_parts(words, 0, INT4, dtype), x.T, acc)
    acc = tl.where(slice[:, None] == column[None, :], acc, 0.0)
    y = tl.sum(tl.sum(acc, axis=1).reshape(OUTPUTS, SLICES), axis=1)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    if not INT4:
        y *= tl.load(scale_ptr + n, mask=n < N, other=0.0)
    tl.store(y_ptr + n, y.to(dtype), mask=n < N)


def weight_only_matmul_gemv(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """weight_only_matmul for one row (ValueError for more), without a part to merge."""
    M, N, K = check_packed("weight_only_matmul_gemv", x, packed)
    if M != 1:
        raise ValueError(f"weight_only_matmul_gemv: x has {M} rows; it takes one: call weight_only_matmul")
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if x.stride(1) != 1:
        x = x.contiguous()
    int4 = packed.format == "int4"
    if N:
        weight_only_matmul_gemv_kernel[(triton.cdiv(N, OUTPUTS),)](
            x, packed.words, packed.scales.view(torch.int32) if int4 else packed.scales, y,
            N, K, packed.words.shape[1] // WORDS.value, INT4=int4, OUTPUTS=OUTPUTS,
            STAGES=count_stages(N, x.device), num_warps=WARPS,
        )  # fmt: skip
    return y


def fills_gpu(N: int, device: torch.device) -> bool:
    """Whether N outputs are enough work for all SMs."""
    return PER_SM * OUTPUTS * device_limits(device).sms <= N


def count_stages(N: int, device: torch.device) -> int:
    """Stages of the pipeline: 2 where the programs are 75 to 100 % of one wave, else 3: chosen by timing on an H200."""
    per_sm = N / (OUTPUTS * device_limits(device).sms)
    return 2 if 0.75 * RESIDENT <= per_sm <= RESIDENT else 3
