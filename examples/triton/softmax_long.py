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
from examples.common.mailbox import new_mailbox, peek, receive, send, shares, split_max_cols
from examples.common.operands import check_rows
from examples.common.rows import ASSEMBLY, DTYPES, SPLIT_STAGES, check_length, pipeline_stages, registers, widen

SPLIT_BLOCK = 4096  # columns a program owns: 32 values a thread at WARPS warps
WARPS = 4
PER_SM = 4  # programs, of 128 registers a thread: some compute while others wait


@triton.jit
def _exp(x):
    """e^x for x <= 0, with 0 in place of subnormals: to have these, tl.exp takes three more instructions, and has a
    predicate wait for each result."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp(x)


@triton.jit
def _merge(max_a, sum_a, max_b, sum_b):
    """Of two pieces of a row, each its maximum and its sum of exponentials against that, the same of both together."""
    both = tl.maximum(max_a, max_b)
    from_max = tl.where(both == -float("inf"), 0.0, both)  # pieces of -inf alone would compute -inf - -inf = NaN
    return both, sum_a * tl.exp(max_a - from_max) + sum_b * tl.exp(max_b - from_max)


@triton.jit
def softmax_split_kernel(
    x_ptr, y_ptr, mail_ptr, stride_xm, stride_ym, n_rows, n_cols, groups,
    PARTS: tl.constexpr, PARTS_POW2: tl.constexpr, STEPS: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    # A ticket, not program_id, decides group and part: so the waits below end (docs/memory_ordering.md, "Tickets").
    ticket = (tl.atomic_add(mail_ptr, 1, sem="relaxed") + 1).to(tl.int32)
    group, part = ticket // PARTS, ticket % PARTS
    mail_ptr += 1
    BLOCK_N: tl.constexpr = STEPS * WARPS * LANES * VEC
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < n_cols
    parts = tl.arange(0, PARTS_POW2)
    sender = tl.minimum(parts, PARTS - 1)
    stride_mail = tl.full((), PARTS, tl.int64)
    stride_xm, stride_ym = tl.cast(stride_xm, tl.int64), tl.cast(stride_ym, tl.int64)
    max_due = tl.zeros((WARPS,), tl.float32)
    kept = tl.zeros((STEPS, WARPS, LANES, VEC), tl.float32)
    # A row is written one iteration after its words were sent, when those of the others have had time to arrive.
    for row in tl.range(group, n_rows + groups, groups, num_stages=STAGES):
        # `due` is the group's previous row; in the first iteration there is none, and no word is waited for.
        due = tl.maximum(row - groups, group)
        due_mail = mail_ptr + due * stride_mail + sender
        x = widen(tl.load(x_ptr + row * stride_xm + cols, mask=inside & (row < n_rows), other=0.0))
        if not FULL:  # not by the load, which would carry its mask until the copy has arrived
            x = tl.where(inside, x, -float("inf"))
        x = tl.reshape(x, (STEPS, WARPS, LANES, VEC))  # which thread has which values: nothing moves
        peeked = peek(due_mail)
        # Each warp takes the exponentials against its own maximum, which needs no barrier; one reduction across warps
        # follows. Within a thread the sums are STEPS chains, as one chain of all values would wait for each addition.
        warp_max = tl.max(tl.max(tl.max(x, axis=3), axis=0), axis=1)
        weights = _exp(x - tl.where(warp_max == -float("inf"), 0.0, warp_max)[None, :, None, None])
        warp_sum = tl.sum(tl.sum(tl.sum(weights, axis=3), axis=0), axis=1)
        part_max, part_sum = tl.reduce((warp_max, warp_sum), 0, _merge)
        send(mail_ptr + row * stride_mail + part, part_max, part_sum, row < n_rows)

        maxima, sums = receive(due_mail, tl.where(row > group, peeked, 0))
        row_max = tl.max(maxima, axis=0)
        # A part of -inf alone has the sum 0, and 0 * exp(-inf - -inf) would be NaN. A NaN in a part stays in its sum.
        scaled = tl.where((parts < PARTS) & (sums != 0.0), sums * tl.exp(maxima - row_max), 0.0)
        scale = tl.where(max_due == -float("inf"), 0.0, tl.exp(max_due - row_max)) / tl.sum(scaled, axis=0)
        y = tl.reshape(kept * scale[None, :, None, None], (BLOCK_N,))
        kept, max_due = weights, warp_max
        tl.store(y_ptr + due * stride_ym + cols, y.to(y_ptr.dtype.element_ty), mask=inside & (row > group))


def launch_split(x, y) -> None:
    """The rows of x to y, by as many groups as the SMs hold."""
    n_rows, n_cols = x.shape
    parts, groups = shares(x, SPLIT_BLOCK, PER_SM)
    vec = 16 // x.element_size()  # values that a thread loads at once
    lanes = min(32, SPLIT_BLOCK // WARPS // vec)
    softmax_split_kernel[(groups * parts,)](
        x, y, new_mailbox(x, parts), x.stride(0), y.stride(0), n_rows, n_cols, groups,
        PARTS=parts, PARTS_POW2=triton.next_power_of_2(parts), STEPS=SPLIT_BLOCK // (WARPS * lanes * vec), WARPS=WARPS,
        LANES=lanes, VEC=vec, STAGES=pipeline_stages(x, SPLIT_BLOCK, PER_SM, SPLIT_STAGES),
        FULL=n_cols % SPLIT_BLOCK == 0, num_warps=WARPS, maxnreg=registers(WARPS, PER_SM),
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
