"""Rows by a program: what of a row its threads hold, and rows longer than that, read again from L1.

A row that registers do not hold is read three times: for mean and variance, for amax, and to be written. Its length is
a constant of the kernel, so each length is compiled.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from examples.common.quantize import GROUP, absmax, larger, scale_and_inverse

STEP_GROUPS, NUM_WARPS = 64, 16  # a step is 8192 columns
# Of rows in registers, by the bytes of an element: values of a row that a thread holds, and its registers.
HELD = {2: (32, 64), 4: (32, 80)}
LONG, HELD_LONG = 8192, (64, 96)  # 16-bit rows of just this length
UNALIGNED = 128  # registers where VECTOR does not divide every row's start and length
VECTOR = 8  # neighbouring columns of a thread


def plan_rows(x: torch.Tensor, per_group: bool) -> dict:
    """Rows and columns of a program that holds whole rows, how it reads them, its warps and registers."""
    n_cols, size = x.shape[1], x.element_size()
    block_n = max(GROUP, triton.next_power_of_2(n_cols))
    align = math.gcd(VECTOR, n_cols, x.stride(0))
    aligned = align == VECTOR
    long = aligned and size == 2 and n_cols == LONG
    per_thread, registers = HELD_LONG if long else HELD[size]
    num_warps = max(1, block_n // (32 * per_thread))
    return {
        "ROWS": max(1, 32 * per_thread // block_n),  # at least what fills a warp
        "BLOCK_N": block_n,
        "FULL": n_cols == block_n,
        "ALIGN": align,
        "STEP": min(block_n, 32 * num_warps * VECTOR),
        "PAST_L1": aligned and size == 2 and (long or per_group),
        "num_warps": num_warps,
        "maxnreg": registers if aligned else UNALIGNED,
    }


@triton.jit
def _load_row(row_ptr, cols, N_COLS: tl.constexpr, FULL: tl.constexpr, HINT: tl.constexpr):
    if FULL:  # a mask costs a predicate per load; most lengths need none
        x = tl.load(row_ptr + cols, eviction_policy=HINT)
    else:
        x = tl.load(row_ptr + cols, mask=cols < N_COLS, other=0.0, eviction_policy=HINT)
    return x.to(tl.float32)


@triton.jit
def _normalized(
    x_row, weight_ptr, bias_ptr, cols, origin, mean, rstd,
    BIAS: tl.constexpr, N_COLS: tl.constexpr, FULL: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """y, 0 outside the row: the same arithmetic for amax and for q."""
    x = _load_row(x_row, cols, N_COLS, FULL, HINT)
    if x_row.dtype.element_ty == tl.float32:
        x -= origin
    y = (x - mean) * rstd * _load_row(weight_ptr, cols, N_COLS, FULL, "evict_last")
    if BIAS:
        y += _load_row(bias_ptr, cols, N_COLS, FULL, "evict_last")
    return y if FULL else tl.where(cols < N_COLS, y, 0.0)


@triton.jit
def layer_norm_quantize_resident_kernel(
    x_ptr, weight_ptr, bias_ptr, q_ptr, scale_ptr, stride_xm, stride_sg, eps,
    CENTER: tl.constexpr, BIAS: tl.constexpr, PER_GROUP: tl.constexpr, MOST: tl.constexpr,
    N_COLS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = GROUPS * GROUP
    FULL: tl.constexpr = N_COLS % STEP == 0
    row = tl.program_id(0).to(tl.int64)
    x_row, q_row = x_ptr + row * stride_xm, q_ptr + row * N_COLS
    groups = tl.arange(0, GROUPS)
    lane = (groups * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    # One running mean and sum of squares per lane, not per row: no reduction inside the loop.
    lane_mean = tl.zeros((GROUPS, GROUP), tl.float32)
    squares = tl.zeros((GROUPS, GROUP), tl.float32)
    seen = 0.0
    for start in tl.range(0, N_COLS, STEP):
        x = _load_row(x_row, start + lane, N_COLS, FULL, "evict_last")
        if CENTER:
            seen += 1.0
            off = x - lane_mean
            if not FULL:
                off = tl.where(start + lane < N_COLS, off, 0.0)
            lane_mean += off * (1.0 / seen)  # one division, not one per lane
            squares += off * (x - lane_mean)
        else:
            squares += x * x
    origin, mean = 0.0, 0.0
    if CENTER:
        count = ((N_COLS + STEP - 1 - lane) // STEP).to(tl.float32)  # elements this lane has seen
        # A mean of 10000 with a spread of 1 would cost float32 four digits; 16-bit values there have none to lose.
        origin = tl.load(x_row).to(tl.float32)
        between = lane_mean - origin
        mean = tl.sum(tl.sum(between * count, axis=1), axis=0) / N_COLS
        between = tl.where(count > 0, between - mean, 0.0)  # an empty lane's square may be infinite
        squares += between * between * count
        if x_ptr.dtype.element_ty != tl.float32:
            mean += origin
    rstd = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / N_COLS + eps)
    if not PER_GROUP:
        largest = tl.zeros((GROUPS, GROUP), tl.float32)
        for start in tl.range(0, N_COLS, STEP):
            y = _normalized(
                x_row, weight_ptr, bias_ptr, start + lane, origin, mean, rstd, BIAS, N_COLS, FULL, "evict_last"
            )
            largest = larger(largest, tl.abs(y))
        scale, inverse = scale_and_inverse(absmax(absmax(largest, 1), 0), MOST, INFINITE=False)
        tl.store(scale_ptr + row, scale)
    for start in tl.range(0, N_COLS, STEP):
        cols = start + lane
        y = _normalized(x_row, weight_ptr, bias_ptr, cols, origin, mean, rstd, BIAS, N_COLS, FULL, "evict_first")
        if PER_GROUP:
            scale, inverse = scale_and_inverse(absmax(y, 1), MOST, INFINITE=False)
            group = start // GROUP + groups
            tl.store(scale_ptr + row + group.to(tl.int64) * stride_sg, scale, mask=group * GROUP < N_COLS)
            q = y * inverse[:, None]
        else:
            q = y * inverse
        tl.store(q_row + cols, q.to(q_ptr.dtype.element_ty), mask=cols < N_COLS)


def launch_resident(x, weight, bias, q: torch.Tensor, scale: torch.Tensor, eps: float, kind: dict) -> None:
    n_rows, n_cols = x.shape
    layer_norm_quantize_resident_kernel[(n_rows,)](
        x, weight, bias, q, scale, x.stride(0), n_rows, eps, **kind, GROUP=GROUP,
        N_COLS=n_cols, GROUPS=STEP_GROUPS, num_warps=NUM_WARPS,
    )  # fmt: skip
