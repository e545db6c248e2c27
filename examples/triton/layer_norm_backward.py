"""LayerNorm backward: row sums for dx and column sums for dweight and dbias, from one pass over x and dy.

rows    A program takes many rows. It loads the next ones into shared memory while it works, has the row sums at once,
        because it holds whole rows, and keeps the column sums of all its rows in registers. It writes these once, and
        a small kernel (column_sums in examples/common/rows.py) adds up what the programs wrote. There are no atomics,
        so every run gives the same bits. Three passes: x and dy in, dx out.
loop    Any length: a first kernel computes the two sums of each row, a second one reads everything again to write dx.
        A program then needs only a block of columns at a time. Five passes in place of three.

layer_norm_backward_split.py, in Gluon, takes longer rows in three passes, with programs that wait for each other.

Source  the derivation is that of Triton tutorial 05, whose locks are not needed here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.common.one_node import one_node
from examples.common.rows import (
    check_layer_norm_backward,
    check_length,
    column_sums,
    pipeline_stages,
    row_block,
    widen,
)
from examples.triton.layer_norm_backward_split import layer_norm_backward_split, split_limit

BACKWARD_ROWS_MAX = 8192  # 16 columns a thread at 16 warps: x, dy and two sums of each take 64 of its 128 registers


@triton.jit
def layer_norm_backward_rows_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    stride_dym, stride_xm, stride_dxm, n_rows, n_cols, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)
    in_row = cols < n_cols
    stride_dym, stride_xm = tl.cast(stride_dym, tl.int64), tl.cast(stride_xm, tl.int64)
    stride_dxm = tl.cast(stride_dxm, tl.int64)
    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
    dweight = tl.zeros((BLOCK_N,), tl.float32)
    dbias = tl.zeros((BLOCK_N,), tl.float32)
    for first in tl.range(program * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & in_row[None, :]
        x = widen(tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=inside, other=0.0))
        dy = widen(tl.load(dy_ptr + rows[:, None] * stride_dym + cols[None, :], mask=inside, other=0.0))
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        x_hat = (x - mean) * rstd
        dweight += tl.sum(dy * x_hat, axis=0)
        dbias += tl.sum(dy, axis=0)
        grad = dy * widen(weight)[None, :]
        shift = tl.sum(grad, axis=1)[:, None] / n_cols * rstd
        slope = tl.sum(grad * x_hat, axis=1)[:, None] / n_cols * rstd
        dx = grad * rstd - (x_hat * slope + shift)
        tl.store(dx_ptr + rows[:, None] * stride_dxm + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + program.to(tl.int64) * n_cols + cols, dweight, mask=in_row)
    tl.store(dbias_ptr + program.to(tl.int64) * n_cols + cols, dbias, mask=in_row)


@triton.jit
def layer_norm_backward_sums_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, shift_ptr, slope_ptr, stride_dym, stride_xm, n_cols,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    lane = tl.arange(0, BLOCK_N)
    totals = tl.zeros((BLOCK_N,), tl.float32)
    products = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + lane
        inside = cols < n_cols
        x = widen(tl.load(x_ptr + row * stride_xm + cols, mask=inside, other=0.0))
        dy = widen(tl.load(dy_ptr + row * stride_dym + cols, mask=inside, other=0.0))
        grad = dy * widen(tl.load(weight_ptr + cols, mask=inside, other=0.0))
        totals += grad
        products += grad * ((x - mean) * rstd)
    tl.store(shift_ptr + row, tl.sum(totals, axis=0) / n_cols)
    tl.store(slope_ptr + row, tl.sum(products, axis=0) / n_cols)


@triton.jit
def layer_norm_backward_loop_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, shift_ptr, slope_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    stride_dym, stride_xm, stride_dxm, n_rows, n_cols, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < n_cols
    group = tl.program_id(1)
    stride_dym, stride_xm = tl.cast(stride_dym, tl.int64), tl.cast(stride_xm, tl.int64)
    stride_dxm = tl.cast(stride_dxm, tl.int64)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
    dweight = tl.zeros((BLOCK_N,), tl.float32)
    dbias = tl.zeros((BLOCK_N,), tl.float32)
    for row in tl.range(group, n_rows, tl.num_programs(1), num_stages=STAGES):
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
        shift, slope = tl.load(shift_ptr + row), tl.load(slope_ptr + row)
        x = widen(tl.load(x_ptr + row * stride_xm + cols, mask=inside, other=0.0))
        dy = widen(tl.load(dy_ptr + row * stride_dym + cols, mask=inside, other=0.0))
        x_hat = (x - mean) * rstd
        dweight += dy * x_hat
        dbias += dy
        dx = (dy * widen(weight) - shift - x_hat * slope) * rstd
        tl.store(dx_ptr + row * stride_dxm + cols, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + group.to(tl.int64) * n_cols + cols, dweight, mask=inside)
    tl.store(dbias_ptr + group.to(tl.int64) * n_cols + cols, dbias, mask=inside)


def layer_norm_backward_rows(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias) for rows of up to BACKWARD_ROWS_MAX columns, by programs that stay for many rows.

    Takes and raises what layer_norm_backward does.
    """
    n_rows, n_cols = check_layer_norm_backward("layer_norm_backward_rows", dy, x, weight, mean, rstd)
    check_length("layer_norm_backward_rows", n_cols, BACKWARD_ROWS_MAX, "layer_norm_backward")
    if not n_rows:
        return torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(weight)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_n = row_block(n_cols)
    rows, num_warps = max(1, min(64, 2048 // block_n)), max(4, min(16, block_n // 512))
    per_sm = 16 // num_warps  # at 128 registers a thread: all run from the start, and all take the same share of rows
    programs = min(triton.cdiv(n_rows, rows), per_sm * device_limits(x.device).sms)
    partials = torch.empty(2, programs, n_cols, dtype=torch.float32, device=x.device)
    stages = pipeline_stages(x, 2 * rows * block_n, per_sm)
    layer_norm_backward_rows_kernel[(programs,)](
        dy, x, weight, mean, rstd, dx, partials[0], partials[1],
        dy.stride(0), x.stride(0), dx.stride(0), n_rows, n_cols,
        ROWS=rows, BLOCK_N=block_n, STAGES=stages, num_warps=num_warps, maxnreg=128,
    )  # fmt: skip
    return dx, *column_sums(partials, weight)


def layer_norm_backward_loop(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias) for rows of any length; x and dy are read twice. Takes what layer_norm_backward does."""
    n_rows, n_cols = check_layer_norm_backward("layer_norm_backward_loop", dy, x, weight, mean, rstd)
    if not n_rows:
        return torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(weight)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_n = min(4096, row_block(n_cols))
    num_warps = max(4, block_n // 512)
    shift, slope = torch.empty_like(mean), torch.empty_like(mean)
    layer_norm_backward_sums_kernel[(n_rows,)](
        dy, x, weight, mean, rstd, shift, slope, dy.stride(0), x.stride(0), n_cols, BLOCK_N=block_n, num_warps=num_warps
    )
    blocks = triton.cdiv(n_cols, block_n)
    groups = max(1, min(n_rows, 2 * device_limits(x.device).sms // blocks))
    partials = torch.empty(2, groups, n_cols, dtype=torch.float32, device=x.device)
    layer_norm_backward_loop_kernel[(blocks, groups)](
        dy, x, weight, mean, rstd, shift, slope, dx, partials[0], partials[1],
        dy.stride(0), x.stride(0), dx.stride(0), n_rows, n_cols,
        BLOCK_N=block_n, STAGES=pipeline_stages(x, 2 * block_n, 2), num_warps=num_warps,
    )  # fmt: skip
    return dx, *column_sums(partials, weight)


@one_node(
    "(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd) -> (Tensor, Tensor, Tensor)", like=(1, 2, 2),
    check=lambda *args: check_layer_norm_backward("layer_norm_backward", *args),
)  # fmt: skip
def layer_norm_backward(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias) by the kernel that is fastest for the row length; mean and rstd from layer_norm_forward.

    mean is one float32 number a row, whose rounding puts x_hat off by up to 6e-8 * |mean| / std (y has no such error).
    dy and x: [n_rows, n_cols] of one dtype (ValueError), any row stride. mean and rstd: float32 [n_rows] (TypeError).
    dx has x's dtype, dweight and dbias that of weight [n_cols]. Otherwise raises as layer_norm_forward does.
    Beyond BACKWARD_ROWS_MAX columns, programs wait for each other, if rows are read 16 bytes at a time and an eighth of
    the SMs can run those of a row (split_limit), so that other kernels may hold the rest. Other rows are read twice.
    """
    _, n_cols = check_layer_norm_backward("layer_norm_backward", dy, x, weight, mean, rstd)
    if n_cols <= BACKWARD_ROWS_MAX:
        return layer_norm_backward_rows(dy, x, weight, mean, rstd)
    split = n_cols <= split_limit(dy, x)
    return (layer_norm_backward_split if split else layer_norm_backward_loop)(dy, x, weight, mean, rstd)


class LayerNorm(torch.autograd.Function):
    """What autograd calls; `kernel` is layer_norm_forward."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, kernel):
        rows = x.reshape(-1, x.shape[-1])  # a view, unless the leading dimensions cannot be merged
        y, mean, rstd = kernel(rows, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)  # x and not rows: autograd knows where an input came from
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        return *LayerNormBackward.apply(dy, *ctx.saved_tensors), None, None


class LayerNormBackward(torch.autograd.Function):
    """A node of its own, so that differentiating again is an error.

    once_differentiable would not do: it refuses only where dy requires grad, and for a sum of y, say, dy does not.
    """

    @staticmethod
    def forward(ctx, dy, x, weight, mean, rstd):
        x_rows, dy_rows = (t.reshape(-1, x.shape[-1]) for t in (x, dy))
        if dy_rows.stride(1) != 1:  # the gradient of a sum is one number expanded, with strides of 0: it is written out
            dy_rows = dy_rows.contiguous()
        dx, dweight, dbias = layer_norm_backward(dy_rows, x_rows, weight, mean, rstd)
        return dx.view(dy.shape), dweight, dbias

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("layer_norm: its gradient has no derivative; use torch.nn.functional.layer_norm for that")


def reference_backward(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, ...]:
    """Gradients of the float64 LayerNorm; its mean and rstd are its own."""
    with torch.enable_grad():
        x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
        bias = torch.zeros_like(weight, requires_grad=True)
        y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)
        return torch.autograd.grad(y, (x, weight, bias), dy.double())
