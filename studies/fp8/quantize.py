"""Study of quantize: zeros, extremes, infinities and NaN in every recipe, bit for bit, and its code.

1. Every bit: of ragged sizes, and of rows of zeros, of numbers below what a scale resolves, near the end of float16,
   infinite and NaN.
2. The code of every recipe: accesses of 16 bytes, and a cast that saturates.
"""

from __future__ import annotations

from harness import Harness

import torch

from examples.common.fp8 import E4M3, FORMATS, quantize_reference
from examples.fp8.quantize import RECIPES, block_of, quantize


def bits(q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of a quantizer's results as int32, scales as a matrix; -1 for every NaN, whose bits are not defined."""
    scale = scale.reshape(scale.shape or (1, 1)).contiguous()
    codes = q.view(torch.uint8).int().masked_fill_(q.float().isnan(), -1)
    return codes, scale.view(torch.int32).masked_fill(scale.isnan(), -1)


def check_bits(h: Harness, x: torch.Tensor, recipe: str, dtype: torch.dtype = E4M3, what: str = "random") -> None:
    """quantize() against quantize_reference, bit for bit; on sm_89, which casts by way of float16, the scales."""
    only = int(h.machine.sm == 89)
    h.check(
        lambda x: bits(*quantize(x, recipe, dtype))[only:],
        lambda x: tuple(t.double() for t in bits(*quantize_reference(x, block_of(x, recipe), dtype))[only:]),
        x, dtype=torch.int32, what=f"{what} {x.shape[0]}x{x.shape[1]} {dtype} per {recipe}, bit for bit",
    )  # fmt: skip


def with_extremes(x: torch.Tensor) -> torch.Tensor:
    """x with a row each of zeros, of numbers below what a scale resolves and near the end of float16, inf and NaN."""
    x = x.clone()
    x[1::7] = 0.0
    x[2::7] *= 1e-7
    x[3::7] *= 1e4
    x[4::14, 3::300] = float("inf")
    x[11::14, 5::300] = float("nan")
    return x


def study(h: Harness) -> None:
    x = with_extremes(h.randn(15, 1024, dtype=h.half))[:, :901]  # a row stride above the columns
    size = h.pick(interpreted=256, quick=4096, full=16384)
    for recipe in RECIPES:
        for rows, cols in [(1, 1), (17, 781), (131, 257), (2, 9001), (size, size)]:
            check_bits(h, h.randn(rows, cols, dtype=h.half), recipe)
        for dtype in FORMATS:
            check_bits(h, x, recipe, dtype, "zeros, extremes, infinities and NaN")
    wide = ("ld.global.v4", "st.global.v4")
    for quantizer in RECIPES.values():
        h.codegen(quantizer, h.meta(16384, 16384), find={89: wide, 90: (*wide, "cvt f8"), 100: (*wide, "cvt f8")})
