"""vector_add: masks at every edge, extremes, bad input, the generated code."""

from harness.check import check
from harness.codegen import compile_for

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import interpreted
from examples.triton.vector_add import BLOCK, DTYPES, reference, vector_add

FLOATS = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_edge(h, dtype):
    for n in (0, 1, 2, 31, 997, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17):
        h.check(vector_add, reference, h.randn(n, dtype=dtype), h.randn(n, dtype=dtype), terms=0)


@given(n=st.integers(0, 5000), seed=st.integers(0, 99))
def test_any_size(n, seed):
    device, generator = "cpu" if interpreted() else "cuda", torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, generator=generator).to(device) for _ in range(2))
    check(vector_add, reference, x, y, what="vector_add", terms=0)


def test_shapes_are_kept(h):
    for shape in ((3, 5, 7), ()):
        x = torch.ones(shape, device=h.device)
        assert vector_add(x, x).shape == shape


def test_extremes_are_those_of_torch(h):
    inf, nan, big = float("inf"), float("nan"), 3e38
    x = torch.tensor([inf, inf, nan, big, -big, 1e-45, -0.0, 1e-38], device=h.device)
    y = torch.tensor([-inf, 1.0, 1.0, big, -big, 1e-45, -0.0, -1e-38], device=h.device)
    assert torch.equal(vector_add(x, y).nan_to_num(7), (x + y).nan_to_num(7))


def test_bad_input(h):
    x, square, meta = h.randn(8), h.randn(4, 4), torch.empty(8, device="meta")
    for args, error, message in [
        (([1.0], x), TypeError, r"expected a torch\.Tensor, got list"),
        ((x.int(), x.int()), TypeError, r"torch\.int32 and torch\.int32"),
        ((x.double(), x.double()), TypeError, r"torch\.float64"),
        ((x, x.half()), TypeError, r"torch\.float32 and torch\.float16"),
        ((square.to_sparse(), square), TypeError, r"sparse.*to_dense"),
        ((x, x[:7]), ValueError, r"shapes \(8,\) and \(7,\)"),
        ((x, x[:1]), ValueError, "expand or slice"),
        ((h.randn(16)[::2], x), ValueError, r"strides \(2,\).*contiguous"),
        ((x, h.randn(16)[::2]), ValueError, r"strides .*\(2,\).*contiguous"),
        ((square.t(), square.t()), ValueError, "contiguous"),
        ((torch._neg_view(x), x), ValueError, "lazy negation.*resolve_neg"),
        ((torch.complex(x, x).conj().imag, x), ValueError, "lazy negation.*resolve_neg"),
        ((x, meta), ValueError, "move them to one device"),
        ((meta, meta), RuntimeError, "on meta"),
        ((x.clone().requires_grad_(), x), RuntimeError, "no backward"),
        *([((x.bfloat16(), x.bfloat16()), TypeError, "interpreter computes bfloat16 wrongly")] * interpreted()),
    ]:
        with pytest.raises(error, match=f"vector_add: .*{message}"):
            vector_add(*args)
    with torch.no_grad():
        assert torch.equal(vector_add(x.clone().requires_grad_(), x), x + x)


@pytest.mark.gpu
def test_tensors_on_the_cpu(h):
    with pytest.raises(RuntimeError, match="tensors are on cpu; move them to a CUDA device"):
        vector_add(torch.randn(4), torch.randn(4))


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(20)
    n = 2**31 + BLOCK + 7
    x, y = (torch.empty(n, dtype=torch.float16, device=h.device).normal_() for _ in range(2))
    assert torch.equal(vector_add(x, y), x + y)


@pytest.mark.parametrize(("sm", "dtype"), [(80, DTYPES[0]), (89, DTYPES[2]), (90, DTYPES[1]), (100, DTYPES[0])])
def test_one_128_bit_access_per_thread_and_tensor(sm, dtype):
    x = torch.empty(1 << 20, dtype=dtype, device="meta")
    (kernel,) = compile_for(vector_add, (x, x), sms=(sm,))
    assert (kernel.error, kernel.found, kernel.spills) == (None, {"ld.global.v4": 2, "st.global.v4": 1}, 0)
