"""Rows that are longer than a program holds: read in steps for amax, then again, backwards, to be written.

The second pass hits L2, and it hits L1 at the end of the row, which the first pass read last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.fp8 import fp8_max
from examples.common.quantize import magnitude_bits, scale_and_factor

LONG_STEP, LONG_UNROLL = 8192, 2  # the step is doubled for rows of more than two


@triton.jit
def _load_row(x_row, cols, N_COLS: tl.constexpr, BLOCK_N: tl.constexpr, HINT: tl.constexpr):
    if N_COLS % BLOCK_N:
        x = tl.load(x_row + cols, mask=cols < N_COLS, other=0.0, eviction_policy=HINT)
    else:  # a mask costs a predicate per load; most lengths need none
        x = tl.load(x_row + cols, eviction_policy=HINT)
    return x.to(tl.float32)


@triton.jit
def quantize_long_row_kernel(
    x_ptr, q_ptr, scale_ptr, stride_xm, stride_qm,
    N_COLS: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row, q_row = x_ptr + row * stride_xm, q_ptr + row * stride_qm
    lane = tl.arange(0, BLOCK_N)
    largest = tl.zeros((BLOCK_N,), tl.int32)  # one per lane: no reduction inside the loop
    for start in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        largest = tl.maximum(largest, magnitude_bits(_load_row(x_row, start + lane, N_COLS, BLOCK_N, "evict_last")))
    scale, inverse = scale_and_factor(tl.max(largest, axis=0), MOST)
    tl.store(scale_ptr + row, scale)
    # Backwards: what was read last is the surest to be still there.
    LAST: tl.constexpr = (N_COLS - 1) // BLOCK_N * BLOCK_N
    for done in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        cols = LAST - done + lane
        q = _load_row(x_row, cols, N_COLS, BLOCK_N, "evict_first") * inverse
        tl.store(q_row + cols, q.to(q_ptr.dtype.element_ty), mask=cols < N_COLS)


def launch_long_rows(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    n_rows, n_cols = x.shape
    if n_rows:  # a grid of zero programs is a launch error
        step = LONG_STEP if n_cols <= 2 * LONG_STEP else 2 * LONG_STEP
        quantize_long_row_kernel[(n_rows,)](
            x, q, scale, x.stride(0), q.stride(0),
            N_COLS=n_cols, BLOCK_N=step, UNROLL=LONG_UNROLL, MOST=fp8_max(q.dtype), num_warps=step // 512,
        )  # fmt: skip
