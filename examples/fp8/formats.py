"""FP8 formats: every number that e4m3fn and e5m2 have, and what a cast makes of the rest.

An 8-bit format has 256 codes, so nothing need be taken on trust: each is decoded here from the definition,
(-1)^sign * 2^(exponent - bias) * 1.mantissa, and torch and Triton are held to that. e4m3fn spends a bit on precision
that e5m2 spends on range. Its top exponent holds numbers up to 448 and one NaN of each sign, where e5m2, a shortened
float16, has infinities and NaNs.

Within the range a cast rounds to nearest, ties to even (Triton's rounds twice on sm_89, by way of float16). Beyond it
casts differ, and scales exist to avoid that: some give NaN or an infinity, others the largest number. Triton's cast
saturates, which all kernels of this topic rely on; torch's depends on its version, so code in torch clamps first.

Question   Which numbers are there in FP8, how far apart are they, and what does a cast do with what lies beyond them?
Needs      triton, sm_89
Wins when  (which to use) e4m3fn for what is multiplied, weights and activations; e5m2 where range matters more than the
           third bit of the mantissa, as for gradients.
Study      studies/fp8/formats.py
Source     goes beyond the chapter; the definition is Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

from __future__ import annotations

import math
from typing import NamedTuple

from harness import Harness, run

import torch
import triton
import triton.language as tl

from examples.common.fp8 import E4M3, E5M2, FORMATS, fp8_max
from examples.common.operands import check_elementwise
from examples.common.rows import DTYPES

BLOCK = 4096


@triton.jit
def cast_kernel(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements).to(tl.float32)
    tl.store(y_ptr + offsets, x.to(y_ptr.dtype.element_ty), mask=offsets < n_elements)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x, contiguous and of any shape, in another dtype: Triton's cast from float32, which saturates where dtype is FP8.

    Both dtypes are float32, float16, bfloat16, float8_e4m3fn or float8_e5m2. Raises TypeError for another one;
    ValueError for a layout that is not contiguous; RuntimeError for no Triton or an input that requires grad.
    """
    check_elementwise("cast", (*DTYPES, *FORMATS), x)
    if dtype not in (*DTYPES, *FORMATS):
        raise TypeError(f"cast: dtype is {dtype}, which is not one of {(*DTYPES, *FORMATS)}")
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        cast_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
    return y


def clamp_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.clamp(-fp8_max(dtype), fp8_max(dtype)).to(dtype)


class Layout(NamedTuple):
    exponent_bits: int
    mantissa_bits: int
    bias: int
    infinities: bool  # else the codes of the top exponent are numbers, but for one NaN of each sign


LAYOUTS = {E4M3: Layout(4, 3, 7, False), E5M2: Layout(5, 2, 15, True)}


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.float8_")


def decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that codes from 0 to 255 stand for, in float64, from the definition of the format."""
    exponent_bits, mantissa_bits, bias, infinities = LAYOUTS[dtype]
    device, codes = codes.device, codes.long().cpu()  # the same machine's arithmetic for all
    sign = 1.0 - 2.0 * (codes >> 7)
    exponent = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = (codes & (2**mantissa_bits - 1)).double() / 2**mantissa_bits
    # Exponent 0 has no leading 1 and the scale of exponent 1: the subnormal numbers, evenly spaced down to 0.
    value = torch.ldexp(mantissa + (exponent > 0), exponent.clamp(min=1) - bias)
    if infinities:
        top = exponent == 2**exponent_bits - 1
        value = torch.where(top, torch.where(mantissa == 0, math.inf, math.nan), value)
    else:
        value = value.masked_fill(codes & 127 == 127, math.nan)
    return (sign * value).to(device)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """The finite numbers from 0 up, in float64: code i stands for number i."""
    values = decode(torch.arange(128), dtype)
    return values[values.isfinite()]


def properties(dtype: torch.dtype) -> dict[str, float | int | str]:
    values, every, normal = numbers(dtype), decode(torch.arange(256), dtype), 2.0 ** (1 - LAYOUTS[dtype].bias)
    return {
        "largest": values[-1].item(),
        "apart at 1": 2.0 ** -LAYOUTS[dtype].mantissa_bits,
        "smallest normal": f"2^{math.log2(normal):.0f}",
        "smallest": f"2^{math.log2(values[1].item()):.0f}",
        "numbers": int(every.isfinite().sum()) - 1,  # 0 and -0 are one
        "infinities": int(every.isinf().sum()),
        "NaN": int(every.isnan().sum()),
        "dynamic range": int(values[-1].item() / normal),
    }


def beyond_the_range(h: Harness) -> dict[str, dict[str, list[str]]]:
    """What each cast makes of a number and of an infinity beyond the range of each format."""
    casts = {"torch on cpu": (torch.Tensor.to, "cpu"), f"torch on {h.device.type}": (torch.Tensor.to, h.device)}
    casts |= {"torch after clamp": (clamp_cast, h.device), "triton": (cast, h.device)}
    rows = {}
    for label, (fn, device) in casts.items():
        for dtype in FORMATS:
            got = fn(torch.tensor([2 * fp8_max(dtype), math.inf], device=device), dtype).float().tolist()
            words = {fp8_max(dtype): "the largest number", math.inf: "an infinity"}
            rows.setdefault(label, {})[short(dtype)] = [words.get(value, "NaN") for value in got]
    return rows


def answer(h: Harness, formats: dict[str, dict], rules: dict[str, dict[str, list]]) -> str:
    ranges = "; ".join(
        f"{name} has {cells['numbers']} numbers up to {cells['largest']:g}, {cells['apart at 1']:g} apart at 1"
        for name, cells in formats.items()
    )
    ours = " and ".join(dict.fromkeys(rule for rule, _ in rules["triton"].values()))
    on_device = f"torch on {h.device.type}"
    theirs = ", ".join(f"{rule} in {name}" for name, (rule, _) in rules[on_device].items())
    return f"{ranges}. Beyond that Triton's cast gives {ours}; {on_device} gives {theirs}."


def demo(h: Harness) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=h.device)
    readers = {"torch": lambda c, dtype: c.view(dtype).float(), "triton": lambda c, d: cast(c.view(d), torch.float32)}
    for dtype in FORMATS:
        for name, reader in readers.items():
            what = f"{name} reads the 256 codes of {short(dtype)}"
            h.check(reader, decode, codes, dtype, dtype=torch.float32, what=what)
        x, what = h.randn(3, 1365, scale=fp8_max(dtype) / 4), f"triton casts 3x1365 float32 to {short(dtype)}"
        h.check(cast, lambda x, d: clamp_cast(x, d).double(), x, dtype, dtype=dtype, terms=0, what=what)
    f32 = h.meta(1 << 20, dtype=torch.float32)
    h.codegen(cast, f32, E4M3, find=dict.fromkeys((89, 90, 100, 120), ("cvt f8",)))

    formats, rules = {short(dtype): properties(dtype) for dtype in FORMATS}, beyond_the_range(h)
    h.table("the formats", formats)
    h.table("what a cast makes of a number / an infinity beyond the range", rules)
    h.answer(lambda: answer(h, formats, rules), timed=False)


if __name__ == "__main__":
    run(demo)
