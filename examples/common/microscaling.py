"""Block-scaled formats: what mxfp8, mxfp4 and nvfp4 are, their scales in tiles, and what quantized values stand for.

`rule` rounds a scale that is a power of two: "floor", as the MX specification has it, lets the largest values of a
group saturate; "up" takes the next power where they would.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from examples.common.device import require_triton_device
from examples.common.fp8 import FLOOR, may_read, require_scales
from examples.common.tma import require_tma_layout, tma_descriptor


class Format(NamedTuple):
    element: torch.dtype
    scale: torch.dtype
    group: int
    pack: int  # values in a byte
    dot: str  # what tl.dot_scaled calls the element
    largest: float
    emulated: tl.dtype  # holds a value times its scale exactly (bfloat16 down to 2**-133: an mxfp8 group with an
    # amax below 2**-116 may lose bits)

    @property
    def bits(self) -> float:
        return 8 / self.pack + 8 / self.group


FP4, E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
FORMATS = {
    "mxfp8": Format(torch.float8_e4m3fn, E8M0, 32, 1, "e4m3", 448.0, tl.bfloat16),
    "mxfp4": Format(FP4, E8M0, 32, 2, "e2m1", 6.0, tl.bfloat16),
    "nvfp4": Format(FP4, torch.float8_e4m3fn, 16, 2, "e2m1", 6.0, tl.float16),
}
RULES = ("floor", "up")
RECIPES = {f"{fmt}, scales {rule}": (fmt, rule) for fmt in ("mxfp8", "mxfp4") for rule in RULES} | {
    "nvfp4": ("nvfp4", "floor")
}
NV_SPAN = 448.0 * 6.0  # largest scale times largest value: what the tensor's scale maps its amax to


def format_of(name: str, fmt: str) -> Format:
    if not isinstance(fmt, str) or fmt not in FORMATS:
        raise ValueError(f"{name}: format {fmt!r} is not one of {tuple(FORMATS)}")
    return FORMATS[fmt]


def check_tensor_scale(name: str, fmt: str, scale: torch.Tensor | None, like: torch.Tensor, values: bool) -> None:
    if (scale is not None) != (fmt == "nvfp4"):
        have = "has no" if fmt != "nvfp4" else "needs a"
        raise ValueError(
            f"{name}: {fmt} {have} scale for the tensor, got {type(scale).__name__}: "
            f"{'pass a_tensor_scale and b_tensor_scale of mx_quantize' if fmt == 'nvfp4' else 'leave it out'}"
        )
    if scale is None:
        return
    require_scales(name, like, False, **{"the tensor's scale": (scale, ((), (1,), (1, 1)))})
    if values and may_read(scale) and not 0 < scale.item() < float("inf"):
        raise ValueError(f"{name}: the tensor's scale is {scale.item()}; it must be positive and finite")


def scales_shape(rows: int, groups: int, swizzled: bool) -> tuple[int, ...]:
    return (triton.cdiv(rows, 128), triton.cdiv(groups, 4), 32, 16) if swizzled else (rows, groups)


def check_operand(name: str, label: str, q: torch.Tensor, scale: torch.Tensor, fmt: str) -> None:
    form = FORMATS[fmt]
    if q.dtype is not form.element or scale.dtype is not form.scale:
        raise TypeError(
            f"{name}: {label} is {q.dtype} with scales in {scale.dtype}; {fmt} is {form.element} with {form.scale}"
        )
    if q.ndim != 2:
        raise ValueError(f"{name}: {label} has shape {tuple(q.shape)}; need [rows, K / {form.pack}]")
    rows, K = q.shape[0], q.shape[1] * form.pack
    if K % 32:
        raise ValueError(f"{name}: K of {label} is {K}; need a multiple of 32 (the groups, and TMA's 16 bytes): pad it")
    need = scales_shape(rows, K // form.group, swizzled=True)
    if tuple(scale.shape) != need or not scale.is_contiguous():
        raise ValueError(
            f"{name}: scales of {label} have shape {list(scale.shape)}; need {list(need)}, contiguous: quantize with "
            f"swizzled=True, or call swizzle_scales on [{rows}, {K // form.group}]"
        )
    require_tma_layout(name, **{label: q, f"scales of {label}": scale})


def check_mx_gemm(name: str, a: tuple, b: tuple, fmt: str, values: bool) -> tuple[int, int, int]:
    """M, N and K of a @ b.T, each (values, their scales, the tensor's scale), which is read if `values`.

    Raises what require_triton_device, format_of, check_operand and check_tensor_scale do, ValueError for two K.
    """
    given = [x for x in (a[2], b[2]) if isinstance(x, torch.Tensor)]
    require_triton_device(name, *a[:2], *b[:2], *given)
    pack = format_of(name, fmt).pack
    for label, (q, scale, _) in (("a", a), ("b", b)):
        check_operand(name, label, q, scale, fmt)
    for _, _, tensor_scale in (a, b):
        check_tensor_scale(name, fmt, tensor_scale, a[0], values)
    if a[0].shape[1] != b[0].shape[1]:
        raise ValueError(
            f"{name}: K is {a[0].shape[1] * pack} of a and {b[0].shape[1] * pack} of b; both are [rows, K]"
        )
    return a[0].shape[0], b[0].shape[0], a[0].shape[1] * pack


def mx_descriptor(x: torch.Tensor, rows: int, block_k: int, form: Format):
    """A TMA descriptor of values, or of scales in tiles, for so many rows and values of K."""
    x = x if x.dtype is torch.float8_e4m3fn else x.view(torch.uint8)
    if x.ndim == 2:
        return tma_descriptor(x, [rows, block_k // form.pack])
    box = [rows // 128, block_k // form.group // 4, 2, 256]  # as TMA wants it: no box is wider than 256
    return tma_descriptor(x.view(*x.shape[:2], 2, 256), box)


@triton.jit
def decode(q, scale, FP4: tl.constexpr, GROUP: tl.constexpr, OPERAND: tl.constexpr):
    """[rows, K] in OPERAND of values and scales, without rounding: OPERAND has bits enough for each product."""
    if FP4:
        WIDE: tl.constexpr = tl.float32 == OPERAND
        MANTISSA: tl.constexpr = 23 if WIDE else (7 if tl.bfloat16 == OPERAND else 10)
        # The bits of e2m1 at the ends of a wider format's exponent and fraction are its value but for the bias.
        BIAS: tl.constexpr = 2.0**14 if tl.float16 == OPERAND else 2.0**126
        codes = tl.join(q & 15, q >> 4).reshape(q.shape[0], 2 * q.shape[1]).to(tl.uint32 if WIDE else tl.uint16)
        bits = ((codes & 7) << (MANTISSA - 1)) | ((codes & 8) << (28 if WIDE else 12))
        values = bits.to(OPERAND, bitcast=True) * tl.full((), BIAS, OPERAND)
    else:
        values = q.to(OPERAND)
    if scale.dtype == tl.uint8:
        # An exponent of a float32; its code 0 is 2**-127, a subnormal there, and 255 is NaN.
        bits = scale.to(tl.uint32) << 23
        scale = tl.where(scale == 0, 0x400000, tl.where(scale == 255, 0x7FC00000, bits)).to(tl.float32, bitcast=True)
    scales = scale.to(OPERAND)[:, :, None]
    return (values.reshape(scale.shape[0], scale.shape[1], GROUP) * scales).reshape(values.shape)


@triton.jit
def unswizzled(tiles, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """[tiles of rows, tiles of K, 2, 256] bytes of scales as [ROWS, GROUPS]."""
    tiles = tiles.reshape(ROWS // 128, GROUPS // 4, 32, 4, 4).trans(0, 3, 2, 1, 4)
    return tiles.reshape(ROWS, GROUPS)


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales [rows, groups] as the tensor cores read them: [ceil(rows / 128), ceil(groups / 4), 32, 16], padded with 0.

    A tile holds 128 rows by 4 groups: row r and group g of it are byte 4 * (r // 32) + g of line r % 32.
    """
    rows, groups = scale.shape
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, -groups % 4, 0, -rows % 128))
    tiles = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0, 3, 2, 1, 4)
    return tiles.flatten(3).contiguous().view(scale.dtype)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2**exponents in float64, from its bits: exact on any device."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)


def values_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The values of the positive codes of FP4 or e4m3, in their order; e4m3 keeps its last code for NaN."""
    if dtype is FP4:
        return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64, device=device)
    return torch.arange(127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).double()


def nearest(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The code of the value nearest to |x|, ties to the even code, what is larger than all to the last."""
    between = (values[1:] + values[:-1]) / 2
    code = torch.searchsorted(between, x.abs())  # the lower one of a tie
    tie = between[code.clamp(max=len(between) - 1)] == x.abs()
    return code + (tie & (code % 2 == 1))


def reference_quantize(
    x: torch.Tensor, fmt: str, rule: str = "floor", tensor_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of mx_quantize's values and plain scales, written from the formats' descriptions, in float64.

    nvfp4 is described in float32 steps, which are taken here as in the kernel, so that the bytes can be the same.
    """
    form = FORMATS[fmt]
    elements = values_of(form.element, x.device)
    groups = x.double().unflatten(1, (-1, form.group))
    finite = groups.isfinite().all(2)
    groups = groups.where(finite[..., None], 0.0)
    amax = groups.abs().amax(2)
    if fmt == "nvfp4":
        if tensor_scale is None:
            largest = x.double().where(x.isfinite(), 0.0).abs().max() if x.numel() else x.new_zeros(()).double()
            tensor_scale = largest.float().clamp(min=FLOOR) * (1 / NV_SPAN)
        scales = values_of(form.scale, x.device)
        code = nearest((amax.float() / (6 * tensor_scale)).double(), scales).clamp(min=1)
        factor = 1 / (scales[code].float() * tensor_scale)
        scaled = (groups.float() * factor[..., None]).double()
        code = code.where(finite, 0x7F)
    else:
        emax = torch.frexp(elements[-1])[1] - 1
        exponent = torch.frexp(amax)[1] - 1 - emax
        if rule == "up":
            exponent = exponent + (amax > elements[-1] * power_of_two(exponent))
        exponent = exponent.where(amax > 0, -127).clamp(-127, 127)
        scaled = groups * power_of_two(-exponent)[..., None]
        code = (exponent + 127).where(finite, 0xFF)
    q = (nearest(scaled, elements) | (scaled.signbit() * (8 if form.pack == 2 else 0x80))).flatten(1)
    q = q[:, ::2] | q[:, 1::2] << 4 if form.pack == 2 else q
    return q.to(torch.uint8), code.to(torch.uint8)


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, fmt: str, tensor_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """What quantized values with plain scales stand for, in float64."""
    form = FORMATS[fmt]
    if form.pack == 2:
        codes = torch.stack([bytes_of(q) & 15, bytes_of(q) >> 4], dim=2).flatten(1).long()
        values = values_of(FP4, q.device)[codes & 7] * (1.0 - 2.0 * (codes >> 3))
    else:
        values = q.double()
    scales = scale.double() if tensor_scale is None else scale.double() * tensor_scale.double()
    return (values.unflatten(1, (-1, form.group)) * scales[..., None]).flatten(1)
