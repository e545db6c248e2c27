"""RMSNorm, forward and backward, with the residual addition before it: each input read once, each output written once.

y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps): 4 bytes an element in 16 bits, like a copy. In a transformer x
is the sum of two tensors, needed too: two kernels move 10 bytes an element, one pass 8 (x, residual, their sum, y).

The kernel below holds a row in registers. Few long rows fit an SM, and a program that waits for the end of one loads
nothing, so programs share them, with their next rows in flight (layer_norm_long.py). Backward reads x and dy, writes
dx, and sums dweight in registers (rms_norm_backward.py).

Question   How close to a copy is RMSNorm, alone, with the residual, and in training, from 4096 to 131072 columns?
Needs      triton
Wins when  above 4096 columns in training, 16384 with residual, 65536 alone; else max-autotune is up to 5 % ahead.
Variants   rms_norm_long.py (long rows), rms_norm_backward.py
Study      studies/triton/rms_norm.py
Source     goes beyond the chapter; Zhang and Sennrich 2019; backward as in layer_norm_backward.py
"""

from __future__ import annotations

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.compiled import compiled_modes, over_library
from examples.common.rows import DTYPES, check_eps, check_norm, row_block, widen
from examples.common.training import forward_backward, in_float64
from examples.triton.rms_norm_backward import RmsNorm
from examples.triton.rms_norm_long import check_input, launch_long

ROWS_BYTES = 32768  # the longest row that a program holds in registers: a longer one leaves too few loads in flight


@triton.jit
def rms_norm_rows_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, stride_xm, stride_rm, stride_ym, n_rows, n_cols, eps,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # int64 because row * stride passes 2**31 elements on tensors that still fit in memory.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    out = rows[:, None] * stride_ym + cols[None, :]
    x = widen(tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=inside, other=0.0))
    if residual_ptr is not None:
        x += widen(tl.load(residual_ptr + rows[:, None] * stride_rm + cols[None, :], mask=inside, other=0.0))
        summed = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, summed, mask=inside)
        x = summed.to(tl.float32)  # y is the norm of the sum as rounded, which is what backward gets, too
    eps = tl.cast(eps, tl.float32)  # torch.compile passes a float in 64 bits
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
    weight = widen(tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0))
    tl.store(y_ptr + out, (x * rstd[:, None] * weight[None, :]).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


def rms_norm_forward(x, weight, residual=None, eps: float = 1e-6):
    """(y, x + residual or None, float32 rstd) of matrices of any row stride; no autograd. Raises what rms_norm does."""
    check_eps("rms_norm_forward", eps)
    check_input("rms_norm_forward", x, residual)
    matrices = {"x": x} | ({} if residual is None else {"residual": residual})
    n_rows, n_cols = check_norm("rms_norm_forward", DTYPES, matrices, {"weight": weight})
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    if n_rows and n_cols * x.element_size() > ROWS_BYTES:
        launch_long(x, residual, weight, y, summed, rstd, eps)
    elif n_rows:  # a grid of zero programs is a launch error
        block_n, rows = row_block(n_cols), max(1, 2048 // row_block(n_cols))
        rms_norm_rows_kernel[(triton.cdiv(n_rows, rows),)](
            x, residual, weight, y, summed, rstd, x.stride(0), 0 if residual is None else residual.stride(0),
            y.stride(0), n_rows, n_cols, eps, ROWS=rows, BLOCK_N=block_n, num_warps=max(4, block_n // 512),
        )  # fmt: skip
    return y, summed, rstd


def rms_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, eps: float = 1e-6):
    """RMSNorm over the last dimension of x [..., n_cols], once differentiable in x, weight [n_cols] and residual.

    With a residual, like x, the norm of x + residual as rounded: returns (y, x + residual). x: float32, float16 or
    bfloat16, last dimension contiguous; y has its dtype. weight: x's dtype or float32. The arithmetic is float32, in
    which squares of values beyond 1e19 overflow. Programs wait for each other beyond 32 KiB a row, in backward beyond
    8192 columns. Raises TypeError for another dtype, a missing weight or an eps that is no number; ValueError for a
    residual unlike x, or sizes, strides or an eps that do not fit; RuntimeError without Triton, in a second derivative.
    """
    with torch.no_grad():  # this one has a backward
        check_input("rms_norm", x, residual)
    return RmsNorm.apply(x, weight, residual, eps, rms_norm_forward)


def torch_norm(x, weight, eps: float = 1e-6) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def torch_add(x, weight, residual) -> tuple[torch.Tensor, torch.Tensor]:
    return torch_norm(x + residual, weight), x + residual


reference, reference_step = map(in_float64, (torch_norm, forward_backward(torch_norm)))


def reference_add(x, weight, residual) -> tuple[torch.Tensor, torch.Tensor]:
    summed = (x.float() + residual.float()).to(x.dtype)  # rounded: if one value is most of its row, that moves y
    return reference(summed, weight), summed.double()


def short_of_rows(x, weight, dy) -> tuple[torch.Tensor, ...]:  # what a check of sums over rows must notice
    return *reference_step(x, weight, dy)[:2], reference_step(x[:-4], weight, dy[:-4])[2]


def compare_all(h: Harness, rows: int, cols: int):
    x, residual, dy = (h.rows(rows, cols, dtype=h.half) for _ in range(3))
    inputs, how = (x, h.randn(cols, dtype=h.half)), {"case": f"{rows}x{cols}", "baseline": "torch", "terms": cols}
    alone, both = ({"torch": fn} | compiled_modes(h, fn) | {"triton": rms_norm} for fn in (torch_norm, torch_add))
    yield h.compare(alone, reference, *inputs, title="forward", work=Work(bytes=2 * x.nbytes), **how)
    more = {"title": "residual", "work": Work(bytes=4 * x.nbytes), "library": {"stores": 3}}
    yield h.compare(both, reference_add, *inputs, residual, **more, **how)
    yield h.compare(
        {name: forward_backward(fn) for name, fn in alone.items()}, reference_step, *inputs, dy,
        title="forward + backward", work=Work(bytes=5 * x.nbytes), library={"operand_eps": torch.finfo(h.half).eps},
        wrong={"without 4 rows of dweight": short_of_rows}, **how | {"terms": max(rows, cols)},
    )  # fmt: skip


def demo(h: Harness) -> None:
    for shape in [(3, 781), (4, 5, 1025), (6, 16385)]:  # odd; just beyond where one kernel ends and the next begins
        x, residual = h.rows(*shape, dtype=h.half), h.rows(*shape, dtype=h.half)
        weight, dy = h.randn(shape[-1], dtype=h.half), h.randn(*shape, dtype=h.half)
        h.check(forward_backward(rms_norm), reference_step, x, weight, dy, terms=shape[-1], what=f"{shape}")
        h.check(rms_norm, reference_add, x, weight, residual, terms=shape[-1], what=f"residual {shape}")
    for cols, find in ((4096, ("ld.global.v4", "st.global.v4")), (65536, ("cp.async", "st.global.v4"))):
        h.codegen(rms_norm_forward, h.meta(4096, cols), h.meta(cols), find=dict.fromkeys((80, 90, 100), find))
    elements, widths = h.pick(interpreted=1 << 17, quick=1 << 26, full=1 << 28), (4096, 16384, 65536, 131072)
    tables = [list(compare_all(h, h.fit(elements, bytes_each=100) // cols, cols)) for cols in widths]

    def answer() -> str:
        each = list(zip(*tables, strict=True))
        alone, both, step = (", ".join(f"{table['triton'].of_ceiling:.0%}" for table in of) for of in each)
        return (
            f"At 4096, 16384, 65536, 131072 columns, of a copy's speed: forward {alone}; with residual {both}; "
            f"training {step}. Means over torch's best: {', '.join(f'{over_library(of):.2f}x' for of in each)}."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
