"""A linear layer of one row: a matrix-vector product by FMAs, which an SM has enough of for what memory delivers.

A program has one output, whose weights are on their way nearly at once: a thread loads 8 of every block of K, two times
for a K of 8192 and at most 16 times up to 65536, and the program adds up what they give. K is a constant, so the
compiler puts loads first, and needs a mask for the rest of K alone. Where rows start at multiples of 16 bytes, a load
has 16 bytes. Nothing waits in shared memory: while one program waits for weights, others on its SM add up. x stays in
L1, where the next programs find it; Triton's cp.async of 16 bytes would pass L1 by.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.stream_k import check_linear
from examples.common.tma import tma_takes
from examples.common.untraced import untraced

DTYPES = (torch.float16, torch.bfloat16)
VECTOR = 8  # elements in 16 bytes
BLOCKS_K = (4096, 2048, 1024, 512, 256)  # a vector for each thread of 16 to 1 warps
UNROLLED = tl.constexpr(16)  # blocks of K at most: code without a loop, to put loads first


@triton.jit
def skinny_matmul_gemv_kernel(
    x_ptr, w_ptr, y_ptr, stride_wn, K: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    n, inner = tl.program_id(0), tl.arange(0, BLOCK_K)
    w_ptr += n.to(tl.int64) * stride_wn
    if ALIGNED:  # every row starts at a multiple of 16 bytes; Triton infers that only where 16 divides the stride
        w_ptr = tl.multiple_of(w_ptr, 16)
    acc = tl.zeros((BLOCK_K,), tl.float32)  # one sum for each place: they are added up once, at the end
    LOOPED: tl.constexpr = max(K - 1, 0) // (UNROLLED * BLOCK_K) * (UNROLLED * BLOCK_K)
    for k in tl.range(0, LOOPED, BLOCK_K, num_stages=1):
        w = tl.load(w_ptr + k + inner, eviction_policy="evict_first")
        x = tl.load(x_ptr + k + inner, eviction_policy="evict_last")
        acc += w.to(tl.float32) * x.to(tl.float32)
    for k in tl.static_range(LOOPED, K, BLOCK_K):
        inside, other = (None, None) if k + BLOCK_K <= K else (inner < K - k, 0.0)
        w = tl.load(w_ptr + k + inner, mask=inside, other=other, eviction_policy="evict_first")
        x = tl.load(x_ptr + k + inner, mask=inside, other=other, eviction_policy="evict_last")
        acc += w.to(tl.float32) * x.to(tl.float32)
    tl.store(y_ptr + n, tl.sum(acc, axis=0).to(y_ptr.dtype.element_ty))


def block_of(K: int) -> int:
    """BLOCK_K for this K, of those that cover it in at most UNROLLED; beyond 65536, 4096.

    It is the largest of which K holds two or more and that masks at most a 17th of all loads, else the smallest.
    """
    blocks = [b for b in BLOCKS_K if UNROLLED.value * b >= K] or BLOCKS_K[:1]
    return next((b for b in blocks if 2 * b <= K and 16 * triton.cdiv(K, b) * b <= 17 * K), blocks[-1])


@untraced
def skinny_matmul_gemv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """skinny_matmul for one row (ValueError for more), without MMAs. The kernel is compiled for each K."""
    M, N, K = check_linear("skinny_matmul_gemv", x, w, DTYPES)
    if M != 1:
        raise ValueError(f"skinny_matmul_gemv: x has {M} rows; it takes one: call skinny_matmul")
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if N:
        block_k = block_of(K)
        skinny_matmul_gemv_kernel[(N,)](
            x, w, y, w.stride(0), K=K, BLOCK_K=block_k, ALIGNED=tma_takes(w), num_warps=block_k // (32 * VECTOR)
        )
    return y
