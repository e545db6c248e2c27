"""Softmax of a row too long for one SM: a group of programs shares it, and exchanges two numbers of each part.

While a program waits for the others of its row, its next rows must be in flight. As in layer_norm_backward_split.py
each program owns a slice of the columns for good and goes from row to row. It sends the maximum and the sum of its
slice as one 64-bit word, and writes the slice one iteration later, when the words of the others have arrived; the next
slices are on their way to shared memory. docs/memory_ordering.md says why the words are never torn and every wait ends.

Exponentials are taken once, and stay in registers until they are written. As in cross_entropy_long.py, each thread
takes them relative to the maximum of its own values and has a sum of its own: a 16-bit value costs an FMA and the
hardware's 2^x (exponentials.py), and no thread waits for a reduction across the program. One factor per thread merges
the sums, and another scales what is written. Where rows are read 16 bytes at a time a program is a single warp, whose
barriers wait for no other, with 128 bytes of the row a thread, and an SM holds twelve.

Source  Milakov and Gimelshein 2018 (merging maxima and sums).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import interpreted
from examples.common.exponentials import LOG2_E, exponentials, largest_of_vectors
from examples.common.mailbox import new_mailbox, pack, peek, receive, send, shares, split_max_cols, unpack
from examples.common.operands import check_rows
from examples.common.rows import DTYPES, SPLIT_STAGES, check_length, pipeline_stages, registers, widen
from examples.common.slices import in_vectors, vector_width

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # and not -inf, as -inf - -inf is NaN


def split_shape(x: torch.Tensor) -> tuple[int, int, int]:
    """(columns of a slice, warps of a program, programs on an SM), for the rows of x.

    Twelve warps are three on each quarter of an SM, whose 16384 registers allow 168 a thread. Rows that cannot be read
    16 bytes at a time cost more instructions, and more warps issue them.
    """
    return (4096 // x.element_size(), 1, 12) if in_vectors(x) else (4096, 4, 4)


def split_limit(x: torch.Tensor) -> int:
    """Longest rows like those of x whose slices, of split_shape's columns, may wait for each other."""
    block_n, _, per_sm = split_shape(x)
    return split_max_cols(x.device, block_n, per_sm)


@triton.jit
def softmax_split_kernel(
    x_ptr, y_ptr, mail_ptr, stride_xm, stride_ym, n_rows, n_cols, groups,
    PARTS: tl.constexpr, PARTS_POW2: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr,
    WIDTH: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    # A ticket, not program_id, decides group and part: so the waits below end (docs/memory_ordering.md, "Tickets").
    ticket = (tl.atomic_add(mail_ptr, 1, sem="relaxed") + 1).to(tl.int32)
    group, part = ticket // PARTS, ticket % PARTS
    mail_ptr += 1
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < n_cols
    parts = tl.arange(0, PARTS_POW2)
    sender = tl.minimum(parts, PARTS - 1)
    stride_mail = tl.full((), PARTS, tl.int64)
    stride_xm, stride_ym = tl.cast(stride_xm, tl.int64), tl.cast(stride_ym, tl.int64)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    STEPS: tl.constexpr = BLOCK_N // WIDTH // THREADS
    kept = tl.zeros((STEPS, THREADS, WIDTH), tl.float32)
    reference_due, rest_due = tl.zeros((THREADS,), tl.float32), tl.zeros((THREADS,), tl.float32)
    # A row is written one iteration after its words were sent, when those of the others have had time to arrive.
    for row in tl.range(group, n_rows + groups, groups, num_stages=STAGES):
        # `due` is the group's previous row, whose words arrive now; in the first iteration it is this row, not written.
        due = tl.maximum(row - groups, group)
        due_mail = mail_ptr + due * stride_mail + sender
        peeked = peek(due_mail)
        x = tl.load(x_ptr + row * stride_xm + cols, mask=inside & (row < n_rows), other=0.0)
        if not FULL:  # not by the load: cp.async fills with 0 alone, and the mask would live until data arrives
            x = tl.where(inside, x, -float("inf"))
        # One maximum and one sum for each thread, of its own values: no thread waits for another.
        if WIDTH > 1:
            packed = pack(x)
            largest, values = largest_of_vectors(packed, DTYPE), unpack(packed, DTYPE)
        else:
            values = widen(x)
            largest = values
        reference = tl.maximum(tl.max(tl.reshape(largest, (STEPS, THREADS)), axis=0), LOWEST)
        terms, rest = exponentials(
            tl.reshape(values, (STEPS, THREADS, WIDTH)), tl.reshape(reference, (1, THREADS, 1)), DTYPE
        )
        rest = tl.reshape(rest, (THREADS,))
        part_max = tl.max(reference, axis=0)
        total = tl.sum(tl.sum(terms, axis=2), axis=0) * tl.exp2((reference - part_max) * LOG2_E - rest)
        send(mail_ptr + row * stride_mail + part, part_max, tl.sum(total, axis=0), row < n_rows)

        # A part of -inf alone has the maximum LOWEST and the sum 0. A NaN in a part is in its sum.
        maxima, sums = receive(due_mail, peeked)
        row_max = tl.max(maxima, axis=0)
        row_sum = tl.sum(tl.where(parts < PARTS, sums * tl.exp2((maxima - row_max) * LOG2_E), 0.0), axis=0)
        weight = tl.exp2((reference_due - row_max) * LOG2_E - rest_due) / row_sum
        y = tl.reshape(kept * tl.reshape(weight, (1, THREADS, 1)), (BLOCK_N,))
        kept, reference_due, rest_due = terms, reference, rest
        tl.store(y_ptr + due * stride_ym + cols, y.to(y_ptr.dtype.element_ty), mask=inside & (row > group))


def launch_split(x, y) -> None:
    """The rows of x to y, by as many groups as the SMs hold."""
    n_rows, n_cols = x.shape
    (block_n, warps, per_sm), width = split_shape(x), vector_width(x)
    parts, groups = shares(x, block_n, per_sm)
    softmax_split_kernel[(groups * parts,)](
        x, y, new_mailbox(x, parts), x.stride(0), y.stride(0), n_rows, n_cols, groups,
        PARTS=parts, PARTS_POW2=triton.next_power_of_2(parts), BLOCK_N=block_n, FULL=n_cols % block_n == 0,
        WIDTH=width, THREADS=min(32 * warps, block_n // width),
        STAGES=pipeline_stages(x, block_n, per_sm, SPLIT_STAGES),
        num_warps=warps, maxnreg=registers(warps, per_sm) // 8 * 8,  # allocated in units of 8 a thread
    )  # fmt: skip


def softmax_split(x: torch.Tensor) -> torch.Tensor:
    """Softmax over rows of up to split_limit(x) columns, each held by several programs at once.

    GPU only: programs wait for each other, and the interpreter runs one after the other (RuntimeError there).
    Otherwise takes and raises what softmax does.
    """
    n_rows, n_cols = check_rows("softmax_split", x, DTYPES)
    check_length("softmax_split", n_cols, split_limit(x), "softmax")
    if interpreted():
        raise RuntimeError("softmax_split: its programs wait for each other; in the interpreter use softmax_resident")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if n_rows:
        launch_split(x, y)
    return y
