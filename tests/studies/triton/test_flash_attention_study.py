"""The study of flash attention: two programs share an SM, and where the operands of wgmma come from."""

from harness.codegen import compile_for

import pytest
import torch

from examples.triton.flash_attention import flash_attention
from studies.triton.flash_attention import left_operands, programs_per_sm


@pytest.mark.parametrize("D", [64, 128])
def test_two_programs_share_an_sm(D):
    x = torch.empty(4, 32, 4096, D, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(flash_attention, (x, x, x), sms=(90,))
    assert programs_per_sm(kernel) == 2
    places = left_operands(x, x, x)  # queries and weights from registers, or the weights alone
    assert sum(places.values()) == kernel.found["wgmma"]
    assert places["left in registers"]
    assert bool(places["left in memory"]) == (D == 128)
