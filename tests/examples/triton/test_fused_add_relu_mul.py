"""fused_add_relu_mul: edges, NaN as in torch, one rounding instead of three, bad input, the generated code."""

from harness.check import check
from harness.codegen import compile_for

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import interpreted
from examples.triton.fused_add_relu_mul import (
    BLOCK,
    DTYPES,
    EAGER_PASSES,
    FUSED_PASSES,
    eager,
    fused_add_relu_mul,
    reference,
)

BUDGET = {"terms": 0, "roundings": 2}  # an addition and a multiplication, and nothing summed
HALVES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_every_edge(h, dtype):
    for n in (0, 1, 2, 31, 997, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17):
        h.check(fused_add_relu_mul, reference, h.randn(n, dtype=dtype), h.randn(n, dtype=dtype), 1.5, **BUDGET)


@given(
    n=st.integers(0, 5000), scale=st.sampled_from([0.0, -2.0, 3, True]) | st.integers(-4000, 4000).map(lambda k: k / 40)
)
def test_any_size_and_scale(n, scale):
    device, generator = "cpu" if interpreted() else "cuda", torch.Generator().manual_seed(n)
    x, y = (torch.randn(n, generator=generator).to(device) for _ in range(2))
    check(fused_add_relu_mul, reference, x, y, scale, what="fused", **BUDGET)


def test_nan_and_infinities_pass_through_as_in_torch(h):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([nan, inf, -inf, inf, 1.0, -1.0, 0.0, -0.0], device=h.device)
    y = torch.tensor([1.0, 1.0, 1.0, -inf, nan, 0.5, 0.0, -0.0], device=h.device)
    got, want = fused_add_relu_mul(x, y, 2.0), eager(x, y, 2.0)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("dtype", HALVES)
def test_one_rounding_is_at_least_as_exact_as_three(h, dtype):
    x, y = h.randn(4000, dtype=dtype), h.randn(4000, dtype=dtype)
    want = reference(x, y, 1.1)
    fused, three = ((f(x, y, 1.1).double() - want).abs().mean() for f in (fused_add_relu_mul, eager))
    assert fused <= three


def test_the_ratio_the_lesson_derives():
    assert pytest.approx(7 / 3) == EAGER_PASSES / FUSED_PASSES


def test_bad_input(h):
    x, meta = h.randn(8), torch.empty(8, device="meta")
    for args, error, message in [
        (([1.0], x, 1.0), TypeError, r"expected a torch\.Tensor, got list"),
        ((x.int(), x.int(), 1.0), TypeError, r"torch\.int32"),
        ((x, x.half(), 1.0), TypeError, r"torch\.float32 and torch\.float16"),
        ((x, x, x[0]), TypeError, "scale is a Tensor; pass a Python number"),
        ((x, x, None), TypeError, "scale is a NoneType"),
        ((x, x[:7], 1.0), ValueError, r"shapes \(8,\) and \(7,\)"),
        ((h.randn(16)[::2], x, 1.0), ValueError, r"strides \(2,\).*contiguous"),
        ((x, meta, 1.0), ValueError, "move them to one device"),
        ((meta, meta, 1.0), RuntimeError, "on meta"),
        ((x.clone().requires_grad_(), x, 1.0), RuntimeError, "no backward"),
    ]:
        with pytest.raises(error, match=f"fused_add_relu_mul: .*{message}"):
            fused_add_relu_mul(*args)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(24)
    n = 2**31 + BLOCK + 7
    x, y = (torch.empty(n, dtype=torch.bfloat16, device=h.device).normal_() for _ in range(2))
    got = fused_add_relu_mul(x, y, 2.0)  # doubling is exact, so the one rounding is that of torch's first kernel
    assert torch.equal(got, eager(x, y, 2.0))


@pytest.mark.parametrize(("sm", "dtype"), [(80, DTYPES[0]), (90, DTYPES[1]), (100, DTYPES[2])])
def test_three_passes_of_128_bit_accesses(sm, dtype):
    x = torch.empty(1 << 20, dtype=dtype, device="meta")
    (kernel,) = compile_for(fused_add_relu_mul, (x, x, 2.0), sms=(sm,))
    assert (kernel.error, kernel.found, kernel.spills) == (None, {"ld.global.v4": 2, "st.global.v4": 1}, 0)
