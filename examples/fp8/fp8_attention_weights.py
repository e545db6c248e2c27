"""Weights of attention in Gluon, from scores in registers to the left operand of an FP8 MMA, also in registers.

An SM of Hopper computes 16 exponentials a clock and 128 FMAs: at D = 64 the exponential of a score takes twice as long
as its FP8 MMAs. So a share of the columns takes a polynomial instead, as in FlashAttention-4: 2^x is 2^n 2^f with n the
integer next to x; 2^f is a polynomial of degree 2 for f in [-1/2, 1/2], and n is added to the exponent. It is off by
0.0018 of the weight at most, where rounding to e4m3 may take 0.06.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from examples.common.tiles import split_columns

P0, P1, P2 = tl.constexpr(1.00044314), tl.constexpr(0.70344801), tl.constexpr(0.23842894)
NEXT_INTEGER = tl.constexpr(1.5 * 2**23)  # so large that a sum with it is rounded to an integer, in its lowest bits


@triton.jit
def polynomial(x):
    """2^x for any x up to 127, in relative terms off by 0.0018 at most; 2^-126 for what is less, and NaN for NaN."""
    x = tl.maximum(x, -126.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = x + NEXT_INTEGER
    f = x - (shifted - NEXT_INTEGER)
    power = (f * P2 + P1) * f + P0
    bits = power.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@gluon.jit
def join_columns(left, right, like):
    """What split_columns() split, in the layout of `like`."""
    WIDTH: gl.constexpr = 2 * left.shape[1]
    x = gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], WIDTH])
    return gl.convert_layout(x, like.type.layout)


@gluon.jit
def exp2(x, EMULATED: gl.constexpr):
    """2^x; one in EMULATED columns by the polynomial, none for 0."""
    if EMULATED == 0:
        return gl.exp2(x)
    elif EMULATED == 1:
        return polynomial(x)
    else:
        left, right = split_columns(x)
        return join_columns(gl.exp2(left), exp2(right, EMULATED // 2), x)


@gluon.jit
def pack_weights(weights):
    """Four weights of a row as e4m3 in each int32, with the keys in V's order: no value moves from its thread.

    As tensors of bytes they would be taken apart where a loop carries them.
    """
    ROWS: gl.constexpr = weights.shape[0]
    GROUPS: gl.constexpr = weights.shape[1] // 16
    halves = weights.reshape([ROWS, GROUPS, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    even, odd = gl.split(halves)
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return gl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }""",
        "=r,f,f,f,f", [w0, w1, w2, w3], gl.int32, True, 1,
    )  # fmt: skip


@gluon.jit
def unpack_weights(packed, LAYOUT: gl.constexpr):
    """The weights as an operand. It takes no instruction: the operand's registers are the int32, of 4 bytes each."""
    ROWS: gl.constexpr = packed.shape[0]
    BLOCK_N: gl.constexpr = packed.shape[1] * 16
    twice = gl.join(packed, packed)
    whole = gl.convert_layout(gl.join(twice, twice).reshape([ROWS, BLOCK_N]), LAYOUT)
    p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [whole], gl.int8, True, 4)
    return p.to(gl.float8e4nv, bitcast=True)
