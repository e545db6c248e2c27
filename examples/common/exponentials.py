"""Maxima and exponentials of a slice of a row in few instructions a value, so that memory remains the bottleneck."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from examples.common.mailbox import unpack
from examples.common.rows import ASSEMBLY

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _larger(a, b, dtype: tl.constexpr):
    """The element-wise maximum of two registers that hold two 16-bit values each."""
    kind: tl.constexpr = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
    return tl.inline_asm_elementwise(
        "max." + kind + " $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def largest_of_vectors(packed, dtype: tl.constexpr):
    """The maximum of every 16 bytes of what mailbox.pack returned, as float32: n / 8 of n 16-bit values, else n / 4.

    16-bit values are compared in pairs, without widening them. NaN is ignored, as by tl.max; a vector of nothing but
    NaN gives NaN.
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
    """(e^(x - largest) * 2^rest, rest) for float32 x that was loaded as `dtype`: an FMA and the hardware's 2^x a value.

    The FMA subtracts largest * log2(e), which has been rounded, from the exact x * log2(e). `rest`, of largest's shape,
    is that rounding error: at most 1/4 while |largest| < 2^22. The caller multiplies by 2^-rest, once for each largest.
    From 2^22 on the error would be too large, but there a bfloat16 that is not equal to `largest` is at least 2^14
    below it (float16 ends at 65504). So e^(x - largest) is 1 or 0, and 2^(x - largest) is the same, without a product
    to round. float32 is subtracted first, which takes one instruction more and leaves a rest of 0.
    """
    if dtype == tl.float32:
        return tl.exp2((x - largest) * LOG2_E), largest * 0.0
    else:
        factor = tl.where(tl.abs(largest) < 4194304.0, LOG2_E, 1.0)
        base = largest * factor
        powers = tl.fma(x, tl.broadcast_to(factor, x.shape), tl.broadcast_to(-base, x.shape))
        return tl.exp2(powers), tl.fma(largest, factor, -base)
