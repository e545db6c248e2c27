"""fused_gelu_quantize: read back within one rounding, exact bits where y is exact, saturation, bad input, code."""

from harness.catalog import Needs
from harness.codegen import compile_for
from harness.session import Harness

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from examples.common.fp8 import E4M3, E5M2, FLOOR, quantize_reference
from examples.common.quantize import GROUP, read_back, scale_and_inverse, scales_of
from examples.fp8.fused_gelu_quantize import (
    BUDGET,
    ROW_MAX,
    demo,
    fused_gelu_quantize,
    fused_gelu_quantize_static,
    reference,
)
from examples.fp8.fused_gelu_quantize_long_rows import PER_THREAD

MOST = torch.finfo(E4M3).max
PER = ["row", "group"]
FORMS = ["tanh", "none"]
SCALES = {"dtype": torch.float32, "terms": 0, "roundings": 64, "constant_ok": True}


def _hold(h, x, per, approximate):
    """y and scales against float64."""
    h.check(lambda x, a: read_back(*fused_gelu_quantize(x, per, a), per), reference, x, approximate, what=per, **BUDGET)
    h.check(
        lambda x, a: fused_gelu_quantize(x, per, a)[1], lambda x, a: scales_of(reference(x, a), per), x, approximate,
        what="scales", **SCALES,
    )  # fmt: skip


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize(
    ("rows", "cols"),
    [(3, 2), (1, 127), (5, 128), (33, 129), (2, 781), (3, 4096), (2, 4097), (1, 8192), (1, ROW_MAX + 1)],
)
def test_shapes(h, rows, cols, per, approximate):
    _hold(h, h.randn(rows, cols, dtype=torch.float16, scale=2.0), per, approximate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("approximate", FORMS)
def test_dtypes(h, dtype, approximate):
    for per in PER:
        _hold(h, h.randn(9, 1000, dtype=dtype, scale=2.0), per, approximate)


@given(
    rows=st.integers(1, 40), cols=st.integers(2, 1500), per=st.sampled_from(PER), approximate=st.sampled_from(FORMS),
    scale=st.sampled_from([1e-4, 0.1, 1.0, 30.0]),
)  # fmt: skip
def test_any_shape_and_size_of_values(rows, cols, per, approximate, scale):
    h = Harness("test", Needs.parse("triton"))
    x = h.randn(rows, cols, scale=scale)
    x[:, 0] = scale  # a row of negative values alone has an amax that only its tail decides: below
    _hold(h, x, per, approximate)


@pytest.mark.parametrize("approximate", FORMS)
def test_gelu_itself_to_single_precision(h, approximate):
    # One column: amax of each row is its |y|, so the scales are y, unrounded.
    x = torch.linspace(-6, 12, 5001, device=h.device)
    x = x[x != 0][:, None].contiguous()
    _, scale = fused_gelu_quantize(x, "row", approximate)
    want = reference(x, approximate).abs()
    assert ((scale.double() * MOST - want) / want).abs().max() < 1e-5


@pytest.mark.parametrize("approximate", FORMS)
def test_far_tails(h, approximate):
    x = torch.tensor([[-3e38, -1e30, -1e4, -40.0, -0.0, 0.0, 1e-30, 1e4, 1e30, 3e38]], device=h.device).t().contiguous()
    q, scale = fused_gelu_quantize(x, "row", approximate)
    got = q.double() * scale.double()
    want = torch.where(x > 1, x, 0.0).double()
    assert got.isfinite().all()
    assert ((got - want).abs() <= 1e-6 * want.abs() + 2 * FLOOR).all()


@pytest.mark.parametrize("per", PER)
def test_padded_rows(h, per):
    padded = h.randn(7, 317, dtype=torch.float16)[:, :300]
    for got, want in zip(fused_gelu_quantize(padded, per), fused_gelu_quantize(padded.contiguous(), per), strict=True):
        assert torch.equal(got.float(), want.float())


def _exact(h, rows, cols):
    """Inputs that GELU keeps (above 6) or makes zero (below -30), in float32 too, and that result."""
    x = h.randn(rows, cols, dtype=torch.float16).abs() + 6
    x = torch.where(h.randn(rows, cols) > 0, x, -5 * x)
    return x, torch.where(x > 0, x, 0.0).float()


def _same_codes(h, q, want):
    """Hold to the bit codes of results without a sign, where -0 is 0.

    On sm_89 Triton casts by way of float16: next to a tie the code may be the other neighbour.
    """
    codes, wanted = (each.view(torch.uint8).int() & 0x7F for each in (q, want))
    assert (q.float() >= 0).all()
    assert (codes - wanted).abs().max() <= (h.machine.sm == 89)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("cols", [1, 300, 8192, ROW_MAX + 1])
def test_the_very_bits_of_the_reference_quantizer(h, cols, per, dtype, approximate):
    x, y = _exact(h, 3, cols)
    q, scale = fused_gelu_quantize(x, per, approximate, dtype)
    want_q, want_scale = quantize_reference(y, (1, cols if per == "row" else GROUP), dtype)
    assert q.dtype is dtype
    assert torch.equal(scale, want_scale)
    _same_codes(h, q, want_q)


@triton.jit
def _quotients(amax_ptr, scale_ptr, inverse_ptr, MOST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale, inverse = scale_and_inverse(tl.load(amax_ptr + at), MOST, INFINITE=True)
    tl.store(scale_ptr + at, scale)
    tl.store(inverse_ptr + at, inverse)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_and_inverses_are_rounded_once(h, dtype):
    most = torch.finfo(dtype).max
    mantissas = torch.arange(2**23, dtype=torch.int32, device=h.device)
    for exponent in (27, 28, 64, 126, 127, 128, 200, 252, 253, 254):  # as float32 stores them; 27 is the floor's
        amax = (mantissas + (exponent << 23)).view(torch.float32)
        scale, inverse = torch.empty_like(amax), torch.empty_like(amax)
        _quotients[(amax.numel() // 1024,)](amax, scale, inverse, most, 1024)
        assert torch.equal(scale, (amax.double() / most).float())
        assert torch.equal(inverse, (most / amax.double()).float())


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("cols", [1, 300, 8192])
def test_a_given_scale_saturates_and_amax_tells(h, cols, approximate):
    x, y = _exact(h, 9, cols)
    for share in (2.0, 1.0, 0.25):
        scale = (share * y.max() / MOST).reshape(1)
        q, amax = fused_gelu_quantize_static(x, scale, approximate)
        want = (y * (1.0 / scale)).clamp(max=MOST).to(E4M3)
        _same_codes(h, q, want)
        assert amax.max() == y.max()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_shapes_of_a_given_scale(h, shape):
    x = h.randn(3, 300)
    q, _ = fused_gelu_quantize_static(x, torch.full(shape, 0.01, device=h.device))
    assert torch.equal(q.float(), fused_gelu_quantize_static(x, torch.full((1,), 0.01, device=h.device))[0].float())


def test_layout_of_scales(h):
    x = h.randn(5, 300)
    q, scale = fused_gelu_quantize(x, "row")
    assert (q.shape, q.is_contiguous(), scale.shape, scale.dtype) == (x.shape, True, (5, 1), torch.float32)
    _, scale = fused_gelu_quantize(x)
    assert (scale.shape, scale.stride()) == ((5, 3), (1, 5))


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("cols", [300, ROW_MAX + 1])
def test_zeros_stay_zeros(h, cols, per):
    q, scale = fused_gelu_quantize(torch.zeros(2, cols, device=h.device), per)
    assert not q.float().any()
    assert torch.equal(scale, torch.full_like(scale, FLOOR) / MOST)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("approximate", FORMS)
def test_what_is_not_finite_is_seen_in_its_group_and_in_no_other(h, approximate, value):
    x = h.randn(4, 300)
    x[2, 130] = value
    got = read_back(*fused_gelu_quantize(x, "group", approximate), "group")
    assert got[2, 128:256].isnan().all()
    got[2, 128:256] = 0
    assert got.isfinite().all()
    got = read_back(*fused_gelu_quantize(x, "row", approximate), "row")
    assert got[2].isnan().all()
    assert got[[0, 1, 3]].isfinite().all()
    _, amax = fused_gelu_quantize_static(x, torch.ones(1, device=h.device), approximate)
    assert not amax.isfinite().all()


@pytest.mark.parametrize("approximate", FORMS)
def test_nan_under_a_given_scale_stays_nan(h, approximate):
    x = h.randn(4, 300)
    x[2, 130] = float("nan")
    q, _ = fused_gelu_quantize_static(x, torch.ones(1, device=h.device), approximate)
    assert q.float().isnan().sum() == 1
    assert q[2, 130].float().isnan()


def test_no_rows(h):
    q, scale = fused_gelu_quantize(h.randn(0, 300))
    assert (q.shape, q.dtype, scale.shape) == ((0, 300), E4M3, (0, 3))
    assert fused_gelu_quantize(h.randn(0, 300), "row")[1].shape == (0, 1)
    assert fused_gelu_quantize_static(h.randn(0, 300), torch.ones(1, device=h.device))[1].numel() == 0


def _bad(device):
    x = torch.randn(4, 8, device=device)
    return {
        "no tensor": (([1.0],), {}, TypeError, r"expected a torch\.Tensor, got list"),
        "integers": ((x.int(),), {}, TypeError, r"dtype torch\.int32"),
        "a vector": ((x[0],), {}, ValueError, r"shape \(8,\); need \[n_rows, n_cols\]"),
        "no columns": ((x[:, :0],), {}, ValueError, r"shape \(4, 0\) has no columns"),
        "columns apart": ((x.t().contiguous().t(),), {}, ValueError, r"strides \(1, 4\).*contiguous"),
        "an unknown form": ((x,), {"approximate": "sigmoid"}, ValueError, "approximate 'sigmoid' is not one of"),
        "a wrong FP8": ((x,), {"dtype": torch.float8_e5m2fnuz}, TypeError, "fnuz formats are AMD's"),
        "no FP8": ((x,), {"dtype": torch.float16}, TypeError, r"dtype is torch\.float16"),
        "no dtype": ((x,), {"dtype": "fp8"}, TypeError, "dtype is fp8"),
        "requires grad": ((x.clone().requires_grad_(),), {}, RuntimeError, "no backward"),
        "a device without kernels": ((x.to("meta"),), {}, RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, options, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"fused_gelu_quantize: .*{message}"):
        fused_gelu_quantize(*args, **options)
    with pytest.raises(error, match=f"fused_gelu_quantize_static: .*{message}"):
        fused_gelu_quantize_static(*args, torch.ones(1, device=h.device), **options)


def test_an_unknown_recipe(h):
    with pytest.raises(ValueError, match=r"fused_gelu_quantize: per is 'tensor'.*call fused_gelu_quantize_static"):
        fused_gelu_quantize(h.randn(2, 8), "tensor")


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (0.1, TypeError, "scale is float; pass a float32 tensor"),
        (torch.ones(1).half(), TypeError, r"scale is torch\.float16"),
        (torch.ones(2), ValueError, r"scale has shape \[2\]; need \[1\]"),
        (torch.zeros(1), ValueError, "1 of 1 values that are not positive and finite"),
        (-torch.ones(1), ValueError, "not positive and finite"),
        (torch.full((1,), float("nan")), ValueError, "not positive and finite"),
        (torch.full((1,), float("inf")), ValueError, "not positive and finite"),
        (torch.ones(1, device="meta"), ValueError, "scale is on meta"),
    ],
)
def test_bad_scales(h, scale, error, message):
    scale = scale.to(h.device) if isinstance(scale, torch.Tensor) and scale.device.type != "meta" else scale
    with pytest.raises(error, match=f"fused_gelu_quantize_static: .*{message}"):
        fused_gelu_quantize_static(h.randn(2, 8), scale)


def test_values_of_scales_are_left_alone_on_request(h):
    _, amax = fused_gelu_quantize_static(h.randn(2, 8), torch.full((1,), -1.0, device=h.device), check_scales=False)
    assert amax.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("cols", [1024, 5120, 8192, ROW_MAX, 28672])
def test_full_size_rows_in_bfloat16(h, cols, approximate):
    for per in PER:
        _hold(h, h.randn(1000, cols, dtype=torch.bfloat16, scale=2.0), per, approximate)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(24)
    x = torch.empty(2**18 + 3, 8192, dtype=torch.bfloat16, device=h.device).normal_()
    for per in PER:
        q, scale = fused_gelu_quantize(x, per)
        few, few_scales = fused_gelu_quantize(x[-5:], per)
        assert torch.equal(q[-5:].float(), few.float())
        assert torch.equal(scale[-5:], few_scales)


@pytest.mark.parametrize("sm", [89, 90, 100, 120])
@pytest.mark.parametrize("options", [{"per": "row"}, {"per": "group"}, {"approximate": "none"}])
def test_accesses_of_16_bytes_without_spills(sm, options):
    x = torch.empty(16384, 8192, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(fused_gelu_quantize, (x,), options, sms=(sm,))
    assert kernel.error is None
    assert (kernel.found["ld.global.v4"], kernel.found["st.global.v4"]) == (PER_THREAD // 8, PER_THREAD // 16)
    assert kernel.spills == 0


@pytest.mark.parametrize("cols", [1, 1024, 14336, ROW_MAX, 28672])
@pytest.mark.parametrize("per", PER)
def test_every_length_compiles_without_spills(cols, per):
    for dtype in (torch.float32, torch.float16):
        x = torch.empty(4096, cols, dtype=dtype, device="meta")
        (kernel,) = compile_for(fused_gelu_quantize, (x, per), {}, sms=(90,))
        assert (kernel.error, kernel.spills) == (None, 0)


def test_demo(h):
    demo(h)
    assert len(h.record.checks) == 12
    assert all(check["passed"] for check in h.record.checks)
    assert {kernel["sm"] for kernel in h.record.codegen} == {89, 90, 100, 120}
    assert len(h.record.tables) == 3
