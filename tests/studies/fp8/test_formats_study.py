"""The study of formats: casts held to the definition, and wrong ones found; all of them on any float32."""

import math

from harness.check import CheckError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.fp8 import E4M3, E5M2, FORMATS
from examples.fp8.formats import LAYOUTS, clamp_cast, numbers
from studies.fp8.formats import check_cast, codes_of, differing, encode, hard_cases


def test_numbers_stay_ties_go_to_even_codes_and_what_is_beyond_the_range_saturates():
    for dtype, sign in ((E4M3, 1), (E4M3, -1), (E5M2, 1), (E5M2, -1)):
        codes = torch.arange(len(numbers(dtype))) + (128 if sign < 0 else 0)
        assert torch.equal(encode(sign * numbers(dtype), dtype), codes)
    x = torch.tensor([1.0625, 1.1875, 2**-10, 3 * 2**-10, 464.1, 1e30, math.inf, -math.inf, math.nan])
    assert encode(x, E4M3).tolist() == [0x38, 0x3A, 0, 2, 0x7E, 0x7E, 0x7E, 0xFE, -1]


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40), dtype=st.sampled_from(FORMATS))
def test_casts_agree_with_the_definition_on_any_float32(values, dtype):
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(codes_of(clamp_cast(x, dtype)), encode(x, dtype))


def truncated(x, dtype):
    """Rounds towards zero, as clearing the bits that do not fit does."""
    kept = 2 ** (23 - LAYOUTS[dtype].mantissa_bits)
    return clamp_cast((x.view(torch.int32) // kept * kept).view(torch.float32), dtype)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_cast_that_rounds_wrongly_is_found(h, dtype):
    for wrong in (truncated, lambda x, dtype: clamp_cast(x.half().float(), dtype)):
        with pytest.raises(CheckError, match="numbers are rounded wrongly"):
            check_cast("a cast", wrong, hard_cases(dtype), dtype)
    for number in (1.0, torch.finfo(dtype).max, 2.0**-9, math.inf, -1.0):
        assert differing(torch.tensor(number).view(torch.int32).item() - 500, 1000, dtype, h.device) == 0
    # Near the tie above 1, float16 rounds to it what is more, and then the tie to even.
    tie = torch.tensor(1 + torch.finfo(dtype).eps / 2).view(torch.int32).item()
    assert differing(tie + 1, 100, dtype, h.device, torch.float16) == (0 if h.machine.sm == 89 else 100)
