"""The study of flash attention: two programs share an SM, and where the operands of wgmma come from."""

from harness.codegen import compile_for

import pytest
import torch

from examples.triton.flash_attention import flash_attention
from studies.triton.flash_attention import left_operands, programs_per_sm


@pytest.mark.parametrize(("D", "causal"), [(64, False), (64, True), (128, False), (128, True)])
def test_two_programs_share_an_sm(D, causal):
    x = torch.empty(4, 32, 4096, D, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(flash_attention, (x, x, x, causal), sms=(90,))
    assert programs_per_sm(kernel) == 2
    if not causal:  # queries and weights from registers, or the weights alone
        places = left_operands(x, x, x)
        assert sum(places.values()) == kernel.found["wgmma"]
        assert places["left in registers"]
        assert bool(places["left in memory"]) == (D == 128)


def test_a_ragged_end_and_float16_too():
    q, k = (torch.empty(4, h, s, 128, dtype=torch.float16, device="meta") for h, s in ((32, 4096), (8, 4001)))
    (kernel,) = compile_for(flash_attention, (q, k, k), sms=(90,))
    assert kernel.error is None
    assert kernel.found["wgmma"]
    assert kernel.spills <= 96
    assert programs_per_sm(kernel) == 2
