"""LayerNorm and RMSNorm forward of rows too long for an SM to hold several: a group of programs shares a row.

A row's statistics are known only when all of it has been read, and a program that waits for them should have the next
rows in flight. As in layer_norm_backward_split.py each program owns a slice of the columns for good, so weight and bias
stay in its registers; it sends two numbers of its slice as one 64-bit word, and writes a row one iteration later, when
the words of the others have arrived. The slice is kept packed, two 16-bit values to a register; the next slices are on
their way to shared memory. docs/memory_ordering.md says why every wait ends.

What a program does once for each row (exchanging words, reducing, computing addresses) costs as much as its work on the
columns. So where rows are read 16 bytes at a time a program is a single warp, whose barriers wait for no other, with
128 bytes of x a thread, and an SM holds twelve: some compute while others wait for words. Each thread first takes the
mean and squares of its own values, in one pass that keeps no value of the slice in float32: around a pivot, its first
value, and corrected by the mean's distance from it. The pivot is one of the n values, so the squares around it add up
to at most n times those around the mean: with 64 values the correction costs six bits at worst, where the pivot is an
outlier, and usually one.

Source  Chan, Golub and LeVeque 1983 (merging means and squares).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits, interpreted
from examples.common.mailbox import new_mailbox, pack, peek, receive, send, shares, slice_cols, split_max_cols, unpack
from examples.common.rows import check_layer_norm, check_length, pipeline_stages, registers, widen
from examples.common.slices import in_vectors, vector_width

STAGES = 4  # Triton loads at the end of an iteration: from two to three rows are in flight


def split_shape(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[int, int, int]:
    """(columns of a slice, warps of a program, programs on an SM), for rows of x whose weight is `weight`.

    Twelve warps are three on each quarter of an SM, whose 16384 registers allow 168 a thread. Rows that cannot be read
    16 bytes at a time cost more instructions, and more warps issue them; there, and where shared memory has no room for
    the next rows of twelve programs, two larger ones share an SM.
    """
    room = residual is None or device_limits(x.device).shared_bytes >= 128 * 1024
    if room and in_vectors(x, residual):
        return 4096 // max(x.element_size(), weight.element_size()), 1, 12
    return slice_cols(x, weight), 8, 2


def split_limit(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> int:
    """Longest rows of x whose slices, of split_shape's columns, may wait for each other."""
    block_n, _, per_sm = split_shape(x, weight, residual)
    return split_max_cols(x.device, block_n, per_sm)


@triton.jit
def _of_thread(x):
    """The sum of x [steps, threads, width] over what a thread has, by itself."""
    return tl.sum(tl.sum(x, axis=2), axis=0)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _pivoted(x, inside, count, share, is_first, FULL: tl.constexpr):
    """Of each thread's `count` values in x [steps, threads, width]: the first, the mean's distance from it, and the
    squared deviations from the mean; share is 1 / count."""
    pivot = _of_thread(tl.where(is_first, x, 0.0))
    off = x - pivot[None, :, None]
    if not FULL:
        off = tl.where(inside, off, 0.0)
    total, squares = tl.reduce((off, off * off), 2, _add_pairs)
    total, squares = tl.reduce((total, squares), 0, _add_pairs)
    shift = total * share
    return pivot, shift, squares - shift * shift * count


@triton.jit
def norm_split_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, mail_ptr,
    stride_xm, stride_rm, stride_ym, n_rows, n_cols, eps, groups,
    PARTS: tl.constexpr, PARTS_POW2: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    WIDTH: tl.constexpr, THREADS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """LayerNorm of x; without bias_ptr RMSNorm of x, or of x + residual, which goes to sum_ptr."""
    # Tickets and mailbox are layer_norm_backward_split_kernel's (docs/memory_ordering.md).
    ticket = (tl.atomic_add(mail_ptr, 1, sem="relaxed") + 1).to(tl.int32)
    group, part = ticket // PARTS, ticket % PARTS
    mail_ptr += 1
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < n_cols
    weight = pack(tl.load(weight_ptr + cols, mask=inside, other=0.0))
    parts = tl.arange(0, PARTS_POW2)
    sender = tl.minimum(parts, PARTS - 1)
    stride_mail = tl.full((), PARTS, tl.int64)
    stride_xm, stride_rm = tl.cast(stride_xm, tl.int64), tl.cast(stride_rm, tl.int64)
    stride_ym = tl.cast(stride_ym, tl.int64)
    eps = tl.cast(eps, tl.float32)  # torch.compile passes a float in 64 bits
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WEIGHT_DTYPE: tl.constexpr = weight_ptr.dtype.element_ty
    if bias_ptr is not None:
        STEPS: tl.constexpr = BLOCK_N // WIDTH // THREADS
        own_inside = tl.reshape(inside, (STEPS, THREADS, WIDTH))
        if FULL:
            own_count = tl.full((THREADS,), BLOCK_N // THREADS, tl.float32)
        else:
            own_count = _of_thread(own_inside.to(tl.float32))
        own_share = 1.0 / tl.maximum(own_count, 1.0)
        is_first = (tl.arange(0, STEPS)[:, None, None] == 0) & (tl.arange(0, WIDTH)[None, None, :] == 0)
        bias = pack(tl.load(bias_ptr + cols, mask=inside, other=0.0))
        count = tl.minimum(n_cols - part * BLOCK_N, BLOCK_N).to(tl.float32)
        counts = tl.where(parts < PARTS, tl.minimum(n_cols - parts * BLOCK_N, BLOCK_N), 0).to(tl.float32)
        # Of float32, measured from the row's first element: a mean of 10000 with a spread of 1 would cost four digits.
        origin = tl.load(x_ptr + group * stride_xm).to(tl.float32)
    x_due = pack(tl.zeros((BLOCK_N,), DTYPE))
    # A row is written one iteration after its word was sent, when those of the others have had time to arrive.
    for row in tl.range(group, n_rows + groups, groups, num_stages=STAGES):
        # `due` is the group's previous row, whose words arrive now; in the first iteration it is this row, not written.
        due = tl.maximum(row - groups, group)
        due_mail = mail_ptr + due * stride_mail + sender
        x = tl.load(x_ptr + row * stride_xm + cols, mask=inside & (row < n_rows), other=0.0)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * stride_rm + cols, mask=inside & (row < n_rows), other=0.0)
            x = (widen(x) + widen(residual)).to(DTYPE)
            tl.store(sum_ptr + row * stride_ym + cols, x, mask=inside & (row < n_rows))
        packed = pack(x)
        peeked = peek(due_mail)
        if bias_ptr is None:
            wide = widen(x)
            squares = tl.sum(wide * wide, axis=0)
            send(mail_ptr + row * stride_mail + part, squares, squares, row < n_rows)
            _, squares = receive(due_mail, peeked)
            rstd = tl.rsqrt(tl.sum(tl.where(parts < PARTS, squares, 0.0), axis=0) / n_cols + eps)
            y = unpack(x_due, DTYPE) * rstd * unpack(weight, WEIGHT_DTYPE)
        else:
            values = tl.reshape(unpack(packed, DTYPE), (STEPS, THREADS, WIDTH))
            pivot, shift, own_squares = _pivoted(values, own_inside, own_count, own_share, is_first, FULL)
            if x_ptr.dtype.element_ty == tl.float32:
                # Loaded again, as Triton would not pipeline a loop that carries it over; and an iteration ahead.
                origin_due = tl.load(x_ptr + due * stride_xm)
                origin_next = tl.load(x_ptr + (row + groups) * stride_xm, mask=row + groups < n_rows, other=0.0)
                pivot -= origin
            own_mean = pivot + shift
            part_mean = tl.sum(own_mean * own_count, axis=0) / count
            between = tl.where(own_count > 0, own_mean - part_mean, 0.0)  # else 0 times an infinite square
            squares = tl.sum(own_squares + between * between * own_count, axis=0)
            send(mail_ptr + row * stride_mail + part, part_mean, squares, row < n_rows)
            means, squares = receive(due_mail, peeked)
            mean = tl.sum(tl.where(parts < PARTS, means * counts, 0.0), axis=0) / n_cols
            between = means - mean
            squares = tl.where(parts < PARTS, squares + between * between * counts, 0.0)
            rstd = tl.rsqrt(tl.sum(squares, axis=0) / n_cols + eps)
            off = unpack(x_due, DTYPE)
            row_mean = mean
            if x_ptr.dtype.element_ty == tl.float32:
                off -= origin_due
                row_mean += origin_due
                origin = origin_next
            # Not off * rstd - mean * rstd, an operation less: a row without variance would then not give the bias.
            y = (off - mean) * rstd * unpack(weight, WEIGHT_DTYPE) + unpack(bias, WEIGHT_DTYPE)
            tl.store(mean_ptr + due, row_mean, mask=(part == 0) & (row > group))
        tl.store(y_ptr + due * stride_ym + cols, y.to(DTYPE), mask=inside & (row > group))
        tl.store(rstd_ptr + due, rstd, mask=(part == 0) & (row > group))
        x_due = packed


def launch_split(x, residual, weight, bias, y, summed, mean, rstd, eps) -> None:
    """The rows of x to y, summed, mean and rstd, by as many groups as the SMs hold."""
    (n_rows, n_cols), (block_n, warps, per_sm) = x.shape, split_shape(x, weight, residual)
    (parts, groups), width = shares(x, block_n, per_sm), vector_width(x, residual)
    norm_split_kernel[(groups * parts,)](
        x, residual, weight, bias, y, summed, mean, rstd, new_mailbox(x, parts),
        x.stride(0), 0 if residual is None else residual.stride(0), y.stride(0), n_rows, n_cols, eps, groups,
        PARTS=parts, PARTS_POW2=triton.next_power_of_2(parts), BLOCK_N=block_n, FULL=n_cols % block_n == 0,
        WIDTH=width, THREADS=min(32 * warps, block_n // width),
        STAGES=pipeline_stages(x, block_n if residual is None else 2 * block_n, per_sm, STAGES),
        num_warps=warps, maxnreg=registers(warps, per_sm) // 8 * 8,  # allocated in units of 8 a thread
    )  # fmt: skip


def layer_norm_split(x, weight, bias, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) for rows of up to split_limit(x, weight) columns, each held by several programs at once.

    GPU only: programs wait for each other, and the interpreter runs one after the other (RuntimeError there).
    Otherwise takes and raises what layer_norm_forward does.
    """
    name = "layer_norm_split"
    n_rows, n_cols = check_layer_norm(name, x, weight, bias, eps)
    check_length(name, n_cols, split_limit(x, weight), "layer_norm_resident")
    if interpreted():
        raise RuntimeError(f"{name}: its programs wait for each other; in the interpreter use layer_norm_resident")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(n_rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if n_rows:
        launch_split(x, None, weight, bias, y, None, mean, rstd, eps)
    return y, mean, rstd
