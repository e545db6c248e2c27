"""Rows longer than a program holds: read twice and GELU computed twice, which is cheaper than writing y."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.activations import gelu_fitted, gelu_tanh
from examples.common.fp8 import fp8_max
from examples.common.quantize import absmax, larger, scale_and_inverse, widen_bfloat16

ROW_STEP = 8192  # columns that a program takes at once
PER_THREAD = 32  # values a thread holds: two 16-byte stores of FP8


@triton.jit
def gelu(x, TANH: tl.constexpr):
    """GELU in float32: two special operations, and few enough others."""
    return gelu_tanh(x) if TANH else gelu_fitted(x)


@triton.jit
def gelu_quantize_long_rows_kernel(
    x_ptr, q_ptr, scale_ptr, stride_xm, n_cols, TANH: tl.constexpr, MOST: tl.constexpr, STEP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_row, q_row = x_ptr + row * stride_xm, q_ptr + row * n_cols
    lane = tl.arange(0, STEP)
    largest = tl.zeros((STEP,), tl.float32)
    for start in tl.range(0, n_cols, STEP):
        cols = start + lane
        x = tl.load(x_row + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_last")
        largest = larger(largest, tl.abs(gelu(widen_bfloat16(x), TANH)))
    scale, inverse = scale_and_inverse(absmax(largest, 0), MOST, INFINITE=True)
    tl.store(scale_ptr + row, scale)
    for start in tl.range(0, n_cols, STEP):
        cols = start + lane
        x = tl.load(x_row + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_first")
        q = (gelu(widen_bfloat16(x), TANH) * inverse).to(q_ptr.dtype.element_ty)
        tl.store(q_row + cols, q, mask=cols < n_cols)


def launch_long_rows(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, tanh: bool) -> None:
    n_rows, n_cols = x.shape
    gelu_quantize_long_rows_kernel[(n_rows,)](
        x, q, scale, x.stride(0), n_cols,
        TANH=tanh, MOST=fp8_max(q.dtype), STEP=ROW_STEP, num_warps=ROW_STEP // (32 * PER_THREAD),
    )  # fmt: skip
