"""Cross-entropy over a large vocabulary: loss and gradient from one read of the logits, no probabilities stored.

The logits of a language model are its largest tensor: 8192 tokens by 128256 classes take 2.1 GB in bfloat16. A row's
loss needs two numbers, the maximum and the sum of exp(x - maximum); the gradient of the mean loss is
(exp(x - maximum) / sum - [class is target]) / n_rows. Two passes, with two reads and a write, move 6 bytes a logit.

In training the gradient is wanted anyway, so the forward makes it: 4 bytes a logit, what a copy moves. The kernel below
reads a row, which is then in the L1 cache of its SM, and reads it again from there to write the gradient. A row too
long for that is shared by a group of programs, which keep its exponentials in registers (cross_entropy_long.py). A
second read would come from memory, for 6 bytes a logit, as 132 rows of 250 KiB, with all else that passes through, do
not stay in L2. The gradient may also be written over the logits, and then the loss needs no memory besides them.

Question   How close to a copy of the logits do a loss and its gradient come, at 32000 and 128256 classes?
Needs      triton
Wins when  there are thousands of classes, and backward starts from this loss. For a factor other than 1 (a scaled loss)
           the gradient is made again, 8 bytes a logit in all; gradient="backward" takes 6.
Variants   cross_entropy_long.py (a row split over programs), cross_entropy_backward.py (the gradient, and autograd),
           cross_entropy_operands.py
Study      studies/triton/cross_entropy.py
Source     goes beyond the chapter; online softmax (Milakov, Gimelshein 2018); gradient in the forward: Liger Kernel.
"""

from __future__ import annotations

import functools

from harness import Harness, Table, Work, run

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from examples.common.classes import check_classes, gradient_of
from examples.common.compiled import compiled_modes, over_library
from examples.common.operands import check_choice
from examples.triton.cross_entropy_backward import LN_2, LOWEST, CrossEntropy, apply_in_place, exp_of, softmax_of
from examples.triton.cross_entropy_long import can_split, launch_split
from examples.triton.cross_entropy_operands import edges_of, empty_gradient, prepare, row_layout, total_of, vectors_of

WHEN = ("forward", "backward", "in place")  # the gradient is made, and where
L1_BEST_KIB = 100  # of a row: 50257 classes of 16 bits; longer ones are faster if programs share them
# Bytes of a row per step, and warps: for loss and gradient, then for the loss alone.
RESIDENT, STREAMED = (16384, 32), (4096, 4)


@triton.jit
def _fold(x, reference, total, WIDTH: tl.constexpr):
    """Fold x into a maximum and a sum for WIDTH neighbours each, so that no threads wait for others."""
    x = tl.reshape(x.to(tl.float32), (x.shape[0] // WIDTH, WIDTH))  # of one load, so in one thread
    larger = tl.maximum(reference, tl.max(x, axis=1))
    return larger, total * exp_of(reference - larger) + tl.sum(exp_of(x - larger[:, None]), axis=1)


@triton.jit
def cross_entropy_kernel(
    logits_ptr, target_ptr, scale_ptr, loss_ptr, stats_ptr, grad_ptr, stride_xm, stride_target, stride_gm, n_rows,
    ignore_index, smoothing, SMOOTH: tl.constexpr, N_COLS: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    EDGES: tl.constexpr, EARLY: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    if SUMMED:
        tl.extra.cuda.gdc_launch_dependents()  # once every program has started, the sum's may
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2**31 elements on tensors that still fit in memory
    smoothing = tl.cast(smoothing, tl.float32)  # torch.compile passes a float in 64 bits
    x_row, lane = logits_ptr + row * stride_xm, tl.arange(0, BLOCK_N)
    target = tl.load(target_ptr + row * stride_target)
    counts = target != ignore_index
    known = counts & (target >= 0) & (target < N_COLS)
    # Whole vectors in blocks, and the few columns beside them.
    head, vectors = vectors_of(x_row, N_COLS, WIDTH, EDGES)
    x_vectors = tl.multiple_of(x_row + head if EDGES else x_row, 16)  # `+ 0` is folded, and the hint with it
    if EDGES:
        cols, in_edge = edges_of(head, vectors, N_COLS, WIDTH)
        edge = tl.load(x_row + cols, mask=in_edge, other=-float("inf")).to(tl.float32)
    reference = tl.full((BLOCK_N // WIDTH,), LOWEST, tl.float32)
    total, plain = tl.zeros((BLOCK_N // WIDTH,), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    KEEP: tl.constexpr = "evict_first" if grad_ptr is None else "evict_last"
    for start in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=2, num_stages=1):  # cp.async is slower
        inside = start + lane < vectors
        x = tl.load(x_vectors + start + lane, mask=inside, other=-float("inf"), eviction_policy=KEEP)
        reference, total = _fold(x, reference, total, WIDTH)
        if SMOOTH:
            plain += tl.where(inside, x.to(tl.float32), 0.0)
    row_max = tl.max(reference, axis=0)
    if EDGES:
        row_max = tl.maximum(row_max, tl.max(edge, axis=0))
    row_sum = tl.sum(total * exp_of(reference - row_max), axis=0)
    if EDGES:
        row_sum += tl.sum(exp_of(edge - row_max), axis=0)
    if EARLY:  # nothing is written before this, and what is read before it was there when `prepare` began
        tl.extra.cuda.gdc_wait()
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    # An ignored row has a gradient of 0 times its softmax; a row whose target is no class has a gradient of NaN.
    factor = tl.where(known, scale, tl.where(counts, float("nan"), 0.0))
    weight = factor / row_sum
    x_target = tl.load(x_row + target, mask=known, other=float("nan")).to(tl.float32)
    # Not the logarithm of the whole sum: with a maximum of 10000, float32 would keep three digits fewer.
    log_sum = tl.log2(row_sum) * LN_2
    loss = log_sum + (row_max - x_target)
    if SMOOTH:  # the mean over all classes
        mean = tl.sum(plain, axis=0) / N_COLS
        if EDGES:
            mean += tl.sum(tl.where(in_edge, edge, 0.0), axis=0) / N_COLS
        loss = (1.0 - smoothing) * loss + smoothing * (log_sum + (row_max - mean))
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0) * scale)
    if stats_ptr is not None:
        tl.store(stats_ptr + row, row_max)
        tl.store(stats_ptr + n_rows + row, weight)
        tl.store(stats_ptr + 2 * tl.cast(n_rows, tl.int64) + row, factor)
    if grad_ptr is not None:
        grad_row = grad_ptr + row * stride_gm
        g_vectors = tl.multiple_of(grad_row + head if EDGES else grad_row, 16)
        tl.debug_barrier()  # in place: all threads have the target's logit
        if EDGES:
            edge_grad = softmax_of(edge, row_max, weight, factor, smoothing, N_COLS, SMOOTH)
            tl.store(grad_row + cols, edge_grad.to(grad_ptr.dtype.element_ty), mask=in_edge)
        # Backwards: what was read last is the most likely to be still cached.
        LAST: tl.constexpr = (N_COLS - 1) // BLOCK_N * BLOCK_N
        for done in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=2):
            at = LAST - done + lane
            x = tl.load(x_vectors + at, mask=at < vectors, other=0.0, eviction_policy="evict_first").to(tl.float32)
            grad = softmax_of(x, row_max, weight, factor, smoothing, N_COLS, SMOOTH)
            tl.store(g_vectors + at, grad.to(grad_ptr.dtype.element_ty), mask=at < vectors)
        # The target's column again: a comparison for every logit would cost more than this barrier.
        tl.debug_barrier()
        target_grad = softmax_of(x_target, row_max, weight, factor, smoothing, N_COLS, SMOOTH)
        target_grad -= factor * (1.0 - smoothing)
        tl.store(grad_row + target, target_grad.to(grad_ptr.dtype.element_ty), mask=known)


def launch(logits, target, loss, stats, grad, reduction: str, ignore_index: int, smoothing: float) -> None:
    """Each row's loss, its three numbers and its gradient, where there are tensors for them."""
    (n_rows, n_cols), size = logits.shape, logits.element_size()
    step, num_warps = STREAMED if grad is None else RESIDENT
    block_n = min(step // size, max(16, triton.next_power_of_2(n_cols)))
    (width, edges), (scale, order) = row_layout(logits), prepare(target, ignore_index, reduction)
    cross_entropy_kernel[(n_rows,)](
        logits, target, scale, loss, stats, grad,
        logits.stride(0), target.stride(0), 0 if grad is None else grad.stride(0), n_rows, ignore_index, smoothing,
        SMOOTH=smoothing > 0, N_COLS=n_cols, BLOCK_N=block_n, WIDTH=width, EDGES=edges,
        num_warps=max(1, num_warps * block_n * size // step), **order,
    )  # fmt: skip


def _forward(logits, target, when: str | None, reduction: str, ignore_index: int, smoothing: float):
    """(loss, three numbers of each row, gradient), the last two where `when`, one of WHEN or None, asks for them."""
    n_rows, n_cols = logits.shape
    loss = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    stats = torch.empty(3, n_rows, dtype=torch.float32, device=logits.device) if when else None
    grad = logits.detach() if when == "in place" else empty_gradient(logits) if when == "forward" else None
    if n_rows:  # a grid of zero programs is a launch error
        split = grad is not None and n_cols * logits.element_size() > 1024 * L1_BEST_KIB and can_split(logits)
        (launch_split if split else launch)(logits, target, loss, stats, grad, reduction, ignore_index, smoothing)
    return loss if reduction == "none" else total_of(loss, reduction), stats, grad


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
    scaled losses in float16. None: "forward", or "backward" for reduction "none". torch.compile takes "backward" for
    both, and "in place" breaks its graph. All but "backward" make programs wait for each other beyond 100 KiB a row.

    Raises TypeError for another dtype or an ignore_index that is no int; ValueError for other options, sizes that do
    not fit, no columns, an inner stride other than 1 and, in place, rows that overlap; RuntimeError for a device
    without Triton, a second derivative and, in place, a leaf that requires grad.
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
    # One logit, an odd number, one block and one column more, an ignored row.
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
            f"At 32000 and 128256 classes loss and gradient run at {share} of a copy's speed, geometric mean "
            f"{over_library(both):.2f}x torch's fastest call; the loss alone at {alone}, {over_library(losses):.2f}x."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
