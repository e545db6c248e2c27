"""fused_gelu_quantize: read back within one rounding, exact bits where y is exact, saturation, bad input, code."""

import itertools

import pytest
import torch

from examples.common.fp8 import E4M3, E5M2, FLOOR
from examples.common.quantize import GROUP, read_back
from examples.fp8 import fused_gelu_quantize as lesson
from examples.fp8.fused_gelu_quantize import COLUMNS_MAX, PER_THREAD, ROW_MAX, fused_gelu_quantize, reference
from examples.fp8.fused_gelu_quantize import fused_gelu_quantize_static as static
from tests.examples.fp8.helpers import INF, NAN, PER, code, hold, hold_bits, meta, refused, same_codes

MOST = torch.finfo(E4M3).max
FORMS = ("tanh", "none")


def gelu(x, approximate, per):
    return fused_gelu_quantize(x, per, approximate)


SHAPES = [(3, 2), (1, 127), (5, 128), (33, 129), (2, 781), (3, 4097), (1, ROW_MAX)]


@pytest.mark.parametrize(("case", "shape"), list(enumerate(SHAPES)), ids=str)
def test_shapes(h, case, shape):
    for per, approximate in itertools.product(PER, FORMS[case % 2 :] if case else FORMS):
        for scale in (2.0, 1e-4, 30.0)[: 1 + 2 * (shape[0] > 2)]:
            x = h.randn(*shape, dtype=torch.float32 if case % 3 else torch.float16, scale=scale)
            x[:, ::GROUP] = scale  # of negative values alone the tail decides the amax: below
            hold(h, gelu, reference, x, approximate, per=per)


@pytest.mark.parametrize("approximate", FORMS)
def test_gelu_itself_to_single_precision_and_in_its_far_tails(h, approximate):
    # One column: amax of each row is its |y|, so the scales are y, unrounded.
    x = torch.linspace(-6, 12, 1001, device=h.device)
    x = x[x != 0][:, None].contiguous()
    want = reference(x, approximate).abs()
    _, scale = fused_gelu_quantize(x, "row", approximate)
    assert ((scale.double() * MOST - want) / want).abs().max() < 1e-5
    x = torch.tensor([[-3e38, -1e30, -1e4, -40.0, -0.0, 0.0, 1e-30, 1e4, 1e30, 3e38]], device=h.device).t().contiguous()
    got, want = read_back(*fused_gelu_quantize(x, "row", approximate), "row").double(), torch.where(x > 1, x, 0.0)
    assert got.isfinite().all()
    assert ((got - want).abs() <= 1e-6 * want.abs() + 2 * FLOOR).all()


def _exact(h, rows, cols):
    """Inputs that GELU keeps (above 6) or makes zero (below -30), in float32 too, and that result."""
    x = h.randn(rows, cols, dtype=torch.float16).abs() + 6
    x = torch.where(h.randn(rows, cols) > 0, x, -5 * x)
    return x, torch.where(x > 0, x, 0.0).float()


def unsigned(q):
    """The codes of results without a sign, where -0 is 0."""
    assert (q.float() >= 0).all()
    return q.view(torch.uint8) & 0x7F


@pytest.mark.parametrize(("cols", "dtype"), [(1, E4M3), (300, E5M2), (8192, E4M3), (ROW_MAX, E5M2)])
def test_the_very_bits_of_the_reference_quantizer(h, cols, dtype):
    x, y = _exact(h, 3, cols)
    padded = torch.nn.functional.pad(x, (0, 17))[:, :cols]
    for per, given_x, approximate in [("row", x, "tanh"), ("group", padded, "none"), ("group", x, "tanh")]:
        hold_bits(h, fused_gelu_quantize(given_x, per, approximate, dtype), y, per, dtype, unsigned)
    for per, rows in itertools.product(PER, (0, 2)):  # no rows; zeros, which stay zeros
        zeros = torch.zeros(rows, cols, device=h.device)
        hold_bits(h, fused_gelu_quantize(zeros, per, dtype=dtype), zeros, per, dtype, unsigned)
    assert static(h.randn(0, cols), torch.ones(1, device=h.device))[1].numel() == 0


@pytest.mark.parametrize(("cols", "approximate"), [(1, "tanh"), (300, "none"), (8192, "tanh")])
def test_a_given_scale_saturates_and_amax_tells(h, cols, approximate):
    x, y = _exact(h, 9, cols)
    for share, shape in ((2.0, ()), (1.0, (1,)), (0.25, (1, 1))):
        scale = (share * y.max() / MOST).reshape(shape)
        q, amax = static(x, scale, approximate)
        assert same_codes(h, unsigned(q), unsigned((y * (1.0 / scale)).clamp(max=MOST).to(E4M3)))
        assert amax.max() == y.max()


def test_the_table_of_a_given_scale_compares_the_same_results(h, monkeypatch):
    """The rows show q alone; amax, too, is that of all tiles. The last of them has the largest."""
    given = []
    monkeypatch.setattr(lesson, "fused_variants", lambda *args: given.extend(args))
    monkeypatch.setattr(h, "compare", lambda *args, **kwargs: None)
    x, y = _exact(h, 9, 600)
    x[8, 599] = y[8, 599] = 1000
    lesson.compare(h, x, "static")
    _, act, ours, _, to_fp8 = given
    scale = torch.full((1,), 0.5, device=h.device)
    (q, amax), (want_q, want_amax) = ours(x, scale), to_fp8(act(x.float(), scale), x, scale)
    assert same_codes(h, unsigned(q), unsigned(want_q))
    assert amax == want_amax == 1000


@pytest.mark.parametrize(("approximate", "value"), [("tanh", NAN), ("none", NAN), ("tanh", -INF), ("none", INF)])
def test_what_is_not_finite_is_seen_in_its_group_and_in_no_other(h, approximate, value):
    x = h.randn(4, 300)
    x[2, 130] = value
    for per, ruined in (("group", slice(128, 256)), ("row", slice(None))):
        got = read_back(*fused_gelu_quantize(x, per, approximate), per)
        assert got[2, ruined].isnan().all()
        got[2, ruined] = 0
        assert got.isfinite().all()
    q, amax = static(x, torch.ones(1, device=h.device), approximate)
    assert not amax.isfinite().all()
    if value == INF:
        assert q[2, 130].item() == MOST  # it saturates
    else:
        assert q.float().isnan().nonzero().tolist() == [[2, 130]]


def test_bad_input(h):
    x, one = h.randn(4, 8), torch.ones(1, device=h.device)
    per, fnuz = fused_gelu_quantize, torch.float8_e5m2fnuz
    assert COLUMNS_MAX == 33553920  # first: a longer row would be interpreted for minutes
    refused([
        (per, (x, "row", "sigmoid"), ValueError, "approximate 'sigmoid' is not one of"),
        (per, (x, "row", "none", fnuz), TypeError, "fnuz formats are AMD's"),
        (per, (h.randn(1, ROW_MAX + 1), "row"), ValueError, "16385 columns, but a row may have 16384"),
        (per, (h.randn(1, 1).expand(1, 33553921).contiguous(),), ValueError, "33553921 columns, but a row may"),
        (per, (x, "tensor"), ValueError, "per is 'tensor'.*call fused_gelu_quantize_static"),
        (static, (x, one, "sigmoid"), ValueError, "approximate 'sigmoid' is not one of"),
        (static, (x, one, "none", fnuz), TypeError, "fnuz formats are AMD's"),
        (static, (x, one.expand(2)), ValueError, r"scale has shape \[2\]; need \[1\]"),
        (static, (x, -one), ValueError, "scale .*not positive and finite"),
    ])  # fmt: skip
    assert static(x, -one, check_scales=False)[1].isfinite().all()  # not looked at


@pytest.mark.gpu
def test_shapes_on_the_gpu(h):
    for cols, per, approximate in itertools.product((1024, 5120, 8192, ROW_MAX), PER, FORMS):
        hold(h, gelu, reference, h.randn(1000, cols, dtype=h.half, scale=2.0), approximate, per=per)


def test_generated_code():
    found = code(90, "", fused_gelu_quantize, meta(16384, 8192, dtype=torch.bfloat16)).found
    assert (found["ld.global.v4"], found["st.global.v4"]) == (PER_THREAD // 8, PER_THREAD // 16)  # of 16 bytes
    code(90, "", fused_gelu_quantize, meta(16384, ROW_MAX, dtype=torch.float32), "row", "none")
