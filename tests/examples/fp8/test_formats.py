"""formats: the definition held to torch and to known numbers; casts told right from wrong."""

import pytest
import torch

from examples.common.fp8 import E4M3, E5M2, FORMATS
from examples.common.rows import DTYPES
from examples.fp8.formats import BLOCK, cast, clamp_cast, decode, properties
from tests.examples.fp8.helpers import refused


def test_the_definition_is_torchs_and_gives_known_numbers():
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in FORMATS:
        torch.testing.assert_close(decode(codes, dtype), codes.view(dtype).double(), rtol=0, atol=0, equal_nan=True)
    assert properties(E4M3) == {
        "largest": 448.0, "apart at 1": 0.125, "smallest normal": "2^-6", "smallest": "2^-9", "numbers": 253,
        "infinities": 0, "NaN": 2, "dynamic range": 448 * 64,
    }  # fmt: skip


@pytest.mark.parametrize("n", [0, 1, 31, BLOCK, BLOCK + 1])
def test_cast_between_all_dtypes(h, n):
    x = h.randn(n, scale=4.0)
    for source in (*DTYPES, *FORMATS):
        for target in (*DTYPES, *FORMATS):
            if h.interpreted and torch.bfloat16 in (source, target):
                continue
            given_x = x.to(source)
            want = given_x.float() if target not in FORMATS else clamp_cast(given_x.float(), target).float()
            got = cast(given_x, target)
            assert got.dtype == target
            assert torch.equal(got.float(), want.to(target).float())


def test_shapes_and_bad_input(h):
    x = h.randn(3, 5, 7)
    assert cast(x, E4M3).shape == (3, 5, 7)
    assert cast(x[0, 0, 0], E5M2).shape == ()
    refused([
        (cast, (x, torch.float64), TypeError, r"dtype is torch\.float64, which is not one of"),
        (cast, (x[0].t(), E4M3), ValueError, r"strides \(1, 7\); call \.contiguous\(\)"),
    ])  # fmt: skip
