"""LayerNorm backward of rows too long for one program: a group of programs shares a row, and exchanges two sums.

Each program owns a slice of the columns for good, so weight and column sums stay in its registers, and the group takes
row after row. For dx a program needs two sums over the whole row, of which it has only those of its slice. They travel
through memory as one 64-bit word per row and program. The word is its own signal, so there is no counter and no fence.
A row is written two iterations after its sums were sent, which leaves the group's slowest program time to send its own.
Three passes, as if a program held the row. docs/memory_ordering.md says why words are never torn and every wait ends.

Registers decide how many warps an SM has. A thread has 32 columns of 16 bits: their column sums and weights in float32
take 96 of the 168 registers that twelve warps leave it. So the rows that wait for their sums stay in shared memory,
where they arrived, and are read from there again. Triton's pipeliner frees a buffer in the iteration that reads it,
which is why this is Gluon.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from examples.common.async_copies import commit_group, copy_in, wait_group
from examples.common.device import device_limits, interpreted
from examples.common.lanes import index_of_lane
from examples.common.mailbox import new_mailbox, peek, receive, send, shares, split_max_cols
from examples.common.rows import check_layer_norm_backward, check_length, column_sums, registers, widen
from examples.common.slices import in_vectors
from examples.common.untraced import untraced

SLICE_BYTES = 4096  # of a row of x in a program of two warps: 64 bytes a thread
LAG = gl.constexpr(2)  # iterations from a row's sums to its dx
STAGES = gl.constexpr(4)  # rows in shared memory: LAG that wait for their sums, one in use, one on its way


@gluon.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@gluon.jit
def copy_row(x_buf, dy_buf, x_ptr, dy_ptr, stride_xm, stride_dym, row, n_rows, cols, n_cols):
    """Start a row's copies into shared memory, as one group; zeros for a row that is not there."""
    wanted = cols < gl.where(row < n_rows, n_cols, 0)
    row = row.to(gl.int64)
    copy_in(x_buf, x_ptr + row * stride_xm + cols, wanted)
    copy_in(dy_buf, dy_ptr + row * stride_dym + cols, wanted)
    commit_group()


@gluon.jit
def layer_norm_backward_split_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, mail_ptr,
    stride_dym, stride_xm, stride_dxm, n_rows, n_cols, groups,
    PARTS: gl.constexpr, PARTS_POW2: gl.constexpr, BLOCK_N: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    # Each thread copies what it reads, so it needs no other's copies; each warp has all words of a row.
    OWN: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0])
    MAIL: gl.constexpr = gl.BlockedLayout([max(1, PARTS_POW2 // 32)], [32], [gl.num_warps()], [0])
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # A ticket, not program_id, decides group and part: so the waits below end (docs/memory_ordering.md, "Tickets").
    ticket = (gl.atomic_add(mail_ptr, 1, sem="relaxed") + 1).to(gl.int32)
    group, part, zero = ticket // PARTS, ticket % PARTS, ticket >> 31
    mail_ptr += 1
    cols = part * BLOCK_N + gl.arange(0, BLOCK_N, layout=OWN)
    inside = cols < n_cols
    weight = gl.load(weight_ptr + cols, mask=inside, other=0.0).to(gl.float32)
    parts = gl.arange(0, PARTS_POW2, layout=MAIL)
    sender = gl.minimum(parts, PARTS - 1)
    share = 1.0 / n_cols
    xs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BLOCK_N], ROW)
    dys = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES, BLOCK_N], ROW)
    for i in gl.static_range(STAGES - LAG):
        row = group + i * groups
        copy_row(xs.index(i), dys.index(i), x_ptr, dy_ptr, stride_xm, stride_dym, row, n_rows, cols, n_cols)
    dweight, dbias = gl.zeros([BLOCK_N], gl.float32, OWN), gl.zeros([BLOCK_N], gl.float32, OWN)
    mean, rstd = gl.load(mean_ptr + group), gl.load(rstd_ptr + group)
    # Of the previous row, and of the one to be written. Not mean and rstd, though any number would do: Triton 3.6, 3.9
    # does not carry to the next iteration a name that begins as another and is given that other's value in the loop.
    mean_last, rstd_last, mean_due, rstd_due = 0.0, 0.0, 0.0, 0.0
    slot = 0
    for row in range(group, n_rows + LAG * groups, groups):
        # `due` is the row whose sums arrive now; in the first LAG iterations it is the group's first, not written.
        due = gl.maximum(row - LAG * groups, group)
        due_mail = mail_ptr + due.to(gl.int64) * PARTS + sender
        peeked = peek(due_mail)
        next_row = index_of_lane(row + groups, zero)
        mean_next = gl.load(mean_ptr + next_row, mask=next_row < n_rows, other=0.0)
        rstd_next = gl.load(rstd_ptr + next_row, mask=next_row < n_rows, other=0.0)
        wait_group(STAGES - LAG - 1)
        x_hat = (widen(xs.index(slot).load(OWN)) - mean) * rstd
        grad = widen(dys.index(slot).load(OWN))
        dweight += grad * x_hat
        dbias += grad
        grad *= weight
        total, product = gl.reduce((grad, grad * x_hat), 0, _add_pairs)
        send(mail_ptr + row.to(gl.int64) * PARTS + part, total, product, row < n_rows)

        totals, products = receive(due_mail, peeked)
        totals, products = gl.where(parts < PARTS, totals, 0.0), gl.where(parts < PARTS, products, 0.0)
        total, product = gl.reduce((totals, products), 0, _add_pairs)
        slope = product * share * rstd_due
        shift, slope = total * share * rstd_due, slope * rstd_due  # of x - mean, no longer of x_hat
        slot_due = (slot + STAGES - LAG) % STAGES
        x, dy = xs.index(slot_due), dys.index(slot_due)
        dx = widen(dy.load(OWN)) * weight * rstd_due - ((widen(x.load(OWN)) - mean_due) * slope + shift)
        dx_row = dx_ptr + due.to(gl.int64) * stride_dxm
        # Compared for each row: Triton 3.9 keeps a mask made before the loop in local memory, and rows wait for it.
        written = cols < gl.where(row >= group + LAG * groups, n_cols, 0)
        gl.store(dx_row + cols, dx.to(dx_ptr.dtype.element_ty), mask=written)
        ahead = row + (STAGES - LAG) * groups
        copy_row(x, dy, x_ptr, dy_ptr, stride_xm, stride_dym, ahead, n_rows, cols, n_cols)
        slot = (slot + 1) % STAGES
        mean_due, rstd_due = mean_last, rstd_last
        mean_last, rstd_last = mean, rstd
        mean, rstd = mean_next, rstd_next
    wait_group(0)  # the last copies, of rows that are not there: they write zeros, and no iteration waited for them
    first = group.to(gl.int64) * n_cols
    gl.store(dweight_ptr + first + cols, dweight, mask=inside)
    gl.store(dbias_ptr + first + cols, dbias, mask=inside)


def slices(x: torch.Tensor) -> tuple[int, int]:
    """(columns of a slice, programs on an SM): six programs, or as many as shared memory has room for."""
    # CUDA keeps 1 KiB for each program, and sums across warps take 16 bytes.
    room = (device_limits(x.device).shared_bytes + 1024) // (2 * STAGES.value * SLICE_BYTES + 1280)
    return SLICE_BYTES // x.element_size(), max(1, min(6, room))


def split_limit(dy: torch.Tensor, x: torch.Tensor) -> int:
    """Longest rows like those of dy and x that layer_norm_backward_split takes; 0 where it takes none.

    That is where rows cannot be read 16 bytes at a time, and the interpreter, which has no Gluon.
    """
    return split_max_cols(x.device, *slices(x)) if in_vectors(x, dy) and not interpreted() else 0


@untraced
def layer_norm_backward_split(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias) for rows of up to split_limit(dy, x) columns, each held by several programs at once.

    GPU only: Gluon is not interpreted (RuntimeError there). Columns and row strides are multiples of 16, and x and dy
    start at a multiple of 16 bytes (ValueError). Which program is which part of which group depends on the order in
    which they start; what each computes does not. Otherwise takes and raises what layer_norm_backward does.
    """
    name, instead = "layer_norm_backward_split", "layer_norm_backward_loop"
    n_rows, n_cols = check_layer_norm_backward(name, dy, x, weight, mean, rstd)
    if interpreted():
        raise RuntimeError(f"{name}: Gluon kernels are not interpreted; call {instead}")
    if not in_vectors(x, dy):
        raise ValueError(
            f"{name}: x is {tuple(x.shape)}, x and dy have strides {x.stride()} and {dy.stride()}, but columns and row "
            f"strides must be multiples of 16 and both start at a multiple of 16 bytes; call {instead}"
        )
    check_length(name, n_cols, split_limit(dy, x), instead)
    if not n_rows:
        return torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(weight)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_n, per_sm = slices(x)
    parts, groups = shares(x, block_n, per_sm)
    partials = torch.empty(2, groups, n_cols, dtype=torch.float32, device=x.device)
    layer_norm_backward_split_kernel[(groups * parts,)](
        dy, x, weight, mean, rstd, dx, partials[0], partials[1], new_mailbox(x, parts),
        dy.stride(0), x.stride(0), dx.stride(0), n_rows, n_cols, groups,
        PARTS=parts, PARTS_POW2=triton.next_power_of_2(parts), BLOCK_N=block_n, VECTOR=16 // x.element_size(),
        num_warps=2, maxnreg=min(255, registers(2, per_sm)) // 8 * 8,  # allocated in units of 8 a thread
    )  # fmt: skip
    return dx, *column_sums(partials, weight)
