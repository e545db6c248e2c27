"""LayerNorm, forward and backward: sums along rows and sums along columns, with each element moved once.

Technique  Forward: a row's mean and variance before any of it is written. Backward: two sums along each row for dx, and
           two along each column for the gradients of weight and bias. Where these sums are made decides the traffic:
           rows      forward, one program holds one row, or several short ones, in registers. Backward, a program stays
                     for many rows, loads the next ones into shared memory, and keeps the column sums in registers; it
                     writes them once, and a small kernel adds up what all wrote. No atomics: the same bits each run.
           resident  forward, a longer row: one loop for mean and variance, one that writes and finds the row in the
                     SM's first-level cache. The length is a constant of the kernel, so the compiler unrolls the loops
                     (of a row that fits) and has many loads on their way at once; each length is compiled for itself.
           split     backward, a row too long for one program is shared by a group of them. Each owns a slice of the
                     columns for good, so weight and column sums stay in its registers; per row the group exchanges two
                     sums. They travel as one 64-bit word, which is its own signal: no counter, no fence. A row is
                     finished one turn after its sums were sent, and rows to come are on their way to shared memory.
           loop      backward, any length, no waiting: the sums first, then everything again to write: 5 passes for 3.
Question   Training needs sums along both axes; how do both come from one pass, also when no program holds a row?
Needs      triton
Shapes     x, dy [n_rows, n_cols], last dimension contiguous, any row stride; weight, bias [n_cols]; mean, rstd [n_rows]
           -> y, dx contiguous; gradients like weight. layer_norm() takes x [..., n_cols].
Dtypes     float32, float16, bfloat16; weight and bias both of x's dtype or both float32; mean, rstd and the arithmetic
           are float32 whatever the storage.
Errors     TypeError for another dtype, a missing weight or bias, or an eps that is no number; ValueError for another
           rank, no columns, sizes or dtypes of matrices that do not fit each other, an inner stride other than 1, an
           eps that is negative or not finite, or a row longer than the chosen kernel takes; RuntimeError for a device
           without Triton, a second derivative, or an input that requires grad anywhere but in layer_norm().
Wins when  x is larger than L2; how close to a copy each row length comes is in README's table of recorded runs.
Source     Welford 1962 and Chan, Golub and LeVeque 1983 (merging means and squares); backward as in Triton tutorial 05,
           without its locks; chapter section "Triton".
Run        python examples/triton/layer_norm.py
"""

from __future__ import annotations

from harness import Harness, Work, device_limits, interpreted, require_triton_device, run

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS_MAX = 1024  # forward: longer rows are faster from the cache than held in registers
BACKWARD_ROWS_MAX = 8192  # 16 columns a thread at 16 warps: x, dy and two sums of each take 64 of its 128 registers
# Forward rows up to so many KiB: 16-bit values that a program takes at a step, warps, and steps that are unrolled.
RESIDENT = [(4, 1024, 4, 1), (8, 2048, 8, 1), (16, 1024, 8, 1), (32, 4096, 16, 1), (64, 8192, 32, 1),
            (128, 16384, 32, 4), (float("inf"), 16384, 32, 1)]  # fmt: skip
STAGES = 3  # one row on its way to shared memory, one in use: its slot is refilled when the turn ends
# By bits of a value: columns a program owns, so that it has 32 or 16 values a thread at 8 warps and fills an SM alone.
SPLIT_BLOCK = {16: 8192, 32: 4096}
ASSEMBLY = tl.constexpr(not interpreted())  # of which the interpreter has none


@triton.jit
def _widen(x):
    """x in float32, converted where it is used: hoisted out of the loop, as LLVM would, it takes twice the registers.

    Volatile assembly stays where it is. It gets pairs of 16-bit values, as they lie in 32-bit registers.
    """
    if x.dtype == tl.float32 or not ASSEMBLY:
        return x.to(tl.float32)
    elif x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=False, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=f,=f,r", [x], dtype=tl.float32, is_pure=False, pack=2,
        )  # fmt: skip


@triton.jit
def layer_norm_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, stride_xm, stride_ym, n_rows, n_cols, eps,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    # int64 because row * stride passes 2**31 elements on tensors that still fit in memory.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_N)
    in_row = (cols < n_cols)[None, :]
    inside = (rows < n_rows)[:, None] & in_row
    x = _widen(tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=inside, other=0.0))
    # Measured from the row's first element: a mean of 10000 with a spread of 1 would cost float32 four digits.
    origin = tl.load(x_ptr + rows * stride_xm, mask=rows < n_rows, other=0.0).to(tl.float32)
    x -= origin[:, None]
    if not FULL:
        x = tl.where(in_row, x, 0.0)
    mean = tl.sum(x, axis=1) / n_cols
    # Not E[x^2] - E[x]^2, of which nothing would be left where the mean is large.
    x -= mean[:, None]
    if not FULL:
        x = tl.where(in_row, x, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
    weight = _widen(tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0))
    bias = _widen(tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0))
    y = x * rstd[:, None] * weight[None, :] + bias[None, :]
    tl.store(y_ptr + rows[:, None] * stride_ym + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + rows, origin + mean, mask=rows < n_rows)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


@triton.jit
def _load_row(row_ptr, cols, N_COLS: tl.constexpr, FULL: tl.constexpr, HINT: tl.constexpr):
    if FULL:  # a mask costs a predicate per load; most lengths need none
        x = tl.load(row_ptr + cols, eviction_policy=HINT)
    else:
        x = tl.load(row_ptr + cols, mask=cols < N_COLS, other=0.0, eviction_policy=HINT)
    return x.to(tl.float32)


@triton.jit
def layer_norm_resident_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, stride_xm, stride_ym, eps,
    N_COLS: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    FULL: tl.constexpr = N_COLS % BLOCK_N == 0
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * stride_xm, y_ptr + row * stride_ym
    lane = tl.arange(0, BLOCK_N)
    # One running mean and sum of squares per lane, not per row: no reduction inside the loop.
    lane_mean = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    seen = 0.0
    for start in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        cols = start + lane
        x = _load_row(x_row, cols, N_COLS, FULL, "evict_last")
        seen += 1.0
        off = x - lane_mean
        if not FULL:
            off = tl.where(cols < N_COLS, off, 0.0)
        lane_mean += off * (1.0 / seen)  # one division, not one per lane
        squares += off * (x - lane_mean)
    count = ((N_COLS + BLOCK_N - 1 - lane) // BLOCK_N).to(tl.float32)  # elements this lane has seen
    # Measured from the row's first element: a mean of 10000 with a spread of 1 would cost float32 four digits.
    origin = tl.load(x_row).to(tl.float32)
    between = lane_mean - origin
    mean = tl.sum(between * count, axis=0) / N_COLS
    between = tl.where(count > 0, between - mean, 0.0)  # an empty lane's square may be infinite
    rstd = tl.rsqrt(tl.sum(squares + between * between * count, axis=0) / N_COLS + eps)
    mean += origin
    for start in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        cols = start + lane
        x = _load_row(x_row, cols, N_COLS, FULL, "evict_first")
        weight = _load_row(weight_ptr, cols, N_COLS, FULL, "evict_last")
        bias = _load_row(bias_ptr, cols, N_COLS, FULL, "evict_last")
        y = (x - mean) * rstd * weight + bias
        tl.store(y_row + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N_COLS)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def layer_norm_backward_rows_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    stride_dym, stride_xm, stride_dxm, n_rows, n_cols, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)
    in_row = cols < n_cols
    stride_dym, stride_xm = tl.cast(stride_dym, tl.int64), tl.cast(stride_xm, tl.int64)
    stride_dxm = tl.cast(stride_dxm, tl.int64)
    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
    dweight = tl.zeros((BLOCK_N,), tl.float32)
    dbias = tl.zeros((BLOCK_N,), tl.float32)
    for first in tl.range(program * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & in_row[None, :]
        x = _widen(tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=inside, other=0.0))
        dy = _widen(tl.load(dy_ptr + rows[:, None] * stride_dym + cols[None, :], mask=inside, other=0.0))
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        x_hat = (x - mean) * rstd
        dweight += tl.sum(dy * x_hat, axis=0)
        dbias += tl.sum(dy, axis=0)
        grad = dy * _widen(weight)[None, :]
        shift = tl.sum(grad, axis=1)[:, None] / n_cols * rstd
        slope = tl.sum(grad * x_hat, axis=1)[:, None] / n_cols * rstd
        dx = grad * rstd - (x_hat * slope + shift)
        tl.store(dx_ptr + rows[:, None] * stride_dxm + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + program.to(tl.int64) * n_cols + cols, dweight, mask=in_row)
    tl.store(dbias_ptr + program.to(tl.int64) * n_cols + cols, dbias, mask=in_row)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _keep(x):
    """x for the next turn, two 16-bit values to a register; the compiler would give each its own."""
    if x.dtype == tl.float32 or not ASSEMBLY:
        return x
    else:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), (x.shape[0] // 2, 2)))
        return tl.inline_asm_elementwise(
            "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _kept(kept, dtype: tl.constexpr):
    """What _keep was given, of that dtype, in float32."""
    if dtype == tl.float32 or not ASSEMBLY:
        return kept.to(tl.float32)
    elif dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r", [kept], dtype=(tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
        return tl.reshape(tl.join(low, high), (2 * kept.shape[0],))
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=f,=f,r", [kept], dtype=(tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
        return tl.reshape(tl.join(low, high), (2 * kept.shape[0],))


@triton.jit
def _send(ptr, first, second, mask):
    """Put two sums into the mailbox as one 64-bit word: whoever sees the word has both, and needs no other signal."""
    low = first.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = second.to(tl.uint32, bitcast=True).to(tl.uint64)
    # Never the -1 of an empty box: arithmetic makes NaNs of the bits 0x7fffffff.
    tl.atomic_xchg(ptr, ((high << 32) | low).to(tl.int64, bitcast=True), mask=mask, sem="relaxed")


@triton.jit
def _peek(ptr):
    """Ask for the words at ptr; the answer is under way while the program does something else."""
    return tl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b64 $0, [$1];", "=l,l", [ptr.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _receive(ptr, peeked):
    """The two sums in each word at ptr, once all are there.

    Assembly, because a loop of Triton's own would be one within the row loop, and Triton prefetches for innermost
    loops only.
    """
    word = tl.inline_asm_elementwise(
        """{
        .reg .pred empty;
        mov.b64 $0, $2;
        again:
        setp.eq.s64 empty, $0, -1;
        @empty ld.relaxed.gpu.global.b64 $0, [$1];
        @empty bra again;
        }""",
        "=&l,l,l", [ptr.to(tl.int64), peeked], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    first = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    second = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return first, second


@triton.jit
def layer_norm_backward_split_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, mail_ptr,
    stride_dym, stride_xm, stride_dxm, n_rows, n_cols, groups,
    PARTS: tl.constexpr, PARTS_POW2: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A ticket, not program_id: hardware may start programs in any order, tickets are dealt in the order in which
    # they run. So at most one group waits for a program that has not started, and the others end and make room for it.
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
    x_due = _keep(tl.zeros((BLOCK_N,), x_ptr.dtype.element_ty))
    dy_due = _keep(tl.zeros((BLOCK_N,), dy_ptr.dtype.element_ty))
    # A row is written one turn after its sums were sent, in which those of the others have had time to arrive.
    for row in tl.range(group, n_rows + groups, groups, num_stages=STAGES):
        due = tl.maximum(row - groups, group)  # nothing is due in the first turn, and nothing is stored
        due_mail = mail_ptr + due * stride_mail + sender
        peeked = _peek(due_mail)
        # Loaded again, not handed on from the last turn: Triton prefetches for no loop that only passes a value on.
        mean_due, rstd_due = tl.load(mean_ptr + due), tl.load(rstd_ptr + due)
        # These by hand, a turn ahead, in registers: Triton would send each number through shared memory.
        next_row = row + groups
        mean_next = tl.load(mean_ptr + next_row, mask=next_row < n_rows, other=0.0)
        rstd_next = tl.load(rstd_ptr + next_row, mask=next_row < n_rows, other=0.0)
        x = tl.load(x_ptr + row * stride_xm + cols, mask=inside & (row < n_rows), other=0.0)
        dy = tl.load(dy_ptr + row * stride_dym + cols, mask=inside & (row < n_rows), other=0.0)
        x_hat = (_widen(x) - mean) * rstd
        grad = _widen(dy)
        dweight += grad * x_hat
        dbias += grad
        grad *= _widen(weight)
        total, product = tl.reduce((grad, grad * x_hat), 0, _add_pairs)
        _send(mail_ptr + row * stride_mail + part, total, product, row < n_rows)

        totals, products = _receive(due_mail, peeked)
        shift = tl.sum(tl.where(parts < PARTS, totals, 0.0), axis=0) / n_cols
        slope = tl.sum(tl.where(parts < PARTS, products, 0.0), axis=0) / n_cols * rstd_due
        shift = (shift - mean_due * slope) * rstd_due  # of x itself, no longer of x_hat
        grad = _kept(dy_due, x_ptr.dtype.element_ty) * _widen(weight)
        dx = grad * rstd_due - (_kept(x_due, x_ptr.dtype.element_ty) * (slope * rstd_due) + shift)
        tl.store(dx_ptr + due * stride_dxm + cols, dx.to(dx_ptr.dtype.element_ty), mask=inside & (row > group))
        x_due, dy_due = _keep(x), _keep(dy)
        mean, rstd = mean_next, rstd_next
    tl.store(dweight_ptr + group.to(tl.int64) * n_cols + cols, dweight, mask=inside)
    tl.store(dbias_ptr + group.to(tl.int64) * n_cols + cols, dbias, mask=inside)


@triton.jit
def layer_norm_backward_sums_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, shift_ptr, slope_ptr, stride_dym, stride_xm, n_cols,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    lane = tl.arange(0, BLOCK_N)
    totals = tl.zeros((BLOCK_N,), tl.float32)
    products = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + lane
        inside = cols < n_cols
        x = _widen(tl.load(x_ptr + row * stride_xm + cols, mask=inside, other=0.0))
        dy = _widen(tl.load(dy_ptr + row * stride_dym + cols, mask=inside, other=0.0))
        grad = dy * _widen(tl.load(weight_ptr + cols, mask=inside, other=0.0))
        totals += grad
        products += grad * ((x - mean) * rstd)
    tl.store(shift_ptr + row, tl.sum(totals, axis=0) / n_cols)
    tl.store(slope_ptr + row, tl.sum(products, axis=0) / n_cols)


@triton.jit
def layer_norm_backward_loop_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, shift_ptr, slope_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    stride_dym, stride_xm, stride_dxm, n_rows, n_cols, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < n_cols
    group = tl.program_id(1)
    stride_dym, stride_xm = tl.cast(stride_dym, tl.int64), tl.cast(stride_xm, tl.int64)
    stride_dxm = tl.cast(stride_dxm, tl.int64)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
    dweight = tl.zeros((BLOCK_N,), tl.float32)
    dbias = tl.zeros((BLOCK_N,), tl.float32)
    for row in tl.range(group, n_rows, tl.num_programs(1), num_stages=STAGES):
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
        shift, slope = tl.load(shift_ptr + row), tl.load(slope_ptr + row)
        x = _widen(tl.load(x_ptr + row * stride_xm + cols, mask=inside, other=0.0))
        dy = _widen(tl.load(dy_ptr + row * stride_dym + cols, mask=inside, other=0.0))
        x_hat = (x - mean) * rstd
        dweight += dy * x_hat
        dbias += dy
        dx = (dy * _widen(weight) - shift - x_hat * slope) * rstd
        tl.store(dx_ptr + row * stride_dxm + cols, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + group.to(tl.int64) * n_cols + cols, dweight, mask=inside)
    tl.store(dbias_ptr + group.to(tl.int64) * n_cols + cols, dbias, mask=inside)


@triton.jit
def layer_norm_backward_columns_kernel(
    dweights_ptr, dbiases_ptr, dweight_ptr, dbias_ptr, n_parts, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, n_parts, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        inside = (rows < n_parts)[:, None] & (cols < n_cols)[None, :]
        at = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
        dweight += tl.load(dweights_ptr + at, mask=inside, other=0.0)
        dbias += tl.load(dbiases_ptr + at, mask=inside, other=0.0)
    tl.store(dweight_ptr + cols, tl.sum(dweight, axis=0).to(dweight_ptr.dtype.element_ty), mask=cols < n_cols)
    tl.store(dbias_ptr + cols, tl.sum(dbias, axis=0).to(dbias_ptr.dtype.element_ty), mask=cols < n_cols)


def _check(name: str, matrices: dict, columns: dict, rows: dict) -> None:
    """What every wrapper checks before it allocates: by name, what is like x, one value per column, one per row."""
    if missing := [label for label, vector in columns.items() if vector is None]:
        raise TypeError(f"{name}: {missing[0]} is None; pass torch.ones(n_cols) as weight, torch.zeros(n_cols) as bias")
    require_triton_device(name, *matrices.values(), *columns.values(), *rows.values())
    x, weight = matrices["x"], columns["weight"]
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype} is not one of {DTYPES}; convert with x.float() first")
    if x.ndim != 2:
        raise ValueError(f"{name}: need x [n_rows, n_cols], got shape {tuple(x.shape)}; call x.reshape(-1, n_cols)")
    n_rows, n_cols = x.shape
    if n_cols == 0:
        raise ValueError(f"{name}: shape {tuple(x.shape)} has no columns, and nothing has no mean")
    for label, matrix in matrices.items():
        if matrix.shape != x.shape or matrix.dtype != x.dtype:
            raise ValueError(
                f"{name}: {label} is {tuple(matrix.shape)} {matrix.dtype}, but x is {tuple(x.shape)} {x.dtype}; "
                "pass the gradient of y, which is like x"
            )
        if matrix.stride(1) != 1 and n_cols > 1:
            raise ValueError(
                f"{name}: {label} has strides {matrix.stride()}, but columns must be contiguous; "
                f"call {label}.contiguous() first"
            )
    for label, vector in columns.items():
        if vector.dtype not in (x.dtype, torch.float32) or vector.dtype != weight.dtype:
            raise TypeError(
                f"{name}: {label} is {vector.dtype}; weight and bias must both be {x.dtype} as x, or both torch.float32"
            )
    for label, vector in rows.items():
        if vector.dtype != torch.float32:
            raise TypeError(f"{name}: {label} is {vector.dtype}; pass the float32 one of layer_norm_forward")
    for label, vector in (columns | rows).items():
        size = n_rows if label in rows else n_cols
        if vector.shape != (size,) or (vector.stride(0) != 1 and size > 1):
            raise ValueError(
                f"{name}: {label} has shape {tuple(vector.shape)} and strides {vector.stride()}, but x of "
                f"{tuple(x.shape)} needs [{size}], contiguous"
            )


def _check_eps(name: str, eps: float) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{name}: eps is {eps!r}; pass a Python number such as 1e-5")
    if not 0 <= eps < 1e30:  # NaN is not
        raise ValueError(f"{name}: eps is {eps}; pass a number from 0 up that float32 can hold, such as 1e-5")


def _check_length(name: str, x: torch.Tensor, limit: int, instead: str) -> None:
    if x.shape[1] > limit:
        raise ValueError(f"{name}: {x.shape[1]} columns, but a row may have {limit} here; call {instead}")


def _check_split(name: str, x: torch.Tensor, instead: str) -> None:
    _check_length(name, x, split_max_cols(x.device), instead)
    if interpreted():
        raise RuntimeError(f"{name}: its programs wait for each other and cannot be interpreted; use {instead}")


def split_max_cols(device: torch.device) -> int:
    """Longest row layer_norm_backward_split takes.

    A group's programs wait for each other and an SM runs one of them, so a group may have no more than there are SMs.
    For 16-bit values this is half of what would do, a margin for two such launches side by side on two streams. Several
    at once, one beside another kernel that waits and keeps its SMs (NCCL's do), or a context that is given fewer SMs,
    must not use it on its longest rows.
    """
    return SPLIT_BLOCK[32] * device_limits(device).sms


def _bits(x: torch.Tensor, weight: torch.Tensor) -> int:
    return 8 * max(x.element_size(), weight.element_size())


def _stages(x: torch.Tensor, elements: int, per_sm: int) -> int:
    """STAGES, or as many as leave shared memory for `per_sm` programs, when a stage takes `elements` of x's dtype."""
    room = (device_limits(x.device).shared_bytes - 8192) // per_sm  # 8 KiB for sums across warps
    return max(1, min(STAGES, 1 + room // (elements * x.element_size())))


def _mailbox(x: torch.Tensor, parts: int) -> torch.Tensor:
    """One word per row and part that says "nothing yet", after one from which tickets are drawn: one fill for both."""
    return torch.full((1 + x.shape[0] * parts,), -1, dtype=torch.int64, device=x.device)


def _block(n_cols: int) -> int:
    return max(16, triton.next_power_of_2(n_cols))  # assembly on pairs needs two at least


def _outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(x.shape[0], dtype=torch.float32, device=x.device) for _ in range(2))
    return y, mean, rstd


def layer_norm_rows(x, weight, bias, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) for rows of up to ROWS_MAX columns, each held in one program's registers."""
    _check("layer_norm_rows", {"x": x}, {"weight": weight, "bias": bias}, {})
    _check_eps("layer_norm_rows", eps)
    _check_length("layer_norm_rows", x, ROWS_MAX, "layer_norm_forward")
    y, mean, rstd = _outputs(x)
    n_rows, n_cols = x.shape
    if n_rows:  # a grid of zero programs is a launch error
        block_n = _block(n_cols)
        rows = max(1, min(64, 2048 // block_n))
        layer_norm_rows_kernel[(triton.cdiv(n_rows, rows),)](
            x, weight, bias, y, mean, rstd, x.stride(0), y.stride(0), n_rows, n_cols, eps,
            ROWS=rows, BLOCK_N=block_n, FULL=n_cols == block_n, num_warps=4,
        )  # fmt: skip
    return y, mean, rstd


def layer_norm_resident(x, weight, bias, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) for rows of any length, read from memory once as long as a row fits the cache of an SM."""
    _check("layer_norm_resident", {"x": x}, {"weight": weight, "bias": bias}, {})
    _check_eps("layer_norm_resident", eps)
    y, mean, rstd = _outputs(x)
    n_rows, n_cols = x.shape
    if n_rows:
        # By the bytes of a row, chosen by timing on an H200.
        kib = n_cols * x.element_size() / 1024
        step, num_warps, unroll = next(choice for limit, *choice in RESIDENT if kib <= limit)
        layer_norm_resident_kernel[(n_rows,)](
            x, weight, bias, y, mean, rstd, x.stride(0), y.stride(0), eps,
            N_COLS=n_cols, BLOCK_N=min(2 * step // x.element_size(), triton.next_power_of_2(n_cols)),
            UNROLL=unroll, num_warps=num_warps,
        )  # fmt: skip
    return y, mean, rstd


def layer_norm_forward(x, weight, bias, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) of a matrix, over its rows, by the kernel that is fastest for their length."""
    _check("layer_norm_forward", {"x": x}, {"weight": weight, "bias": bias}, {})
    _check_eps("layer_norm_forward", eps)
    return (layer_norm_rows if x.shape[1] <= ROWS_MAX else layer_norm_resident)(x, weight, bias, eps)


def _column_sums(partials: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(dweight, dbias) in weight's dtype from float32 partials [2, n_parts, n_cols]."""
    _, n_parts, n_cols = partials.shape
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    block_n = 32 if n_cols <= 4096 else 128  # few columns, so that there is a program for most SMs; at least 128 bytes
    layer_norm_backward_columns_kernel[(triton.cdiv(n_cols, block_n),)](
        partials[0], partials[1], dweight, dbias, n_parts, n_cols, BLOCK_M=2048 // block_n, BLOCK_N=block_n, num_warps=8
    )
    return dweight, dbias


def _no_rows(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(weight)  # sums of nothing


def layer_norm_backward_rows(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias) for rows of up to BACKWARD_ROWS_MAX columns, by programs that stay for many rows."""
    _check("layer_norm_backward_rows", {"x": x, "dy": dy}, {"weight": weight}, {"mean": mean, "rstd": rstd})
    _check_length("layer_norm_backward_rows", x, BACKWARD_ROWS_MAX, "layer_norm_backward")
    n_rows, n_cols = x.shape
    if not n_rows:
        return _no_rows(x, weight)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_n = _block(n_cols)
    rows, num_warps = max(1, min(64, 2048 // block_n)), max(4, min(16, block_n // 512))
    per_sm = 16 // num_warps  # at 128 registers a thread: all run from the start, and all take the same share of rows
    programs = min(triton.cdiv(n_rows, rows), per_sm * device_limits(x.device).sms)
    partials = torch.empty(2, programs, n_cols, dtype=torch.float32, device=x.device)
    layer_norm_backward_rows_kernel[(programs,)](
        dy, x, weight, mean, rstd, dx, partials[0], partials[1],
        dy.stride(0), x.stride(0), dx.stride(0), n_rows, n_cols,
        ROWS=rows, BLOCK_N=block_n, STAGES=_stages(x, 2 * rows * block_n, per_sm), num_warps=num_warps, maxnreg=128,
    )  # fmt: skip
    return dx, *_column_sums(partials, weight)


def layer_norm_backward_loop(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias) for rows of any length; x and dy are read twice."""
    _check("layer_norm_backward_loop", {"x": x, "dy": dy}, {"weight": weight}, {"mean": mean, "rstd": rstd})
    n_rows, n_cols = x.shape
    if not n_rows:
        return _no_rows(x, weight)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_n = min(4096, _block(n_cols))
    num_warps = max(4, block_n // 512)
    shift, slope = torch.empty_like(mean), torch.empty_like(mean)
    layer_norm_backward_sums_kernel[(n_rows,)](
        dy, x, weight, mean, rstd, shift, slope, dy.stride(0), x.stride(0), n_cols, BLOCK_N=block_n, num_warps=num_warps
    )
    blocks = triton.cdiv(n_cols, block_n)
    groups = max(1, min(n_rows, 2 * device_limits(x.device).sms // blocks))
    partials = torch.empty(2, groups, n_cols, dtype=torch.float32, device=x.device)
    layer_norm_backward_loop_kernel[(blocks, groups)](
        dy, x, weight, mean, rstd, shift, slope, dx, partials[0], partials[1],
        dy.stride(0), x.stride(0), dx.stride(0), n_rows, n_cols,
        BLOCK_N=block_n, STAGES=_stages(x, 2 * block_n, 2), num_warps=num_warps,
    )  # fmt: skip
    return dx, *_column_sums(partials, weight)


def layer_norm_backward_split(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias) for rows of up to split_max_cols(x.device) columns, each held by several programs at once.

    GPU only: programs wait for each other, and the interpreter runs one after the other (RuntimeError there). Which
    program is which part of which group depends on the order in which they start; what each computes does not.
    """
    _check("layer_norm_backward_split", {"x": x, "dy": dy}, {"weight": weight}, {"mean": mean, "rstd": rstd})
    _check_split("layer_norm_backward_split", x, "layer_norm_backward_loop")
    n_rows, n_cols = x.shape
    if not n_rows:
        return _no_rows(x, weight)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_n = SPLIT_BLOCK[_bits(x, weight)]
    parts = triton.cdiv(n_cols, block_n)
    groups = max(1, min(n_rows, device_limits(x.device).sms // parts))
    partials = torch.empty(2, groups, n_cols, dtype=torch.float32, device=x.device)
    layer_norm_backward_split_kernel[(groups * parts,)](
        dy, x, weight, mean, rstd, dx, partials[0], partials[1], _mailbox(x, parts),
        dy.stride(0), x.stride(0), dx.stride(0), n_rows, n_cols, groups,
        PARTS=parts, PARTS_POW2=triton.next_power_of_2(parts), BLOCK_N=block_n,
        STAGES=_stages(x, 2 * block_n, 1), num_warps=8,
    )  # fmt: skip
    return dx, *_column_sums(partials, weight)


def layer_norm_backward(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias) by the kernel that is fastest for the length of the rows; mean, rstd from the forward."""
    _check("layer_norm_backward", {"x": x, "dy": dy}, {"weight": weight}, {"mean": mean, "rstd": rstd})
    if x.shape[1] <= BACKWARD_ROWS_MAX:
        return layer_norm_backward_rows(dy, x, weight, mean, rstd)
    wait = not interpreted() and x.shape[1] <= split_max_cols(x.device)
    return (layer_norm_backward_split if wait else layer_norm_backward_loop)(dy, x, weight, mean, rstd)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        rows = x.reshape(-1, x.shape[-1])  # a view, unless the leading dimensions cannot be merged
        y, mean, rstd = layer_norm_forward(rows, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)  # x and not rows: autograd knows where an input came from
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        return *_LayerNormBackward.apply(dy, *ctx.saved_tensors), None


class _LayerNormBackward(torch.autograd.Function):
    """A node of its own, so that differentiating again is an error.

    once_differentiable would not do: it refuses only where dy requires grad, and for a sum of y, say, it does not.
    """

    @staticmethod
    def forward(ctx, dy, x, weight, mean, rstd):
        rows = x.reshape(-1, x.shape[-1])
        dx, dweight, dbias = layer_norm_backward(_rows_of(dy, rows), rows, weight, mean, rstd)
        return dx.view(dy.shape), dweight, dbias

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("layer_norm: its gradient has no derivative; use torch.nn.functional.layer_norm for that")


def _rows_of(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy as a matrix like x. The gradient of a sum is one number expanded, with strides of 0: it is written out."""
    rows = dy.reshape(x.shape)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """LayerNorm over the last dimension of x [..., n_cols], once differentiable in x, weight and bias."""
    with torch.no_grad():  # this one has a backward
        require_triton_device("layer_norm", x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"layer_norm: shape {tuple(x.shape)} has no columns, and nothing has no mean")
    return _LayerNorm.apply(x, weight, bias, eps)


def reference(x, weight, bias, eps: float = 1e-5) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double(), eps)


def reference_backward(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, ...]:
    """Gradients of the float64 LayerNorm; its mean and rstd are its own."""
    with torch.enable_grad():
        x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
        bias = torch.zeros_like(weight, requires_grad=True)
        return torch.autograd.grad(reference(x, weight, bias), (x, weight, bias), dy.double())


def torch_forward(x, weight, bias) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


def torch_backward(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, ...]:
    """The operator that autograd calls, on the same mean and rstd that ours get."""
    if x.device.type == "cpu" and x.dtype != torch.float32:  # there it wants them in the dtype of x
        return tuple(t.to(x.dtype) for t in torch_backward(dy.float(), x.float(), weight.float(), mean, rstd))
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, x.shape[-1:], mean[:, None], rstd[:, None], weight, weight, [True, True, True]
    )


def only_y(forward):
    """forward() without mean and rstd, which the tables cannot hold to the dtype of y."""
    return lambda *args: forward(*args)[0]


def gradients(x, weight, bias, dy) -> tuple[torch.Tensor, ...]:
    """What autograd makes of layer_norm()."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    with torch.enable_grad():
        return torch.autograd.grad(layer_norm(*leaves), leaves, dy)


def reference_gradients(x, weight, bias, dy) -> tuple[torch.Tensor, ...]:
    return reference_backward(dy, x, weight, None, None)


def demo(h: Harness) -> None:
    def inputs(rows, cols):
        x, dy = (h.randn(rows, cols, dtype=h.half, scale=scale) for scale in (2.0, 1.0))
        weight, bias = (h.randn(cols, dtype=h.half) for _ in range(2))
        return x.add_(1.0), dy, weight, bias

    # Tails before sizes. The rows are summed along columns for y and dx, the columns along rows for the rest.
    backwards = [layer_norm_backward_rows, layer_norm_backward_loop]
    backwards += [] if interpreted() else [layer_norm_backward_split]
    for rows, cols in [(1, 1), (3, 781), (9, 4097)]:
        x, dy, weight, bias = inputs(rows, cols)
        what = f"{rows}x{cols}"
        for forward in (layer_norm_rows, layer_norm_resident) if cols <= ROWS_MAX else (layer_norm_resident,):
            h.check(only_y(forward), reference, x, weight, bias, terms=cols, what=f"{forward.__name__} {what}")
        if cols == 1:  # its dx is 0, and what float64 makes of 0 is noise
            continue
        _, mean, rstd = layer_norm_forward(x, weight, bias)
        for backward in backwards:
            h.check(backward, reference_backward, dy, x, weight, mean, rstd, terms=max(rows, cols))

    for shape, dy in [((4, 5, 300), None), ((64, 300), "one number")]:
        x, weight, bias = h.randn(*shape, dtype=h.half), h.randn(300, dtype=h.half), h.randn(300, dtype=h.half)
        dy = h.randn(*shape, dtype=h.half) if dy is None else h.randn(1, dtype=h.half).expand(shape)
        h.check(gradients, reference_gradients, x, weight, bias, dy, terms=300)

    if interpreted():
        h.say(
            "layer_norm_backward_split is compiled below but not run: its programs wait for each other, on a GPU only"
        )

    def meta(cols, backward=False):
        x, weight, stats = h.meta(4096, cols), h.meta(cols), h.meta(4096, dtype=torch.float32)
        return (x, x, weight, stats, stats) if backward else (x, weight, weight)

    h.codegen(layer_norm_rows, *meta(1024), find={90: ("ld.global.v4", "st.global.v4")})
    h.codegen(layer_norm_resident, *meta(16384), find=dict.fromkeys((90, 100), ("ld.global.v4", "st.global.v4")))
    h.codegen(layer_norm_backward_rows, *meta(4096, True), find={90: ("cp.async",)})
    h.codegen(layer_norm_backward_split, *meta(65536, True), find=dict.fromkeys((90, 100), ("cp.async", "atom")))

    widths = (1024, 4096, 16384, 65536)
    elements = h.fit(h.pick(interpreted=1 << 15, quick=1 << 26, full=1 << 28), bytes_each=100)
    for cols in h.pick(interpreted=(1024, 20000), quick=(1024, 16384, 65536), full=widths):
        rows = elements // cols
        x, dy, weight, bias = inputs(rows, cols)
        forward = {"torch": torch_forward, "torch.compile": h.compiled(torch_forward)}
        backward = {"torch": torch_backward, "torch.compile": h.compiled(torch_backward)}
        if cols <= ROWS_MAX:
            forward["triton rows"] = only_y(layer_norm_rows)
        else:
            forward["triton resident"] = only_y(layer_norm_resident)
        if cols <= BACKWARD_ROWS_MAX:
            backward["triton rows"] = layer_norm_backward_rows
        else:
            backward["triton loop"] = layer_norm_backward_loop
            if not interpreted():
                backward["triton split"] = layer_norm_backward_split
        h.compare(
            forward, reference, x, weight, bias,
            title="layer_norm forward", baseline="torch", work=Work(bytes=2 * x.nbytes), terms=cols,
        )  # fmt: skip
        _, mean, rstd = layer_norm_forward(x, weight, bias)
        h.compare(
            backward, reference_backward, dy, x, weight, mean, rstd,
            title="layer_norm backward", baseline="torch", work=Work(bytes=3 * x.nbytes), terms=max(rows, cols),
            # torch adds up dweight and dbias in parts that it rounds to 16 bits; what that costs is a fact below.
            operand_eps=torch.finfo(h.half).eps / 2,
        )  # fmt: skip
        if cols == widths[0] and not h.profile:
            _, want, _ = reference_backward(dy, x, weight, mean, rstd)
            off = {name: backward[name](dy, x, weight, mean, rstd)[1].double() - want for name in backward}
            errors = {name: float(f"{(error.norm() / want.norm()).item():.2g}") for name, error in off.items()}
            h.fact(f"rms error of dweight over its rms, {rows}x{cols}", errors)


if __name__ == "__main__":
    run(demo)
