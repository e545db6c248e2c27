"""warp_specialized_matmul's study: the chapter's loop."""

import pytest
import torch

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
