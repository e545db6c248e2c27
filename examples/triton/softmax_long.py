"""Softmax of a row too long for one SM: a group of programs shares it, and exchanges two numbers of each part.

Where a program waits for the others of its row, the next rows must be in flight. As in layer_norm_backward_split.py
each program owns a slice of the columns for good and goes from row to row. It sends the maximum and the sum of its
slice as one 64-bit word, and writes the slice one iteration later, when the words of the others have arrived; the next
slices are on their way to shared memory. Exponentials are taken once, against the slice's own maximum, and stay in
registers until then. docs/memory_ordering.md says why the words are never torn and no wait is for ever.

Source  Milakov and Gimelshein 2018 (merging maxima and sums).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import interpreted
from examples.common.mailbox import new_mailbox, pack, peek, receive, send, shares, split_max_cols, unpack
from examples.common.operands import check_rows
from examples.common.rows import ASSEMBLY, DTYPES, SPLIT_STAGES, check_length, pipeline_stages, registers, widen

SPLIT_BLOCK = 4096  # columns a program owns: 32 values a thread at WARPS warps
WARPS = 4
PER_SM = 4  # programs, of 128 registers a thread: some compute while others wait
KEEP = True  # exponentials until they are written, 32 registers; else x, 16 if in 16 bits, and a second exponential


@triton.jit
def _exp(x):
    """e^x for x <= 0, with 0 in place of subnormals: for these tl.exp takes three more instructions a value, and a
    predicate that the result waits for."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp(x)


@triton.jit
def softmax_split_kernel(
    x_ptr, y_ptr, mail_ptr, stride_xm, stride_ym, n_rows, n_cols, groups,
    PARTS: tl.constexpr, PARTS_POW2: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, KEEP: tl.constexpr,
    FULL: tl.constexpr,
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
    max_due = 0.0
    kept = tl.zeros((BLOCK_N,), tl.float32) if KEEP else pack(tl.zeros((BLOCK_N,), x_ptr.dtype.element_ty))
    # A row is written one iteration after its words were sent, when those of the others have had time to arrive.
    for row in tl.range(group, n_rows + groups, groups, num_stages=STAGES):
        # `due` is the group's previous row; in the first iteration there is none, and no word is waited for.
        due = tl.maximum(row - groups, group)
        due_mail = mail_ptr + due * stride_mail + sender
        loaded = tl.load(x_ptr + row * stride_xm + cols, mask=inside & (row < n_rows), other=0.0)
        x = widen(loaded)
        if not FULL:  # not by the load, which would carry its mask until the copy has arrived
            x = tl.where(inside, x, -float("inf"))
        peeked = peek(due_mail)
        part_max = tl.max(x, axis=0)
        # A part of -inf alone would compute -inf - -inf = NaN.
        weights = _exp(x - tl.where(part_max == -float("inf"), 0.0, part_max))
        send(mail_ptr + row * stride_mail + part, part_max, tl.sum(weights, axis=0), row < n_rows)

        maxima, sums = receive(due_mail, tl.where(row > group, peeked, 0))
        row_max = tl.max(maxima, axis=0)
        # A part of -inf alone has the sum 0, and 0 * exp(-inf - -inf) would be NaN. A NaN in a part stays in its sum.
        scaled = tl.where((parts < PARTS) & (sums != 0.0), sums * tl.exp(maxima - row_max), 0.0)
        row_sum = tl.sum(scaled, axis=0)
        if KEEP:
            y = kept * (tl.where(max_due == -float("inf"), 0.0, tl.exp(max_due - row_max)) / row_sum)
            kept = weights
        else:
            y = _exp(unpack(kept, x_ptr.dtype.element_ty) - row_max) * (1.0 / row_sum)
            kept = pack(loaded)
        max_due = part_max
        tl.store(y_ptr + due * stride_ym + cols, y.to(y_ptr.dtype.element_ty), mask=inside & (row > group))


def launch_split(x, y) -> None:
    """The rows of x to y, by as many groups as the SMs hold."""
    n_rows, n_cols = x.shape
    parts, groups = shares(x, SPLIT_BLOCK, PER_SM)
    softmax_split_kernel[(groups * parts,)](
        x, y, new_mailbox(x, parts), x.stride(0), y.stride(0), n_rows, n_cols, groups,
        PARTS=parts, PARTS_POW2=triton.next_power_of_2(parts), BLOCK_N=SPLIT_BLOCK,
        STAGES=pipeline_stages(x, SPLIT_BLOCK, PER_SM, SPLIT_STAGES), KEEP=KEEP, FULL=n_cols % SPLIT_BLOCK == 0,
        num_warps=WARPS, maxnreg=registers(WARPS, PER_SM),
    )  # fmt: skip


def softmax_split(x: torch.Tensor) -> torch.Tensor:
    """Softmax over rows of up to split_max_cols(...) columns, each held by several programs at once.

    GPU only: programs wait for each other, and the interpreter runs one after the other (RuntimeError there).
    Otherwise takes and raises what softmax does.
    """
    n_rows, n_cols = check_rows("softmax_split", x, DTYPES)
    check_length("softmax_split", n_cols, split_max_cols(x.device, SPLIT_BLOCK, PER_SM), "softmax")
    if interpreted():
        raise RuntimeError("softmax_split: its programs wait for each other; in the interpreter use softmax_resident")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if n_rows:
        launch_split(x, y)
    return y
