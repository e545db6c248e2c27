"""Softmax of a row that stays in the L1 cache of one SM: three loops over it, of which only the first reads memory.

The row length is a constant of the kernel, so that the compiler unrolls the loops and has many loads in flight; the
price is one compilation for each length. A longer row works too, but is read again from L2 or memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.operands import check_rows
from examples.common.rows import DTYPES

# The longest row in KiB; then 16-bit values a program takes at a step, warps, and steps that are unrolled. Chosen by
# timing on an H200.
RESIDENT = [(16, 2048, 8, 1), (32, 4096, 16, 1), (64, 4096, 32, 2), (float("inf"), 16384, 32, 2)]


@triton.jit
def _load_row(x_row, cols, N_COLS: tl.constexpr, BLOCK_N: tl.constexpr, HINT: tl.constexpr):
    if N_COLS % BLOCK_N:
        x = tl.load(x_row + cols, mask=cols < N_COLS, other=-float("inf"), eviction_policy=HINT)
    else:  # a mask costs a predicate per load; most lengths need none
        x = tl.load(x_row + cols, eviction_policy=HINT)
    return x.to(tl.float32)


@triton.jit
def softmax_resident_kernel(
    x_ptr, y_ptr, stride_xm, stride_ym, N_COLS: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * stride_xm, y_ptr + row * stride_ym
    lane = tl.arange(0, BLOCK_N)
    # One maximum and one sum per lane: no reduction inside a loop. An online softmax would save the second loop, which
    # is cheap because it hits L1, and pay with a second exponential per element, which is not.
    largest = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    for start in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        largest = tl.maximum(largest, _load_row(x_row, start + lane, N_COLS, BLOCK_N, "evict_last"))
    row_max = tl.max(largest, axis=0)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        total += tl.exp(_load_row(x_row, start + lane, N_COLS, BLOCK_N, "evict_last") - row_max)
    scale = 1.0 / tl.sum(total, axis=0)
    # Backwards: what was read last is the most likely to be still cached.
    LAST: tl.constexpr = (N_COLS - 1) // BLOCK_N * BLOCK_N
    for done in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        cols = LAST - done + lane
        y = tl.exp(_load_row(x_row, cols, N_COLS, BLOCK_N, "evict_first") - row_max) * scale
        tl.store(y_row + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N_COLS)


def softmax_resident(x: torch.Tensor) -> torch.Tensor:
    """Softmax over rows of any length, each read from memory once as long as a row fits the L1 cache of an SM.

    Takes and raises what softmax does.
    """
    n_rows, n_cols = check_rows("softmax_resident", x, DTYPES)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if n_rows:
        kib = n_cols * x.element_size() / 1024
        step, num_warps, unroll = next(choice for limit, *choice in RESIDENT if kib <= limit)
        softmax_resident_kernel[(n_rows,)](
            x, y, x.stride(0), y.stride(0),
            N_COLS=n_cols, BLOCK_N=min(2 * step // x.element_size(), triton.next_power_of_2(n_cols)),
            UNROLL=unroll, num_warps=num_warps,
        )  # fmt: skip
    return y
