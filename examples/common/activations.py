"""Activations in float32 registers, for Triton and Gluon kernels alike, and their torch references.

An SM's special-function units make 16 results a clock, and the number it needs limits an epilogue: each of these takes
one or two, and as few other instructions as possible. NaN stays NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import interpreted

ACTIVATIONS = ("none", "silu", "gelu", "gelu exact")
ASSEMBLY = tl.constexpr(not interpreted())  # of which the interpreter has none


@triton.jit
def tanh_approx(x):
    """One special operation; the absolute error is at most 2**-11. The interpreter does not have it."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def silu(x, FAST: tl.constexpr = False):
    """x / (1 + exp(-x)). FAST: one special operation, absolute error up to 2**-12 |x|; else two."""
    if FAST and ASSEMBLY:
        half = 0.5 * x
        t = tanh_approx(half)
        return tl.fma(half, t, half)
    else:
        root = tl.rsqrt(1.0 + tl.exp2(-1.4426950409 * x))  # squared, it takes fewer instructions than a division
        return x * (root * root)


@triton.jit
def gelu_tanh(x, FAST: tl.constexpr = False):
    """0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3); FAST as in silu."""
    if FAST and ASSEMBLY:
        inner = x * (0.7978845608 + 0.0356774081 * (x * x))
        t = tanh_approx(inner)
        half = 0.5 * x
        return tl.fma(half, t, half)
    else:
        # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)), and exp2 wants -2 log2(e) u.
        root = tl.rsqrt(1.0 + tl.exp2(x * (-2.302208198 + -0.1029432397 * (x * x))))
        return x * (root * root)


@triton.jit
def gelu_erf(x):
    """The exact GELU, by erf."""
    half = 0.5 * x
    return half + half * tl.erf(0.7071067812 * x)


@triton.jit
def gelu_fitted(x):
    """The exact GELU to 1e-5 of its size, without erf's branches: two special operations and a polynomial.

    x Phi(x) is max(x, 0) - |x| Phi(-|x|), and Phi(-a) = exp(-a^2 / 2) t P(t) with t = 1 / (1 + 0.28 a); P is fitted to
    the least relative error (4e-6): small where Phi is, so the negative tail keeps its digits.
    """
    magnitude = tl.maximum(-x, tl.minimum(x, 16.0))  # of +inf too: Phi(-16) is 0 in float32, and inf * 0 would be NaN
    root = tl.rsqrt(1.0 + 0.28 * magnitude)
    t = root * root
    poly = 0.02495613 + t * (0.10543722 + t * -0.05022897)
    poly = 0.11170385 + t * (0.11174059 + t * (0.10193651 + t * (0.09445284 + t * poly)))
    tail = poly * t * tl.exp2(-0.7213475204 * (x * x))
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - magnitude * tail


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, FAST: tl.constexpr = False):
    """One of ACTIVATIONS, or "swiglu" for its gate, which is a SiLU."""
    if ACTIVATION == "silu" or ACTIVATION == "swiglu":
        return silu(x, FAST)
    elif ACTIVATION == "gelu":
        return gelu_tanh(x, FAST)
    elif ACTIVATION == "gelu exact":
        return gelu_erf(x)
    else:
        return x


def activation_reference(x: torch.Tensor, activation: str) -> torch.Tensor:
    """torch's, in the dtype of x."""
    if activation == "silu":
        return torch.nn.functional.silu(x)
    if activation == "none":
        return x
    return torch.nn.functional.gelu(x, approximate="none" if activation == "gelu exact" else "tanh")
