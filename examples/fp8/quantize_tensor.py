"""One scale for all elements: a kernel finds amax, a second one casts.

Nothing may be written before everything was read, so 16-bit elements move 5 bytes each. The second kernel goes
backwards, so that it hits what the first one left in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.fp8 import E4M3, FLOOR, fp8_max
from examples.common.quantize import check_quantize, magnitude_bits, scale_and_factor

# Chosen by timing bf16 16384x16384 on an H200.
AMAX_TILE, AMAX_STEPS, AMAX_WARPS = 8192, 2, 8
CAST_TILE, CAST_WARPS = 2048, 4


@triton.jit
def _tile(number, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a tile, int64 as there may be one row of all elements, and what of it is inside."""
    tiles_n = (n_cols - 1) // BLOCK_N + 1  # tl.cdiv adds BLOCK_N - 1 first, which passes 2**31
    rows = (number // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (number % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows[:, None], cols[None, :], (rows < n_rows)[:, None] & (cols < n_cols)[None, :]


@triton.jit
def amax_kernel(
    x_ptr, amax_ptr, stride_xm, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr
):
    largest = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for step in range(STEPS):
        rows, cols, inside = _tile(tl.program_id(0) * STEPS + step, n_rows, n_cols, BLOCK_M, BLOCK_N)
        x = tl.load(x_ptr + rows * stride_xm + cols, mask=inside, other=0.0, eviction_policy="evict_last")
        largest = tl.maximum(largest, magnitude_bits(x.to(tl.float32)))
    tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")


@triton.jit
def cast_kernel(
    x_ptr, q_ptr, amax_ptr, scale_ptr, stride_xm, stride_qm, n_rows, n_cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    # Last tile first: it is the likeliest to be still in L2.
    rows, cols, inside = _tile(tl.num_programs(0) - 1 - tl.program_id(0), n_rows, n_cols, BLOCK_M, BLOCK_N)
    x = tl.load(x_ptr + rows * stride_xm + cols, mask=inside, eviction_policy="evict_first").to(tl.float32)
    scale, inverse = scale_and_factor(tl.load(amax_ptr), MOST)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    q = (x * inverse).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + rows * stride_qm + cols, q, mask=inside, cache_modifier=".cs")


def _fit_tile(elements: int, n_rows: int, n_cols: int) -> tuple[dict[str, int], int]:
    """A tile of at most so many elements, as wide as rows allow, and how many of them there are."""
    block_n = min(elements, max(16, triton.next_power_of_2(n_cols)))
    block_m = min(elements // block_n, triton.next_power_of_2(n_rows))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n}, triton.cdiv(n_rows, block_m) * triton.cdiv(n_cols, block_n)


def quantize_tensor(x: torch.Tensor, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale []): one scale for all elements, in two passes over x. Raises what quantize does."""
    check_quantize("quantize_tensor", x, dtype)
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    if not x.numel():  # a grid of zero programs is a launch error
        return q, scale.fill_(FLOOR / fp8_max(dtype))
    n_rows, n_cols = (1, x.numel()) if x.is_contiguous() else x.shape
    amax = torch.zeros((), dtype=torch.int32, device=x.device)  # a memset, which is part of its time
    blocks, tiles = _fit_tile(AMAX_TILE, n_rows, n_cols)
    amax_kernel[(triton.cdiv(tiles, AMAX_STEPS),)](
        x, amax, x.stride(0), n_rows, n_cols, **blocks, STEPS=AMAX_STEPS, num_warps=AMAX_WARPS
    )
    blocks, tiles = _fit_tile(CAST_TILE, n_rows, n_cols)
    cast_kernel[(tiles,)](
        x, q, amax, scale, x.stride(0), q.stride(0), n_rows, n_cols, **blocks,
        MOST=fp8_max(dtype), num_warps=CAST_WARPS,
    )  # fmt: skip
    return q, scale
