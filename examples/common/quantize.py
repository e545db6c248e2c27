"""What kernels that quantize to FP8 share: amax that keeps NaN, scales that are rounded once, and the same in torch.

`per` is "row" or "group": what shares a scale is a row, or GROUP columns of it. Scales are [n_rows, groups of a row].
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from examples.common.compiled import MODES
from examples.common.device import architecture, interpreted, require_triton_device
from examples.common.fp8 import E4M3, E5M2, FLOOR, FORMATS, fp8_max
from examples.common.rows import DTYPES

GROUP = 128
INLINE_PTX = tl.constexpr(not interpreted())  # the interpreter has none
# The error budget of q * scale: one rounding to e4m3, relative to the value or, below e4m3's smallest normal number, to
# the size of the row; all before it is float32.
READ_BACK = {"dtype": torch.float32, "roundings": 1, "acc": 2.0**-4 * 1.001, "terms": 0, "operand_eps": 4e-6}
AMAX_FLOOR = tl.constexpr(FLOOR)
AMAX_FLOOR_BITS = tl.constexpr(struct.unpack("i", struct.pack("f", FLOOR))[0])


@triton.jit
def magnitude_bits(x):
    """|x| as an integer: the order of floats, with NaN above infinity."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def scale_and_factor(bits, MOST: tl.constexpr):
    """The scale that dequantizes and the factor that quantizes, from the bits of amax. Plain division is inexact."""
    amax = tl.maximum(bits, AMAX_FLOOR_BITS).to(tl.float32, bitcast=True)
    return tl.div_rn(amax, MOST), tl.div_rn(MOST, amax)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absmax(y, axis: tl.constexpr):
    """Largest magnitude along an axis, or NaN where there is one, which tl.max would pass over."""
    if INLINE_PTX:
        return tl.reduce(tl.abs(y), axis, larger)
    else:  # the interpreter is slow at reductions of our own; as integers, NaN is the largest
        return tl.max(tl.abs(y).to(tl.int32, bitcast=True), axis).to(tl.float32, bitcast=True)


def require_format(name: str, dtype: torch.dtype) -> None:
    """Raises TypeError unless dtype is float8_e4m3fn or float8_e5m2."""
    if dtype not in FORMATS:
        hint = "; the fnuz formats are AMD's" if "fnuz" in str(dtype) else ""
        raise TypeError(f"{name}: dtype is {dtype}; pass {E4M3} or {E5M2}{hint}")


@triton.jit
def scale_and_inverse(amax, MOST: tl.constexpr, INFINITE: tl.constexpr):
    """amax / MOST and MOST / amax, each rounded once; for an infinity, inf and 0 where INFINITE, else NaN.

    tl.div_rn rounds this way too, but branches on extreme operands: a thread with several groups would divide for one
    after the other. Here the branch is not needed: amax has a floor, and SMALL keeps its inverse normal. Each
    quotient is a guess put right by its remainder. For MOST of both formats that rounds as a division does, wherever
    the approximate reciprocal lies within the one unit in the last place that PTX promises.
    """
    amax = larger(amax, AMAX_FLOOR)
    if INLINE_PTX:
        PART: tl.constexpr = 1.0 / MOST
        SMALL: tl.constexpr = 2.0**-16
        near = amax * PART
        scale = tl.fma(tl.fma(near, -MOST, amax), PART, near)
        down = amax * SMALL
        guess = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [down], tl.float32, True, 1)
        if INFINITE:
            guess = tl.fma(tl.fma(guess, -down, 1.0), guess, guess)  # a step of Newton
        near = guess * (MOST * SMALL)
        inverse = tl.fma(tl.fma(near, -down, MOST * SMALL), guess, near)
        if INFINITE:
            infinite = amax == float("inf")
            return tl.where(infinite, amax, scale), tl.where(infinite, 0.0, inverse)
        else:
            return scale, inverse
    else:
        return tl.div_rn(amax, MOST), tl.div_rn(MOST, amax)


@triton.jit
def quantize_groups(
    y, scale_ptr, stride_sg, rows, row_exists, first, n_cols,
    MOST: tl.constexpr, GROUP: tl.constexpr, INFINITE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """y * inverse for a tile of whole groups from column `first` on, once their scales are stored; WHOLE: all exist."""
    ROWS: tl.constexpr = y.shape[0]
    GROUPS: tl.constexpr = y.shape[1] // GROUP
    grouped = tl.reshape(y, (ROWS, GROUPS, GROUP))
    scale, inverse = scale_and_inverse(absmax(grouped, 2), MOST, INFINITE)
    groups = first // GROUP + tl.arange(0, GROUPS)
    exists = row_exists[:, None] & (groups * GROUP < n_cols)[None, :]
    scale_ptrs = scale_ptr + rows[:, None] + groups[None, :].to(tl.int64) * stride_sg
    tl.store(scale_ptrs, scale, mask=None if WHOLE else exists)
    return tl.reshape(grouped * inverse[:, :, None], (ROWS, GROUPS * GROUP))


@triton.jit
def widen_bfloat16(x):
    """x in float32: pairs of bfloat16, as they lie in 32-bit registers, with one instruction each."""
    if x.dtype == tl.bfloat16 and INLINE_PTX:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


def check_quantize(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    """The checks of a quantizer of x [M, K] with contiguous columns to `dtype`.

    Raises what require_triton_device does; TypeError for another dtype of x, or one that is not FP8; ValueError for
    rank or an inner stride other than 1; RuntimeError for a GPU before sm_89.
    """
    require_triton_device(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: x is {x.dtype}, which is not one of {DTYPES}; convert with x.float() first")
    require_format(name, dtype)
    if x.ndim != 2:
        raise ValueError(f"{name}: need a matrix [M, K], got shape {tuple(x.shape)}; call x.reshape(-1, K)")
    if x.stride(1) != 1 and operator.index(x.shape[1]) > 1:  # the length of a row is no symbol to torch.compile
        raise ValueError(f"{name}: strides {x.stride()}, but columns must be contiguous; call x.contiguous() first")
    if x.is_cuda and (sm := architecture(x.device)) < 89:
        raise RuntimeError(
            f"{name}: this GPU is sm_{sm}; FP8 comes with sm_89: use quantize_reference of examples/common/fp8.py"
        )


def empty_group_scales(x: torch.Tensor) -> torch.Tensor:
    """[n_rows, groups of a row], those of one group contiguous, as torch's scaled_mm reads them."""
    n_rows, n_cols = x.shape
    return torch.empty(triton.cdiv(n_cols, GROUP), n_rows, dtype=torch.float32, device=x.device).t()


def empty_quantized(name: str, x: torch.Tensor, per: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for q and its scales; raises TypeError unless dtype is float8_e4m3fn or float8_e5m2."""
    require_format(name, dtype)
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    return q, empty_group_scales(x) if per == "group" else torch.empty(len(x), 1, dtype=torch.float32, device=x.device)


def _groups(y: torch.Tensor, per: str) -> torch.Tensor:
    """y [n_rows, n_cols] as [n_rows, groups, columns of a group], padded with zeros."""
    size = y.shape[1] if per == "row" else GROUP
    return torch.nn.functional.pad(y, (0, -y.shape[1] % size)).unflatten(1, (-1, size))


def scales_of(y: torch.Tensor, per: str) -> torch.Tensor:
    """The scales of a result for e4m3, in the precision of y."""
    return _groups(y, per).abs().amax(dim=2).clamp(min=FLOOR) / fp8_max(E4M3)


def codes_of(y: torch.Tensor, per: str, shift: int = 0) -> torch.Tensor:
    """What is rounded to e4m3: y in units of its scale, or, as a fault, of that of the row `shift` rows before it."""
    return (_groups(y, per) / scales_of(y, per).roll(shift, 0)[:, :, None]).flatten(1)[:, : y.shape[1]]


def read_back(q: torch.Tensor, scale: torch.Tensor, per: str) -> torch.Tensor:
    """q * scale in float32."""
    return (_groups(q.float(), per) * scale[:, :, None]).flatten(1)[:, : q.shape[1]]


def torch_quantize(y: torch.Tensor, per: str) -> tuple[torch.Tensor, torch.Tensor]:
    """y to e4m3 in torch, in the float32 steps of the kernels; torch's cast need not saturate, so it clamps."""
    groups, most = _groups(y.float(), per), fp8_max(E4M3)
    amax = groups.abs().amax(dim=2).clamp(min=FLOOR)
    q = (groups * (most / amax)[:, :, None]).clamp(-most, most).to(E4M3)
    return q.flatten(1)[:, : y.shape[1]], amax / most


def block_of(x: torch.Tensor, recipe: str) -> tuple[int, int]:
    """Rows and columns of x that share a scale: "tensor", "row", "group" or "block"."""
    return {"tensor": tuple(x.shape), "row": (1, x.shape[1]), "group": (1, GROUP), "block": (GROUP, GROUP)}[recipe]


def torch_quantize_blocks(x: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x to e4m3 in torch by any recipe, for sizes that are multiples of the groups; its reciprocals round once more."""
    rows, columns = block_of(x, recipe)
    most = fp8_max(E4M3)
    groups = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    amax = groups.abs().amax(dim=(1, 3), keepdim=True).float().clamp(min=FLOOR)
    q = (groups.float() * (most / amax)).clamp(-most, most).to(E4M3)
    scale = (amax / most)[:, 0, :, 0]
    return q.view(x.shape), scale.t().contiguous().t() if recipe == "group" else scale


def fused_variants(
    compiled: Callable, op: Callable, ours: Callable, per: str, quantizer: Callable | None = None
) -> dict[str, Callable]:
    """What makes q alone: op and quantizer as two kernels, in torch and `compiled`; as one function compiled in each of
    MODES, y in float32 as in our kernels; and ours. op(*args) is y, quantizer(y, *args) its q and scales, else
    torch_quantize's."""
    quantize = quantizer or (lambda y, *_: torch_quantize(y, per))

    def one(*args):
        return quantize(op(*(x.float() for x in args)), *args)

    first, second, together = compiled(op), compiled(quantize), [compiled(one, **mode) for mode in MODES.values()]
    return {
        "torch": lambda *args: quantize(op(*args), *args)[0],
        "torch.compile, two kernels": lambda *args: second(first(*args), *args)[0],
        **{name: lambda *args, fn=fn: fn(*args)[0] for name, fn in zip(MODES, together, strict=True)},
        "triton": lambda *args: ours(*args)[0],
    }
