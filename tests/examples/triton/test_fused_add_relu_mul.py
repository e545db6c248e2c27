"""fused_add_relu_mul: edges, NaN as in torch, one rounding instead of three, bad input."""

import pytest
import torch

from examples.triton.fused_add_relu_mul import BLOCK, eager, fused_add_relu_mul, reference
from tests.examples.triton.helpers import INF, NAN, refused

BUDGET = {"terms": 0, "roundings": 2}  # an addition and a multiplication, and nothing summed
HALVES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_every_edge(h, dtype):
    for i, n in enumerate((0, 1, 2, 31, 997, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17)):
        scale = (1.5, -2.0, 3, True)[i % 4]
        h.check(fused_add_relu_mul, reference, h.randn(n, dtype=dtype), h.randn(n, dtype=dtype), scale, **BUDGET)
    h.check(fused_add_relu_mul, reference, h.randn(50), h.randn(50), 0.0, constant_ok=True, **BUDGET)


def test_nan_and_infinities_pass_through_as_in_torch(h):
    x = torch.tensor([NAN, INF, -INF, INF, 1.0, -1.0, 0.0, -0.0], device=h.device)
    y = torch.tensor([1.0, 1.0, 1.0, -INF, NAN, 0.5, 0.0, -0.0], device=h.device)
    got, want = fused_add_relu_mul(x, y, 2.0), eager(x, y, 2.0)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("dtype", HALVES)
def test_one_rounding_is_at_least_as_exact_as_three(h, dtype):
    x, y = h.randn(4000, dtype=dtype), h.randn(4000, dtype=dtype)
    want = reference(x, y, 1.1)
    fused, three = ((f(x, y, 1.1).double() - want).abs().mean() for f in (fused_add_relu_mul, eager))
    assert fused <= three


def test_bad_input(h):
    x = h.randn(8)
    for scale in (x[0], None):
        refused(fused_add_relu_mul, TypeError, "scale is a .*; pass a Python number", x, x, scale)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(24)
    x, y = (torch.empty(2**31 + BLOCK + 7, dtype=torch.bfloat16, device=h.device).normal_() for _ in range(2))
    got = fused_add_relu_mul(x, y, 2.0)  # doubling is exact, so the one rounding is that of torch's first kernel
    assert torch.equal(got, eager(x, y, 2.0))
