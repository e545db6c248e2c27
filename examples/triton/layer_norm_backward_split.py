"""LayerNorm backward of rows too long for one program: a group of programs shares a row, and exchanges two sums.

Each program owns a slice of the columns for good, so weight and column sums stay in its registers, and the group takes
row after row. For dx a program needs two sums over the whole row, of which it has only those of its slice. They travel
through memory as one 64-bit word per row and program. The word is its own signal, so there is no counter and no fence,
and the exchange is hidden: a row is written one iteration after its sums were sent, while the next rows are in flight
to shared memory. Three passes, as if a program held the row. docs/memory_ordering.md says why the words are never torn
and every wait ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import interpreted
from examples.common.mailbox import new_mailbox, pack, peek, receive, send, shares, slice_cols, split_max_cols, unpack
from examples.common.rows import check_layer_norm_backward, check_length, column_sums, pipeline_stages, widen


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def layer_norm_backward_split_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, mail_ptr,
    stride_dym, stride_xm, stride_dxm, n_rows, n_cols, groups,
    PARTS: tl.constexpr, PARTS_POW2: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A ticket, not program_id, decides group and part: so the waits below end (docs/memory_ordering.md, "Tickets").
    ticket = (tl.atomic_add(mail_ptr, 1, sem="relaxed") + 1).to(tl.int32)
    group, part = ticket // PARTS, ticket % PARTS
    mail_ptr += 1
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < n_cols
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
    parts = tl.arange(0, PARTS_POW2)
    sender = tl.minimum(parts, PARTS - 1)
    stride_mail = tl.full((), PARTS, tl.int64)
    stride_dym, stride_xm = tl.cast(stride_dym, tl.int64), tl.cast(stride_xm, tl.int64)
    stride_dxm = tl.cast(stride_dxm, tl.int64)
    dweight = tl.zeros((BLOCK_N,), tl.float32)
    dbias = tl.zeros((BLOCK_N,), tl.float32)
    mean, rstd = tl.load(mean_ptr + group), tl.load(rstd_ptr + group)
    x_due = pack(tl.zeros((BLOCK_N,), x_ptr.dtype.element_ty))
    dy_due = pack(tl.zeros((BLOCK_N,), dy_ptr.dtype.element_ty))
    # A row is written one iteration after its sums were sent, when those of the others have had time to arrive.
    for row in tl.range(group, n_rows + groups, groups, num_stages=STAGES):
        # `due` is the group's previous row, whose sums arrive now; in the first iteration it is this row, not written.
        due = tl.maximum(row - groups, group)
        due_mail = mail_ptr + due * stride_mail + sender
        peeked = peek(due_mail)
        # Loaded again: if it were carried over from the last iteration, Triton would not pipeline the loop.
        mean_due, rstd_due = tl.load(mean_ptr + due), tl.load(rstd_ptr + due)
        # Loaded an iteration ahead, into registers: Triton's pipeliner would send each number through shared memory.
        next_row = row + groups
        mean_next = tl.load(mean_ptr + next_row, mask=next_row < n_rows, other=0.0)
        rstd_next = tl.load(rstd_ptr + next_row, mask=next_row < n_rows, other=0.0)
        x = tl.load(x_ptr + row * stride_xm + cols, mask=inside & (row < n_rows), other=0.0)
        dy = tl.load(dy_ptr + row * stride_dym + cols, mask=inside & (row < n_rows), other=0.0)
        x_hat = (widen(x) - mean) * rstd
        grad = widen(dy)
        dweight += grad * x_hat
        dbias += grad
        grad *= widen(weight)
        total, product = tl.reduce((grad, grad * x_hat), 0, _add_pairs)
        send(mail_ptr + row * stride_mail + part, total, product, row < n_rows)

        totals, products = receive(due_mail, peeked)
        shift = tl.sum(tl.where(parts < PARTS, totals, 0.0), axis=0) / n_cols
        slope = tl.sum(tl.where(parts < PARTS, products, 0.0), axis=0) / n_cols * rstd_due
        shift = (shift - mean_due * slope) * rstd_due  # of x itself, no longer of x_hat
        grad = unpack(dy_due, x_ptr.dtype.element_ty) * widen(weight)
        dx = grad * rstd_due - (unpack(x_due, x_ptr.dtype.element_ty) * (slope * rstd_due) + shift)
        tl.store(dx_ptr + due * stride_dxm + cols, dx.to(dx_ptr.dtype.element_ty), mask=inside & (row > group))
        x_due, dy_due = pack(x), pack(dy)
        mean, rstd = mean_next, rstd_next
    tl.store(dweight_ptr + group.to(tl.int64) * n_cols + cols, dweight, mask=inside)
    tl.store(dbias_ptr + group.to(tl.int64) * n_cols + cols, dbias, mask=inside)


def layer_norm_backward_split(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias) for rows of up to split_max_cols(...) columns, each held by several programs at once.

    GPU only: programs wait for each other, and the interpreter runs one after the other (RuntimeError there). Which
    program is which part of which group depends on the order in which they start; what each computes does not.
    Otherwise takes and raises what layer_norm_backward does.
    """
    name = "layer_norm_backward_split"
    n_rows, n_cols = check_layer_norm_backward(name, dy, x, weight, mean, rstd)
    block_n = slice_cols(x, weight)  # x, dy, weight and both sums: their registers fill an SM
    check_length(name, n_cols, split_max_cols(x.device, block_n), "layer_norm_backward_loop")
    if interpreted():
        raise RuntimeError(f"{name}: its programs wait for each other; in the interpreter use layer_norm_backward_loop")
    if not n_rows:
        return torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(weight)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts, groups = shares(x, block_n)
    partials = torch.empty(2, groups, n_cols, dtype=torch.float32, device=x.device)
    layer_norm_backward_split_kernel[(groups * parts,)](
        dy, x, weight, mean, rstd, dx, partials[0], partials[1], new_mailbox(x, parts),
        dy.stride(0), x.stride(0), dx.stride(0), n_rows, n_cols, groups,
        PARTS=parts, PARTS_POW2=triton.next_power_of_2(parts), BLOCK_N=block_n,
        STAGES=pipeline_stages(x, 2 * block_n, 1), num_warps=8,
    )  # fmt: skip
    return dx, *column_sums(partials, weight)
