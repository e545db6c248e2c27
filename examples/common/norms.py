"""Statistics of rows that a program holds in registers, where warps wait for each other as seldom as possible."""

from __future__ import annotations

import triton
import triton.language as tl

from examples.common.quantize import INLINE_PTX, absmax, larger


@triton.jit
def apart(x, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr):
    """Sums of the columns that are STEP apart, all in one thread: short chains of additions beside each other."""
    if STEP == BLOCK_N:
        return x
    else:
        return tl.sum(tl.reshape(x, (ROWS, BLOCK_N // STEP, STEP)), axis=1)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def sums(a, b):
    """Sums of rows of a and of b, for which warps wait for each other once."""
    if INLINE_PTX:
        return tl.reduce((a, b), 1, _add_both)
    else:
        return tl.sum(a, axis=1), tl.sum(b, axis=1)


@triton.jit
def share(total, n_cols, BLOCK_N: tl.constexpr, FULL: tl.constexpr):
    return total * (1.0 / BLOCK_N) if FULL else total / n_cols  # exact where BLOCK_N is n_cols, a power of two


@triton.jit
def moments(x, n_cols, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, STEP: tl.constexpr):
    """Mean and variance of rows from sums of x and of its square: one round of messages between warps."""
    total, squares = sums(apart(x, ROWS, BLOCK_N, STEP), apart(x * x, ROWS, BLOCK_N, STEP))
    mean = share(total, n_cols, BLOCK_N, FULL)
    return mean, larger(share(squares, n_cols, BLOCK_N, FULL) - mean * mean, 0.0)


@triton.jit
def layer_normed(
    x, in_row, n_cols, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, STEP: tl.constexpr
):
    """(x - mean) * rstd of rows. One whose mean is further from 0 than two deviations would lose digits in one pass, by
    the sums of x and of its square, and is summed again, measured from that mean."""
    mean, variance = moments(x, n_cols, ROWS, BLOCK_N, FULL, STEP)
    near = mean * mean <= 4.0 * variance  # false where either is NaN
    if tl.min(near.to(tl.int32), 0) == 0:
        x -= mean[:, None] if ROWS == 1 else tl.where(near, 0.0, mean)[:, None]
        if not FULL:
            x = tl.where(in_row, x, 0.0)
        mean_off, variance_off = moments(x, n_cols, ROWS, BLOCK_N, FULL, STEP)
        if ROWS > 1:  # a row's result is the same whatever rows share its program
            mean_off, variance_off = tl.where(near, mean, mean_off), tl.where(near, variance, variance_off)
        mean, variance = mean_off, variance_off
    rstd = tl.rsqrt(variance + tl.cast(eps, tl.float32))  # torch.compile passes a float in 64 bits
    return tl.fma(x, rstd[:, None], (-mean * rstd)[:, None])


@triton.jit
def rms_normed(x, n_cols, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, STEP: tl.constexpr):
    squares = tl.sum(apart(x * x, ROWS, BLOCK_N, STEP), axis=1)
    return x * tl.rsqrt(share(squares, n_cols, BLOCK_N, FULL) + tl.cast(eps, tl.float32))[:, None]


@triton.jit
def row_absmax(y, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, VECTOR: tl.constexpr):
    """Largest magnitude of each row, or NaN: as floats in a thread, then as integers, in which magnitudes have the same
    order and NaN is the largest; for these a warp has one instruction."""
    if INLINE_PTX:
        mine = tl.reshape(tl.abs(y), (ROWS, BLOCK_N // STEP, STEP // VECTOR, VECTOR))
        mine = tl.reduce(tl.reduce(mine, 3, larger), 1, larger)
        return tl.max(mine.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    else:
        return absmax(y, 1)
