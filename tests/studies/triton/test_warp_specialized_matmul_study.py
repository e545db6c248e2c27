"""warp_specialized_matmul's study: the chapter's loop."""

from harness.codegen import compile_for

import pytest
import torch
import triton

from examples.triton.warp_specialized_matmul import outcome
from studies.triton.warp_specialized_matmul import COPY_BLOCK, copy_specialized


def copied(x):
    try:
        return copy_specialized(x)
    except RuntimeError as error:
        if "PassManager" in str(error):
            pytest.skip("this GPU's compiler does not take the loop")
        raise


def test_copy(h):
    """Nothing, one element, a prime, around a block, more blocks than programs (16 in the interpreter), no vector."""
    for shape in [(0,), (1,), (997,), (COPY_BLOCK + 1,), (40 * COPY_BLOCK + 3,), (3, 5, 7), ()]:
        x = h.randn(*(shape or (1,)), dtype=h.half).reshape(shape)
        h.check(copied, torch.Tensor.double, x, terms=0, constant_ok=x.numel() < 2)
    bits = torch.arange(-(2**15), 2**15, device=h.device).to(torch.int16)  # NaN, infinities, -0.0, subnormals, the rest
    assert torch.equal(copied(bits.view(torch.float16)).view(torch.int16), bits)


@pytest.mark.gpu
def test_copy_near_and_beyond_what_an_int32_counts(h, gpu_gib):
    """Just below 2**31 elements the next start of a 32-bit loop would already be negative."""
    gpu_gib(20)
    x = torch.empty(2**31 + 5000, dtype=torch.bfloat16, device=h.device).normal_()
    for n in (2**31 - 1, 2**31 - COPY_BLOCK, x.numel()):
        assert torch.equal(copied(x[:n]), x[:n])


def test_an_elementwise_loop_is_never_specialized():
    (kernel,) = compile_for(copy_specialized, (torch.empty(1 << 20, device="meta", dtype=torch.bfloat16),), sms=(120,))
    ignored = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    assert outcome(kernel) == ("ignored, 4 warps" if ignored else "not supported")
