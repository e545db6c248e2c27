"""fused_layer_norm_quantize: read back within one rounding, exact bits where y is exact, edges, bad input, code."""

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
from examples.fp8 import fused_layer_norm_quantize as lesson
from examples.fp8.fused_layer_norm_quantize import (
    BUDGET,
    HELD,
    HELD_LONG,
    LONG,
    ROWS_MAX,
    demo,
    fused_layer_norm_quantize,
    fused_rms_norm_quantize,
    reference,
)
from studies.fp8.fused_layer_norm_quantize import rms_reference

PER = ["row", "group"]
SCALES = {"dtype": torch.float32, "terms": 0, "roundings": 64, "constant_ok": True}


def _inputs(h, rows, cols, dtype=torch.float16):
    return h.randn(rows, cols, dtype=dtype, scale=2.0).add_(1.0), h.randn(cols, dtype=dtype), h.randn(cols, dtype=dtype)


def _hold(h, x, weight, bias, per):
    """y and scales of both norms against float64."""

    def norm(*args):
        return read_back(*fused_layer_norm_quantize(*args, per=per), per)

    def rms(*args):
        return read_back(*fused_rms_norm_quantize(*args, per=per), per)

    h.check(norm, reference, x, weight, bias, **BUDGET)
    h.check(rms, rms_reference, x, weight, **BUDGET)
    h.check(
        lambda *args: fused_layer_norm_quantize(*args, per=per)[1],
        lambda *args: scales_of(reference(*args), per),
        x, weight, bias, what="scales", **SCALES,
    )  # fmt: skip


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize(
    ("rows", "cols"), [(3, 2), (1, 127), (5, 128), (33, 129), (2, 781), (3, 4096), (2, 4097), (1, ROWS_MAX)]
)
def test_shapes_held_in_registers(h, rows, cols, per):
    _hold(h, *_inputs(h, rows, cols), per)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("cols", [ROWS_MAX + 1, 24576])
def test_longer_rows(h, cols, per):
    _hold(h, *_inputs(h, 2, cols), per)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("cols", [5, 300])
def test_the_longer_rows_kernel_on_short_ones(h, monkeypatch, cols, per):
    monkeypatch.setattr(lesson, "ROWS_MAX", 0)
    _hold(h, *_inputs(h, 3, cols), per)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("per", PER)
def test_dtypes(h, dtype, per):
    x, weight, bias = _inputs(h, 9, 1000, dtype)
    _hold(h, x, weight, bias, per)
    _hold(h, x, weight.float(), bias.float(), per)


@given(rows=st.integers(1, 40), cols=st.integers(2, 1500), per=st.sampled_from(PER))
def test_any_shape(rows, cols, per):
    h = Harness("test", Needs.parse("triton"))
    _hold(h, *_inputs(h, rows, cols), per)


@pytest.mark.parametrize("per", PER)
def test_several_rows_in_a_program(h, per):
    for cols in (100, 256):  # 8 rows, of which the last program has 3; 4
        _hold(h, *_inputs(h, 83, cols), per)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("cols", [1000, 1004, 1002, 1001, 1024])
def test_rows_that_start_at_any_multiple(h, cols, per):
    x, weight, bias = _inputs(h, 3, cols)
    whole = fused_layer_norm_quantize(x, weight, bias, per=per)
    for pad in (1, 2, 4, 8):
        padded = h.randn(3, cols + pad, dtype=torch.float16)[:, :cols]
        padded.copy_(x)
        got = fused_layer_norm_quantize(padded, weight, bias, per=per)
        assert torch.equal(got[0].float(), whole[0].float())
        assert torch.equal(got[1], whole[1])


@pytest.mark.parametrize("per", PER)
def test_padded_rows(h, per):
    x, weight, bias = _inputs(h, 7, 300)
    padded = h.randn(7, 317, dtype=torch.float16)[:, :300]
    padded.copy_(x)
    for got, want in zip(
        fused_layer_norm_quantize(padded, weight, bias, per=per),
        fused_layer_norm_quantize(x, weight, bias, per=per), strict=True,
    ):  # fmt: skip
        assert torch.equal(got.float(), want.float())


def _exact(h, rows, cols):
    """Inputs whose LayerNorm float32 computes without rounding but in its last addition, and that result."""
    signs = torch.ones(rows, cols, device=h.device)
    signs[:, ::2] = -1
    weight, bias = h.randn(cols, dtype=torch.float16), h.randn(cols, dtype=torch.float16)
    return (signs * 2).half(), weight, bias, signs * weight.float() + bias.float()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("cols", [2, 300, 1024, 8192, ROWS_MAX + 2, 2 * ROWS_MAX])
def test_the_very_bits_of_the_reference_quantizer(h, cols, per, dtype):
    if not h.interpreted and cols & (cols - 1):
        pytest.skip("a GPU's division by this many columns may be off in the last bit")
    x, weight, bias, y = _exact(h, 3, cols)
    q, scale = fused_layer_norm_quantize(x, weight, bias, eps=0.0, per=per, dtype=dtype)
    want_q, want_scale = quantize_reference(y, (1, cols if per == "row" else GROUP), dtype)
    assert q.dtype is dtype
    assert torch.equal(scale, want_scale)
    apart = (q.view(torch.uint8).int() - want_q.view(torch.uint8).int()).abs().max()
    # On sm_89 Triton casts by way of float16: next to a tie the code may be the other neighbour.
    assert apart <= (h.machine.sm == 89)


@triton.jit
def _quotients(amax_ptr, scale_ptr, inverse_ptr, MOST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale, inverse = scale_and_inverse(tl.load(amax_ptr + at), MOST, INFINITE=False)
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


@pytest.mark.parametrize("rows_max", [ROWS_MAX, 0])
def test_no_bias_is_a_bias_of_zeros(h, monkeypatch, rows_max):
    monkeypatch.setattr(lesson, "ROWS_MAX", rows_max)
    x, weight, _ = _inputs(h, 3, 300)
    for per in PER:
        without = fused_layer_norm_quantize(x, weight, None, per=per)
        zeros = fused_layer_norm_quantize(x, weight, torch.zeros_like(weight), per=per)
        assert torch.equal(without[0].float(), zeros[0].float())
        assert torch.equal(without[1], zeros[1])


def test_layout_of_scales(h):
    x, weight, bias = _inputs(h, 5, 300)
    q, scale = fused_layer_norm_quantize(x, weight, bias)
    assert (q.shape, q.is_contiguous(), scale.shape, scale.dtype) == (x.shape, True, (5, 1), torch.float32)
    _, scale = fused_layer_norm_quantize(x, weight, bias, per="group")
    assert (scale.shape, scale.stride()) == ((5, 3), (1, 5))


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("cols", [300, ROWS_MAX + 1])
def test_zeros_stay_zeros(h, cols, per):
    x, zeros = h.randn(2, cols), torch.zeros(cols, device=h.device)
    q, scale = fused_layer_norm_quantize(x, zeros, zeros, per=per)
    assert not q.float().any()
    assert torch.equal(scale, torch.full_like(scale, FLOOR) / torch.finfo(E4M3).max)
    q, _ = fused_rms_norm_quantize(torch.zeros_like(x), torch.ones_like(zeros), per=per)
    assert not q.float().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("cols", [300, ROWS_MAX + 1])
def test_what_is_not_finite_in_x_is_seen_in_its_row_and_in_no_other(h, cols, value):
    x, weight, bias = _inputs(h, 4, cols)
    clean = read_back(*fused_layer_norm_quantize(x, weight, bias), "row")
    x[2, 17] = value
    for per in PER:
        got = read_back(*fused_layer_norm_quantize(x, weight, bias, per=per), per)
        assert got[2].isnan().all()
        assert got[[0, 1, 3]].isfinite().all()
    assert torch.equal(read_back(*fused_layer_norm_quantize(x, weight, bias), "row")[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_in_bias_is_seen_in_its_group(h, value):
    x, weight, bias = _inputs(h, 2, 300)
    bias[130] = value
    got = read_back(*fused_layer_norm_quantize(x, weight, bias, per="group"), "group")
    assert got[:, 128:256].isnan().all()
    assert got[:, :128].isfinite().all()
    assert got[:, 256:].isfinite().all()
    assert read_back(*fused_layer_norm_quantize(x, weight, bias), "row").isnan().all()


@pytest.mark.parametrize("rows_max", [ROWS_MAX, 0])
@pytest.mark.parametrize("mean", [-3.0, 10.0, 10000.0])
def test_a_mean_far_from_zero(h, monkeypatch, rows_max, mean):
    monkeypatch.setattr(lesson, "ROWS_MAX", rows_max)
    for cols in (1024, 3000):
        x, weight, bias = h.randn(3, cols).add_(mean), h.randn(cols), h.randn(cols)
        h.check(lambda *args: read_back(*fused_layer_norm_quantize(*args), "row"), reference, x, weight, bias, **BUDGET)


@pytest.mark.parametrize("cols", [128, 200])
def test_rows_near_and_far_from_zero_in_one_program(h, cols):
    x, weight, bias = h.randn(16, cols), h.randn(cols), h.randn(cols)
    x[3:11] += torch.tensor([1e4, 0, 0, -3e3, 1.0, 2.0, 3.0, 0], device=h.device)[:, None]
    _hold(h, x, weight, bias, "group")
    for per in PER:
        together = fused_layer_norm_quantize(x, weight, bias, per=per)
        for row in (0, 4, 11):  # each beside rows that are summed twice
            alone = torch.zeros_like(x)
            alone[row] = x[row]
            for got, want in zip(fused_layer_norm_quantize(alone, weight, bias, per=per), together, strict=True):
                assert torch.equal(got[row].float(), want[row].float())
    x[5] = float("nan")
    x[12] = 7.25  # its variance is 0
    h.check(
        lambda *args: read_back(*fused_layer_norm_quantize(*args), "row")[[3, 4, 6, 12]],
        lambda *args: reference(*args)[[3, 4, 6, 12]], x, weight, bias, **BUDGET,
    )  # fmt: skip


@pytest.mark.parametrize("rows_max", [ROWS_MAX, 0])
@pytest.mark.parametrize("first", [-30000.0, 30.0, 30000.0])
def test_a_first_element_far_from_the_others(h, monkeypatch, rows_max, first):
    monkeypatch.setattr(lesson, "ROWS_MAX", rows_max)
    for cols in (1024, 3000):
        for shift in (0, 100):
            x, weight, bias = _inputs(h, 3, cols)
            x += shift
            x[:, 0] = first

            def norm(*args):
                return read_back(*fused_layer_norm_quantize(*args, per="group"), "group")

            h.check(norm, reference, x, weight, bias, **BUDGET)


@pytest.mark.parametrize("rows_max", [ROWS_MAX, 0])
def test_one_column_is_its_bias(h, monkeypatch, rows_max):
    monkeypatch.setattr(lesson, "ROWS_MAX", rows_max)
    bias = torch.tensor([-3.0], device=h.device)
    for per in PER:
        q, scale = fused_layer_norm_quantize(h.randn(5, 1), h.randn(1), bias, per=per)
        torch.testing.assert_close(q.float() * scale, bias.expand(5, 1))


def test_no_rows(h):
    weight = h.randn(300)
    q, scale = fused_layer_norm_quantize(h.randn(0, 300), weight, weight, per="group")
    assert (q.shape, q.dtype, scale.shape) == ((0, 300), E4M3, (0, 3))


def _bad(device):
    x, weight = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    return {
        "no tensor": (([1.0], weight, weight), {}, TypeError, r"expected a torch\.Tensor, got list"),
        "no weight": ((x, None, weight), {}, TypeError, "weight is None; pass torch.ones"),
        "integers": ((x.int(), weight, weight), {}, TypeError, r"dtype torch\.int32"),
        "a vector": ((x[0], weight, weight), {}, ValueError, r"shape \(8,\); need \[n_rows, n_cols\]"),
        "no columns": ((x[:, :0], weight[:0], weight[:0]), {}, ValueError, r"shape \(4, 0\) has no columns"),
        "columns apart": ((x.t().contiguous().t(), weight, weight), {}, ValueError, r"strides \(1, 4\).*contiguous"),
        "weight of another dtype": ((x, weight.half(), weight.half()), {}, TypeError, r"weight is torch\.float16"),
        "two dtypes of vectors": ((x.half(), weight.half(), weight), {}, TypeError, r"bias is torch\.float32"),
        "weight of another size": ((x, weight[:7], weight), {}, ValueError, r"weight has shape \(7,\)"),
        "bias that skips": ((x, weight, torch.randn(16, device=device)[::2]), {}, ValueError, r"strides \(2,\)"),
        "a tensor as eps": (
            (x, weight, weight),
            {"eps": weight},
            TypeError,
            "eps is tensor",
        ),
        "a negative eps": ((x, weight, weight), {"eps": -1.0}, ValueError, "eps is -1.0"),
        "eps that is NaN": ((x, weight, weight), {"eps": float("nan")}, ValueError, "eps is nan"),
        "an unknown recipe": ((x, weight, weight), {"per": "tensor"}, ValueError, "per 'tensor' is not one of"),
        "a wrong FP8": ((x, weight, weight), {"dtype": torch.float8_e4m3fnuz}, TypeError, "fnuz formats are AMD's"),
        "no FP8": ((x, weight, weight), {"dtype": torch.int8}, TypeError, r"dtype is torch\.int8"),
        "no dtype": ((x, weight, weight), {"dtype": "fp8"}, TypeError, "dtype is fp8"),
        "requires grad": ((x.clone().requires_grad_(), weight, weight), {}, RuntimeError, "no backward"),
        "two devices": ((x, weight.to("meta"), weight), {}, ValueError, "move them to one device"),
        "a device without kernels": ((x.to("meta"), weight.to("meta"), weight.to("meta")), {}, RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, options, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"fused_layer_norm_quantize: .*{message}"):
        fused_layer_norm_quantize(*args, **options)


def test_bad_input_of_rms_norm_names_it(h):
    with pytest.raises(ValueError, match="fused_rms_norm_quantize: per 'block' is not one of"):
        fused_rms_norm_quantize(h.randn(2, 8), h.randn(8), per="block")


@pytest.mark.gpu
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("cols", [1024, 5120, 8192, ROWS_MAX, 32768])
def test_full_size_rows_in_bfloat16(h, cols, per):
    _hold(h, *_inputs(h, 1000, cols, torch.bfloat16), per)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(24)
    rows, cols = 2**18 + 3, 8192
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device=h.device).normal_()
    weight, bias = h.randn(cols, dtype=torch.bfloat16), h.randn(cols, dtype=torch.bfloat16)
    for per in PER:
        q, scale = fused_layer_norm_quantize(x, weight, bias, per=per)
        few, few_scales = fused_layer_norm_quantize(x[-5:], weight, bias, per=per)
        assert torch.equal(q[-5:].float(), few.float())
        assert torch.equal(scale[-5:], few_scales)


@pytest.mark.parametrize("sm", [89, 90, 100, 120])
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("cols", [5000, 8192])
def test_generated_code(sm, cols, per):
    x = torch.empty(16384, cols, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(cols, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for(fused_layer_norm_quantize, (x, weight, weight), {"per": per}, sms=(sm,))
    assert kernel.error is None
    held, _ = HELD_LONG if cols == LONG else HELD[2]
    # All of 16 bytes: 8 columns of x, weight and bias. 5000 is no multiple of 16, but of 8.
    assert kernel.found["ld.global.v4"] == 3 * held // 8
    assert kernel.spills <= (32 if cols == LONG else 0)  # bytes; 64 values and 96 registers a thread are a close fit
    assert kernel.fits


@pytest.mark.parametrize("cols", [1, 1024, 5001, 5120, ROWS_MAX, 32768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_length_compiles_without_spills(cols, dtype):
    x = torch.empty(4096, cols, dtype=dtype, device="meta")
    weight = torch.empty(cols, dtype=dtype, device="meta")
    (kernel,) = compile_for(fused_layer_norm_quantize, (x, weight, weight), {}, sms=(90,))
    assert (kernel.error, kernel.spills, kernel.fits) == (None, 0, True)


def test_demo(h):
    demo(h)
    assert len(h.record.checks) == 6
    assert all(check["passed"] for check in h.record.checks)
    assert {kernel["sm"] for kernel in h.record.codegen} == {89, 90, 100, 120}
    assert [table["case"] for table in h.record.tables[:2]] == [f"16x1024 per {per}" for per in PER]
