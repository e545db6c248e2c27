"""Cross-entropy backward: the gradient of a row from three numbers, and when it is made.

From three numbers that the forward saved, the row's maximum, a weight and a factor, the gradient is

    exp(x - maximum) * weight - ((1 - smoothing) * [class is target] + smoothing / n_cols) * factor

times the gradient of the loss, which is 1 unless the loss is scaled or divided first. If it is 1 and the forward has
made the gradient, the kernel below does nothing: it reads that number on the device, so the host waits for nothing. For
any other number it makes the gradient again from the logits, because a mean's 16-bit gradients are too small to be
scaled after rounding. In place no logits are left, so the rounded gradients are scaled all the same.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.common.exponentials import LOG2_E
from examples.common.untraced import untraced
from examples.triton.cross_entropy_operands import edges_of, empty_gradient, row_layout, vectors_of

LN_2 = tl.constexpr(math.log(2))
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # and not -inf, as -inf - -inf is NaN
BLOCK_BYTES = 16384  # of a row at a step: 2 loads of 128 bits a thread at 16 warps
BACKWARD_PER_SM = 2  # programs; each goes through rows of its own


@triton.jit
def exp_of(x):
    """e^x for the difference x of a logit and a maximum, by the hardware's 2^x.

    An FMA, x * log2(e) - maximum * log2(e), would save an instruction. But it rounds one product and not the other: the
    largest logit's weight would not be 1, and at 1e30, where float32 has steps of 1e23, it would be zero or infinite.
    exponentials.py uses that FMA and corrects for its rounding.
    """
    return tl.exp2(x * LOG2_E)


@triton.jit
def softmax_of(x, reference, weight, factor, smoothing, n_cols, SMOOTH: tl.constexpr):
    """The derivative of a row's loss at logits x, none of them the target's."""
    grad = exp_of(x - reference) * weight
    if SMOOTH:
        grad -= factor * smoothing / n_cols
    return grad


@triton.jit
def _write(
    x_ptr, grad_ptr, at, inside, target, dy, reference, weight, factor, smoothing, n_cols,
    IN_PLACE: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """The gradient at some columns of a row, the target's among them where `at` is `target`."""
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if not IN_PLACE:
        x = softmax_of(x, reference, weight, factor, smoothing, n_cols, SMOOTH)
        x = tl.where(at == target, x - factor * (1.0 - smoothing), x)
    tl.store(grad_ptr + at, (x * dy).to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _differ(x_row, grad_row, TRACED: tl.constexpr):
    """Whether the two rows begin differently within 16 bytes: then their vectors are of other columns. It is asked
    where torch.compile allocates the gradient, since no tensor has an address while it traces."""
    if not TRACED:
        return False
    else:
        return ((x_row.to(tl.int64) ^ grad_row.to(tl.int64)) & 15) != 0


@triton.jit
def cross_entropy_backward_kernel(
    dy_ptr, logits_ptr, target_ptr, stats_ptr, grad_ptr, stride_dy, stride_xm, stride_target, stride_gm, n_rows, n_cols,
    smoothing, READY: tl.constexpr, SCALAR: tl.constexpr, IN_PLACE: tl.constexpr, SMOOTH: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, EDGES: tl.constexpr, TRACED: tl.constexpr,
):  # fmt: skip
    stride_xm, stride_gm = tl.cast(stride_xm, tl.int64), tl.cast(stride_gm, tl.int64)
    stride_dy, stride_target = tl.cast(stride_dy, tl.int64), tl.cast(stride_target, tl.int64)
    stats_step = tl.cast(n_rows, tl.int64)
    smoothing = tl.cast(smoothing, tl.float32)  # torch.compile passes a float in 64 bits
    lane = tl.arange(0, BLOCK_N)
    rows = n_rows
    if SCALAR:  # READY, and one dy for all rows: whether it is 1 is read once, not for each row
        rows = tl.where(tl.load(dy_ptr) == 1.0, 0, n_rows)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        dy = tl.load(dy_ptr + row * stride_dy)
        if not READY or dy != 1.0:
            reference, weight = tl.load(stats_ptr + row), tl.load(stats_ptr + stats_step + row)
            factor, target = tl.load(stats_ptr + 2 * stats_step + row), tl.load(target_ptr + row * stride_target)
            x_row, grad_row = logits_ptr + row * stride_xm, grad_ptr + row * stride_gm
            if _differ(x_row, grad_row, TRACED):  # one number at a time: no vector is aligned in both rows
                for start in range(0, n_cols, BLOCK_N):
                    at = start + lane
                    _write(x_row, grad_row, at, at < n_cols, target, dy, reference, weight, factor, smoothing, n_cols,
                           IN_PLACE, SMOOTH)  # fmt: skip
            else:
                # From the gradient's address, not the logits': torch.compile takes every tensor that a store's address
                # is computed from for written, and would copy the logits.
                head, vectors = vectors_of(grad_row, n_cols, WIDTH, EDGES)
                x_vectors, grad_vectors = x_row + head if EDGES else x_row, grad_row + head if EDGES else grad_row
                if WIDTH > 1:  # by itself Triton knows multiples of 16 numbers, not of 16 bytes
                    x_vectors, grad_vectors = tl.multiple_of(x_vectors, 16), tl.multiple_of(grad_vectors, 16)
                    vectors = vectors // WIDTH * WIDTH  # unchanged, but now known to be a multiple
                for start in range(0, vectors, BLOCK_N):
                    at = start + lane
                    _write(x_vectors, grad_vectors, at, at < vectors, target - head, dy, reference, weight, factor,
                           smoothing, n_cols, IN_PLACE, SMOOTH)  # fmt: skip
                if EDGES:
                    cols, in_edge = edges_of(head, vectors, n_cols, WIDTH)
                    _write(x_row, grad_row, cols, in_edge, target, dy, reference, weight, factor, smoothing, n_cols,
                           IN_PLACE, SMOOTH)  # fmt: skip


def block_of(x: torch.Tensor, share: int = 1) -> tuple[int, int]:
    """Columns of a step, and warps, for rows like those of x, where `share` programs have what one may have alone."""
    block_n = max(16, min(BLOCK_BYTES // share // x.element_size(), triton.next_power_of_2(x.shape[1])))
    return block_n, max(1, block_n * x.element_size() // 1024)


def launch_backward(dy, logits, target, stats, ready, smoothing: float, in_place: bool) -> torch.Tensor:
    """The gradient of logits, in `ready` where the forward has made it: in memory of its own, or in place."""
    n_rows, n_cols = logits.shape
    grad = empty_gradient(logits) if ready is None else ready
    if n_rows:
        traced = torch.compiler.is_compiling()
        # Where the row stride and n_cols are multiples of 16 numbers Triton finds the vectors by itself, from what
        # torch.compile tells it of the addresses.
        plain = traced and logits.stride(0) % 16 == 0 and n_cols % 16 == 0
        width, edges = (1, False) if plain else row_layout(logits)
        block_n, num_warps = block_of(logits)
        dy = dy.expand(n_rows)
        cross_entropy_backward_kernel[(min(n_rows, BACKWARD_PER_SM * device_limits(logits.device).sms),)](
            dy, logits, target, stats, grad, dy.stride(0), logits.stride(0), target.stride(0), grad.stride(0),
            n_rows, n_cols, smoothing, READY=ready is not None, SCALAR=ready is not None and dy.stride(0) == 0,
            IN_PLACE=in_place, SMOOTH=smoothing > 0, BLOCK_N=block_n, WIDTH=width, EDGES=edges,
            TRACED=traced and edges, num_warps=num_warps,
        )  # fmt: skip
    return grad


class CrossEntropy(torch.autograd.Function):
    """What autograd calls; `kernel` is the lesson's forward, `when`, one of its WHEN, is when the gradient is made."""

    @staticmethod
    def forward(ctx, logits, target, kernel, when, reduction, ignore_index, smoothing):
        loss, stats, grad = kernel(logits, target, when, reduction, ignore_index, smoothing)
        if when == "in place":
            # Autograd does not see what a kernel writes. Once the write counts as a change, an operation that saved the
            # logits for its own backward refuses to use them.
            torch.autograd.graph.increment_version(logits)
        if when != "backward":
            ctx.grad = grad
        ctx.save_for_backward(logits, target, stats)
        ctx.options = smoothing, when
        return loss

    @staticmethod
    def backward(ctx, dy):
        smoothing, when = ctx.options
        ready = None
        if when != "backward":  # handed out once: a second backward must not change what the first returned
            ready, ctx.grad = ctx.grad, None
        if when == "in place" and ready is None:
            raise RuntimeError(
                "cross_entropy: in place, its backward runs once; pass gradient='backward' to run it twice"
            )
        return CrossEntropyBackward.apply(dy, *ctx.saved_tensors, (ready,), smoothing, when), *[None] * 6


class CrossEntropyBackward(torch.autograd.Function):
    """A node of its own, so that differentiating again is an error, whether or not dy requires grad."""

    @staticmethod
    def forward(ctx, dy, logits, target, stats, ready, smoothing, when):
        return launch_backward(dy, logits, target, stats, ready[0], smoothing, when == "in place")

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("cross_entropy: its gradient has no derivative; use torch.nn.functional.cross_entropy")


@untraced  # a graph's inputs must not change under it
def apply_in_place(logits, target, kernel, *options) -> torch.Tensor:
    """CrossEntropy.apply(...) in place, where autograd and the layout allow it."""
    if (logits if logits._base is None else logits._base).is_leaf:
        raise RuntimeError("cross_entropy: in place, logits are a leaf that requires grad; pass gradient='forward'")
    if logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]:
        raise ValueError(f"cross_entropy: in place, rows overlap: {logits.stride()}; call logits.contiguous() first")
    return CrossEntropy.apply(logits, target, kernel, "in place", *options)
