"""A linear layer of one row: a matrix-vector product by FMAs, which an SM has enough of for what memory delivers.

A program has one output, whose weights are on their way nearly at once: for a K of 257 to 16384 each thread loads two
to four vectors, of 16 bytes where rows are a multiple of 32 bytes apart (Triton looks for no other), and the program
adds up what they give. K is a constant, so the compiler puts loads first, and needs a mask for the rest of K alone.
Nothing waits in shared memory: while one program waits for weights, others on its SM add up. x stays in L1, where the
next programs find it; Triton's cp.async of 16 bytes would pass L1 by.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.stream_k import check_linear
from examples.common.untraced import untraced

DTYPES = (torch.float16, torch.bfloat16)
VECTOR = 8  # elements in 16 bytes
BLOCK_K_MIN, BLOCK_K_MAX = 256, 4096  # a vector for each thread of 1 to 16 warps


@triton.jit
def skinny_matmul_gemv_kernel(x_ptr, w_ptr, y_ptr, stride_wn, K: tl.constexpr, BLOCK_K: tl.constexpr):
    n, inner = tl.program_id(0), tl.arange(0, BLOCK_K)
    w_ptr += n.to(tl.int64) * stride_wn
    acc = tl.zeros((BLOCK_K,), tl.float32)  # one sum for each place: they are added up once, at the end
    WHOLE: tl.constexpr = K // BLOCK_K * BLOCK_K
    for k in tl.range(0, WHOLE, BLOCK_K, num_stages=1):
        w = tl.load(w_ptr + k + inner, eviction_policy="evict_first")
        x = tl.load(x_ptr + k + inner, eviction_policy="evict_last")
        acc += w.to(tl.float32) * x.to(tl.float32)
    if WHOLE < K:
        k = WHOLE + inner
        w = tl.load(w_ptr + k, mask=k < K, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + k, mask=k < K, other=0.0, eviction_policy="evict_last")
        acc += w.to(tl.float32) * x.to(tl.float32)
    tl.store(y_ptr + n, tl.sum(acc, axis=0).to(y_ptr.dtype.element_ty))


def block_of(K: int) -> int:
    """BLOCK_K for this K: the power of two of which K holds two to four, within the limits."""
    return max(BLOCK_K_MIN, min(triton.next_power_of_2(K + 1) // 4, BLOCK_K_MAX))


@untraced
def skinny_matmul_gemv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """skinny_matmul for one row (ValueError for more), without MMAs. The kernel is compiled for each K."""
    M, N, K = check_linear("skinny_matmul_gemv", x, w, DTYPES)
    if M != 1:
        raise ValueError(f"skinny_matmul_gemv: x has {M} rows; it takes one: call skinny_matmul")
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if N:
        block_k = block_of(K)
        num_warps = block_k // (32 * VECTOR)
        skinny_matmul_gemv_kernel[(N,)](x, w, y, w.stride(0), K=K, BLOCK_K=block_k, num_warps=num_warps)
    return y
