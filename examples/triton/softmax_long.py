"""Softmax of a row too long for one SM: held by several programs that exchange two numbers.

Each program holds one part of the row in registers, publishes the part's maximum and sum, waits until all parts of the
row have, and writes. Each element is read once. A waiting program loads nothing, though, and the registers that hold
parts leave room for few other programs on its SM, which could load meanwhile: ncu counts the least bytes, and 36 % of
an SM's warps. Loading the next row before the wait, as layer_norm_backward_split.py does, or exchanging through a
cluster's distributed shared memory might help; neither is tried here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import interpreted, sms_to_wait_on
from examples.common.operands import check_rows
from examples.common.rows import DTYPES, check_length

SPLIT_BLOCK = 8192  # 4 warps at 64 values per thread, 80 registers: six programs fit an SM, five load while one waits
PER_SM = 6


@triton.jit
def softmax_split_kernel(
    x_ptr, y_ptr, tickets_ptr, arrived_ptr, stats_ptr, stride_xm, stride_ym, n_cols,
    PARTS: tl.constexpr, PARTS_POW2: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # A ticket, not program_id, decides row and part: so the wait below ends (docs/memory_ordering.md, "Tickets").
    ticket = tl.atomic_add(tickets_ptr, 1, sem="relaxed")
    row = (ticket // PARTS).to(tl.int64)
    part = ticket % PARTS
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < n_cols
    x = tl.load(x_ptr + row * stride_xm + cols, mask=inside, other=-float("inf")).to(tl.float32)
    part_max = tl.max(x, axis=0)
    # A part of -inf alone would compute -inf - -inf = NaN.
    weights = tl.exp(x - tl.where(part_max == -float("inf"), 0.0, part_max))

    maxima_ptr = stats_ptr + row * (2 * PARTS)
    sums_ptr = maxima_ptr + PARTS
    tl.store(maxima_ptr + part, part_max)
    tl.store(sums_ptr + part, tl.sum(weights, axis=0))
    tl.debug_barrier()  # both stores before the release below (docs/memory_ordering.md, "A counter")
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


def split_max_cols(device: torch.device) -> int:
    """Longest row softmax_split takes: its parts wait for each other, and an eighth of the SMs must run them all.

    So it ends beside kernels that keep the other SMs (NCCL's, or such launches on other streams), and in a context that
    is given an eighth; with less, call softmax_resident.
    """
    return SPLIT_BLOCK * PER_SM * sms_to_wait_on(device)


def softmax_split(x: torch.Tensor) -> torch.Tensor:
    """Softmax over rows of up to split_max_cols(x.device) columns, each held by several programs at once.

    GPU only: programs wait for each other, and the interpreter runs one after the other (RuntimeError there).
    Otherwise takes and raises what softmax does.
    """
    n_rows, n_cols = check_rows("softmax_split", x, DTYPES)
    check_length("softmax_split", n_cols, split_max_cols(x.device), "softmax")
    if interpreted():
        raise RuntimeError("softmax_split: its programs wait for each other; in the interpreter use softmax_resident")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
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
