"""vector_add: masks at every edge, extremes, bad input, the generated code."""

from harness.codegen import compile_for
from harness.hardware import interpreted

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.triton.vector_add import BLOCK, DTYPES, reference, vector_add

SIZES = (0, 1, 2, 31, 997, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17)  # nothing, one, a prime, around one block


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sizes(h, n, dtype):
    h.check(vector_add, reference, h.randn(n, dtype=dtype), h.randn(n, dtype=dtype), terms=0)


@given(n=st.integers(0, 5000), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_any_size(n, dtype):
    from harness.catalog import Needs
    from harness.session import Harness

    test_sizes(Harness("test", Needs.parse("triton")), n, dtype)


def test_shapes_are_kept(h):
    x = h.randn(3, 5, 7)
    assert vector_add(x, x).shape == (3, 5, 7)
    scalar = h.randn(1).reshape(())
    assert vector_add(scalar, scalar).shape == ()


def test_extremes_are_those_of_torch(h):
    inf, nan, big = float("inf"), float("nan"), 3e38
    x = torch.tensor([inf, inf, nan, big, -big, 1e-45, -0.0, 1e-38], device=h.device)
    y = torch.tensor([-inf, 1.0, 1.0, big, -big, 1e-45, -0.0, -1e-38], device=h.device)
    assert torch.equal(vector_add(x, y).nan_to_num(7), (x + y).nan_to_num(7))


@pytest.mark.gpu
def test_bfloat16(h):
    h.check(vector_add, reference, h.randn(5001, dtype=torch.bfloat16), h.randn(5001, dtype=torch.bfloat16), terms=0)


def _bad():
    x = torch.randn(8)
    return {
        "no tensor": (([1.0], x), TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((x.int(), x.int()), TypeError, r"dtypes torch\.int32 and torch\.int32; both must be"),
        "float64": ((x.double(), x.double()), TypeError, r"torch\.float64"),
        "two dtypes": ((x, x.half()), TypeError, r"torch\.float32 and torch\.float16"),
        "two sizes": ((x, x[:7]), ValueError, r"shapes \(8,\) and \(7,\) differ"),
        "broadcasting": ((x, x[:1]), ValueError, "expand or slice one first"),
        "a strided vector": ((torch.randn(16)[::2], x), ValueError, r"strides \(2,\).*contiguous"),
        "a transposed matrix": ((torch.randn(4, 4).t(), torch.randn(4, 4).t()), ValueError, "contiguous"),
        "requires grad": ((x.clone().requires_grad_(), x), RuntimeError, "no backward"),
    }


@pytest.mark.parametrize("name", _bad())
def test_bad_input(h, name):
    args, error, message = _bad()[name]
    moved = [
        a.detach().to(h.device).requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args
    ]
    if name == "a strided vector":
        moved[0] = torch.randn(16, device=h.device)[::2]
    with pytest.raises(error, match=f"vector_add: .*{message}"):
        vector_add(*moved)


def test_memory_that_holds_other_numbers_than_it_shows_is_refused(h):
    x = h.randn(8)
    for view in (torch._neg_view(x), torch.complex(x, x).conj().imag):
        with pytest.raises(ValueError, match=r"vector_add: .*lazy negation.*resolve_neg"):
            vector_add(view, x)
    with pytest.raises(TypeError, match=r"vector_add: .*sparse.*to_dense"):
        vector_add(torch.eye(4, device=h.device).to_sparse(), x)


def test_grad_is_fine_where_it_is_off(h):
    x = h.randn(8).requires_grad_()
    with torch.no_grad():
        assert torch.equal(vector_add(x, x), x + x)


def test_the_interpreter_refuses_what_it_computes_wrongly(h):
    if not interpreted():
        pytest.skip("kernels are compiled here")
    x = h.randn(8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="interpreter computes bfloat16 wrongly"):
        vector_add(x, x)


@pytest.mark.gpu
def test_wrong_or_mixed_devices(h):
    with pytest.raises(RuntimeError, match="tensors are on cpu; move them to a CUDA device"):
        vector_add(torch.randn(4), torch.randn(4))
    with pytest.raises(ValueError, match="tensors are on cpu, cuda:0; move them to one device"):
        vector_add(torch.randn(4), h.randn(4))


def test_mixed_devices_without_a_gpu(h):
    with pytest.raises(ValueError, match="move them to one device"):
        vector_add(h.randn(4), torch.empty(4, device="meta"))
    with pytest.raises(RuntimeError, match="on meta"):
        vector_add(torch.empty(4, device="meta"), torch.empty(4, device="meta"))


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(20)
    n = 2**31 + BLOCK + 7
    x, y = (torch.empty(n, dtype=torch.float16, device=h.device).normal_() for _ in range(2))
    assert torch.equal(vector_add(x, y), x + y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_one_128_bit_access_per_thread_and_tensor(sm, dtype):
    x = torch.empty(1 << 20, dtype=dtype, device="meta")
    (kernel,) = compile_for(vector_add, (x, x), sms=(sm,))
    assert kernel.error is None
    assert kernel.found == {"ld.global.v4": 2, "st.global.v4": 1}
    assert kernel.spills == 0
