"""Cross-entropy of rows too long for the L1 cache: a group of programs shares a row, and exchanges maximum and sum.

Each program owns a slice of the classes for good, and the group takes row after row. A slice's maximum and sum travel
through memory as one 64-bit word, which is its own signal, and the exchange is hidden: the gradient of a row is written
one iteration after its words were sent, from the slice's exponentials, which wait in registers while the next rows are
in flight to shared memory. So each logit is read once and exponentiated once. With the gradient written, that is 4
bytes a 16-bit logit, as much as a copy moves.

One exponential a logit does not suffice to keep up with memory. What a program does once for each row (exchanging
words, reducing, computing addresses) costs as much as its work on the logits, and every reduction across warps is a
barrier. So each thread has many logits (64 of 16 bits, 32 of float32); a program for 16-bit logits is a single warp,
which needs no reduction across warps; and an SM holds several programs, so that some compute while others wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import interpreted
from examples.common.exponentials import LOG2_E, exponentials, largest_of_vectors
from examples.common.mailbox import pack, peek, receive, send, shares, split_max_cols, unpack
from examples.common.rows import ASSEMBLY, pipeline_stages, registers
from examples.triton.cross_entropy_backward import LN_2, LOWEST, exp_of, softmax_of
from examples.triton.cross_entropy_operands import edges_of, prepare, row_layout, vectors_of

# By bytes of a logit: columns of a slice, warps of a program, programs on an SM. Either way an SM has 12 warps, 3 on
# each of its four quarters, whose 16384 registers allow 168 a thread. Fewer one-warp programs would not get more: with
# 9 to 11, some quarter still has 3, and with more than 168 registers only 2 fit.
SHAPES = {2: (2048, 1, 12), 4: (4096, 4, 3)}


@triton.jit
def _after_barrier(x):
    """The float32 x once all threads of the program are here: Triton pipelines no loop with a tl.debug_barrier."""
    if ASSEMBLY:
        x = tl.inline_asm_elementwise(
            "bar.sync 0; mov.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return x


@triton.jit
def _ordered(bits):
    """int32 that are ordered as the float32 with these bits are (not NaN); and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _largest(x):
    """The largest of float32 [n], no NaN. Of integers a warp finds it by one instruction, redux."""
    return _ordered(tl.max(_ordered(x.to(tl.int32, bitcast=True)), axis=0)).to(tl.float32, bitcast=True)


@triton.jit
def _in_slice(own, STEPS: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr):
    """Which elements of a slice, [STEPS * THREADS * WIDTH], are in its first `own` vectors.

    The same as columns < own * WIDTH. There the compiler keeps a column number of each step in registers
    of every thread; here it subtracts the step from `own`, which all threads share.
    """
    vectors = tl.arange(0, THREADS)[None, :] < (own - tl.arange(0, STEPS) * THREADS)[:, None]
    elements = tl.reshape(tl.broadcast_to(vectors[:, :, None], (STEPS, THREADS, WIDTH)), (STEPS * THREADS * WIDTH,))
    return tl.max_constancy(elements, (WIDTH,))  # a vector is still written at once


@triton.jit
def cross_entropy_split_kernel(
    logits_ptr, target_ptr, scale_ptr, loss_ptr, stats_ptr, grad_ptr, mail_ptr, stride_xm, stride_target, stride_gm,
    n_rows, n_cols, part_vectors, groups, ignore_index, smoothing, SMOOTH: tl.constexpr,
    PARTS: tl.constexpr, PARTS_POW2: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, THREADS: tl.constexpr,
    EDGES: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    if SUMMED:
        tl.extra.cuda.gdc_launch_dependents()  # once every program has started, the sum's may
    if EARLY:
        tl.extra.cuda.gdc_wait()  # until `prepare` has ended: the mailbox is empty, and the tickets begin at 0
    # A ticket, not program_id, decides group and part: so the waits below end (docs/memory_ordering.md, "Tickets").
    ticket = (tl.atomic_add(mail_ptr, 1, sem="relaxed") + 1).to(tl.int32)
    group, part = ticket // PARTS, ticket % PARTS
    mail_ptr += 1
    stride_xm, stride_gm = tl.cast(stride_xm, tl.int64), tl.cast(stride_gm, tl.int64)
    stride_target, stats_step = tl.cast(stride_target, tl.int64), tl.cast(n_rows, tl.int64)
    stride_mail, plain_step = tl.full((), PARTS, tl.int64), stats_step * PARTS
    smoothing = tl.cast(smoothing, tl.float32)
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    lane = tl.arange(0, BLOCK_N)
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    STEPS: tl.constexpr = BLOCK_N // WIDTH // THREADS
    vector = tl.arange(0, STEPS)[:, None] * THREADS + tl.arange(0, THREADS)[None, :]
    parts = tl.arange(0, PARTS_POW2)
    sender = tl.minimum(parts, PARTS - 1)
    first = part * part_vectors * WIDTH
    is_last = part == PARTS - 1  # it has the columns beside the vectors too
    # Edges and targets are loaded an iteration ahead, into registers.
    if EDGES:
        x_row = logits_ptr + group * stride_xm
        head, vectors = vectors_of(x_row, n_cols, WIDTH, EDGES)
        cols, in_edge = edges_of(head, vectors, n_cols, WIDTH)
        edge = tl.load(x_row + cols, mask=in_edge & is_last, other=-float("inf"))
        edge_due = edge
    target = tl.load(target_ptr + group * stride_target)
    target_due = target
    kept = tl.zeros((STEPS, THREADS, WIDTH), tl.float32)
    reference_due = tl.zeros((THREADS,), tl.float32)
    for row in tl.range(group, n_rows + groups, groups, num_stages=STAGES):
        # `due` is the group's previous row, whose words arrive now; in the first iteration it is this row, not written.
        due = tl.maximum(row - groups, group)
        is_row, is_due = row < n_rows, row > group
        due_mail = mail_ptr + due * stride_mail + sender
        due_row, grad_row = logits_ptr + due * stride_xm, grad_ptr + due * stride_gm
        head_due, vectors_due = vectors_of(due_row, n_cols, WIDTH, EDGES)
        counts = target_due != ignore_index
        known = counts & (target_due >= 0) & (target_due < n_cols)
        # The program that owns the target's column has its logit, and writes the row's loss and what backward needs.
        at = target_due - head_due
        in_vectors = known & (at >= 0) & (at < vectors_due)
        in_slice = (at >= first) & (at < first + part_vectors * WIDTH)
        owner = (in_vectors & in_slice) | (is_last & (in_vectors == 0))
        # In place, this load must precede the stores of the gradient: the loop's barrier for its next slice is between.
        x_target = tl.load(due_row + target_due, mask=known & owner, other=float("nan")).to(tl.float32)

        next_row = row + groups
        is_next = next_row < n_rows
        if EDGES:
            x_next = logits_ptr + next_row * stride_xm
            head, vectors = vectors_of(x_next, n_cols, WIDTH, EDGES)
            cols, in_edge = edges_of(head, vectors, n_cols, WIDTH)
            edge_next = tl.load(x_next + cols, mask=in_edge & is_last & is_next, other=-float("inf"))
        target_next = tl.load(target_ptr + next_row * stride_target, mask=is_next, other=ignore_index)

        x_row = logits_ptr + row * stride_xm
        head, vectors = vectors_of(x_row, n_cols, WIDTH, EDGES)
        own = tl.where(is_row, tl.minimum(part_vectors, vectors // WIDTH - part * part_vectors), 0)
        x_slice = tl.multiple_of(x_row + head if EDGES else x_row, 16) + first
        x = tl.load(x_slice + lane, mask=lane < own * WIDTH, other=0.0)
        # One maximum and one sum for each thread, of its own vectors: no thread waits for another.
        packed = pack(x)
        largest = tl.reshape(largest_of_vectors(packed, DTYPE), (STEPS, THREADS))
        reference = tl.max(tl.where(vector < own, tl.maximum(largest, LOWEST), LOWEST), axis=0)  # -inf - -inf is NaN
        if SMOOTH:
            plain = tl.sum(unpack(packed, DTYPE), axis=0)
        values = tl.reshape(unpack(packed, DTYPE), (STEPS, THREADS, WIDTH))
        terms, rest = exponentials(values, tl.reshape(reference, (1, THREADS, 1)), DTYPE)
        rest = tl.reshape(rest, (THREADS,))
        total = tl.sum(tl.where(vector < own, tl.sum(terms, axis=2), 0.0), axis=0)
        part_max = _largest(reference)
        if EDGES:
            part_max = tl.maximum(part_max, tl.max(edge.to(tl.float32), axis=0))
        total = tl.sum(total * tl.exp2((reference - part_max) * LOG2_E - rest), axis=0)
        if EDGES:
            total += tl.sum(exp_of(edge.to(tl.float32) - part_max), axis=0)
        send(mail_ptr + row * stride_mail + part, part_max, total, is_row)
        if SMOOTH:
            if EDGES:
                cols, in_edge = edges_of(head, vectors, n_cols, WIDTH)
                plain += tl.sum(tl.where(in_edge & is_last, edge.to(tl.float32), 0.0), axis=0)
            send(mail_ptr + plain_step + row * stride_mail + part, plain, part_max, is_row)

        # Not peeked at before the exponentials: those need the registers in which the words would wait.
        maxima, sums = receive(due_mail, peek(due_mail))
        row_max = _largest(maxima)
        row_sum = tl.sum(tl.where(parts < PARTS, sums * exp_of(maxima - row_max), 0.0), axis=0)
        row_sum = tl.where((row_sum > 0.5) & (row_sum < 1.0), 1.0, row_sum)  # rounded: the largest logit's term is 1
        factor = tl.where(known, scale, tl.where(counts, float("nan"), 0.0))
        weight = factor / row_sum
        own = tl.where(is_due, tl.minimum(part_vectors, vectors_due // WIDTH - part * part_vectors), 0)
        _, rest_due = exponentials(reference_due, reference_due, DTYPE)  # again, rather than kept in registers
        thread_weight = tl.exp2((reference_due - row_max) * LOG2_E - rest_due) * weight
        grad = tl.reshape(kept * tl.reshape(thread_weight, (1, THREADS, 1)), (BLOCK_N,))
        if SMOOTH:
            grad -= factor * smoothing / n_cols
        grad_slice = tl.multiple_of(grad_row + head_due if EDGES else grad_row, 16) + first
        written = _in_slice(own, STEPS, THREADS, WIDTH)
        tl.store(grad_slice + lane, grad.to(grad_ptr.dtype.element_ty), mask=written)
        if EDGES:
            cols, in_edge = edges_of(head_due, vectors_due, n_cols, WIDTH)
            edge_grad = softmax_of(edge_due.to(tl.float32), row_max, weight, factor, smoothing, n_cols, SMOOTH)
            tl.store(grad_row + cols, edge_grad.to(grad_ptr.dtype.element_ty), mask=in_edge & is_last & is_due)
        # The target's column again, after the barrier: a comparison for every logit would cost more.
        target_grad = softmax_of(_after_barrier(x_target), row_max, weight, factor, smoothing, n_cols, SMOOTH)
        target_grad -= factor * (1.0 - smoothing)
        tl.store(grad_row + target_due, target_grad.to(grad_ptr.dtype.element_ty), mask=known & owner & is_due)

        log_sum = tl.log2(row_sum) * LN_2
        loss = log_sum + (row_max - x_target)
        if SMOOTH:
            plains, _ = receive(due_mail + plain_step, peek(due_mail + plain_step))
            mean = tl.sum(tl.where(parts < PARTS, plains, 0.0), axis=0) / n_cols
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum + (row_max - mean))
        tl.store(loss_ptr + due, tl.where(counts, loss, 0.0) * scale, mask=owner & is_due)
        tl.store(stats_ptr + due, row_max, mask=owner & is_due)
        tl.store(stats_ptr + stats_step + due, weight, mask=owner & is_due)
        tl.store(stats_ptr + 2 * stats_step + due, factor, mask=owner & is_due)
        # Through tl.where: Triton pipelines no loop that hands a value on unchanged to the iteration after the next.
        target_due = tl.where(is_row, target, ignore_index)
        kept, reference_due, target = terms, reference, target_next
        if EDGES:
            edge_due = tl.where(is_row, edge, 0.0)
            edge = edge_next


def can_split(logits: torch.Tensor) -> bool:
    """Whether the programs of a group can wait for each other here, and share rows like those of the logits."""
    block_n, _, per_sm = SHAPES[logits.element_size()]
    return not interpreted() and logits.shape[1] <= split_max_cols(logits.device, block_n, per_sm)


def _mailbox(logits: torch.Tensor, words: int) -> torch.Tensor:
    """`words` words for each row, after one from which tickets are drawn; `prepare` empties this mailbox."""
    return torch.empty(1 + logits.shape[0] * words, dtype=torch.int64, device=logits.device)


def launch_split(logits, target, loss, stats, grad, reduction: str, ignore_index: int, smoothing: float) -> None:
    """Losses, three numbers of each row and its gradient, as the lesson's launch."""
    n_rows, n_cols = logits.shape
    (block_n, warps, per_sm), (width, edges) = SHAPES[logits.element_size()], row_layout(logits)
    parts, groups = shares(logits, block_n, per_sm)
    line = 128 // logits.element_size()  # slices begin at whole lines of 128 bytes of their row
    part_vectors = triton.cdiv(triton.cdiv(n_cols, line), parts) * line // width
    mail = _mailbox(logits, parts * (2 if smoothing else 1))
    scale, order = prepare(target, ignore_index, reduction, mail)
    cross_entropy_split_kernel[(groups * parts,)](
        logits, target, scale, loss, stats, grad, mail,
        logits.stride(0), target.stride(0), grad.stride(0), n_rows, n_cols,
        part_vectors, groups, ignore_index, smoothing, SMOOTH=smoothing > 0,
        PARTS=parts, PARTS_POW2=triton.next_power_of_2(parts), BLOCK_N=block_n, WIDTH=width, THREADS=32 * warps,
        EDGES=edges, STAGES=pipeline_stages(logits, block_n, per_sm),
        num_warps=warps, maxnreg=registers(warps, per_sm) // 8 * 8,  # allocated in units of 8 a thread
        **order,
    )  # fmt: skip
