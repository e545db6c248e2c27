"""A linear layer of one row: a matrix-vector product by FMAs, which an SM has enough of for what memory delivers.

A program has a few outputs and all of K. It loads its weights through shared memory, several steps ahead, and keeps a
sum for each of BLOCK_K places; these are added up once, at the end. An SM runs five programs, with 80 KiB in flight.
They are small, so that towards the end the few that are left are soon done.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.common.rows import widen
from examples.common.stream_k import check_linear

DTYPES = (torch.float16, torch.bfloat16)
OUTPUTS, BLOCK_K, WARPS, STAGES = 2, 2048, 8, 3
# This kernel is used from this many programs per SM on: with 132 SMs, between the two sizes that are recorded. At 28672
# outputs it is faster than MMAs on an H200 and on an H100; at 8192 it is slower on the H200, which the rule follows,
# and faster on the H100, by a few percent either way.
PER_SM = 64


@triton.jit
def skinny_matmul_gemv_kernel(
    x_ptr, w_ptr, y_ptr, N, K, stride_wn, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    n, inner = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + (n % N)[:, None].to(tl.int64) * stride_wn + inner[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)  # one sum for each place: they are added up once, after the loop
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = inner < K - k
        x = tl.load(x_ptr + k + inner, mask=inside, other=0.0)
        w = tl.load(w_ptrs + k, mask=inside[None, :], other=0.0)
        acc += widen(w) * widen(x)[None, :]
    tl.store(y_ptr + n, tl.sum(acc, axis=1).to(y_ptr.dtype.element_ty), mask=n < N)


def skinny_matmul_gemv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """skinny_matmul for one row (ValueError for more), without MMAs."""
    M, N, K = check_linear("skinny_matmul_gemv", x, w, DTYPES)
    if M != 1:
        raise ValueError(f"skinny_matmul_gemv: x has {M} rows; it takes one: call skinny_matmul")
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if N:
        skinny_matmul_gemv_kernel[(triton.cdiv(N, OUTPUTS),)](
            x, w, y, N, K, w.stride(0), BLOCK_N=OUTPUTS, BLOCK_K=BLOCK_K, STAGES=STAGES, num_warps=WARPS
        )
    return y


def takes_gemv(N: int, device: torch.device) -> bool:
    """Whether N outputs make enough programs for this kernel to be faster than MMAs."""
    return PER_SM * OUTPUTS * device_limits(device).sms <= N
