"""The mended conversions of Triton's interpreter: every code, every rounding, against torch."""

import pytest
import torch
import triton
import triton.language as tl

from examples.common.device import require_triton_device

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def cast_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < n)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    require_triton_device("cast", x.new_empty(0, dtype=torch.float32))  # bfloat16 is only converted here
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    cast_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    got, want = got.double(), want.double()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("source", [*FP8, torch.bfloat16])
def test_every_code_is_read(h, source):
    integer = {1: torch.int8, 2: torch.int16}[source.itemsize]
    codes = torch.arange(2 ** (8 * source.itemsize), device=h.device).to(integer).view(source)
    for target in (torch.float16, torch.float32) if source in FP8 else (torch.float32,):
        same(cast(codes, target), codes.to(target))


@pytest.mark.parametrize("dtype", FP8)
def test_rounding_to_nearest_even_and_saturation(h, dtype):
    """Every number of the format, every middle of two, a little beside each, and what is beyond."""
    info = torch.finfo(dtype)
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = codes[codes.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)])
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1e6, -1e6, info.max * 1.01, 1e-30, float("nan")])]).to(h.device)
    same(cast(x, dtype), x.clamp(-info.max, info.max).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(h, dtype):
    x = torch.cat([h.randn(5000, scale=2.0**k) for k in (-30, -14, 0, 9)])
    same(cast(x, dtype), x.to(dtype))
