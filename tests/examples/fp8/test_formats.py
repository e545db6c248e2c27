"""formats: the definition held to torch and to known numbers; casts told right from wrong."""

import pytest
import torch

from examples.common.fp8 import E4M3, E5M2, FORMATS
from examples.common.rows import DTYPES
from examples.fp8.formats import BLOCK, cast, clamp_cast, decode, properties


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_definition_is_torchs(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    got, want = decode(codes, dtype), codes.view(dtype).double()
    assert torch.equal(got.nan_to_num(1e9), want.nan_to_num(1e9))
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.signbit(got[[0, 128]]).tolist() == [False, True]  # 0 and -0


def test_properties():
    assert properties(E4M3) == {
        "largest": 448.0, "apart at 1": 0.125, "smallest normal": "2^-6", "smallest": "2^-9", "numbers": 253,
        "infinities": 0, "NaN": 2, "dynamic range": 448 * 64,
    }  # fmt: skip
    found = properties(E5M2)
    assert (found["numbers"], found["infinities"], found["NaN"]) == (247, 2, 6)


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
    for args, error, message in [
        ((x, torch.float64), TypeError, r"dtype is torch\.float64, which is not one of"),
        ((x, torch.float8_e4m3fnuz), TypeError, r"dtype is torch\.float8_e4m3fnuz"),
        ((x[0].t(), E4M3), ValueError, r"strides \(1, 7\); call \.contiguous\(\)"),
    ]:
        with pytest.raises(error, match=f"cast: .*{message}"):
            cast(*args)
