"""exponentials: right to float32's rounding for inputs of any size, compiled where there is a GPU."""

import pytest
import torch
import triton
import triton.language as tl

from examples.common.exponentials import exponentials, largest_of_vectors
from examples.common.mailbox import pack, unpack
from examples.common.rows import DTYPES
from tests.examples.triton.helpers import FUSED


@triton.jit
def kernel(x_ptr, largest_ptr, y_ptr, N: tl.constexpr, WIDTH: tl.constexpr):
    lane = tl.arange(0, N)
    packed = pack(tl.load(x_ptr + lane))
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    largest = largest_of_vectors(packed, dtype)
    tl.store(largest_ptr + tl.arange(0, N // WIDTH), largest)
    x = tl.reshape(unpack(packed, dtype), (N // WIDTH, WIDTH))
    terms, rest = exponentials(x, tl.reshape(largest, (N // WIDTH, 1)), dtype)
    tl.store(y_ptr + lane, tl.reshape(terms * tl.exp2(-rest), (N,)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centre", [0.0, 300.0, -300.0, 5e4, 3e6, 5e6, -1e30, 1e30])
def test_exponentials(dtype, centre):
    if abs(centre) > torch.finfo(dtype).max:
        pytest.skip(f"not in {dtype}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, rows = 16 // dtype.itemsize, 64
    x = centre + 4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[1::2, 1:] *= 1 - 2.0**-6 * torch.sign(x[1::2, 1:])  # in odd rows all but the first value are 1/64 lower
    x[3, 2], x[4] = -torch.inf, centre
    x = x.to(device, dtype)
    x[5] = torch.nextafter(x[5, 0], x.new_tensor(-torch.inf))
    x[5, 0] = torch.nextafter(x[5, 0], x.new_tensor(torch.inf))
    largest, y = torch.empty(rows, device=device), torch.empty(rows, width, device=device)
    kernel[(1,)](x, largest, y, N=x.numel(), WIDTH=width, num_warps=1)
    assert torch.equal(largest, x.amax(1).float())
    exact = torch.exp(x.double() - x.amax(1, keepdim=True).double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-5 if FUSED else 0.01, atol=1e-37)
