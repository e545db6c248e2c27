"""debugging: the twins are right, the planted bug is one mask, and nothing is planted where a tool would report it."""

import inspect

from harness.check import CheckError, check

import pytest
import torch

from examples.common.device import interpreted
from examples.triton import debugging
from examples.triton.debugging import BLOCK, programs_in_reverse, reference, scale, scale_overrun, total
from tests.examples.triton.helpers import INF, NAN

FLOATS = [torch.float32, torch.float16] + ([] if interpreted() else [torch.bfloat16])


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_twins_are_right(h, dtype):
    """Nothing, one element, a prime, around one and two blocks, two dimensions; extremes."""
    for shape in [(0,), (1,), (997,), (BLOCK - 1,), (BLOCK,), (2 * BLOCK + 1,), (0, 5), (7, 311)]:
        x = h.randn(*shape, dtype=dtype)
        h.check(scale, reference, x, terms=0)
        # A GPU's square root of float32 is off by 1 unit in the last place at most.
        h.check(debugging.sqrt, lambda x: x.double().sqrt(), x.abs(), terms=0, roundings=int(not h.interpreted))
        whole = torch.arange(x.numel(), device=x.device) % 7 - 2  # sums of few bits are exact in any order
        assert total(whole.to(dtype)).item() == whole.sum().item()
    odd = torch.tensor([3e38, -3e38, 1e-30, INF, -INF, NAN, 0.0, -1.0, 2.0, 3.0], device=h.device)
    h.check(scale, reference, odd.to(dtype), terms=0)


def test_the_bug_is_one_mask(h):
    """The twins differ in their name and in the mask of the store alone; one value beyond the output is found."""
    with pytest.raises(CheckError, match="4 bytes outside its output"):
        check(scale_overrun, reference, h.randn(3 * BLOCK - 1), what="scale_overrun", terms=0)
    h.check(scale_overrun, reference, h.randn(2 * BLOCK), terms=0)
    kernels = (debugging.scale_kernel, debugging.scale_overrun_kernel)
    right, wrong = (inspect.getsource(kernel.fn).splitlines()[2:] for kernel in kernels)
    assert [a == b for a, b in zip(right, wrong, strict=True)] == [True, True, False]
    assert right[2].split(", mask=")[0] == wrong[2].split(", mask=")[0]


@pytest.mark.skipif(not interpreted(), reason="needs the interpreter")
def test_programs_in_reverse_are_the_same_programs():
    ones = torch.ones(3 * BLOCK)
    with programs_in_reverse():
        assert total(ones, racy=True).item() == BLOCK
    assert total(ones, racy=True).item() == 3 * BLOCK  # put back


def test_nothing_is_planted_under_a_sanitizer(h, monkeypatch):
    monkeypatch.setattr(h, "SANITIZED", True)
    monkeypatch.setattr(debugging, "scale_overrun_kernel", None)
    debugging.demo(h)
    h.finish()
    assert not h.record.facts
