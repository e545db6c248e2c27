"""Activations in float32: as torch has them, tails and extremes included."""

import pytest
import torch
import triton
import triton.language as tl

from examples.common.activations import ACTIVATIONS, activate, activation_reference, gelu_fitted
from examples.common.device import require_triton_device


@triton.jit
def activate_kernel(x_ptr, y_ptr, n, ACTIVATION: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    if ACTIVATION == "gelu fitted":  # noqa: SIM108  (Triton compiles one branch of an if alone)
        y = gelu_fitted(x)
    else:
        y = activate(x, ACTIVATION, FAST)
    tl.store(y_ptr + at, y, mask=at < n)


def activated(x, activation, fast=False):
    require_triton_device("activated", x)
    y = torch.empty_like(x)
    activate_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), activation, fast, 256)
    return y


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "swiglu", "gelu fitted"])
def test_an_activation_is_that_of_torch(h, activation):
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-20, -1e-20, 60.0, -60.0])]).to(h.device)
    same = {"swiglu": "silu", "gelu fitted": "gelu exact"}.get(activation, activation)
    want = activation_reference(x.double(), same)
    # Beside float32's own rounding, where the result is next to nothing what erf leaves of 1, times x.
    error = (activated(x, activation).double() - want).abs()
    assert (error <= 1e-5 * want.abs() + 1e-7 * x.abs()).all(), error.max()
    fast = (activated(x, activation, True).double() - want).abs()
    assert (fast <= 2.0**-11 * x.abs() + 1e-6).all(), fast.max()
    nan, inf = activated(torch.tensor([float("nan"), float("inf")], device=h.device), activation)
    assert nan.isnan()
    assert inf == float("inf") or activation == "gelu fitted"  # inf - inf * 0 there: NaN, which is seen too
