"""Row softmax: read the matrix once, write it once, at every row length.

Technique  A softmax needs the maximum and the sum of a row before it can write any of it. A row that stays on the
           chip is read once: 2 * n_rows * n_cols elements move, against about 8 for max, subtract, exp, sum and divide
           as kernels of their own. Where a row is kept depends on how long it is, so there are four kernels:
           rows      a program holds one row, or several short ones, in registers: short rows alone are too little
                     work per program to cover memory latency;
           resident  a longer row stays in the SM's first-level cache: a loop for the maximum, one for the sum, one that
                     writes, and only the first reads memory. The length is a constant of the kernel, so the compiler
                     unrolls the loops and has many loads on their way at once; each length is compiled for itself;
           loop      any length: one pass keeps a running maximum and rescales the running sum when it grows (the
                     online softmax), a second pass reads the row again, now mostly from L2, and writes;
           split     a row too long for one SM is held by several: each publishes its part's maximum and sum, waits
                     for the others', and writes. Each element is still read once.
Question   How does one keep a row on the chip when rows have 256 columns, and when they have 131072?
Needs      triton
Shapes     x [n_rows, n_cols], last dimension contiguous, any row stride -> y [n_rows, n_cols], contiguous, same dtype.
Dtypes     float32, float16, bfloat16; the arithmetic is float32 whatever the storage.
Errors     TypeError for another dtype; ValueError for another rank, no columns, an inner stride other than 1, or a row
           longer than the chosen kernel takes; RuntimeError for a device without Triton or an input that requires grad.
Wins when  x is larger than L2; how close to a copy each row length comes is in README's table of recorded runs.
Source     traffic count as in Triton tutorial 02; online softmax: Milakov and Gimelshein 2018; chapter section
           "Triton".
Run        python examples/triton/softmax.py
"""

from __future__ import annotations

from harness import Harness, Work, device_limits, interpreted, require_triton_device, run

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS_MAX = 32768  # 32 values per thread at 32 warps; a row twice as long spills on every architecture
RESIDENT_MIN = 4096  # up to here a row is little enough for the registers of a few warps
RESIDENT_MAX_KIB = 64  # rows of twice that leave room for one program on an SM, and there splitting is faster
# Rows up to so many KiB: 16-bit values that a program takes at a step, warps, and steps that are unrolled.
RESIDENT = [(16, 2048, 8, 1), (32, 4096, 16, 1), (64, 4096, 32, 2), (float("inf"), 16384, 32, 2)]
SPLIT_BLOCK = 8192  # 4 warps at 64 values per thread, 80 registers: six programs fit an SM, five load while one waits


@triton.jit
def softmax_rows_kernel(x_ptr, y_ptr, stride_xm, stride_ym, n_rows, n_cols, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    # int64 because row * stride passes 2**31 elements on tensors that still fit in memory.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    # Pad with -inf, not 0: exp(-inf) is 0, so the padding cannot change the sum.
    x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = weights / tl.sum(weights, axis=1)[:, None]
    tl.store(y_ptr + rows[:, None] * stride_ym + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_row(x_row, cols, N_COLS: tl.constexpr, BLOCK_N: tl.constexpr, HINT: tl.constexpr):
    if N_COLS % BLOCK_N:
        x = tl.load(x_row + cols, mask=cols < N_COLS, other=-float("inf"), eviction_policy=HINT)
    else:  # a mask costs a predicate per load; most lengths need none
        x = tl.load(x_row + cols, eviction_policy=HINT)
    return x.to(tl.float32)


@triton.jit
def softmax_resident_kernel(
    x_ptr, y_ptr, stride_xm, stride_ym, N_COLS: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * stride_xm, y_ptr + row * stride_ym
    lane = tl.arange(0, BLOCK_N)
    # One maximum and one sum per lane: no reduction inside a loop. An online softmax would save the second loop, which
    # is cheap, as it reads the cache, and pay with a second exponential per element, which is not.
    largest = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    for start in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        largest = tl.maximum(largest, _load_row(x_row, start + lane, N_COLS, BLOCK_N, "evict_last"))
    row_max = tl.max(largest, axis=0)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        total += tl.exp(_load_row(x_row, start + lane, N_COLS, BLOCK_N, "evict_last") - row_max)
    scale = 1.0 / tl.sum(total, axis=0)
    # Backwards: what was read last is the surest to be still there.
    LAST: tl.constexpr = (N_COLS - 1) // BLOCK_N * BLOCK_N
    for done in tl.range(0, N_COLS, BLOCK_N, loop_unroll_factor=UNROLL):
        cols = LAST - done + lane
        y = tl.exp(_load_row(x_row, cols, N_COLS, BLOCK_N, "evict_first") - row_max) * scale
        tl.store(y_row + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N_COLS)


@triton.jit
def softmax_loop_kernel(x_ptr, y_ptr, stride_xm, stride_ym, n_cols, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * stride_xm, y_ptr + row * stride_ym
    lane = tl.arange(0, BLOCK_N)
    # One running maximum and sum per lane, not per row: no reduction inside the loop.
    largest = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + lane
        # evict_last asks L2 to keep the row for the second pass.
        x = tl.load(x_row + cols, mask=cols < n_cols, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
        larger = tl.maximum(largest, x)
        # A lane that has seen only -inf would compute -inf - -inf = NaN.
        centre = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(largest - centre) + tl.exp(x - centre)
        largest = larger
    row_max = tl.max(largest, axis=0)
    scale = 1.0 / tl.sum(total * tl.exp(largest - row_max), axis=0)
    # Backwards, so that the second pass starts with what was read last.
    for done in range(0, n_cols, BLOCK_N):
        cols = (tl.cdiv(n_cols, BLOCK_N) - 1) * BLOCK_N - done + lane
        x = tl.load(x_row + cols, mask=cols < n_cols, eviction_policy="evict_first").to(tl.float32)
        y = tl.exp(x - row_max) * scale
        tl.store(y_row + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols, cache_modifier=".cs")


@triton.jit
def softmax_split_kernel(
    x_ptr, y_ptr, tickets_ptr, arrived_ptr, stats_ptr, stride_xm, stride_ym, n_cols,
    PARTS: tl.constexpr, PARTS_POW2: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # A ticket, not program_id: hardware may start programs in any order, tickets are dealt in the order in which
    # they run. So the parts of the oldest unfinished row are all running or next to start, and the wait below ends.
    ticket = tl.atomic_add(tickets_ptr, 1, sem="relaxed")
    row = (ticket // PARTS).to(tl.int64)
    part = ticket % PARTS
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < n_cols
    x = tl.load(x_ptr + row * stride_xm + cols, mask=inside, other=-float("inf")).to(tl.float32)
    part_max = tl.max(x, axis=0)
    weights = tl.exp(x - tl.where(part_max == -float("inf"), 0.0, part_max))

    maxima_ptr = stats_ptr + row * (2 * PARTS)
    sums_ptr = maxima_ptr + PARTS
    tl.store(maxima_ptr + part, part_max)
    tl.store(sums_ptr + part, tl.sum(weights, axis=0))
    tl.debug_barrier()  # both stores before the release below, whichever thread made them
    arrived = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") + 1
    while arrived < PARTS:
        arrived = tl.atomic_add(arrived_ptr + row, 0, sem="acquire")

    parts = tl.arange(0, PARTS_POW2)
    maxima = tl.load(maxima_ptr + parts, mask=parts < PARTS, other=-float("inf"), cache_modifier=".cg")
    sums = tl.load(sums_ptr + parts, mask=parts < PARTS, other=0.0, cache_modifier=".cg")
    row_max = tl.max(maxima, axis=0)
    # A part of -inf alone has the sum 0, and 0 * exp(-inf - -inf) would be NaN. A NaN in a part stays in its sum.
    row_sum = tl.sum(tl.where(sums == 0.0, 0.0, sums * tl.exp(maxima - row_max)), axis=0)
    own = tl.where(part_max == -float("inf"), 0.0, tl.exp(part_max - row_max))
    y = weights * (own / row_sum)
    tl.store(y_ptr + row * stride_ym + cols, y.to(y_ptr.dtype.element_ty), mask=inside)


def _check_input(name: str, x: torch.Tensor) -> None:
    require_triton_device(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype} is not one of {DTYPES}; convert with x.float() first")
    if x.ndim != 2:
        raise ValueError(
            f"{name}: need a matrix [n_rows, n_cols], got shape {tuple(x.shape)}; call x.reshape(-1, n_cols)"
        )
    if x.shape[1] == 0:
        raise ValueError(f"{name}: shape {tuple(x.shape)} has no columns, and a softmax over nothing is undefined")
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"{name}: strides {x.stride()}, but columns must be contiguous; call x.contiguous() first")


def _check_length(name: str, x: torch.Tensor, limit: int) -> None:
    if x.shape[1] > limit:
        raise ValueError(f"{name}: {x.shape[1]} columns, but a row may have {limit} here; call softmax(x)")


def softmax_rows(x: torch.Tensor) -> torch.Tensor:
    """Softmax over rows of up to ROWS_MAX columns, each held in one program's registers."""
    _check_input("softmax_rows", x)
    _check_length("softmax_rows", x, ROWS_MAX)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_rows, n_cols = x.shape
    if n_rows:  # a grid of zero programs is a launch error
        block_n = triton.next_power_of_2(n_cols)
        # 16 or 32 values a thread, and several short rows to a program: chosen by timing on an H200.
        rows = min(64, 4096 // block_n) if block_n <= 512 else max(1, 2048 // block_n)
        num_warps, max_registers = max(4, min(32, block_n // 512)), None
        if block_n == 16384:  # 64 values a thread in 80 registers: three rows share an SM, and one loads as one stores
            num_warps, max_registers = 8, 80
        softmax_rows_kernel[(triton.cdiv(n_rows, rows),)](
            x, y, x.stride(0), y.stride(0), n_rows, n_cols,
            ROWS=rows, BLOCK_N=block_n, num_warps=num_warps, maxnreg=max_registers,
        )  # fmt: skip
    return y


def softmax_resident(x: torch.Tensor) -> torch.Tensor:
    """Softmax over rows of any length that is read from memory once as long as a row fits the cache of an SM."""
    _check_input("softmax_resident", x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_rows, n_cols = x.shape
    if n_rows:
        # By the bytes of a row, chosen by timing on an H200: values of a step, warps, steps unrolled.
        kib = n_cols * x.element_size() / 1024
        step, num_warps, unroll = next(choice for limit, *choice in RESIDENT if kib <= limit)
        softmax_resident_kernel[(n_rows,)](
            x, y, x.stride(0), y.stride(0),
            N_COLS=n_cols, BLOCK_N=min(2 * step // x.element_size(), triton.next_power_of_2(n_cols)),
            UNROLL=unroll, num_warps=num_warps,
        )  # fmt: skip
    return y


def softmax_loop(x: torch.Tensor) -> torch.Tensor:
    """Softmax over rows of any length; each row is read twice, the second time mostly from L2."""
    _check_input("softmax_loop", x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_rows, n_cols = x.shape
    if n_rows:
        block_n = min(SPLIT_BLOCK, triton.next_power_of_2(n_cols))
        softmax_loop_kernel[(n_rows,)](
            x, y, x.stride(0), y.stride(0), n_cols, BLOCK_N=block_n, num_warps=max(1, block_n // 512)
        )
    return y


def split_max_cols(device: torch.device) -> int:
    """Longest row softmax_split takes: its parts wait for each other, so one SM each must be enough to run them all.

    In fact an SM runs six of them. That margin is also what lets a few such launches run side by side on several
    streams; a context that is given less than a sixth of the SMs must not use this kernel on its longest rows.
    """
    return SPLIT_BLOCK * device_limits(device).sms


def softmax_split(x: torch.Tensor) -> torch.Tensor:
    """Softmax over rows of up to split_max_cols(x.device) columns, each held by several programs at once.

    GPU only: programs wait for each other, and the interpreter runs one after the other (RuntimeError there).
    """
    _check_input("softmax_split", x)
    _check_length("softmax_split", x, split_max_cols(x.device))
    if interpreted():
        raise RuntimeError(
            "softmax_split: its programs wait for each other and cannot be interpreted; use softmax_loop"
        )
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_rows, n_cols = x.shape
    if n_rows:
        parts = triton.cdiv(n_cols, SPLIT_BLOCK)
        counters = torch.zeros(n_rows + 1, dtype=torch.int32, device=x.device)
        stats = torch.empty(n_rows * 2 * parts, dtype=torch.float32, device=x.device)
        softmax_split_kernel[(n_rows * parts,)](
            x, y, counters, counters[1:], stats, x.stride(0), y.stride(0), n_cols,
            PARTS=parts, PARTS_POW2=triton.next_power_of_2(parts), BLOCK_N=SPLIT_BLOCK,
            num_warps=4, maxnreg=80,
        )  # fmt: skip
    return y


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of a matrix by the kernel that is fastest for its row length."""
    _check_input("softmax", x)
    n_cols = x.shape[1]
    if n_cols <= RESIDENT_MIN:
        return softmax_rows(x)
    if n_cols * x.element_size() <= RESIDENT_MAX_KIB * 1024:
        return softmax_resident(x)
    return softmax_loop(x) if interpreted() or n_cols > split_max_cols(x.device) else softmax_split(x)


# Nothing cancels in a softmax: each element has its own size as budget, not the row's, which its largest element
# rules. exp(x - max) turns the rounding of an argument of 88, below which float32 is 0, into 64 of the result.
BUDGET = {"terms": 0, "roundings": 64}


def reference(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.double(), dim=-1)


def torch_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=-1)


def demo(h: Harness) -> None:
    # Tails before sizes.
    kernels = [softmax_rows, softmax_resident, softmax_loop] + ([] if interpreted() else [softmax_split])
    for kernel in kernels:
        for shape in [(1, 1), (3, 781), (9, 4097)]:
            h.check(kernel, reference, h.randn(*shape, dtype=h.half, scale=2.0), **BUDGET)
        padded = h.randn(5, 1024, dtype=h.half, scale=2.0)[:, :781]  # a row stride above n_cols
        h.check(kernel, reference, padded, what=f"{kernel.__name__} of padded rows 5x781", **BUDGET)

    if interpreted():
        h.say("softmax_split is compiled below but not run: its programs wait for each other, which needs a GPU")

    h.codegen(softmax_rows, h.meta(4096, 16384), find=dict.fromkeys((80, 90, 100, 120), ("ld.global.v4",)))
    wide = dict.fromkeys((80, 90, 100, 120), ("ld.global.v4", "st.global.v4"))
    h.codegen(softmax_resident, h.meta(4096, 16384), find=wide)
    h.codegen(softmax_split, h.meta(4096, 131072), find=dict.fromkeys((80, 90, 100, 120), ("ld.global.v4", "atom")))

    widths = (256, 1024, 4096, 16384, 32768, 65536, 131072)
    elements = h.pick(interpreted=1 << 16, quick=1 << 26, full=1 << 28)
    for cols in h.pick(interpreted=(256, 4096, 40000), quick=(256, 4096, 32768, 131072), full=widths):
        rows = h.fit(elements, bytes_each=40) // cols
        x = h.randn(rows, cols, dtype=h.half, scale=2.0)
        variants = {"torch": torch_softmax, "torch.compile": h.compiled(torch_softmax)}
        if cols <= ROWS_MAX:
            variants["triton rows"] = softmax_rows
        if cols >= RESIDENT_MIN:
            variants["triton resident"] = softmax_resident
        if cols > ROWS_MAX:
            variants["triton loop"] = softmax_loop
        if cols > ROWS_MAX and not interpreted():
            variants["triton split"] = softmax_split
        h.compare(variants, reference, x, baseline="torch", work=Work(bytes=2 * x.nbytes), **BUDGET)


if __name__ == "__main__":
    run(demo)
