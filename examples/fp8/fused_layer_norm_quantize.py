"""LayerNorm that writes FP8: the norm quantizes its own result, which never goes to memory in 16 bits.

A norm and a quantizer as two kernels write y in 16 bits and read it back: of 7 bytes an element, 4 are that detour. The
norm has y in float32 while it has the row, so it can take the largest magnitude and write FP8 with its scale: 2 bytes
read, 1 written. The price is a second reduction before anything may be written, so the row must stay on the chip: in
registers up to 16384 columns, longer ones in L1 (fused_layer_norm_quantize_resident.py).

Mean and variance come from one pass, from the sums of x and of its square. A row whose mean is further from 0 than two
deviations would lose digits that way, and is summed again, measured from that mean. Weight and bias are read for every
row, from L1; where that is the limit, x is loaded past it (ld.global.cg), so that they stay there. y is rounded once,
to FP8; two kernels round it to 16 bits on the way.

Question   What does a norm save by writing FP8 and its scales itself, instead of leaving it to a quantizer?
Needs      triton, sm_89
Wins when  what reads y is an FP8 GEMM, and x is larger than L2; the gradient of the norm needs x, not y.
Variants   fused_layer_norm_quantize_resident.py
Study      studies/fp8/fused_layer_norm_quantize.py
Source     goes beyond the chapter; bytes counted here; RMSNorm: Zhang and Sennrich 2019
"""

from __future__ import annotations

import math

from harness import Harness, Work, geomean, run

import torch
import triton
import triton.language as tl

from examples.common.fp8 import E4M3, fp8_max
from examples.common.norms import apart, moments, row_absmax, share
from examples.common.operands import check_choice
from examples.common.quantize import (
    GROUP,
    absmax,
    codes_of,
    empty_group_scales,
    read_back,
    require_format,
    scale_and_inverse,
    torch_quantize,
)
from examples.common.rows import DTYPES, check_eps, check_norm, widen
from examples.fp8.fused_layer_norm_quantize_resident import launch_resident

ROWS_MAX = 16384  # longer rows do not fit the registers of one program
# By the bytes of an element: values of a row that a thread holds, and its registers.
HELD = {2: (32, 64), 4: (32, 80)}
LONG, HELD_LONG = 8192, (64, 96)  # 16-bit rows of just this length
UNALIGNED = 128  # registers where VECTOR does not divide every row's start and length
VECTOR = 8  # neighbouring columns of a thread


@triton.jit
def _read(pointers, mask, WHOLE: tl.constexpr, CACHE: tl.constexpr, HINT: tl.constexpr):
    if WHOLE:
        return tl.load(pointers, cache_modifier=CACHE, eviction_policy=HINT)
    else:
        return tl.load(pointers, mask=mask, other=0.0, cache_modifier=CACHE, eviction_policy=HINT)


@triton.jit
def layer_norm_quantize_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, q_ptr, scale_ptr, stride_xm, stride_sg, n_rows, n_cols, eps,
    CENTER: tl.constexpr, BIAS: tl.constexpr, PER_GROUP: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr, VECTOR: tl.constexpr,
    STEP: tl.constexpr, PAST_L1: tl.constexpr,
):  # fmt: skip
    # Of an argument Triton knows only whether 16 divides it. These products say that ALIGN does, which lets loads and
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
    x = widen(_read(x_ptr + (rows * stride_xm)[:, None] + cols, inside, WHOLE, CACHE, HINT))
    if CENTER:
        mean, variance = moments(x, n_cols, ROWS, BLOCK_N, FULL, STEP)
        near = mean * mean <= 4.0 * variance  # false where either is NaN
        if tl.min(near.to(tl.int32), 0) == 0:
            x -= mean[:, None] if ROWS == 1 else tl.where(near, 0.0, mean)[:, None]
            if not FULL:
                x = tl.where(in_row, x, 0.0)
            mean_off, variance_off = moments(x, n_cols, ROWS, BLOCK_N, FULL, STEP)
            if ROWS > 1:  # a row's result is the same whatever rows share its program
                mean_off, variance_off = tl.where(near, mean, mean_off), tl.where(near, variance, variance_off)
            mean, variance = mean_off, variance_off
        rstd = tl.rsqrt(variance + eps)
        y = tl.fma(x, rstd[:, None], (-mean * rstd)[:, None])
    else:
        squares = tl.sum(apart(x * x, ROWS, BLOCK_N, STEP), axis=1)
        y = x * tl.rsqrt(share(squares, n_cols, BLOCK_N, FULL) + eps)[:, None]
    # Outside the row these are 0, and so is y, except where mean * rstd is not finite: then no y of the row is.
    y *= widen(_read(weight_ptr + cols, in_row, FULL, "", "evict_last"))
    if BIAS:
        y += widen(_read(bias_ptr + cols, in_row, FULL, "", "evict_last"))
    if PER_GROUP:
        grouped = tl.reshape(y, (ROWS, BLOCK_N // GROUP, GROUP))
        scale, inverse = scale_and_inverse(absmax(grouped, 2), MOST, INFINITE=False)
        groups = tl.arange(0, BLOCK_N // GROUP)
        scale_ptrs = scale_ptr + rows[:, None] + groups[None, :].to(tl.int64) * stride_sg
        exists = row_exists[:, None] & (groups * GROUP < n_cols)[None, :]
        tl.store(scale_ptrs, scale, mask=None if WHOLE else exists)
        y = tl.reshape(grouped * inverse[:, :, None], (ROWS, BLOCK_N))
    else:
        scale, inverse = scale_and_inverse(row_absmax(y, ROWS, BLOCK_N, STEP, VECTOR), MOST, INFINITE=False)
        tl.store(scale_ptr + rows, scale, mask=None if WHOLE else row_exists)
        y *= inverse[:, None]
    q_ptrs = q_ptr + (rows * tl.cast(n_cols, tl.int64))[:, None] + cols
    tl.store(q_ptrs, y.to(q_ptr.dtype.element_ty), mask=None if WHOLE else inside)


def _launch_rows(x, weight, bias, q: torch.Tensor, scale: torch.Tensor, eps: float, kind: dict) -> None:
    n_rows, n_cols = x.shape
    block_n = max(GROUP, triton.next_power_of_2(n_cols))
    size, align = x.element_size(), math.gcd(VECTOR, n_cols, x.stride(0))
    aligned = align == VECTOR
    long = aligned and size == 2 and n_cols == LONG
    per_thread, registers = HELD_LONG if long else HELD[size]
    rows = max(1, 32 * per_thread // block_n)  # at least what fills a warp
    num_warps = max(1, block_n // (32 * per_thread))
    layer_norm_quantize_rows_kernel[(triton.cdiv(n_rows, rows),)](
        x, weight, bias, q, scale, x.stride(0), n_rows, n_rows, n_cols, eps, **kind, GROUP=GROUP,
        ROWS=rows, BLOCK_N=block_n, FULL=n_cols == block_n, ALIGN=align, VECTOR=VECTOR,
        STEP=min(block_n, 32 * num_warps * VECTOR),
        PAST_L1=aligned and size == 2 and (long or kind["PER_GROUP"]),
        num_warps=num_warps, maxnreg=registers if aligned else UNALIGNED,
    )  # fmt: skip


def _quantized_norm(name, x, weight, bias, eps, per, dtype, center: bool) -> tuple[torch.Tensor, torch.Tensor]:
    columns = {"weight": weight} | ({} if bias is None else {"bias": bias})
    n_rows, n_cols = check_norm(name, DTYPES, {"x": x}, columns)
    check_eps(name, eps)
    check_choice(name, ("row", "group"), per=per)
    require_format(name, dtype)
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = empty_group_scales(x) if per == "group" else torch.empty(n_rows, 1, dtype=torch.float32, device=x.device)
    if n_rows:  # a grid of zero programs is a launch error
        kind = {"CENTER": center, "BIAS": bias is not None, "PER_GROUP": per == "group", "MOST": fp8_max(dtype)}
        (_launch_rows if n_cols <= ROWS_MAX else launch_resident)(x, weight, bias, q, scale, eps, kind)
    return q, scale


def fused_layer_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float = 1e-5, per: str = "row", dtype=E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales) of LayerNorm over the rows of x, y about q * scales.

    x [n_rows, n_cols] is float32, float16 or bfloat16, with contiguous rows and any row stride; weight and bias
    [n_cols] are both of its dtype or both float32. q is contiguous, float8_e4m3fn or float8_e5m2; scales are float32,
    per="row" [n_rows, 1], per="group" (of 128 columns) [n_rows, ceil(n_cols / 128)] with strides (1, n_rows), as a GEMM
    reads them. scale = amax / max of the format, q = y * (max / amax), each rounded once. An infinity or NaN in y turns
    what shares its scale to NaN.

    Raises TypeError for another dtype, a missing weight, or an eps that is no number; ValueError for another rank, no
    columns, sizes that do not fit, an inner stride other than 1, an unknown `per`, or an eps that is negative or not
    finite; RuntimeError for a device without Triton or an input that requires grad.
    """
    return _quantized_norm("fused_layer_norm_quantize", x, weight, bias, eps, per, dtype, True)


def fused_rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, per: str = "row", dtype=E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales) of RMSNorm over the rows of x: as above, without mean and bias."""
    return _quantized_norm("fused_rms_norm_quantize", x, weight, None, eps, per, dtype, False)


def torch_norm(x, weight, bias, eps: float = 1e-5) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias, eps)


def reference(x, weight, bias, eps: float = 1e-5) -> torch.Tensor:
    return torch_norm(x.double(), weight.double(), bias.double(), eps)


def torch_fused(x, weight, bias, per: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and quantizer in one function, y in float32 as in our kernels: for the compiler to fuse."""
    return torch_quantize(torch_norm(x.float(), weight.float(), bias.float()), per)


# One rounding to e4m3, relative or, below its smallest normal, by the size of the row; float32 on the way to it.
BUDGET = {"dtype": torch.float32, "roundings": 1, "acc": 2.0**-4 * 1.001, "terms": 0, "operand_eps": 4e-6}


def inputs(h: Harness, rows: int, cols: int) -> tuple[torch.Tensor, ...]:
    x = h.randn(rows, cols, dtype=h.half, scale=2.0).add_(1.0)
    return x, h.randn(cols, dtype=h.half), h.randn(cols, dtype=h.half)


def compare(h: Harness, rows: int, cols: int, per: str):
    """q alone: by two kernels, by one compiled function, and by ours."""
    x, weight, bias = inputs(h, rows, cols)
    norm, quantize, together = (h.compiled(fn) for fn in (torch_norm, torch_quantize, torch_fused))
    variants = {
        "torch": lambda *args: torch_quantize(torch_norm(*args), per)[0],
        "torch.compile, two kernels": lambda *args: quantize(norm(*args), per)[0],
        "torch.compile": lambda *args: together(*args, per)[0],
        "triton": lambda *args: fused_layer_norm_quantize(*args, per=per)[0],
    }
    scale_bytes = 4 * rows * (1 if per == "row" else triton.cdiv(cols, GROUP))
    # Interpreted, the baseline is checked too, and compiling takes longer than all else.
    return h.compare(
        variants, lambda *args: codes_of(reference(*args), per), x, weight, bias, case=f"{rows}x{cols} per {per}",
        baseline="torch" if h.interpreted else "torch.compile, two kernels", dtype=E4M3,
        work=Work(bytes=x.nbytes + x.numel() + scale_bytes), terms=cols,
    )  # fmt: skip


def answer(tables: dict[str, list]) -> str:
    gains = {per: geomean(each, "torch.compile, two kernels", "triton") for per, each in tables.items()}
    together = geomean([table for each in tables.values() for table in each], "torch.compile", "triton")
    least = min(gains.values())
    return (
        f"4 of 7 bytes, and {'more' if least > 7 / 3 else 'not always as much'} in time: {gains['row']:.2f}x two "
        f"compiled kernels per row, {gains['group']:.2f}x per group (bytes say 2.33x). Over one compiled function: "
        f"{together:.2f}x."
    )


def demo(h: Harness) -> None:
    for rows, cols in [(3, 5), (3, 781), (1, 17000)]:
        for per in ("row", "group"):
            norm = lambda *args, per=per: read_back(*fused_layer_norm_quantize(*args, per=per), per)  # noqa: E731
            h.check(norm, reference, *inputs(h, rows, cols), what=f"{rows}x{cols} per {per}", **BUDGET)
    x, weight = h.meta(16384, 8192), h.meta(8192)
    find = dict.fromkeys((89, 90, 100, 120), ("ld.global.v4",))
    h.codegen(fused_layer_norm_quantize, x, weight, weight, find=find)

    sizes = h.pick(interpreted=((16, 1024),), quick=((16384, 8192),), full=((16384, 8192), (8192, 16384)))
    sizes = [(h.fit(rows, bytes_each=60 * cols), cols) for rows, cols in sizes]
    tables = {per: [compare(h, *size, per) for size in sizes] for per in ("row", "group")}
    h.answer(lambda: answer(tables))


if __name__ == "__main__":
    run(demo)
