"""Row softmax: read the matrix once and write it once, also where a row is too long for one program.

A softmax needs the maximum and the sum of a row before it can write any of it. As kernels of their own, max, subtract,
exp, sum and divide move each element about eight times. A row that stays on the chip between these steps moves twice,
in and out: 2 * n_rows * n_cols elements, as a copy of x does, and that copy's time is the floor.

Where a row fits decides the kernel. The one below holds a row in the registers of one program, and several short rows
at once: a short row alone is too little work to cover memory latency. A longer row stays in the L1 cache of an SM
(softmax_resident.py). A row too long for that is split over programs that exchange maxima and sums (softmax_long.py):
each element is still read once, and while a program waits for the others its next rows are in flight. An exchange
within a thread block cluster, as quack's kernels do it, is not in Triton 3.6. Online softmax is no alternative: it
reads x twice.

Question   Where should a row stay on the chip, from 256 to 131072 columns, and how close to a copy does that come?
Needs      triton
Wins when  x is larger than L2 and rows have 4096 columns or more; for shorter ones torch.compile is as fast. From
           there on torch's fastest call is max-autotune or, from 16384 to 65536, eager; this is far ahead of both,
           further on an H200 than on an H100.
Variants   softmax_resident.py (a row in L1), softmax_long.py (a row split over programs)
Study      studies/triton/softmax.py
Source     goes beyond the chapter; traffic counted as in Triton tutorial 02 (fused softmax).
"""

from __future__ import annotations

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.compiled import compiled_modes, over_library
from examples.common.device import interpreted
from examples.common.operands import check_rows
from examples.common.rows import DTYPES, check_length
from examples.triton.softmax_long import softmax_split, split_limit
from examples.triton.softmax_resident import softmax_resident

REGISTERS_MAX = 32768  # columns: 32 values per thread at 32 warps; a row twice as long spills on every architecture
REGISTERS_BEST = 4096  # columns: longer rows are faster from L1 than in registers
L1_BEST_KIB = 64  # rows of twice that leave room for one program on an SM, and there splitting is faster


@triton.jit
def softmax_rows_kernel(
    x_ptr, y_ptr, stride_xm, stride_ym, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    # int64 because row * stride passes 2**31 elements on tensors that still fit in memory.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    # Pad with -inf, not 0: exp(-inf) is 0, so the padding cannot change the sum.
    x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = weights / tl.sum(weights, axis=1)[:, None]
    tl.store(y_ptr + rows[:, None] * stride_ym + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


def softmax_rows(x: torch.Tensor) -> torch.Tensor:
    """Softmax over rows of up to REGISTERS_MAX columns, each held in one program's registers."""
    n_rows, n_cols = check_rows("softmax_rows", x, DTYPES)
    check_length("softmax_rows", n_cols, REGISTERS_MAX, "softmax")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if n_rows:  # a grid of zero programs is a launch error
        block_n = triton.next_power_of_2(n_cols)
        # 16 or 32 values a thread, and several short rows to a program: chosen by timing on an H200.
        block_m = min(64, 4096 // block_n) if block_n <= 512 else max(1, 2048 // block_n)
        softmax_rows_kernel[(triton.cdiv(n_rows, block_m),)](
            x, y, x.stride(0), y.stride(0), n_rows, n_cols,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=max(4, min(32, block_n // 512)),
        )  # fmt: skip
    return y


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of x [n_rows, n_cols], by the kernel that is fastest for its row length.

    x: float32, float16 or bfloat16, rows contiguous, any row stride. Returns a contiguous tensor of x's dtype; the
    arithmetic is float32. Infinities and NaN give what torch.softmax does.
    Above L1_BEST_KIB a row, programs wait for each other, if an eighth of the SMs can run those of a row
    (split_limit), so that other kernels may hold the rest. Longer rows are read from L2 or memory again.

    Raises TypeError for another dtype; ValueError for another rank, no columns, or an inner stride other than 1;
    RuntimeError for a device without Triton or an input that requires grad.
    """
    _, n_cols = check_rows("softmax", x, DTYPES)
    if n_cols <= REGISTERS_BEST:
        return softmax_rows(x)
    fits = n_cols * x.element_size() <= L1_BEST_KIB * 1024
    resident = fits or interpreted() or n_cols > split_limit(x)
    return softmax_resident(x) if resident else softmax_split(x)


# Nothing cancels in a softmax, so each element's budget follows its own size, not that of the row's largest element.
# From exp(-64) to exp(-104), below which float32 is 0, one rounding of the argument is worth 64 of the result.
BUDGET = {"terms": 0, "roundings": 64}


def reference(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.double(), dim=-1)


def torch_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=-1)


def demo(h: Harness) -> None:
    # One element, an odd length, and lengths just beyond where one kernel ends and the next begins.
    for shape in [(1, 1), (3, 781), (9, 4097), (2, 32769)]:
        h.check(softmax, reference, h.rows(*shape, dtype=h.half), **BUDGET)
    padded = h.rows(5, 1024, dtype=h.half)[:, :781]  # a row stride above n_cols
    h.check(softmax, reference, padded, what="softmax of padded rows 5x781", **BUDGET)
    h.codegen(softmax_rows, h.meta(4096, 16384), find=dict.fromkeys((80, 90, 100, 120), ("ld.global.v4",)))

    tables, elements = {}, h.fit(h.pick(interpreted=1 << 17, quick=1 << 26, full=1 << 28), bytes_each=40)
    for cols in (256, 4096, 32768, 131072):
        x = h.rows(elements // cols, cols, dtype=h.half)
        variants = {"torch": torch_softmax} | compiled_modes(h, torch_softmax)
        if cols <= REGISTERS_MAX:
            variants["triton rows"] = softmax_rows
        variants["triton"] = softmax
        how = {"baseline": "torch", "default": "triton", "case": f"{elements // cols}x{cols}"} | BUDGET
        tables[cols] = h.compare(variants, reference, x, work=Work(bytes=2 * x.nbytes), **how)

    def answer() -> str:
        share = {cols: f"{table['triton'].of_ceiling:.0%}" for cols, table in tables.items()}
        held, over = tables[32768]["triton rows"], over_library(tables.values())
        verdict = "not" if tables[32768].over("triton rows", "triton") > 1.02 else "or as well"
        return (
            f"In registers at 256 and 4096 columns ({share[256]} and {share[4096]} of a copy); at 32768 in L1 "
            f"({share[32768]}), {verdict} in registers ({held.of_ceiling:.0%}); at 131072 split over programs that "
            f"exchange maxima and sums ({share[131072]}). Geometric mean {over:.2f}x torch's fastest call."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
