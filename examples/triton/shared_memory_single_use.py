"""Kernels that use each loaded value once (the matmul: of B): twice x, column and row sums, a matmul by rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.operands import check_choice, check_elementwise, check_gemm, check_rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)
BLOCK = 1024  # columns of a program: 8 values a thread, one 128-bit load of 16-bit values
WARPS = 4


@triton.jit
def scale_kernel(x_ptr, out_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n_elements
    # The chapter's "allocate shared memory, load data into it": a name for zeros, then the same name for x.
    shared_data = tl.zeros((BLOCK,), dtype=tl.float32)
    shared_data += tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    tl.store(out_ptr + offsets, (shared_data * 2.0).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def column_sum_kernel(x_ptr, out_ptr, stride_xm, n_rows, n_cols, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_cols
    stride_xm = tl.cast(stride_xm, tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # A thread adds up its own columns and needs nothing from another. Loads that are issued ahead need a place to wait.
    for row in tl.range(0, n_rows, num_stages=STAGES):
        total += tl.load(x_ptr + row * stride_xm + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def row_sum_kernel(x_ptr, out_ptr, stride_xm, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * stride_xm + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    # Threads of a warp exchange registers; warps exchange through shared memory, one float32 each.
    tl.store(out_ptr + row, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty))


@triton.jit
def matmul_strip_kernel(
    a_ptr, b_ptr, c_ptr, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, BLOCK_N: tl.constexpr
):  # fmt: skip
    # One row of C at a time: every row loads all of B again.
    tiles_n = tl.cdiv(N, BLOCK_N)
    row = (tl.program_id(0) // tiles_n).to(tl.int64)
    cols = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < N
    a_ptrs, b_ptrs = a_ptr + row * stride_am, b_ptr + cols * stride_bn
    stride_ak, stride_bk = tl.cast(stride_ak, tl.int64), tl.cast(stride_bk, tl.int64)
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for _ in range(0, K):
        acc += tl.load(a_ptrs).to(tl.float32) * tl.load(b_ptrs, mask=inside, other=0.0).to(tl.float32)
        a_ptrs += stride_ak
        b_ptrs += stride_bk
    tl.store(c_ptr + row * stride_cm + cols, acc.to(c_ptr.dtype.element_ty), mask=inside)


def scale(x: torch.Tensor) -> torch.Tensor:
    """2 * x for a contiguous x of any shape in float32, float16 or bfloat16, by the chapter's kernel.

    Raises TypeError for another dtype; ValueError for another layout; RuntimeError for a device without Triton or an
    input that requires grad.
    """
    check_elementwise("scale", DTYPES, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        scale_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return out


def column_sum(x: torch.Tensor, num_stages: int = 1) -> torch.Tensor:
    """The sum of each column of x [n_rows, n_cols], as [n_cols] in x's dtype.

    num_stages, 1 to 4, keeps the loads of num_stages - 1 rows in flight. x is float32, float16 or bfloat16, summed in
    float32; any row stride, any number of rows. Raises TypeError for another dtype; ValueError for rank, an inner
    stride other than 1, no columns or another num_stages; RuntimeError for a device without Triton or an input that
    requires grad.
    """
    n_rows, n_cols = check_rows("column_sum", x, DTYPES)
    check_choice("column_sum", (1, 2, 3, 4), num_stages=num_stages)
    out = torch.empty(n_cols, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(n_cols, BLOCK),)
    column_sum_kernel[grid](x, out, x.stride(0), n_rows, n_cols, BLOCK=BLOCK, STAGES=num_stages, num_warps=WARPS)
    return out


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of each row of x [n_rows, n_cols], as [n_rows] in x's dtype; limits and errors as column_sum's."""
    n_rows, n_cols = check_rows("row_sum", x, DTYPES)
    out = torch.empty(n_rows, dtype=x.dtype, device=x.device)
    if n_rows:
        row_sum_kernel[(n_rows,)](x, out, x.stride(0), n_cols, BLOCK=BLOCK, num_warps=WARPS)
    return out


def matmul_strip(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N] without reuse of b, BLOCK columns of one row a program: c [M, N], contiguous, dtype of a.

    Limits and errors as matmul_tile's.
    """
    M, N, K = check_gemm("matmul_strip", a, b, HALF)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if M and N:
        matmul_strip_kernel[(M * triton.cdiv(N, BLOCK),)](
            a, b, c, N, K, *a.stride(), *b.stride(), c.stride(0), BLOCK_N=BLOCK, num_warps=WARPS
        )  # fmt: skip
    return c
