"""formats: the definition held to torch and to known numbers; casts told right from wrong."""

import math

import pytest
import torch

from examples.common.fp8 import E4M3, E5M2, FORMATS
from examples.common.rows import DTYPES
from examples.fp8 import formats
from examples.fp8.formats import (
    BLOCK,
    cast,
    clamp_cast,
    decode,
    demo,
    properties,
    torch_cast,
)

every_format = pytest.mark.parametrize("dtype", FORMATS)
CPU = torch.device("cpu")


# --- the definition


@every_format
def test_the_definition_is_torchs(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(dtype).double()
    got = decode(codes, dtype)
    assert torch.equal(got.nan_to_num(1e9), want.nan_to_num(1e9))
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(torch.signbit(got[:1]), torch.tensor([False]))
    assert torch.signbit(got[128])  # -0


def test_known_codes():
    known = {
        E4M3: {0x00: 0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x40: 2.0, 0x7E: 448.0, 0xB8: -1.0},
        E5M2: {0x00: 0.0, 0x01: 2**-16, 0x03: 3 * 2**-16, 0x04: 2**-14, 0x3C: 1.0, 0x7B: 57344.0, 0x7C: math.inf},
    }
    for dtype, codes in known.items():
        for code, value in codes.items():
            assert decode(torch.tensor([code]), dtype).item() == value
    assert decode(torch.tensor([0x7F, 0xFF]), E4M3).isnan().all()
    assert decode(torch.tensor([0x7D, 0x7E, 0x7F, 0xFD]), E5M2).isnan().all()


def test_properties():
    assert properties(E4M3) == {
        "largest": 448.0, "apart at 1": 0.125, "smallest normal": "2^-6", "smallest": "2^-9", "numbers": 253,
        "infinities": 0, "NaN": 2,
        "dynamic range": 448 * 64,
    }  # fmt: skip
    found = properties(E5M2)
    assert (found["numbers"], found["infinities"], found["NaN"]) == (247, 2, 6)


def test_a_definition_that_is_not_torchs_is_found(monkeypatch):
    monkeypatch.setitem(formats.LAYOUTS, E4M3, formats.Layout(4, 3, 8, False))
    with pytest.raises(ValueError, match=r"e4m3fn: the definition says \(224\.0"):
        properties(E4M3)


# --- casts


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


def test_cast_keeps_the_shape(h):
    assert cast(h.randn(3, 5, 7), E4M3).shape == (3, 5, 7)
    assert cast(h.randn(1)[0], E5M2).shape == ()


def _bad(device):
    x = torch.randn(4, 8, device=device)
    return {
        "no tensor": (([1.0], E4M3), TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((x.int(), E4M3), TypeError, r"x is torch\.int32, which is not one of"),
        "to float64": ((x, torch.float64), TypeError, r"dtype is torch\.float64, which is not one of"),
        "to AMD's format": ((x, torch.float8_e4m3fnuz), TypeError, r"dtype is torch\.float8_e4m3fnuz"),
        "columns apart": ((x.t(), E4M3), ValueError, r"strides \(1, 8\) of shape \(8, 4\); call x\.contiguous\(\)"),
        "requires grad": ((x.clone().requires_grad_(), E4M3), RuntimeError, "no backward"),
        "a device without kernels": ((x.to("meta"), E4M3), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"cast: .*{message}"):
        cast(*args)


# --- the run


def test_demo(h):
    demo(h)
    facts = h.record.facts
    assert len(h.record.checks) == 6
    rules = facts["what a cast makes of a number / an infinity beyond the range"]
    both = {name: ["largest", "largest"] for name in ("e4m3fn", "e5m2")}
    assert rules["triton"] == rules["torch after clamp"] == both
    assert facts["the formats"]["e5m2"]["NaN"] == 6
    h.finish()
    assert h.record.answer.startswith("e4m3fn has 253 numbers up to 448, 0.125 apart at 1; e5m2 has 247 numbers up to")
    assert "Triton's cast gives the largest number; torch on" in h.record.answer


def test_demo_fails_where_tritons_cast_does_not_saturate(h, monkeypatch):
    monkeypatch.setattr(h, "check", lambda *args, **kwargs: None)
    monkeypatch.setattr(formats, "cast", lambda x, dtype: torch_cast(x, dtype))
    monkeypatch.setattr(h, "codegen", lambda *args, **kwargs: [])
    with pytest.raises(ValueError, match="triton's cast does not saturate"):
        demo(h)
