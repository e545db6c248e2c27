"""Maxima and exponentials of a row's slice in few instructions a value, so that memory stays what limits a kernel."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from examples.common.mailbox import unpack
from examples.common.rows import ASSEMBLY

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _larger(a, b, dtype: tl.constexpr):
    """The larger of each of the two 16-bit values in a register."""
    kind: tl.constexpr = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
    return tl.inline_asm_elementwise(
        "max." + kind + " $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def largest_of_vectors(packed, dtype: tl.constexpr):
    """The largest of each 16 bytes of what mailbox.pack returned, in float32: [n / 8] of n 16-bit values, or [n / 4].

    Two 16-bit values are compared at once, and need not be widened for it. NaN is left out, as tl.max does.
    """
    if dtype == tl.float32 or not ASSEMBLY:
        width: tl.constexpr = 4 if dtype == tl.float32 else 8
        return tl.max(tl.reshape(packed.to(tl.float32), (packed.shape[0] // width, width)), axis=1)
    else:
        first, second = tl.split(tl.reshape(packed, (packed.shape[0] // 2, 2)))
        pairs = _larger(first, second, dtype)
        first, second = tl.split(tl.reshape(pairs, (pairs.shape[0] // 2, 2)))
        low, high = tl.split(tl.reshape(unpack(_larger(first, second, dtype), dtype), (pairs.shape[0] // 2, 2)))
        return tl.maximum(low, high)


@triton.jit
def exponentials(x, largest, dtype: tl.constexpr):
    """(e^(x - largest) * 2^rest, rest) of x in float32 that came in `dtype`, by one FMA before the hardware's 2^x.

    The FMA rounds largest * log2(e), and not the product of x: `rest`, of largest's shape, is by how much, a quarter at
    most up to 2^22. Beyond that, 16-bit values that differ do so by 2^14 at least: e^(x - largest) is 1 or 0, as is
    2^(x - largest), which rounds nothing. float32 is subtracted first, an instruction more.
    """
    if dtype == tl.float32:
        return tl.exp2((x - largest) * LOG2_E), largest * 0.0
    else:
        factor = tl.where(tl.abs(largest) < 4194304.0, LOG2_E, 1.0)
        base = largest * factor
        powers = tl.fma(x, tl.broadcast_to(factor, x.shape), tl.broadcast_to(-base, x.shape))
        return tl.exp2(powers), tl.fma(largest, factor, -base)
