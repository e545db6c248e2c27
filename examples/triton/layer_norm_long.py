"""LayerNorm and RMSNorm forward of rows too long for an SM to hold several: a group of programs shares a row.

A row's statistics are known when all of it was read, and a program that waits for them should have the next rows in
flight. As in layer_norm_backward_split.py each program owns a slice of the columns for good, so weight and bias stay in
its registers; it sends two numbers of its slice as one 64-bit word, and writes a row one iteration later, when the
words of the others have arrived. The slice is kept packed, 16 registers a thread; the next ones are on their way to
shared memory. docs/memory_ordering.md says why no wait is for ever.

Source  Chan, Golub and LeVeque 1983 (merging means and squares).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import interpreted
from examples.common.mailbox import new_mailbox, pack, peek, receive, send, shares, slice_cols, split_max_cols, unpack
from examples.common.rows import SPLIT_STAGES, check_layer_norm, check_length, pipeline_stages, registers, widen

WARPS = 8
PER_SM = 2  # programs, of 128 registers a thread: one computes while another waits


@triton.jit
def norm_split_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, mail_ptr,
    stride_xm, stride_rm, stride_ym, n_rows, n_cols, eps, groups,
    PARTS: tl.constexpr, PARTS_POW2: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """LayerNorm of x; without bias_ptr RMSNorm of x, or of x + residual, which goes to sum_ptr."""
    # Tickets and mailbox are layer_norm_backward_split_kernel's (docs/memory_ordering.md).
    ticket = (tl.atomic_add(mail_ptr, 1, sem="relaxed") + 1).to(tl.int32)
    group, part = ticket // PARTS, ticket % PARTS
    mail_ptr += 1
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < n_cols
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
    parts = tl.arange(0, PARTS_POW2)
    sender = tl.minimum(parts, PARTS - 1)
    stride_mail = tl.full((), PARTS, tl.int64)
    stride_xm, stride_rm = tl.cast(stride_xm, tl.int64), tl.cast(stride_rm, tl.int64)
    stride_ym = tl.cast(stride_ym, tl.int64)
    eps = tl.cast(eps, tl.float32)  # torch.compile passes a float in 64 bits
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=inside, other=0.0)
        count = tl.minimum(n_cols - part * BLOCK_N, BLOCK_N).to(tl.float32)
        counts = tl.where(parts < PARTS, tl.minimum(n_cols - parts * BLOCK_N, BLOCK_N), 0).to(tl.float32)
        # Of float32, measured from the row's first element: a mean of 10000 with a spread of 1 would cost four digits.
        origin = tl.load(x_ptr + group * stride_xm).to(tl.float32)
    x_due = pack(tl.zeros((BLOCK_N,), x_ptr.dtype.element_ty))
    # A row is written one iteration after its word was sent, when those of the others have had time to arrive.
    for row in tl.range(group, n_rows + groups, groups, num_stages=STAGES):
        # `due` is the group's previous row; in the first iteration there is none, and no word is waited for.
        due = tl.maximum(row - groups, group)
        due_mail = mail_ptr + due * stride_mail + sender
        x = tl.load(x_ptr + row * stride_xm + cols, mask=inside & (row < n_rows), other=0.0)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * stride_rm + cols, mask=inside & (row < n_rows), other=0.0)
            x = (widen(x) + widen(residual)).to(x_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * stride_ym + cols, x, mask=inside & (row < n_rows))
        if bias_ptr is None:
            wide = widen(x)
            peeked = peek(due_mail)
            squares = tl.sum(wide * wide, axis=0)
            send(mail_ptr + row * stride_mail + part, squares, squares, row < n_rows)
            _, squares = receive(due_mail, tl.where(row > group, peeked, 0))
            rstd = tl.rsqrt(tl.sum(tl.where(parts < PARTS, squares, 0.0), axis=0) / n_cols + eps)
            y = unpack(x_due, x_ptr.dtype.element_ty) * rstd * widen(weight)
        else:
            if x_ptr.dtype.element_ty == tl.float32:
                # Loaded again and an iteration ahead, as layer_norm_backward_split_kernel's mean is.
                origin_due = tl.load(x_ptr + due * stride_xm)
                origin_next = tl.load(x_ptr + (row + groups) * stride_xm, mask=row + groups < n_rows, other=0.0)
                total = tl.sum(tl.where(inside, x - origin, 0.0), axis=0)
            else:
                total = tl.sum(widen(x), axis=0)
            peeked = peek(due_mail)
            part_mean = total / count
            # widen again: x in float32 would take 32 registers across the sum.
            off = widen(x) - part_mean
            if x_ptr.dtype.element_ty == tl.float32:
                off = (x - origin) - part_mean
            if not FULL:
                off = tl.where(inside, off, 0.0)
            send(mail_ptr + row * stride_mail + part, part_mean, tl.sum(off * off, axis=0), row < n_rows)
            means, squares = receive(due_mail, tl.where(row > group, peeked, 0))
            mean = tl.sum(tl.where(parts < PARTS, means * counts, 0.0), axis=0) / n_cols
            between = means - mean
            squares = tl.where(parts < PARTS, squares + between * between * counts, 0.0)
            rstd = tl.rsqrt(tl.sum(squares, axis=0) / n_cols + eps)
            off = unpack(x_due, x_ptr.dtype.element_ty)
            row_mean = mean
            if x_ptr.dtype.element_ty == tl.float32:
                off -= origin_due
                row_mean += origin_due
                origin = origin_next
            y = (off - mean) * rstd * widen(weight) + widen(bias)
            tl.store(mean_ptr + due, row_mean, mask=(part == 0) & (row > group))
        tl.store(y_ptr + due * stride_ym + cols, y.to(y_ptr.dtype.element_ty), mask=inside & (row > group))
        tl.store(rstd_ptr + due, rstd, mask=(part == 0) & (row > group))
        x_due = pack(x)


def launch_split(x, residual, weight, bias, y, summed, mean, rstd, eps) -> None:
    """The rows of x to y, summed, mean and rstd, by as many groups as the SMs hold."""
    (n_rows, n_cols), block_n = x.shape, slice_cols(x, weight)
    parts, groups = shares(x, block_n, PER_SM)
    norm_split_kernel[(groups * parts,)](
        x, residual, weight, bias, y, summed, mean, rstd, new_mailbox(x, parts),
        x.stride(0), 0 if residual is None else residual.stride(0), y.stride(0), n_rows, n_cols, eps, groups,
        PARTS=parts, PARTS_POW2=triton.next_power_of_2(parts), BLOCK_N=block_n, FULL=n_cols % block_n == 0,
        STAGES=pipeline_stages(x, block_n if residual is None else 2 * block_n, PER_SM, SPLIT_STAGES),
        num_warps=WARPS, maxnreg=registers(WARPS, PER_SM),
    )  # fmt: skip


def layer_norm_split(x, weight, bias, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) for rows of up to split_max_cols(...) columns, each held by several programs at once.

    GPU only: programs wait for each other, and the interpreter runs one after the other (RuntimeError there).
    Otherwise takes and raises what layer_norm_forward does.
    """
    name = "layer_norm_split"
    n_rows, n_cols = check_layer_norm(name, x, weight, bias, eps)
    check_length(name, n_cols, split_max_cols(x.device, slice_cols(x, weight), PER_SM), "layer_norm_resident")
    if interpreted():
        raise RuntimeError(f"{name}: its programs wait for each other; in the interpreter use layer_norm_resident")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(n_rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if n_rows:
        launch_split(x, None, weight, bias, y, None, mean, rstd, eps)
    return y, mean, rstd
