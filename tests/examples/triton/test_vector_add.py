"""vector_add: masks at every edge, extremes, bad input, the generated code."""

import pytest
import torch

from examples.common.device import interpreted
from examples.triton.vector_add import BLOCK, reference, vector_add
from tests.examples.triton.helpers import INF, NAN, code, meta, refused

FLOATS = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_edge(h, dtype):
    for n in (0, 1, 2, 31, 997, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17):
        h.check(vector_add, reference, h.randn(n, dtype=dtype), h.randn(n, dtype=dtype), terms=0)
    for shape in ((3, 5, 7), ()):
        x = torch.ones(shape, device=h.device)
        assert vector_add(x, x).shape == shape


def test_the_same_tensors_again(h):
    x, y = h.randn(997), h.randn(997)
    for _ in range(2):
        h.check(vector_add, reference, x, y, terms=0)


def test_extremes_are_those_of_torch(h):
    big = 3e38
    x = torch.tensor([INF, INF, NAN, big, -big, 1e-45, -0.0, 1e-38], device=h.device)
    y = torch.tensor([-INF, 1.0, 1.0, big, -big, 1e-45, -0.0, -1e-38], device=h.device)
    assert torch.equal(vector_add(x, y).nan_to_num(7), (x + y).nan_to_num(7))


def test_bad_input(h):
    x = h.randn(8)
    refused(vector_add, ValueError, "expand or slice", x, x[:1])
    if interpreted():
        refused(vector_add, TypeError, "interpreter computes bfloat16 wrongly", x.bfloat16(), x.bfloat16())
    with torch.no_grad():
        assert torch.equal(vector_add(x.clone().requires_grad_(), x), x + x)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(20)
    x, y = (torch.empty(2**31 + BLOCK + 7, dtype=torch.float16, device=h.device).normal_() for _ in range(2))
    assert torch.equal(vector_add(x, y), x + y)


def test_one_128_bit_access_per_thread_and_tensor():
    x = meta(1 << 20, dtype=torch.float16)
    assert code(90, "", vector_add, x, x).found == {"ld.global.v4": 2, "st.global.v4": 1}
