"""LayerNorm forward of a row that stays in the L1 cache of one SM: a loop for mean and variance, one that writes.

The second loop hits L1. The row length is a constant of the kernel, so that the compiler unrolls the loops and has many
loads in flight; the price is one compilation for each length. Mean and variance come from one loop (Welford's update in
every lane), and the lanes are merged after it.

Source  Welford 1962; Chan, Golub and LeVeque 1983 (merging means and squares).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.rows import check_layer_norm

# The longest row in KiB; then 16-bit values a program takes at a step, warps, and steps that are unrolled.
RESIDENT = [(4, 1024, 4, 1), (8, 2048, 8, 1), (16, 1024, 8, 1), (32, 4096, 16, 1), (64, 8192, 32, 1),
            (128, 16384, 32, 4), (float("inf"), 16384, 32, 1)]  # fmt: skip


@triton.jit
def _load_row(row_ptr, cols, N_COLS: tl.constexpr, FULL: tl.constexpr, HINT: tl.constexpr):
    if FULL:  # a mask costs a predicate per load; most lengths need none
        x = tl.load(row_ptr + cols, eviction_policy=HINT)
    else:
        x = tl.load(row_ptr + cols, mask=cols < N_COLS, other=0.0, eviction_policy=HINT)
    return x.to(tl.float32)


@triton.jit
def layer_norm_resident_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, stride_xm, stride_ym, eps,
    N_COLS: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    FULL: tl.constexpr = N_COLS % BLOCK_N == 0
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * stride_xm, y_ptr + row * stride_ym
    lane = tl.arange(0, BLOCK_N)
    # Measured from the row's first element: a mean of 10000 with a spread of 1 would cost float32 four digits. In 16
    # bits only a nearly constant row has a mean so far from its spread, and nothing is subtracted.
    origin = 0.0
    if x_ptr.dtype.element_ty == tl.float32:
        origin = tl.load(x_row)
    # One running mean and sum of squares per lane, not per row: no reduction inside the loop.
    lane_mean = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    seen = 0.0
    for start in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        cols = start + lane
        x = _load_row(x_row, cols, N_COLS, FULL, "evict_last") - origin
        seen += 1.0
        off = x - lane_mean
        if not FULL:
            off = tl.where(cols < N_COLS, off, 0.0)
        lane_mean += off * (1.0 / seen)  # one division, not one per lane
        squares += off * (x - lane_mean)
    count = ((N_COLS + BLOCK_N - 1 - lane) // BLOCK_N).to(tl.float32)  # elements this lane has seen
    mean = tl.sum(lane_mean * count, axis=0) / N_COLS
    between = tl.where(count > 0, lane_mean - mean, 0.0)  # the square of an empty lane may be infinite
    eps = tl.cast(eps, tl.float32)  # torch.compile passes a float in 64 bits
    rstd = tl.rsqrt(tl.sum(squares + between * between * count, axis=0) / N_COLS + eps)
    for start in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        cols = start + lane
        x = _load_row(x_row, cols, N_COLS, FULL, "evict_first") - origin
        weight = _load_row(weight_ptr, cols, N_COLS, FULL, "evict_last")
        bias = _load_row(bias_ptr, cols, N_COLS, FULL, "evict_last")
        y = (x - mean) * rstd * weight + bias
        tl.store(y_row + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N_COLS)
    tl.store(mean_ptr + row, origin + mean)
    tl.store(rstd_ptr + row, rstd)


def layer_norm_resident(x, weight, bias, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) for rows of any length, read from memory once as long as a row fits the L1 cache of an SM.

    Takes and raises what layer_norm_forward does. For float32 x, y is computed from two numbers, the row's first
    element and the mean of the differences from it; the mean that is returned is their sum, rounded to float32 once.
    """
    n_rows, n_cols = check_layer_norm("layer_norm_resident", x, weight, bias, eps)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(n_rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if n_rows:
        # By the bytes of a row, chosen by timing on an H200.
        kib = n_cols * x.element_size() / 1024
        step, num_warps, unroll = next(choice for limit, *choice in RESIDENT if kib <= limit)
        layer_norm_resident_kernel[(n_rows,)](
            x, weight, bias, y, mean, rstd, x.stride(0), y.stride(0), eps,
            N_COLS=n_cols, BLOCK_N=min(2 * step // x.element_size(), triton.next_power_of_2(n_cols)),
            UNROLL=unroll, num_warps=num_warps,
        )  # fmt: skip
    return y, mean, rstd
