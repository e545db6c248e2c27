"""quantize: every recipe held to the bits of the reference, at edges and extremes; bad input, generated code."""

import itertools

from harness.codegen import compile_for

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.common.fp8 import E5M2, FLOOR, FORMATS, fp8_max
from examples.common.rows import DTYPES
from examples.fp8.quantize import GROUP, RECIPES, ROWS_MAX, quantize
from examples.fp8.quantize_long_row import LONG_STEP
from studies.fp8.quantize import bits, check_bits, with_extremes
from tests.examples.fp8.helpers import meta, refused

recipes = pytest.mark.parametrize("recipe", RECIPES)
formats = pytest.mark.parametrize("dtype", FORMATS)


@given(
    rows=st.integers(1, 150), cols=st.integers(1, 400), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    recipe=st.sampled_from(list(RECIPES)), dtype=st.sampled_from(FORMATS),
)  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bits_are_those_of_the_reference(h, rows, cols, scale, recipe, dtype):
    check_bits(h, h.randn(rows, cols, scale=scale), recipe, dtype)
    check_bits(h, h.randn(rows, cols, dtype=torch.float16), recipe, dtype)  # at times, products of these are ties


@recipes
def test_rows_long_and_apart_in_memory(h, recipe):
    for cols in (ROWS_MAX, ROWS_MAX + 1, 2 * LONG_STEP, 2 * LONG_STEP + 3):
        check_bits(h, h.randn(2, cols, dtype=torch.float16), recipe)
    x = h.randn(21, 1000)
    check_bits(h, x[:, 100:781], recipe)  # a row stride above the columns, a start that is not aligned
    check_bits(h, x[:1, :300].expand(40, 300), recipe)  # one row in memory, forty in the view
    check_bits(h, h.randn(3, ROWS_MAX + 99)[:, 1 : ROWS_MAX + 9], recipe)


@recipes
@formats
def test_zeros_extremes_infinities_and_nan(h, recipe, dtype):
    x = with_extremes(h.randn(150, 300))
    check_bits(h, x, recipe, dtype)
    check_bits(h, x.nan_to_num(0.0, 3e38, -3e38), recipe, dtype)
    check_bits(h, h.randn(130, 200, scale=1e-38), recipe, dtype)  # all below FLOOR, and some subnormal
    q, scale = quantize(torch.zeros(130, 140, device=h.device), recipe, dtype)
    assert not q.view(torch.uint8).any()
    assert torch.equal(scale, torch.full_like(scale, FLOOR / fp8_max(dtype)))
    x = torch.full((4, 140), -0.0, device=h.device)
    x[2] = -1e-45
    assert (quantize(x, recipe, dtype)[0].view(torch.uint8) == 0x80).all(), "signs stay"


def test_shapes_of_scales_also_of_nothing(h):
    stride = {"tensor": (), "row": (1, 1), "group": (1, 260), "block": (3, 1)}
    for recipe, (M, K) in [(r, s) for r in RECIPES for s in ((260, 300), (0, 300), (5, 0), (0, 0), (0, ROWS_MAX + 1))]:
        q, scale = quantize(h.randn(M, K), recipe, E5M2)
        groups, blocks = -(-K // GROUP), -(-M // GROUP)
        shape = {"tensor": (), "row": (M, 1), "group": (M, groups), "block": (blocks, groups)}[recipe]
        assert (tuple(q.shape), q.dtype, q.is_contiguous()) == ((M, K), E5M2, True)
        assert (tuple(scale.shape), scale.dtype) == (shape, torch.float32)
        assert scale.stride() == stride[recipe] if q.numel() else (scale == FLOOR / fp8_max(E5M2)).all()


def test_bad_input(h):
    x = h.randn(4, 8)
    for quantizer in RECIPES.values():
        refused([
            (quantizer, (x, torch.float8_e4m3fnuz), TypeError, r"e4m3fnuz; pass .*; the fnuz formats are AMD's"),
            (quantizer, (x.t(),), ValueError, r"strides \(1, 8\).*x\.contiguous\(\)"),
        ])  # fmt: skip
    refused([(quantize, (x, "channel"), ValueError, r"recipe .* is not one of \['tensor', 'row', 'group', 'bl")])


def test_generated_code():
    """Accesses of 16 bytes, no spills, and a cast that saturates: nothing else keeps a product above max from NaN."""
    for recipe, sm, of, cols in [
        ("tensor", 90, torch.bfloat16, 16384), ("block", 89, torch.bfloat16, 4096),
        ("row", 120, torch.float32, ROWS_MAX), ("row", 90, torch.float16, 4 * ROWS_MAX),
    ]:  # fmt: skip
        *largest, kernel = compile_for(RECIPES[recipe], (meta(4096, cols, dtype=of),), sms=(sm,))
        assert [each.kernel for each in largest] == ["amax_kernel"] * (recipe == "tensor")
        for each in (*largest, kernel):
            assert (each.error, each.spills) == (None, 0)
            assert each.found["ld.global.v4"]
        assert kernel.found["st.global.v4"]
        assert kernel.found["cvt f8"]


@pytest.mark.gpu
@recipes
def test_shapes_on_the_gpu(h, recipe):
    """The same bits as the reference, and in every call."""
    for of, (rows, cols) in itertools.product(DTYPES, ((4096, 4096), (1000, 20000), (70000, 257))):
        x = h.randn(rows, cols, dtype=of)
        check_bits(h, x, recipe)
        check_bits(h, x[:, : cols - 3], recipe, E5M2)
        first, *others = (bits(*quantize(x, recipe)) for _ in range(10))
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
