"""The checks of operands that wrappers share: what fits passes with its sizes, and layouts that do not fit are refused.

test_wrappers has tensors of another kind, dtype, rank or size, on every wrapper.
"""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import interpreted
from examples.common.operands import (
    _overlap,
    check_choice,
    check_elementwise,
    check_gemm,
    check_rows,
    check_tma_gemm,
    check_tma_out,
)

DTYPES = (torch.float32, torch.float16)
HALVES = (torch.float16, torch.bfloat16)


def test_a_choice_is_one_of_those_and_of_their_type():
    check_choice("probe", ("fast", 8, None), form="fast", size=8, other=None)
    for value in ("slow", 8.0, True, [8]):
        with pytest.raises(ValueError, match=r"probe: size .* is not one of \('fast', 8, 1\)"):
            check_choice("probe", ("fast", 8, 1), size=value)


def test_layouts_that_do_not_fit_are_refused_by_name(h):
    a, b, w = (h.randn(*shape, dtype=torch.float16) for shape in ((5, 16), (16, 24), (24, 20)))
    for operands, message in (
        ((a[:, :15], b[:15]), "K is 15 and N 24; .* pad both to multiples of 8"),
        ((w[:16, :5].t(), b), "a has"),
        ((a, w[:, :16].t()), r"b\.t\(\) has"),
        ((a, b[:, ::3]), "b has"),
        ((a, w[:16, :16]), r"b has .* strides \(20, 1\)"),
        ((a[:1].expand(5, 16), b), r"a has .* strides \(0, 1\)"),
        ((w.view(-1)[1:81].view(5, 16), b), "a has .* starts 2 bytes past"),
    ):
        with pytest.raises(ValueError, match=f"probe: .*{message}"):
            check_tma_gemm("probe", *operands, HALVES)
    for x, message in (
        (a[:, :0], "has no columns"),
        (b.t(), r"strides \(1, 24\)"),
        (a[:, :1].expand(5, 16), r"strides \(16, 0\)"),
    ):
        with pytest.raises(ValueError, match=f"probe: .*{message}"):
            check_rows("probe", x, DTYPES)
    with pytest.raises(ValueError, match=r"probe: .*call \.contiguous"):
        check_elementwise("probe", DTYPES, a, b[:, :5].t())


def test_sizes_of_what_fits(h):
    a, w = h.randn(5, 16, dtype=torch.float16), h.randn(24, 32, dtype=torch.float16)[:, :16]
    assert check_gemm("probe", a[:, :15], w.t()[:15], HALVES) == (5, 24, 15)
    assert check_gemm("probe", a, w.t().contiguous(), HALVES, tma=True) == (5, 24, 16)
    assert check_tma_gemm("probe", a, w.t(), HALVES) == (5, 24, 16, True)
    assert check_tma_gemm("probe", a, w.t().contiguous(), HALVES) == (5, 24, 16, False)
    with pytest.raises(ValueError, match="b has"):
        check_gemm("probe", a, w.t(), HALVES, tma=True)
    assert check_rows("probe", w, DTYPES) == (24, 16)
    assert check_rows("probe", w[:0], DTYPES) == (0, 16)
    check_elementwise("probe", DTYPES, a, a)


def test_bfloat16_is_refused_where_it_would_be_wrong(h):
    x = h.randn(5, 16, dtype=torch.bfloat16)
    refusal = pytest.raises(TypeError, match=r"probe: .*bfloat16") if interpreted() else contextlib.nullcontext()
    with refusal:
        check_gemm("probe", x, x.t(), HALVES)


def test_an_output_is_memory_of_its_own(h):
    flat = torch.zeros(400, dtype=torch.float16, device=h.device)
    a, b = flat[:64].view(4, 16), flat[64:192].view(16, 8)
    check_tma_out("probe", flat[200:232].view(4, 8), (4, 8), a=a, b=b)
    for out, message in (
        (flat[200:264].view(8, 8), r"out is .* \(8, 8\).*need .*\(4, 8\)"),
        (torch.zeros(4, 8, device=h.device), r"out is torch\.float32"),
        (flat[200:232].view(8, 4).t(), r"strides \(1, 4\)"),
        (flat[201:233].view(4, 8), "out has .* starts 2 bytes past"),
        (flat[56:88].view(4, 8), "out lies over a, .*its own"),
        (flat[184:216].view(4, 8), "out lies over b"),
    ):
        with pytest.raises(ValueError, match=f"probe: .*{message}"):
            check_tma_out("probe", out, (4, 8), a=a, b=b)


@given(st.integers(0, 30), st.integers(1, 6), st.integers(0, 30), st.integers(1, 6), st.sampled_from([1, 2]))
def test_overlap_is_of_bytes_from_the_first_to_the_last(first, size, second, other, step):
    flat = torch.zeros(64)
    x, y = flat[first : first + size], flat[second : second + step * other : step]
    last = second + step * (other - 1)
    assert _overlap(x, y) == _overlap(y, x) == (first <= last and second < first + size)
    assert not _overlap(x, y[:0])
    assert not _overlap(x, torch.zeros(64, device="meta"))
