"""What cross_entropy asks of its operands: where the vectors of 16 bytes of a row are, and how many rows count."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PREPARE_BLOCK = 8192  # targets, or words of a mailbox: 16 a thread


@triton.jit
def vectors_of(row_ptr, n_cols, WIDTH: tl.constexpr, EDGES: tl.constexpr):
    """The columns of a row before its first address that is a multiple of 16 bytes, and those in vectors of 16 from
    there. A row of 50257 classes begins anywhere, and its loads would otherwise be of one logit each."""
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
    target_ptr, scale_ptr, mail_ptr, stride_target, n_rows, n_words, ignore_index, BLOCK: tl.constexpr
):
    """1 / rows that count, of all rows once, by the first program; the others empty the mailbox, if there is one."""
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


def prepare(target: torch.Tensor, ignore_index: int, mail: torch.Tensor | None = None) -> torch.Tensor:
    """The factor of a mean over the rows that count, on the device; and an empty mailbox, in the same launch."""
    scale = torch.empty((), dtype=torch.float32, device=target.device)
    n_words = 0 if mail is None else mail.numel()
    cross_entropy_prepare_kernel[(1 + triton.cdiv(n_words, PREPARE_BLOCK),)](
        target, scale, mail, target.stride(0), target.shape[0], n_words, ignore_index,
        BLOCK=PREPARE_BLOCK, num_warps=16,
    )  # fmt: skip
    return scale
