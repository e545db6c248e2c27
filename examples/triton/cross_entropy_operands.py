"""What cross_entropy asks of its operands: where the vectors of 16 bytes of a row are, and how many rows count.

One kernel counts the rows before the main one runs, and another sums the losses after it. From sm_90 on, the main
kernel and the sum are launched while the kernel before them still runs, and wait for it where they need what it has
written (programmatic dependent launch). The count starts when everything before it has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import architecture, interpreted

PREPARE_BLOCK = 8192  # targets, or words of a mailbox: 8 a thread, all in flight, as the losses of the sum
SUM_BLOCK = 8192  # losses; with 16 a thread ptxas waits for 4 before it loads the next 4
SUM_MOST = 8 * SUM_BLOCK  # losses that one program sums; more are left to torch's sum, by many programs
PDL = True


@triton.jit
def vectors_of(row_ptr, n_cols, WIDTH: tl.constexpr, EDGES: tl.constexpr):
    """The columns of a row before its first address that is a multiple of 16 bytes, and those in vectors of 16 bytes
    from there. A row of 50257 classes begins anywhere, and its loads would otherwise be of one logit each."""
    if not EDGES:
        return 0, n_cols
    else:
        head = tl.minimum((-row_ptr.to(tl.int64) & 15) * WIDTH // 16, n_cols).to(tl.int32)
        return head, (n_cols - head) // WIDTH * WIDTH


@triton.jit
def edges_of(head, vectors, n_cols, WIDTH: tl.constexpr):
    """The columns of a row in no whole vector, WIDTH - 1 at most at each end, and which of the lanes have one."""
    lane = tl.arange(0, 2 * WIDTH)
    cols = tl.where(lane < WIDTH, lane, head + vectors + lane - WIDTH)
    return cols, (cols < n_cols) & ((lane >= WIDTH) | (lane < head))


@triton.jit
def cross_entropy_prepare_kernel(
    target_ptr, scale_ptr, mail_ptr, stride_target, n_rows, n_words, ignore_index, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The first program stores 1 / the number of rows that count; the others empty the mailbox, if there is one."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # once every program has started, the main kernel's may
    lane = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        counted = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, n_rows, BLOCK):
            at = target_ptr + (first + lane) * tl.cast(stride_target, tl.int64)
            counted += (tl.load(at, mask=first + lane < n_rows, other=ignore_index) != ignore_index).to(tl.int32)
        tl.store(scale_ptr, 1.0 / tl.sum(counted, axis=0).to(tl.float32))
    elif mail_ptr is not None:
        at = (tl.program_id(0).to(tl.int64) - 1) * BLOCK + lane
        tl.store(mail_ptr + at, tl.full((BLOCK,), -1, tl.int64), mask=at < n_words)


@triton.jit
def cross_entropy_sum_kernel(loss_ptr, total_ptr, n_rows, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The sum of all losses, by one program: in the same order every time."""
    if EARLY:
        tl.extra.cuda.gdc_wait()  # until the main kernel has ended, and all losses are visible
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n_rows, BLOCK):
        total += tl.load(loss_ptr + first + lane, mask=first + lane < n_rows, other=0.0)
    tl.store(total_ptr, tl.sum(total, axis=0))


def row_layout(logits: torch.Tensor) -> tuple[int, bool]:
    """(WIDTH, EDGES) of kernels over rows: values to a vector of 16 bytes, and whether rows begin or end within one."""
    size = logits.element_size()
    if torch.compiler.is_compiling():  # no tensor has an address then
        return 16 // size, True
    return 16 // size, (logits.data_ptr() | logits.stride(0) * size | logits.shape[1] * size) % 16 > 0


def empty_gradient(logits: torch.Tensor) -> torch.Tensor:
    """Memory for the gradient. Its rows begin where those of the logits do within 16 bytes, so that the vectors of both
    are of the same columns: of logits[:, :50257], padded to 50304, they are 50264 elements apart."""
    (n_rows, n_cols), size = logits.shape, logits.element_size()
    if torch.compiler.is_compiling():
        return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    first, stride = logits.data_ptr() % 16 // size, n_cols + (logits.stride(0) - n_cols) % (16 // size)
    memory = torch.empty(first + n_rows * stride, dtype=logits.dtype, device=logits.device)
    return memory[first:].as_strided(logits.shape, (stride, 1))


def early(device: torch.device) -> bool:
    """Whether a kernel is launched before the one before it ends. torch.compile does not know that option."""
    return PDL and not (interpreted() or torch.compiler.is_compiling()) and architecture(device) >= 90


def prepare(
    target: torch.Tensor, ignore_index: int, reduction: str, mail: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, dict]:
    """The factor of a mean over the rows that count, on the device; and an empty mailbox, in the same launch.

    Returns the factor, or None, and options of the main kernel's launch. The main kernel may start early if this one
    comes right before it: with neither a mean nor a mailbox, a kernel of the caller's does, which may write the logits.
    """
    soon = early(target.device)
    summed = {"SUMMED": soon and reduction != "none" and target.shape[0] <= SUM_MOST}
    if reduction != "mean" and mail is None:
        return None, {"EARLY": False, **summed}
    scale = torch.empty((), dtype=torch.float32, device=target.device)
    n_words = 0 if mail is None else mail.numel()
    cross_entropy_prepare_kernel[(1 + triton.cdiv(n_words, PREPARE_BLOCK),)](
        target, scale, mail, target.stride(0), target.shape[0], n_words, ignore_index,
        BLOCK=PREPARE_BLOCK, EARLY=soon, num_warps=32,
    )  # fmt: skip
    order = {"EARLY": soon, **summed, **({"launch_pdl": True} if soon else {})}
    return scale if reduction == "mean" else None, order


def total_of(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    """The sum of the losses that the main kernel, the last one launched, stores; a mean of no rows is NaN."""
    if not loss.numel():
        return loss.new_full((), float("nan") if reduction == "mean" else 0.0)
    if torch.compiler.is_compiling() or loss.numel() > SUM_MOST:  # Inductor fuses it with what follows
        return loss.sum()
    total, soon = torch.empty((), dtype=torch.float32, device=loss.device), early(loss.device)
    cross_entropy_sum_kernel[(1,)](
        loss, total, loss.numel(), BLOCK=SUM_BLOCK, EARLY=soon, num_warps=32,
        **({"launch_pdl": True} if soon else {}),
    )  # fmt: skip
    return total
