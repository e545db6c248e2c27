"""The checks of operands that wrappers share: what fits passes with its sizes, what does not is refused by name."""

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


def zeros(*shape, dtype=torch.float16):
    return torch.zeros(*shape, dtype=dtype)


def test_a_choice_is_one_of_those_and_of_their_type():
    check_choice("probe", ("fast", 8, None), form="fast", size=8, other=None)
    for value in ("slow", 8.0, True, [8]):
        with pytest.raises(ValueError, match=r"probe: size .* is not one of \('fast', 8, 1\)"):
            check_choice("probe", ("fast", 8, 1), size=value)


A, B, FLAT = zeros(5, 16), zeros(16, 24), zeros(400)
REFUSED = [
    (check_gemm, (A, B.float()), TypeError, r"dtypes torch.float16 and torch.float32; both must be the same one of"),
    (check_gemm, (A.double(), B.double()), TypeError, "dtypes torch.float64"),
    (check_gemm, (A, A), ValueError, r"shapes \(5, 16\) and \(5, 16\); need \[M, K\] and \[K, N\]"),
    (check_gemm, (A[None], B[None]), ValueError, "shapes"),
    (check_gemm, ("a", B), TypeError, "expected a torch.Tensor, got str"),
    (check_tma_gemm, (A[:, :15], B[:15]), ValueError, "K is 15 and N 24; .* pad both to multiples of 8"),
    (check_tma_gemm, (zeros(16, 5).t(), B), ValueError, "a has"),
    (check_tma_gemm, (A, zeros(24, 20)[:, :16].t()), ValueError, r"b\.t\(\) has"),
    (check_tma_gemm, (A, zeros(16, 48)[:, ::2]), ValueError, "b has"),
    (check_tma_gemm, (A, zeros(16, 28)[:, :24]), ValueError, r"b has .* strides \(28, 1\)"),
    (check_tma_gemm, (A[:1].expand(5, 16), B), ValueError, r"a has .* strides \(0, 1\)"),
    (check_tma_gemm, (FLAT[1:81].view(5, 16), B), ValueError, "a has .* starts 2 bytes past"),
    (check_rows, (A.double(),), TypeError, "dtype torch.float64 is not one of"),
    (check_rows, (A[0],), ValueError, r"shape \(16,\); need \[n_rows, n_cols\]"),
    (check_rows, (A[:, :0],), ValueError, "has no columns"),
    (check_rows, (B.t(),), ValueError, r"strides \(1, 24\)"),
    (check_rows, (A[:, :1].expand(5, 16),), ValueError, r"strides \(16, 0\)"),
    (check_elementwise, (A.float(), A), TypeError, "dtype torch.float32 and torch.float16"),
    (check_elementwise, (A, B), ValueError, "shapes .* differ"),
    (check_elementwise, (A, A[:1]), ValueError, "shapes .* differ"),
    (check_elementwise, (A, zeros(16, 5).t()), ValueError, "call .contiguous"),
    (check_rows, (A.to_sparse(),), TypeError, "layout torch.sparse_coo"),
    (check_rows, (torch._neg_view(A),), ValueError, "lazy negation"),
    (check_elementwise, (A, A.to("meta")), ValueError, "tensors are on cpu, meta; move them to one device"),
    (check_rows, (zeros(5, 16).requires_grad_(),), RuntimeError, "requires grad and this kernel has no backward"),
    (check_rows, (A.to("meta"),), RuntimeError, "meta"),
]


@pytest.mark.parametrize(("check", "operands", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(h, check, operands, error, message):
    if not h.interpreted and error is not TypeError and "meta" not in message:
        operands = tuple(x.to(h.device) if isinstance(x, torch.Tensor) else x for x in operands)
    args = (DTYPES, *operands) if check is check_elementwise else (*operands, DTYPES if check is check_rows else HALVES)
    with pytest.raises(error, match=f"probe: .*{message}"):
        check("probe", *args)


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
    if not interpreted():
        return check_gemm("probe", x, x.t(), HALVES)
    with pytest.raises(TypeError, match=r"probe: .*bfloat16"):
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
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor, got int"):
        check_tma_out("probe", 3, (4, 8), a=a, b=b)


@given(st.integers(0, 30), st.integers(1, 6), st.integers(0, 30), st.integers(1, 6), st.sampled_from([1, 2]))
def test_overlap_is_of_bytes_from_the_first_to_the_last(first, size, second, other, step):
    flat = zeros(64)
    x, y = flat[first : first + size], flat[second : second + step * other : step]
    last = second + step * (other - 1)
    assert _overlap(x, y) == _overlap(y, x) == (first <= last and second < first + size)
    assert not _overlap(x, y[:0])
    assert not _overlap(x, torch.zeros(64, device="meta"))
