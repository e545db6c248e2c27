"""LayerNorm that writes FP8: the norm quantizes its own result, which never goes to memory in 16 bits.

A norm and a quantizer as two kernels write y in 16 bits and read it back: of 7 bytes an element, 4 are that detour. The
norm has y in float32 while it has the row, so it can take the largest magnitude and write FP8 with its scale: 2 bytes
read, 1 written. The price is a second reduction before anything may be written, so the row must stay in registers: it
has at most 16384 columns.

Weight and bias are read for every row, from L1; where that is the limit, loads of x bypass L1 (ld.global.cg), so that
weight and bias stay there. y is rounded once, to FP8; two kernels round it to 16 bits on the way.

Question   What does a norm save by writing FP8 and its scales itself, instead of leaving it to a quantizer?
Needs      triton, sm_89
Wins when  what reads y is an FP8 GEMM, and x is larger than L2; the gradient of the norm needs x, not y.
Study      studies/fp8/fused_layer_norm_quantize.py
Source     goes beyond the chapter; bytes counted here; RMSNorm: Zhang and Sennrich 2019
"""

from __future__ import annotations

import math
import operator

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.compiled import over_library
from examples.common.fp8 import E4M3, fp8_max
from examples.common.norms import layer_normed, rms_normed, row_absmax
from examples.common.operands import check_choice
from examples.common.quantize import (
    GROUP,
    READ_BACK,
    codes_of,
    empty_quantized,
    fused_variants,
    quantize_groups,
    read_back,
    scale_and_inverse,
)
from examples.common.rows import DTYPES, check_eps, check_length, check_norm, widen

ROWS_MAX = 16384  # longer rows do not fit the registers of one program
# By the bytes of an element: values of a row that a thread holds, and its registers.
HELD = {2: (32, 64), 4: (32, 80)}
LONG, HELD_LONG = 8192, (64, 96)  # 16-bit rows of just this length
UNALIGNED = 128  # registers where VECTOR does not divide every row's start and length
VECTOR = 8  # neighbouring columns of a thread


@triton.jit
def _read(pointers, mask, WHOLE: tl.constexpr, CACHE: tl.constexpr, HINT: tl.constexpr):
    if WHOLE:
        return widen(tl.load(pointers, cache_modifier=CACHE, eviction_policy=HINT))
    else:
        return widen(tl.load(pointers, mask=mask, other=0.0, cache_modifier=CACHE, eviction_policy=HINT))


@triton.jit
def layer_norm_quantize_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, q_ptr, scale_ptr, stride_xm, stride_sg, n_rows, n_cols, eps,
    CENTER: tl.constexpr, BIAS: tl.constexpr, PER_GROUP: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr, VECTOR: tl.constexpr,
    STEP: tl.constexpr, PAST_L1: tl.constexpr,
):  # fmt: skip
    # Triton knows of an argument only whether 16 divides it. These products say that ALIGN does, which lets loads and
    # stores of a row of 5000 take as many bytes at once as those of 8192.
    n_cols, stride_xm = n_cols // ALIGN * ALIGN, stride_xm // ALIGN * ALIGN
    # As many columns to a thread as one load takes; left alone, the compiler gives it the 16 of an FP8 store.
    cols = tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK_N)[None, :], (1, VECTOR)), (1, VECTOR))
    in_row = cols < n_cols
    # int64 because row * stride passes 2**31 elements on tensors that still fit in memory.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_exists = rows < n_rows
    WHOLE: tl.constexpr = FULL and ROWS == 1  # no program is without a row
    inside = in_row if ROWS == 1 else row_exists[:, None] & in_row
    CACHE: tl.constexpr = ".cg" if PAST_L1 else ""
    HINT: tl.constexpr = "" if PAST_L1 else "evict_first"  # a load has one or the other
    x = _read(x_ptr + (rows * stride_xm)[:, None] + cols, inside, WHOLE, CACHE, HINT)
    if CENTER:
        y = layer_normed(x, in_row, n_cols, eps, ROWS, BLOCK_N, FULL, STEP)
    else:
        y = rms_normed(x, n_cols, eps, ROWS, BLOCK_N, FULL, STEP)
    # Outside the row these are 0, and so is y, except where mean * rstd is not finite: then no y of the row is.
    y *= _read(weight_ptr + cols, in_row, FULL, "", "evict_last")
    if BIAS:
        y += _read(bias_ptr + cols, in_row, FULL, "", "evict_last")
    if PER_GROUP:
        y = quantize_groups(y, scale_ptr, stride_sg, rows, row_exists, 0, n_cols, MOST, GROUP, False, WHOLE)
    else:
        scale, inverse = scale_and_inverse(row_absmax(y, ROWS, BLOCK_N, STEP, VECTOR), MOST, INFINITE=False)
        tl.store(scale_ptr + rows, scale, mask=None if WHOLE else row_exists)
        y *= inverse[:, None]
    q_ptrs = q_ptr + (rows * tl.cast(n_cols, tl.int64))[:, None] + cols
    tl.store(q_ptrs, y.to(q_ptr.dtype.element_ty), mask=None if WHOLE else inside)


def plan_rows(x: torch.Tensor, per_group: bool) -> dict:
    """Rows and columns of a program that holds whole rows, how it reads them, its warps and registers."""
    n_cols, stride, size = operator.index(x.shape[1]), operator.index(x.stride(0)), x.element_size()  # no symbols
    block_n = max(GROUP, triton.next_power_of_2(n_cols))
    align = math.gcd(VECTOR, n_cols, stride)
    aligned = align == VECTOR
    long = aligned and size == 2 and n_cols == LONG
    per_thread, registers = HELD_LONG if long else HELD[size]
    num_warps = max(1, block_n // (32 * per_thread))
    return {
        "ROWS": max(1, 32 * per_thread // block_n),  # at least what fills a warp
        "BLOCK_N": block_n,
        "FULL": n_cols == block_n,
        "ALIGN": align,
        "STEP": min(block_n, 32 * num_warps * VECTOR),
        "PAST_L1": aligned and size == 2 and (long or per_group),
        "num_warps": num_warps,
        "maxnreg": registers if aligned else UNALIGNED,
    }


def _quantized_norm(name, x, weight, bias, eps, per, dtype, center: bool) -> tuple[torch.Tensor, torch.Tensor]:
    columns = {"weight": weight} | ({} if bias is None else {"bias": bias})
    n_rows, n_cols = check_norm(name, DTYPES, {"x": x}, columns)
    check_length(name, n_cols, ROWS_MAX, "torch's norm, then quantize")
    check_eps(name, eps)
    check_choice(name, ("row", "group"), per=per)
    q, scale = empty_quantized(name, x, per, dtype)
    if n_rows:  # a grid of zero programs is a launch error
        plan = plan_rows(x, per == "group")
        layer_norm_quantize_rows_kernel[(triton.cdiv(n_rows, plan["ROWS"]),)](
            x, weight, bias, q, scale, x.stride(0), n_rows, n_rows, n_cols, eps,
            CENTER=center, BIAS=bias is not None, PER_GROUP=per == "group", MOST=fp8_max(dtype),
            GROUP=GROUP, VECTOR=VECTOR, **plan,
        )  # fmt: skip
    return q, scale


def fused_layer_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float = 1e-5, per: str = "row", dtype=E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales) of y = LayerNorm of the rows of x, where q * scales approximates y; bias may be None.

    x [n_rows, n_cols] is float32, float16 or bfloat16, with contiguous rows and any row stride; weight and bias
    [n_cols] are both of its dtype or both float32. q is contiguous, float8_e4m3fn or float8_e5m2; scales are float32,
    per="row" [n_rows, 1], per="group" (of 128 columns) [n_rows, ceil(n_cols / 128)] with strides (1, n_rows), as a GEMM
    reads them. scale = amax / max of the format, q = y * (max / amax), each rounded once. An infinity or NaN in y turns
    what shares its scale to NaN.

    Raises TypeError for another dtype, a missing weight, an eps that is no number; ValueError for another rank, sizes
    or stride, no columns or more than 16384, an unknown `per`, a bad eps; RuntimeError for no Triton or an input that
    requires grad.
    """
    return _quantized_norm("fused_layer_norm_quantize", x, weight, bias, eps, per, dtype, True)


def fused_rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, per: str = "row", dtype=E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales) of RMSNorm over the rows of x: as fused_layer_norm_quantize, without mean and bias."""
    return _quantized_norm("fused_rms_norm_quantize", x, weight, None, eps, per, dtype, False)


def torch_norm(x, weight, bias) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias, 1e-5)


def reference(x, weight, bias) -> torch.Tensor:
    return torch_norm(x.double(), weight.double(), bias.double())


def inputs(h: Harness, rows: int, cols: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
    dtype = dtype or h.half
    return h.rows(rows, cols, dtype=dtype), h.randn(cols, dtype=dtype), h.randn(cols, dtype=dtype)


def compare(h: Harness, rows: int, cols: int, per: str):
    """q alone: by two kernels, by one compiled function, and by ours."""
    x, weight, bias = inputs(h, rows, cols)
    ours = lambda *args: fused_layer_norm_quantize(*args, per=per)  # noqa: E731
    # Interpreted, the baseline is checked too, and compiling takes longer than all else.
    return h.compare(
        fused_variants(h.compiled, torch_norm, ours, per), lambda *args: codes_of(reference(*args), per),
        x, weight, bias, case=f"{rows}x{cols} per {per}",
        baseline="torch" if h.interpreted else "torch.compile, two kernels", dtype=E4M3, terms=cols,
        wrong={"with another row's scale": lambda *args: codes_of(reference(*args), per, shift=1)},
        work=Work(bytes=sum(t.nbytes for t in (x, *empty_quantized("compare", x, per, E4M3)))),
    )  # fmt: skip


def answer(tables: dict[str, list]) -> str:
    gains = {per: over_library(each) for per, each in tables.items()}
    pays = "more" if min(gains.values()) > 7 / 3 else "less"
    return (
        f"Not writing y in 16 bits saves 4 of 7 bytes, 2.33x; in time it is {pays}: {gains['row']:.2f}x per row, "
        f"{gains['group']:.2f}x per group over torch.compile's fastest, be it two kernels or one function "
        f"(rows and columns: {' and '.join(table.case.split()[0] for table in tables['row'])})."
    )


def demo(h: Harness) -> None:
    for rows, cols in [(3, 5), (3, 781), (1, 9000)]:
        for per in ("row", "group"):
            norm = lambda *args, per=per: read_back(*fused_layer_norm_quantize(*args, per=per), per)  # noqa: E731
            h.check(norm, reference, *inputs(h, rows, cols), what=f"{rows}x{cols} per {per}", **READ_BACK)
    x, weight = h.meta(16384, 8192), h.meta(8192)
    find = dict.fromkeys((89, 90, 100, 120), ("ld.global.v4",))
    h.codegen(fused_layer_norm_quantize, x, weight, weight, find=find)

    sizes = h.pick(interpreted=((16, 1024),), quick=((16384, 8192),), full=((16384, 8192), (8192, 16384)))
    sizes = [(h.fit(rows, bytes_each=60 * cols), cols) for rows, cols in sizes]
    tables = {per: [compare(h, *size, per) for size in sizes] for per in ("row", "group")}
    h.answer(lambda: answer(tables))


if __name__ == "__main__":
    run(demo)
