"""Cross-entropy over a large vocabulary: loss and gradient from one read of the logits, no probabilities stored.

The logits of a language model are its largest tensor: 8192 tokens by 128256 classes take 2.1 GB in bfloat16. A row's
loss needs two numbers of it, the maximum and the sum of exp(x - maximum); the gradient of the mean loss is
(exp(x - maximum) / sum - [class is target]) / n_rows. In two passes, two reads and a write, that is 6 bytes a logit.

In training the gradient is wanted anyway, so the forward makes it: 4 bytes a logit, what a copy moves. A row of 250 KiB
fits no SM, but it stays in L2 while a program works on it. One loop reads the program's next row from memory, and reads
its previous row again, from L2, to write the gradient: so neither memory nor arithmetic waits for the end of a row. The
gradient may also be written over the logits, and then the loss needs no memory beside them.

Question   How close to a copy of the logits do a loss and its gradient come, at 32000 and 128256 classes?
Needs      triton
Wins when  by bytes, not recorded yet: there are thousands of classes, and backward starts from this loss. For a factor
           other than 1 (a scaled loss) the gradient is made again, 8 bytes a logit; gradient="backward" takes 6.
Variants   cross_entropy_backward.py (the gradient by itself, and autograd)
Study      studies/triton/cross_entropy.py
Source     goes beyond the chapter; online softmax (Milakov, Gimelshein 2018); gradient in the forward: Liger Kernel.
"""

from __future__ import annotations

import functools
import math

from harness import Harness, Table, Work, run

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from examples.common.classes import check_classes, gradient_of
from examples.common.compiled import compiled_modes, over_library
from examples.common.device import device_limits
from examples.common.operands import check_choice
from examples.triton.cross_entropy_backward import CrossEntropy, apply_in_place, block_of, exp_of, softmax_of

WHEN = ("forward", "backward", "in place")  # the gradient is made, and where
LN_2 = tl.constexpr(math.log(2))
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
STAGES = 4  # three blocks of each row in flight to shared memory while one is in use
L2_BYTES = 24 << 20  # that rows may take which wait for their gradient; beyond, an SM has one program and not two


@triton.jit
def _fold(x, reference, total, WIDTH: tl.constexpr):
    """Fold x into a maximum and a sum for WIDTH neighbours each, so that no threads wait for others."""
    x = tl.reshape(x, (x.shape[0] // WIDTH, WIDTH))  # of one load, so in one thread
    larger = tl.maximum(reference, tl.max(x, axis=1))
    return larger, total * exp_of(reference - larger) + tl.sum(exp_of(x - larger[:, None]), axis=1)


@triton.jit
def cross_entropy_kernel(
    logits_ptr, target_ptr, loss_ptr, stats_ptr, grad_ptr, stride_xm, stride_target, stride_gm, n_rows, n_cols,
    ignore_index, smoothing, MEAN: tl.constexpr, SMOOTH: tl.constexpr, GRAD: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # int64 because row * stride passes 2**31 elements on tensors that still fit in memory.
    stride_xm, stride_gm = tl.cast(stride_xm, tl.int64), tl.cast(stride_gm, tl.int64)
    stride_target, stats_step = tl.cast(stride_target, tl.int64), tl.cast(n_rows, tl.int64)
    smoothing = tl.cast(smoothing, tl.float32)  # torch.compile passes a float in 64 bits
    lane = tl.arange(0, BLOCK_N)
    scale = 1.0
    if MEAN:  # every program counts for itself: no launch before this one, and the host need not know
        counted = tl.zeros((BLOCK_N,), tl.int32)
        for first in range(0, n_rows, BLOCK_N):
            at = target_ptr + (first + lane) * stride_target
            counted += (tl.load(at, mask=first + lane < n_rows, other=ignore_index) != ignore_index).to(tl.int32)
        scale = 1.0 / tl.sum(counted, axis=0).to(tl.float32)
    whole = n_cols // BLOCK_N * BLOCK_N  # columns of whole blocks: a mask would cost several instructions a logit
    # `due` is the program's previous row, whose gradient is written while `row` is read; the first has none before it.
    reference_due, weight_due, factor_due, x_due, target_due = 0.0, 0.0, 0.0, 0.0, tl.full((), -1, tl.int64)
    for row in range(tl.program_id(0), n_rows + (tl.num_programs(0) if GRAD else 0), tl.num_programs(0)):
        due = row - tl.num_programs(0)
        is_row, is_due = row < n_rows, due >= 0
        x_row, due_row, grad_row = logits_ptr + row * stride_xm, logits_ptr + due * stride_xm, grad_ptr
        target = tl.load(target_ptr + row * stride_target, mask=is_row, other=ignore_index)
        counts = target != ignore_index
        known = counts & (target >= 0) & (target < n_cols)
        # Here, before the barriers of the reductions below: in place, the next iteration overwrites it.
        x_target = tl.load(x_row + target, mask=known, other=float("nan")).to(tl.float32)
        # The last block, loaded now and used after the loop, so that nothing waits for it.
        cols = whole + lane
        in_row = cols < n_cols
        rest = tl.load(x_row + cols, mask=in_row & is_row, other=-float("inf")).to(tl.float32)
        if GRAD:
            grad_row += due * stride_gm
            rest_due = tl.load(due_row + cols, mask=in_row & is_due, other=0.0).to(tl.float32)
        # The lowest float32 and not -inf, as -inf - -inf is NaN.
        reference = tl.full((BLOCK_N // WIDTH,), LOWEST, tl.float32)
        total = tl.zeros((BLOCK_N // WIDTH,), tl.float32)
        plain = tl.zeros((BLOCK_N,), tl.float32)
        for start in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
            x = tl.load(x_row + start + lane, mask=is_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
            reference, total = _fold(x, reference, total, WIDTH)
            if SMOOTH:
                plain += x
            if GRAD:
                x = tl.load(due_row + start + lane, mask=is_due, other=0.0, eviction_policy="evict_first")
                grad = softmax_of(x.to(tl.float32), reference_due, weight_due, factor_due, smoothing, n_cols, SMOOTH)
                grad = grad.to(grad_ptr.dtype.element_ty)
                tl.store(grad_row + start + lane, grad, mask=is_due, eviction_policy="evict_first")
        reference, total = _fold(rest, reference, total, WIDTH)
        if GRAD:
            grad = softmax_of(rest_due, reference_due, weight_due, factor_due, smoothing, n_cols, SMOOTH)
            tl.store(grad_row + cols, grad.to(grad_ptr.dtype.element_ty), mask=in_row & is_due)
            # The target's column again: a comparison for every logit would cost more than this barrier.
            tl.debug_barrier()
            grad = softmax_of(x_due, reference_due, weight_due, factor_due, smoothing, n_cols, SMOOTH)
            grad -= factor_due * (1.0 - smoothing)
            tl.store(grad_row + target_due, grad.to(grad_ptr.dtype.element_ty), mask=is_due & (target_due >= 0))

        reference_due = tl.max(reference, axis=0)
        row_sum = tl.sum(total * exp_of(reference - reference_due), axis=0)
        # Not the logarithm of the whole sum: of a maximum of 10000, float32 would keep three digits less.
        log_sum = tl.log2(row_sum) * LN_2
        loss = log_sum + (reference_due - x_target)
        if SMOOTH:  # the mean over all classes
            mean = (tl.sum(plain, axis=0) + tl.sum(tl.where(in_row, rest, 0.0), axis=0)) / n_cols
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum + (reference_due - mean))
        tl.store(loss_ptr + row, tl.where(counts, loss, 0.0) * scale, mask=is_row)
        # An ignored row has a gradient of 0 times its softmax; one whose target is no class, of NaN.
        factor_due = tl.where(known, scale, tl.where(counts, float("nan"), 0.0))
        weight_due = factor_due / row_sum
        x_due, target_due = x_target, tl.where(known, target, -1)
        if stats_ptr is not None:
            tl.store(stats_ptr + row, reference_due, mask=is_row)
            tl.store(stats_ptr + stats_step + row, weight_due, mask=is_row)
            tl.store(stats_ptr + 2 * stats_step + row, factor_due, mask=is_row)


def _forward(logits, target, when: str | None, reduction: str, ignore_index: int, smoothing: float):
    """(loss, three numbers of each row, gradient), the last two where `when`, one of WHEN or None, asks for them."""
    n_rows, n_cols = logits.shape
    loss = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    stats = torch.empty(3, n_rows, dtype=torch.float32, device=logits.device) if when else None
    grad = logits.detach() if when == "in place" else torch.empty_like(logits) if when == "forward" else None
    if n_rows:  # a grid of zero programs is a launch error
        sms, stride_gm = device_limits(logits.device).sms, 0 if grad is None else grad.stride(0)
        waiting = 2 * sms * n_cols * logits.element_size()  # bytes of rows with two programs to an SM
        per_sm = 4 if grad is None else 2 if waiting < L2_BYTES else 1
        block_n, num_warps = block_of(logits, min(per_sm, 2))
        cross_entropy_kernel[(min(n_rows, per_sm * sms),)](
            logits, target, loss, stats, grad, logits.stride(0), target.stride(0), stride_gm,
            n_rows, n_cols, ignore_index, smoothing, MEAN=reduction == "mean", SMOOTH=smoothing > 0,
            GRAD=grad is not None, BLOCK_N=block_n, WIDTH=16 // logits.element_size(), STAGES=STAGES,
            num_warps=num_warps,
        )  # fmt: skip
    elif reduction == "mean":
        loss = loss.new_full((1,), float("nan"))  # as in torch
    return loss if reduction == "none" else loss.sum(), stats, grad


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, reduction: str = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, gradient: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """The cross-entropy of logits [n_rows, n_cols] and classes `target` [n_rows], once differentiable in logits.

    logits: float32, float16 or bfloat16, rows contiguous, any row stride; target: int64. The loss is float32 whatever
    the logits are: F.cross_entropy(logits.float(), target, ...), with its infinities, NaN and ignored rows. A target
    that is no class gives NaN (torch's device assert stops the process).
    gradient: "forward" makes it with the loss, and again in backward where the loss's own gradient is not 1. "backward"
    makes it there. "in place" makes it with the loss, over the logits: operations that saved them (a tanh, not a linear
    layer) then refuse their backward, this backward runs once, and another factor multiplies rounded gradients: not for
    scaled losses in float16. None: "forward"; "backward" for reduction "none" and within torch.compile, whose graph
    "in place" breaks.

    Raises TypeError for another dtype; ValueError for other options, sizes that do not fit, no columns, an inner stride
    other than 1 and, in place, rows that overlap; RuntimeError for a device without Triton, a second derivative and, in
    place, a leaf that requires grad.
    """
    with torch.no_grad():  # this one has a backward
        check_classes("cross_entropy", logits, target, reduction, ignore_index, label_smoothing)
    check_choice("cross_entropy", (None, *WHEN), gradient=gradient)
    options = reduction, ignore_index, float(label_smoothing)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return _forward(logits, target, None, *options)[0]
    if gradient == "in place":
        return apply_in_place(logits, target, _forward, *options)
    if torch.compiler.is_compiling() or (reduction == "none" and gradient is None):
        gradient = "backward"
    return CrossEntropy.apply(logits, target, _forward, gradient or "forward", *options)


# Nothing cancels in a softmax, so each element's budget follows its own size; the argument of exp is rounded twice.
BUDGET = {"terms": 0, "roundings": 64}


def reference(logits: torch.Tensor, target: torch.Tensor, **options) -> torch.Tensor:
    return F.cross_entropy(logits.double(), target, **options)


def reference_gradient(logits: torch.Tensor, target: torch.Tensor, **options) -> torch.Tensor:
    return gradient_of(reference)(logits.double(), target, **options)


def loss_and_gradient(logits: torch.Tensor, target: torch.Tensor, **options) -> torch.Tensor:
    return gradient_of(cross_entropy)(logits, target, **options)


def torch_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), target)  # in 16 bits eager torch rounds the logarithms, and its loss


def compare_both(h: Harness, rows: int, classes: int) -> tuple[Table, Table]:
    inputs = h.randn(rows, classes, dtype=h.half, scale=2.0), h.randint(classes, rows)
    how = {"baseline": "torch", "case": f"{rows}x{classes}"} | BUDGET
    calls = {"torch": torch_loss} | compiled_modes(h, torch_loss) | {"triton": cross_entropy}
    once, twice = Work(bytes=inputs[0].nbytes), Work(bytes=2 * inputs[0].nbytes)
    loss = h.compare(calls, reference, *inputs, title="loss", work=once, dtype=torch.float32, **how)
    steps = {name: gradient_of(fn) for name, fn in calls.items()}
    # Forward and backward compiled as one function, which a user can put into a Function.
    steps |= {f"{name}, one graph": fn for name, fn in compiled_modes(h, torch.func.grad(torch_loss)).items()}
    return loss, h.compare(
        steps, reference_gradient, *inputs, title="loss and gradient", work=twice,
        wrong={"without the targets": lambda x, target: torch.softmax(x.double(), 1) / len(target)}, **how,
    )  # fmt: skip


def demo(h: Harness) -> None:
    # One logit, a prime, one block and one column more, an ignored row; fewer and more rows than programs.
    for rows, classes in [(1, 1), (7, 781), (9, 8193)]:
        logits, target = h.randn(rows, classes, dtype=h.half, scale=2.0), h.randint(classes, rows)
        target[5:6] = -100
        h.check(cross_entropy, reference, logits, target, dtype=torch.float32, **BUDGET)
        for when in WHEN[:2]:
            ours, what = functools.partial(loss_and_gradient, gradient=when), f"gradient in {when}, {rows}x{classes}"
            h.check(ours, reference_gradient, logits, target, what=what, **BUDGET)
    find = dict.fromkeys((80, 90, 100), ("cp.async", "st.global.v4"))
    h.codegen(loss_and_gradient, h.meta(4096, 128256), h.meta(4096, dtype=torch.int64), find=find)
    rows = h.pick(interpreted=2, quick=1024, full=8192)
    tables = [compare_both(h, h.fit(rows, bytes_each=64 * classes), classes) for classes in (32000, 128256)]

    def answer() -> str:
        losses, both = zip(*tables, strict=True)
        alone, share = (" and ".join(f"{table['triton'].of_ceiling:.0%}" for table in each) for each in (losses, both))
        return (
            f"At 32000 and 128256 classes loss and gradient run at {share} of a copy's speed, the loss alone at {alone}"
            f": {over_library(both):.2f}x and {over_library(losses):.2f}x torch's fastest call (geometric means)."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
