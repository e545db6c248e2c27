"""LayerNorm that writes FP8: the norm quantizes its own result, which never goes to memory in 16 bits.

Technique  A norm and a quantizer as two kernels write y in 16 bits and read it back: of 7 bytes an element, 4 are that
           detour. The norm knows y in float32 while it has the row, so it can take the largest magnitude and write FP8
           with its scale: 2 bytes read, 1 written. What it costs is one more reduction, after that for mean and
           variance, before anything may be written; so the row must stay on the chip until then:
           rows      a program holds one row, or several short ones, in registers. Mean and variance come from one pass,
                     from the sums of x and of its square; a row whose mean is further from 0 than two deviations would
                     lose digits that way, and is summed again, measured from that mean. Weight and bias are read for
                     every row, from the SM's first-level cache; where that is what limits, x is loaded past it
                     (ld.global.cg), so that they stay there;
           resident  a longer row is read three times, for mean and variance, for amax, to write, and is found in the
                     SM's first-level cache after the first. The length is a constant of the kernel; each is compiled.
           y is rounded once, to FP8; two kernels round it to 16 bits on the way.
Question   What does a norm save by writing FP8 and its scales itself, instead of leaving it to a quantizer?
Needs      triton, sm_89
Shapes     x [n_rows, n_cols], last dimension contiguous, any row stride; weight [n_cols], bias [n_cols] or None -> q
           [n_rows, n_cols], contiguous, and scales: per="row" [n_rows, 1]; per="group" [n_rows, ceil(n_cols / 128)],
           strides (1, n_rows), as 1x128 scales of a GEMM lie. y is q * scale.
Dtypes     x float32, float16, bfloat16; weight and bias both of x's dtype or both float32; q float8_e4m3fn or
           float8_e5m2; scales and the arithmetic are float32. scale = amax / max of the format, q = y * (max / amax),
           each rounded once. An infinity or NaN in y turns its row or group to NaN when it is read back.
Errors     TypeError for another dtype, a missing weight, or an eps that is no number; ValueError for another rank, no
           columns, sizes that do not fit, an inner stride other than 1, an unknown `per`, or an eps that is negative or
           not finite; RuntimeError for a device without Triton or an input that requires grad.
Wins when  what reads y is an FP8 GEMM, and x is larger than L2; the gradient of the norm needs x, not y.
Source     bytes counted here; LayerNorm as in this chapter's Triton section; RMSNorm: Zhang and Sennrich 2019.
Run        python examples/fp8/fused_layer_norm_quantize.py
"""

from __future__ import annotations

import math

from harness import Harness, Work, fp8_max, interpreted, require_fp8, require_triton_device, run

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
GROUP = 128
ROWS_MAX = 16384  # longer rows do not fit the registers of one program
# By the bytes of an element: values of a row that a thread holds, and its registers.
HELD = {2: (32, 64), 4: (32, 80)}
LONG, HELD_LONG = 8192, (64, 96)  # 16-bit rows of just this length
UNALIGNED = 128  # registers where VECTOR divides not every row's start and length
RESIDENT_STEP, RESIDENT_WARPS = 8192, 16  # of a longer row
VECTOR = 8  # neighbouring columns of a thread
ASSEMBLY = tl.constexpr(not interpreted())  # of which the interpreter has none
AMAX_MIN = 2.0**-100  # what counts as amax of a group of zeros
FLOOR = tl.constexpr(AMAX_MIN)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax(y, axis: tl.constexpr):
    """Largest magnitude along an axis, or NaN where there is one, which tl.max would pass over."""
    if ASSEMBLY:
        return tl.reduce(tl.abs(y), axis, _larger)
    else:  # the interpreter is slow at reductions of our own; as integers, NaN is the largest
        return tl.max(tl.abs(y).to(tl.int32, bitcast=True), axis).to(tl.float32, bitcast=True)


@triton.jit
def _scale_and_inverse(amax, MOST: tl.constexpr):
    """amax / MOST and MOST / amax, each rounded once.

    tl.div_rn rounds so too, but branches on operands that are extreme: a thread with several groups would divide for
    one after the other. Here the branch is not needed: amax has a floor, and SMALL keeps its inverse normal. Each
    quotient is a guess put right by its remainder. For MOST of both formats that rounds as a division does, wherever
    within one unit in the last place, as PTX promises, the approximate reciprocal lies. Of infinity both are NaN.
    """
    amax = _larger(amax, FLOOR)
    if ASSEMBLY:
        PART: tl.constexpr = 1.0 / MOST
        SMALL: tl.constexpr = 2.0**-16
        near = amax * PART
        scale = tl.fma(tl.fma(near, -MOST, amax), PART, near)
        down = amax * SMALL
        guess = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [down], tl.float32, True, 1)
        near = guess * (MOST * SMALL)
        return scale, tl.fma(tl.fma(near, -down, MOST * SMALL), guess, near)
    else:
        return tl.div_rn(amax, MOST), tl.div_rn(MOST, amax)


@triton.jit
def _widen(x):
    """x in float32, converted where it is used: earlier, as LLVM would, it takes twice the registers.

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
def _apart(x, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr):
    """Sums of the columns that are STEP apart, all in one thread: short chains of additions beside each other."""
    if STEP == BLOCK_N:
        return x
    else:
        return tl.sum(tl.reshape(x, (ROWS, BLOCK_N // STEP, STEP)), axis=1)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(a, b):
    """Sums of rows of a and of b, for which warps wait for each other once."""
    if ASSEMBLY:
        return tl.reduce((a, b), 1, _add_both)
    else:
        return tl.sum(a, axis=1), tl.sum(b, axis=1)


@triton.jit
def _share(total, n_cols, BLOCK_N: tl.constexpr, FULL: tl.constexpr):
    return total * (1.0 / BLOCK_N) if FULL else total / n_cols  # exact where BLOCK_N is n_cols, a power of two


@triton.jit
def _moments(x, n_cols, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, STEP: tl.constexpr):
    """Mean and variance of rows from sums of x and of its square: one round of messages between warps."""
    total, squares = _sums(_apart(x, ROWS, BLOCK_N, STEP), _apart(x * x, ROWS, BLOCK_N, STEP))
    mean = _share(total, n_cols, BLOCK_N, FULL)
    return mean, _larger(_share(squares, n_cols, BLOCK_N, FULL) - mean * mean, 0.0)


@triton.jit
def _row_amax(y, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, VECTOR: tl.constexpr):
    """Largest magnitude of each row, or NaN: as floats in a thread, then as integers, in which magnitudes have the same
    order and NaN is the largest; for these a warp has one instruction."""
    if ASSEMBLY:
        mine = tl.reshape(tl.abs(y), (ROWS, BLOCK_N // STEP, STEP // VECTOR, VECTOR))
        mine = tl.reduce(tl.reduce(mine, 3, _larger), 1, _larger)
        return tl.max(mine.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    else:
        return _amax(y, 1)


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
    x = _widen(_read(x_ptr + (rows * stride_xm)[:, None] + cols, inside, WHOLE, CACHE, HINT))
    if CENTER:
        mean, variance = _moments(x, n_cols, ROWS, BLOCK_N, FULL, STEP)
        near = mean * mean <= 4.0 * variance  # false where either is NaN
        if tl.min(near.to(tl.int32), 0) == 0:
            x -= mean[:, None] if ROWS == 1 else tl.where(near, 0.0, mean)[:, None]
            if not FULL:
                x = tl.where(in_row, x, 0.0)
            mean_off, variance_off = _moments(x, n_cols, ROWS, BLOCK_N, FULL, STEP)
            if ROWS > 1:  # a row's result is the same whatever rows share its program
                mean_off, variance_off = tl.where(near, mean, mean_off), tl.where(near, variance, variance_off)
            mean, variance = mean_off, variance_off
        rstd = tl.rsqrt(variance + eps)
        y = tl.fma(x, rstd[:, None], (-mean * rstd)[:, None])
    else:
        squares = tl.sum(_apart(x * x, ROWS, BLOCK_N, STEP), axis=1)
        y = x * tl.rsqrt(_share(squares, n_cols, BLOCK_N, FULL) + eps)[:, None]
    # Outside the row these are 0, and so is y, except where mean * rstd is not finite: then no y of the row is.
    y *= _widen(_read(weight_ptr + cols, in_row, FULL, "", "evict_last"))
    if BIAS:
        y += _widen(_read(bias_ptr + cols, in_row, FULL, "", "evict_last"))
    if PER_GROUP:
        grouped = tl.reshape(y, (ROWS, BLOCK_N // GROUP, GROUP))
        scale, inverse = _scale_and_inverse(_amax(grouped, 2), MOST)
        groups = tl.arange(0, BLOCK_N // GROUP)
        scale_ptrs = scale_ptr + rows[:, None] + groups[None, :].to(tl.int64) * stride_sg
        exists = row_exists[:, None] & (groups * GROUP < n_cols)[None, :]
        tl.store(scale_ptrs, scale, mask=None if WHOLE else exists)
        y = tl.reshape(grouped * inverse[:, :, None], (ROWS, BLOCK_N))
    else:
        scale, inverse = _scale_and_inverse(_row_amax(y, ROWS, BLOCK_N, STEP, VECTOR), MOST)
        tl.store(scale_ptr + rows, scale, mask=None if WHOLE else row_exists)
        y *= inverse[:, None]
    q_ptrs = q_ptr + (rows * tl.cast(n_cols, tl.int64))[:, None] + cols
    tl.store(q_ptrs, y.to(q_ptr.dtype.element_ty), mask=None if WHOLE else inside)


@triton.jit
def _load_row(row_ptr, cols, N_COLS: tl.constexpr, FULL: tl.constexpr, HINT: tl.constexpr):
    if FULL:  # a mask costs a predicate per load; most lengths need none
        x = tl.load(row_ptr + cols, eviction_policy=HINT)
    else:
        x = tl.load(row_ptr + cols, mask=cols < N_COLS, other=0.0, eviction_policy=HINT)
    return x.to(tl.float32)


@triton.jit
def _normalized(
    x_row, weight_ptr, bias_ptr, cols, origin, mean, rstd,
    BIAS: tl.constexpr, N_COLS: tl.constexpr, FULL: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """y, 0 outside the row: the same arithmetic for amax and for q."""
    x = _load_row(x_row, cols, N_COLS, FULL, HINT)
    if x_row.dtype.element_ty == tl.float32:
        x -= origin
    y = (x - mean) * rstd * _load_row(weight_ptr, cols, N_COLS, FULL, "evict_last")
    if BIAS:
        y += _load_row(bias_ptr, cols, N_COLS, FULL, "evict_last")
    return y if FULL else tl.where(cols < N_COLS, y, 0.0)


@triton.jit
def layer_norm_quantize_resident_kernel(
    x_ptr, weight_ptr, bias_ptr, q_ptr, scale_ptr, stride_xm, stride_sg, eps,
    CENTER: tl.constexpr, BIAS: tl.constexpr, PER_GROUP: tl.constexpr, MOST: tl.constexpr,
    N_COLS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = GROUPS * GROUP
    FULL: tl.constexpr = N_COLS % STEP == 0
    row = tl.program_id(0).to(tl.int64)
    x_row, q_row = x_ptr + row * stride_xm, q_ptr + row * N_COLS
    groups = tl.arange(0, GROUPS)
    lane = (groups * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    # One running mean and sum of squares per lane, not per row: no reduction inside the loop.
    lane_mean = tl.zeros((GROUPS, GROUP), tl.float32)
    squares = tl.zeros((GROUPS, GROUP), tl.float32)
    seen = 0.0
    for start in tl.range(0, N_COLS, STEP):
        x = _load_row(x_row, start + lane, N_COLS, FULL, "evict_last")
        if CENTER:
            seen += 1.0
            off = x - lane_mean
            if not FULL:
                off = tl.where(start + lane < N_COLS, off, 0.0)
            lane_mean += off * (1.0 / seen)  # one division, not one per lane
            squares += off * (x - lane_mean)
        else:
            squares += x * x
    origin, mean = 0.0, 0.0
    if CENTER:
        count = ((N_COLS + STEP - 1 - lane) // STEP).to(tl.float32)  # elements this lane has seen
        # A mean of 10000 with a spread of 1 would cost float32 four digits; 16-bit values there have none to lose.
        origin = tl.load(x_row).to(tl.float32)
        between = lane_mean - origin
        mean = tl.sum(tl.sum(between * count, axis=1), axis=0) / N_COLS
        between = tl.where(count > 0, between - mean, 0.0)  # an empty lane's square may be infinite
        squares += between * between * count
        if x_ptr.dtype.element_ty != tl.float32:
            mean += origin
    rstd = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / N_COLS + eps)
    if not PER_GROUP:
        largest = tl.zeros((GROUPS, GROUP), tl.float32)
        for start in tl.range(0, N_COLS, STEP):
            y = _normalized(
                x_row, weight_ptr, bias_ptr, start + lane, origin, mean, rstd, BIAS, N_COLS, FULL, "evict_last"
            )
            largest = _larger(largest, tl.abs(y))
        scale, inverse = _scale_and_inverse(_amax(_amax(largest, 1), 0), MOST)
        tl.store(scale_ptr + row, scale)
    for start in tl.range(0, N_COLS, STEP):
        cols = start + lane
        y = _normalized(x_row, weight_ptr, bias_ptr, cols, origin, mean, rstd, BIAS, N_COLS, FULL, "evict_first")
        if PER_GROUP:
            scale, inverse = _scale_and_inverse(_amax(y, 1), MOST)
            group = start // GROUP + groups
            tl.store(scale_ptr + row + group.to(tl.int64) * stride_sg, scale, mask=group * GROUP < N_COLS)
            q = y * inverse[:, None]
        else:
            q = y * inverse
        tl.store(q_row + cols, q.to(q_ptr.dtype.element_ty), mask=cols < N_COLS)


def _quantized_norm(name, x, weight, bias, eps, per, dtype, center: bool) -> tuple[torch.Tensor, torch.Tensor]:
    vectors = {"weight": weight} | ({} if bias is None else {"bias": bias})
    require_triton_device(name, x, *vectors.values())
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype} is not one of {DTYPES}; convert with x.float() first")
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f"{name}: need a matrix [n_rows, 1 or more columns], got shape {tuple(x.shape)}; call x.reshape(-1, n_cols)"
        )
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"{name}: strides {x.stride()}, but columns must be contiguous; call x.contiguous() first")
    for label, vector in vectors.items():
        if vector.dtype not in (x.dtype, torch.float32) or vector.dtype != weight.dtype:
            raise TypeError(
                f"{name}: {label} is {vector.dtype}; weight and bias must both be {x.dtype} as x, or both torch.float32"
            )
        if vector.shape != (x.shape[1],) or (vector.stride(0) != 1 and x.shape[1] > 1):
            raise ValueError(
                f"{name}: {label} has shape {tuple(vector.shape)} and strides {vector.stride()}, but x of "
                f"{tuple(x.shape)} needs [{x.shape[1]}], contiguous"
            )
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{name}: eps is of type {type(eps).__name__}; pass a Python number such as 1e-5")
    if not 0 <= eps < 1e30:  # NaN is not
        raise ValueError(f"{name}: eps is {eps}; pass a number from 0 up that float32 can hold, such as 1e-5")
    if per not in ("row", "group"):
        raise ValueError(f"{name}: per is {per!r}; pass 'row' or 'group' (of {GROUP} columns)")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: dtype is {dtype!r}; pass {E4M3} or torch.float8_e5m2")

    n_rows, n_cols = x.shape
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    require_fp8(name, q=q)
    if per == "row":
        scale = torch.empty(n_rows, 1, dtype=torch.float32, device=x.device)
    else:
        scale = torch.empty(triton.cdiv(n_cols, GROUP), n_rows, dtype=torch.float32, device=x.device).t()
    if not n_rows:  # a grid of zero programs is a launch error
        return q, scale
    kind = {"CENTER": center, "BIAS": bias is not None, "PER_GROUP": per == "group", "MOST": fp8_max(dtype)}
    if n_cols <= ROWS_MAX:
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
            STEP=min(block_n, 32 * num_warps * VECTOR), PAST_L1=aligned and size == 2 and (long or per == "group"),
            num_warps=num_warps, maxnreg=registers if aligned else UNALIGNED,
        )  # fmt: skip
    else:
        layer_norm_quantize_resident_kernel[(n_rows,)](
            x, weight, bias, q, scale, x.stride(0), n_rows, eps, **kind, GROUP=GROUP,
            N_COLS=n_cols, GROUPS=RESIDENT_STEP // GROUP, num_warps=RESIDENT_WARPS,
        )  # fmt: skip
    return q, scale


def fused_layer_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float = 1e-5, per: str = "row", dtype=E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales) of LayerNorm over the rows of x; limits and errors are in the module docstring."""
    return _quantized_norm("fused_layer_norm_quantize", x, weight, bias, eps, per, dtype, True)


def fused_rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, per: str = "row", dtype=E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales) of RMSNorm over the rows of x: no mean, no bias."""
    return _quantized_norm("fused_rms_norm_quantize", x, weight, None, eps, per, dtype, False)


def reference(x, weight, bias, eps: float = 1e-5) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.double(), x.shape[1:], weight.double(), bias.double(), eps)


def rms_reference(x, weight, eps: float = 1e-6) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.double(), x.shape[1:], weight.double(), eps)


def _groups(y: torch.Tensor, per: str) -> torch.Tensor:
    """y [n_rows, n_cols] as [n_rows, groups, columns of a group], padded with zeros."""
    size = y.shape[1] if per == "row" else GROUP
    return torch.nn.functional.pad(y, (0, -y.shape[1] % size)).unflatten(1, (-1, size))


def scales_of(y: torch.Tensor, per: str) -> torch.Tensor:
    """The scales of a result, in the precision of y."""
    return _groups(y, per).abs().amax(dim=2).clamp(min=AMAX_MIN) / fp8_max(E4M3)


def codes_of(y: torch.Tensor, per: str) -> torch.Tensor:
    """What is rounded to FP8: y in units of its scale."""
    groups = _groups(y, per)
    return (groups / scales_of(y, per)[:, :, None]).flatten(1)[:, : y.shape[1]]


def read_back(q: torch.Tensor, scale: torch.Tensor, per: str) -> torch.Tensor:
    return (_groups(q.float(), per) * scale[:, :, None]).flatten(1)[:, : q.shape[1]]


def torch_quantize(y: torch.Tensor, per: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantizer in torch, float32 steps as in the kernels; torch's cast does not saturate, so it clamps."""
    groups, most = _groups(y.float(), per), fp8_max(E4M3)
    amax = groups.abs().amax(dim=2).clamp(min=AMAX_MIN)
    q = (groups * (most / amax)[:, :, None]).clamp(-most, most).to(E4M3)
    return q.flatten(1)[:, : y.shape[1]], amax / most


def torch_fused(x, weight, bias, per: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and quantizer in one function, y in float32 as in our kernels: for the compiler to fuse."""
    return torch_quantize(torch.nn.functional.layer_norm(x.float(), x.shape[1:], weight.float(), bias.float()), per)


def torch_norm(x, weight, bias) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias)


def explain(h: Harness, x: torch.Tensor, per: str, table) -> None:
    """Put the bytes that fusing saves next to the time that it saved."""
    took = {row.variant: row.ms for row in table.rows}
    size = x.element_size()
    moved = {"two kernels": 3 * size + 1, "fused": size + 1}  # bytes an element
    ms = {"two kernels": took["torch.compile, two kernels"], "fused": took["triton fused"]}
    h.fact(
        f"two kernels and one, per {per}, {table.case}",
        {way: {"MiB": round(moved[way] * x.numel() / 2**20), "ms": round(ms[way], 4)} for way in moved},
    )
    allowed = moved["two kernels"] / moved["fused"]
    h.say(f"bytes allow {allowed:.2f}x over two kernels, measured {ms['two kernels'] / ms['fused']:.2f}x")


# One rounding to e4m3, relative or, below its smallest normal, by the size of the row; float32 on the way to it.
BUDGET = {"dtype": torch.float32, "roundings": 1, "acc": 2.0**-4 * 1.001, "terms": 0, "operand_eps": 4e-6}


def demo(h: Harness) -> None:
    def inputs(rows, cols):
        x = h.randn(rows, cols, dtype=h.half, scale=2.0).add_(1.0)
        return x, h.randn(cols, dtype=h.half), h.randn(cols, dtype=h.half)

    # Tails before sizes.
    for rows, cols in [(3, 5), (3, 781), (1, 17000)]:
        x, weight, bias = inputs(rows, cols)
        for per in ("row", "group"):

            def layer_norm(*args, per=per):
                return read_back(*fused_layer_norm_quantize(*args, per=per), per)

            def rms_norm(*args, per=per):
                return read_back(*fused_rms_norm_quantize(*args, per=per), per)

            def scales(*args, per=per):
                return fused_layer_norm_quantize(*args, per=per)[1]

            def reference_scales(*args, per=per):
                return scales_of(reference(*args), per)

            what = f"{rows}x{cols} per {per}"
            h.check(layer_norm, reference, x, weight, bias, what=f"layer norm read back, {what}", **BUDGET)
            h.check(rms_norm, rms_reference, x, weight, what=f"RMS norm read back, {what}", **BUDGET)
            h.check(
                scales, reference_scales, x, weight, bias,
                what=f"scales of layer norm, {what}", dtype=torch.float32, terms=0, roundings=64, constant_ok=True,
            )  # fmt: skip

    x, weight = h.meta(16384, 8192), h.meta(8192)
    h.codegen(
        fused_layer_norm_quantize,
        x,
        weight,
        weight,
        find=dict.fromkeys((89, 90, 100, 120), ("ld.global.v4",)),
    )
    long, weight = h.meta(4096, 32768), h.meta(32768)
    h.codegen(fused_layer_norm_quantize, long, weight, weight, find={90: ("ld.global.v4", "st.global.v4")})

    # Interpreted, the baseline is checked too, and compiling takes longer than all else.
    baseline = "torch" if h.interpreted else "torch.compile, two kernels"
    for rows, cols in h.pick(interpreted=((16, 1024),), quick=((16384, 8192),), full=((16384, 8192), (8192, 16384))):
        x, weight, bias = inputs(h.fit(rows, bytes_each=60 * cols), cols)
        for per in ("row", "group"):
            norm, quantize = h.compiled(torch_norm), h.compiled(torch_quantize)
            together = h.compiled(torch_fused)
            variants = {
                "torch": lambda *args, per=per: torch_quantize(torch_norm(*args), per)[0],
                "torch.compile, two kernels": lambda *args, per=per, n=norm, q=quantize: q(n(*args), per)[0],
                "torch.compile": lambda *args, per=per, f=together: f(*args, per)[0],
                "triton fused": lambda *args, per=per: fused_layer_norm_quantize(*args, per=per)[0],
            }
            scale_bytes = 4 * x.shape[0] * (1 if per == "row" else triton.cdiv(cols, GROUP))
            table = h.compare(
                variants, lambda *args, per=per: codes_of(reference(*args), per), x, weight, bias,
                title=f"layer norm to FP8, per {per}", baseline=baseline, dtype=E4M3,
                work=Work(bytes=x.nbytes + x.numel() + scale_bytes), terms=cols,
            )  # fmt: skip
            if table and table.rows[-1].ms and x.is_cuda:
                explain(h, x, per, table)


if __name__ == "__main__":
    run(demo)
