"""fused_layer_norm_quantize: read back within one rounding, exact bits where y is exact, edges, bad input, code."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from examples.common.fp8 import E4M3, E5M2
from examples.common.norms import moments
from examples.common.quantize import GROUP, READ_BACK, read_back
from examples.fp8.fused_layer_norm_quantize import HELD, HELD_LONG, LONG, ROWS_MAX, inputs, reference
from examples.fp8.fused_layer_norm_quantize import fused_layer_norm_quantize as layer_norm
from examples.fp8.fused_layer_norm_quantize import fused_rms_norm_quantize as rms_norm
from studies.fp8.fused_layer_norm_quantize import rms_reference
from tests.examples.fp8.helpers import INF, NAN, PER, code, hold, hold_bits, meta, refused


def hold_both(h, x, weight, bias, per):
    """LayerNorm, and RMSNorm without a bias."""
    hold(h, layer_norm, reference, x, weight, bias, per=per)
    hold(h, rms_norm, rms_reference, x, weight, per=per, scales=False)


# Two columns, around a group, a prime; several rows in a program, of which the last has 3; what registers hold.
SHAPES = [(3, 2), (1, 127), (5, 128), (33, 129), (2, 781), (83, 100), (1, ROWS_MAX)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(h, shape):
    x, weight, bias = inputs(h, *shape, torch.float32 if shape[0] % 2 == 0 else torch.float16)
    hold_both(h, x, weight, bias, "row")
    hold_both(h, x, weight.float(), bias.float(), "group")  # columns may be in float32


@pytest.mark.parametrize(
    ("cols", "per", "dtype"),
    [(2, "row", E4M3), (300, "group", E5M2), (1024, "row", E5M2), (ROWS_MAX, "group", E4M3)],
)
def test_the_very_bits_of_the_reference_quantizer(h, cols, per, dtype):
    """Of inputs whose LayerNorm float32 computes without rounding but in its last addition."""
    if not h.interpreted and cols & (cols - 1):
        pytest.skip("a GPU's division by this many columns may be off in the last bit")
    signs = torch.ones(3, cols, device=h.device)
    signs[:, ::2] = -1
    weight, bias = h.randn(cols, dtype=torch.float16), h.randn(cols, dtype=torch.float16)
    got = layer_norm((signs * 2).half(), weight, bias, eps=0.0, per=per, dtype=dtype)
    hold_bits(h, got, signs * weight.float() + bias.float(), per, dtype)


def test_any_start_no_bias_one_column_no_rows_and_zeros(h):
    x, weight, bias = inputs(h, 3, 1000)
    for per, pad in (("row", 1), ("group", 2), ("row", 4), ("group", 8)):
        padded = torch.nn.functional.pad(x, (0, pad))[:, :1000]
        for got, want in zip(*(layer_norm(each, weight, bias, per=per) for each in (padded, x)), strict=True):
            assert torch.equal(got.float(), want.float())
    x, weight, zeros = h.randn(3, 300), h.randn(300), torch.zeros(300, device=h.device)
    for per in PER:
        without, with_zeros = (layer_norm(x, weight, b, per=per) for b in (None, zeros))
        assert torch.equal(without[0].float(), with_zeros[0].float())
        assert torch.equal(without[1], with_zeros[1])
        bias = torch.tensor([-3.0], device=h.device)  # one column is its bias
        q, scale = layer_norm(h.randn(5, 1), h.randn(1), bias, per=per)
        torch.testing.assert_close(q.float() * scale, bias.expand(5, 1))
        for few in (x[:0], x):
            hold_bits(h, layer_norm(few, zeros, zeros, per=per), torch.zeros_like(few), per, E4M3)
        assert not rms_norm(torch.zeros_like(x), torch.ones_like(zeros), per=per)[0].float().any()


@pytest.mark.parametrize("value", [NAN, -INF])
def test_what_is_not_finite_is_seen_in_what_shares_its_scale(h, value):
    x, weight, bias = inputs(h, 4, 300)
    clean = read_back(*layer_norm(x, weight, bias), "row")
    x[2, 17], others = value, [0, 1, 3]
    for per in PER:
        got = read_back(*layer_norm(x, weight, bias, per=per), per)
        assert got[2].isnan().all()
        assert got[others].isfinite().all()
        assert per == "group" or torch.equal(got[others], clean[others])
    bias[130] = value
    lost = read_back(*layer_norm(x, weight, bias, per="group"), "group")[others].isnan()
    assert (lost == torch.arange(300, device=h.device).floor_divide(GROUP).eq(1)).all()


def test_a_mean_or_a_first_element_far_from_zero(h):
    """Then rows near and far from zero in one program."""
    means = [(-3.0, 0), (10.0, 30.0), (10000.0, 0), (0, -30000.0), (100.0, 30000.0)]
    for cols, (mean, first) in itertools.product((1024, 3000), means):
        x, weight, bias = h.randn(3, cols).add_(mean), h.randn(cols), h.randn(cols)
        x[:, 0] += first
        hold(h, layer_norm, reference, x, weight, bias, per="group", scales=False)
    x, weight, bias = h.randn(16, 200), h.randn(200), h.randn(200)
    x[3:11] += torch.tensor([1e4, 0, 0, -3e3, 1.0, 2.0, 3.0, 0], device=h.device)[:, None]
    hold_both(h, x, weight, bias, "group")
    x[5], x[12], seen = NAN, 7.25, [3, 4, 6, 12]  # the variance of row 12 is 0
    norm = lambda *args: read_back(*layer_norm(*args), "row")[seen]  # noqa: E731
    h.check(norm, lambda *args: reference(*args)[seen], x, weight, bias, **READ_BACK)


@triton.jit
def variance_kernel(x_ptr, variance_ptr, ROWS: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, ROWS)
    _, variance = moments(tl.load(x_ptr + rows[:, None] * N + tl.arange(0, N)[None, :]), N, ROWS, N, True, N)
    tl.store(variance_ptr + rows, variance)


def test_a_variance_that_cancels_is_not_negative(h):
    """Of constant rows it is a rounding error, of either sign. In the interpreter no norm shows it: layer_normed sums
    such a row again, measured from its mean, and what is left cancels to exactly 0 where division is exact."""
    x, variance = h.randn(32, 1, scale=1000.0).expand(32, 128).contiguous(), torch.empty(32, device=h.device)
    variance_kernel[(1,)](x, variance, 32, 128)
    assert (variance >= 0).all()


def test_bad_input(h):
    x, weight, bias = inputs(h, 4, 8, torch.float32)
    refused([
        (layer_norm, {"weight": None}, TypeError, "weight is None; pass torch.ones"),
        (layer_norm, {"weight": weight.half(), "bias": bias.half()}, TypeError, r"weight is torch\.float16"),
        (layer_norm, {"eps": -1.0}, ValueError, "eps is -1.0"),
        (layer_norm, {"x": h.randn(1, ROWS_MAX + 1), "weight": h.randn(ROWS_MAX + 1), "bias": None}, ValueError,
         "16385 columns, but a row may have 16384"),
        (layer_norm, {"per": "tensor"}, ValueError, "per 'tensor' is not one of"),
        (layer_norm, {"dtype": torch.float8_e4m3fnuz}, TypeError, "fnuz formats are AMD's"),
    ], x=x, weight=weight, bias=bias)  # fmt: skip


@pytest.mark.gpu
def test_shapes_on_the_gpu(h):
    for cols, per in itertools.product((1024, 5120, 8192, ROWS_MAX), PER):
        hold_both(h, *inputs(h, 1000, cols, torch.bfloat16), per)


@pytest.mark.parametrize(
    ("cols", "per", "of"), [(5000, "row", "bfloat16"), (LONG, "group", "bfloat16"), (5001, "row", "float32")]
)
def test_generated_code(cols, per, of):
    x, weight = (meta(*shape, dtype=getattr(torch, of)) for shape in ((16384, cols), (cols,)))
    spills = 32 if cols == LONG else 0  # bytes: 96 registers a thread are a close fit
    kernel = code(90, "", layer_norm, x, weight, weight, spills=spills, per=per)
    if of == "bfloat16":  # all of 16 bytes: 8 columns of x, weight and bias; 8 divides 5000, 16 does not
        assert kernel.found["ld.global.v4"] == 3 * (HELD_LONG if cols == LONG else HELD[2])[0] // 8
