"""Accuracy: quantizers to the bit, products to float64, layers, and what the library is handed."""

import math

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from examples.common.fp8 import E4M3, E5M2, FLOOR, dequantize_reference, fp8_max, quantize_reference
from examples.fp8 import accuracy_layer as layers_of
from examples.fp8.accuracy import (
    ALL_RECIPES,
    RECIPES,
    TIMED,
    accumulator,
    breaks,
    decibel,
    demo,
    price,
    with_channels,
)
from examples.fp8.accuracy_layer import (
    FP8Linear,
    engine,
    multiply,
    product64,
    quantize,
    quantize_input,
    sized,
    spread,
)


def harness(**options):
    return Harness("accuracy", Needs.parse("torch"), console=Console(quiet=True), **options)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# --- the demo


def test_demo():
    h = harness(timing=False)
    with settings_kept("accuracy", 0):
        demo(h)
    assert all(check["passed"] for check in h.record.checks)
    assert len(h.record.checks) == len(RECIPES)
    (table,) = h.record.tables
    variants = [row["variant"] for row in table["rows"]]
    assert all(variant.endswith(name) for variant, name in zip(variants, ("bfloat16", *TIMED), strict=True))
    ((name, snr),) = h.record.facts.items()
    assert name.startswith("signal-to-noise ratio")
    assert list(snr) == list(ALL_RECIPES)
    assert snr["per row"]["small groups"] < 5 < 27 < snr["1x128 by 128x128"]["small groups"]


def test_demo_under_profile_calls_the_layers_alone():
    h = harness(profile=True)
    demo(h)
    assert not h.record.facts
    assert not h.record.checks
    assert not h.record.tables


def test_what_breaks_is_3_dB_below_plain_data():
    each = {"plain": {"dB": 28.0, "worst token": 26.0}, "mild": {"dB": 25.5, "worst token": 24.0}}
    each |= {"all": {"dB": 24.0, "worst token": 26.0}, "a token": {"dB": 28.0, "worst token": 9.0}}
    assert breaks(each) == {"all": 24.0, "a token": 9.0}


# --- quantizers

BLOCKS = [(None, None), (1, None), (1, 128), (128, 128), (1, 32), (3, 5)]


@given(
    rows=st.integers(1, 150), cols=st.integers(1, 150), block=st.sampled_from(BLOCKS),
    dtype=st.sampled_from([E4M3, E5M2]), exponent=st.integers(-40, 40), seed=st.integers(0, 99),
)  # fmt: skip
def test_quantize_is_the_reference_or_rounds_its_scales_up(rows, cols, block, dtype, exponent, seed):
    x = randn(rows, cols, seed=seed) * 2.0**exponent
    size = sized(block, x)
    q, scale = quantize(x, block, dtype)
    want, want_scale = quantize_reference(x, size, dtype)
    assert same_bits(q, want)
    assert same_bits(scale, want_scale)
    q, scale = quantize(x, block, dtype, power=True)
    assert q.dtype == dtype
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert ((scale >= want_scale) & (scale / 2 < want_scale)).all()
    error = (dequantize_reference(q, scale, size) - x.double()).abs()
    each, info = spread(scale, size, x.shape).double(), torch.finfo(dtype)
    assert (error <= torch.maximum(info.eps / 2 * x.double().abs(), info.smallest_normal * info.eps / 2 * each)).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_scale_that_is_a_power_of_two_stays(dtype):
    x = torch.tensor([[fp8_max(dtype), 1.0], [2 * fp8_max(dtype), 1.0], [1.001 * fp8_max(dtype), 1.0], [0.0, 0.0]])
    _, scale = quantize(x, (1, None), dtype, power=True)
    assert scale[:3, 0].tolist() == [1, 2, 2]
    assert 0 < scale[3, 0] <= FLOOR


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_an_amax_of_its_own_is_dynamic_and_a_smaller_one_saturates(dtype):
    x = randn(40, 24)
    q, scale = quantize(x, (None, None), dtype, amax=x.abs().amax())
    want, want_scale = quantize_reference(x, tuple(x.shape), dtype)
    assert same_bits(q, want)
    assert same_bits(scale, want_scale)
    q, scale = quantize(x, (None, None), dtype, amax=torch.tensor(0.5))
    beyond = x.abs() > 0.5
    assert (q.float()[beyond].abs() == fp8_max(dtype)).all()
    assert torch.equal(q.float()[beyond].sign(), x[beyond].sign())
    assert (scale.double() * fp8_max(dtype) - 0.5).abs() < 1e-7
    q, _ = quantize(x, (None, None), dtype, amax=torch.tensor(0.0))  # a first batch of zeros
    assert q.float().isfinite().all()


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_takes_its_group_and_no_other(bad, power):
    x = randn(4, 64)
    x[1, 3] = bad
    q, scale = quantize(x, (1, 32), power=power)
    back = dequantize_reference(q, scale, (1, 32))
    assert back[1, :32].isnan().all()
    back[1, :32] = 0
    assert back.isfinite().all()


def test_zeros_stay_zeros():
    for name, recipe in RECIPES.items():
        q, scale, _ = quantize_input(torch.zeros(3, 160), recipe)
        assert (q.float() == 0).all(), name
        assert ((scale > 0) & scale.isfinite()).all(), name


# --- theory


def test_decibels_stay_in_json():
    assert decibel(torch.tensor(100.0)) == 20
    assert decibel(torch.tensor(math.inf)) == 300
    assert decibel(torch.tensor(0.0)) == -300


# --- products

SHAPES = [(1, 1, 1), (1, 16, 16), (17, 3, 131), (32, 48, 256), (5, 129, 127), (64, 32, 33)]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(name, shape):
    m, n, k = shape
    x, w, recipe = randn(m, k), randn(n, k, seed=1), RECIPES[name]
    q, scale, _ = quantize_input(x, recipe)
    qw, w_scale = quantize(w, recipe.w_block, power=recipe.power)
    got = multiply(q, scale, qw, w_scale, recipe)
    want = product64(q, scale, qw, w_scale, recipe)
    assert got.dtype == torch.bfloat16
    size = x.abs().double() @ w.abs().double().t()
    assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-5 * size).all()


def library_scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, output_dtype):
    """torch's rules for blocks on Hopper, as its error messages state them, and the product."""
    (m, k), n = a.shape, b.shape[1]
    assert a.stride() == (k, 1)
    assert b.stride() == (1, k)
    assert (kind_a, kind_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    assert tuple(scale_a.shape) == (m, k // 128)
    assert scale_a.stride() == (1, m)
    assert tuple(scale_b.shape) == (k // 128, n // 128)
    assert scale_b.stride(0) == 1
    assert scale_b.stride(1) == -(-k // 128 // 4) * 4
    x, w = a.float() * spread(scale_a, (1, 128), a.shape), b.t().float() * spread(scale_b.t(), (128, 128), b.t().shape)
    return (x @ w.t()).to(output_dtype)


@pytest.mark.parametrize("contiguous", [False, True])
def test_what_the_library_is_handed_for_blocks(monkeypatch, contiguous):
    monkeypatch.setattr(layers_of, "engine", lambda *_: "torch scaled_mm")
    monkeypatch.setattr(F, "scaled_mm", library_scaled_mm)
    recipe = RECIPES["1x128 by 128x128"]
    q, scale, _ = quantize_input(randn(48, 512), recipe)
    qw, w_scale = quantize(randn(256, 512, seed=1), recipe.w_block)
    got = multiply(q, scale.contiguous() if contiguous else scale, qw, w_scale, recipe)
    want = product64(q, scale, qw, w_scale, recipe)
    assert ((got.double() - want).square().mean() / want.square().mean()).sqrt() < 0.005


def test_what_the_library_is_handed_for_rows(monkeypatch):
    def library(a, b, scale_a, scale_b, out_dtype, use_fast_accum):
        assert (tuple(scale_a.shape), tuple(scale_b.shape)) == ((a.shape[0], 1), (1, b.shape[1]))
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert use_fast_accum
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(layers_of, "engine", lambda *_: "_scaled_mm")
    monkeypatch.setattr(torch, "_scaled_mm", library)
    recipe = RECIPES["per row"]
    q, scale, _ = quantize_input(randn(48, 64), recipe)
    qw, w_scale = quantize(randn(32, 64, seed=1), recipe.w_block)
    want = product64(q, scale, qw, w_scale, recipe)
    got = multiply(q, scale, qw, w_scale, recipe)
    assert ((got.double() - want).square().mean() / want.square().mean()).sqrt() < 0.005


@pytest.mark.parametrize(
    ("name", "sm", "cuda", "shape", "want"),
    [
        ("per tensor", (9, 0), "13.0", (64, 64, 512), "_scaled_mm"),
        ("per tensor, e5m2", (8, 9), "12.8", (64, 64, 512), "_scaled_mm"),
        ("per tensor", (8, 0), "13.0", (64, 64, 512), "torch emulated"),
        ("per tensor", (9, 0), "13.0", (64, 64, 500), "torch emulated"),
        ("per row", (8, 9), "13.0", (64, 64, 512), "torch emulated"),
        ("per row", (9, 0), "12.6", (64, 64, 512), "_scaled_mm"),
        ("1x128 by 128x128", (9, 0), "13.0", (64, 128, 512), "torch scaled_mm"),
        ("1x128 by 128x128, 2**n", (9, 0), "12.9", (64, 128, 512), "torch scaled_mm"),
        ("1x128 by 128x128", (9, 0), "12.8", (64, 128, 512), "torch emulated"),
        ("1x128 by 128x128", (10, 0), "13.0", (64, 128, 512), "torch emulated"),
        ("1x128 by 128x128", (9, 0), "13.0", (64, 128, 640), "torch emulated"),
        ("1x32 by 1x32, 2**n", (10, 0), "13.0", (64, 128, 512), "torch emulated"),
    ],
)
def test_who_multiplies_on_a_gpu(monkeypatch, name, sm, cuda, shape, want):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: sm)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    how = engine(RECIPES[name], *shape, torch.device("cuda", 0))
    assert how == want
    assert accumulator(how, torch.device("cuda", 0)) == (torch.float32 if how == "torch emulated" else 2.0**-13)


def test_who_multiplies_elsewhere():
    cpu = torch.device("cpu")
    assert engine(RECIPES["per tensor"], 16, 16, 32, cpu) == "torch emulated"
    assert engine(RECIPES["per row"], 16, 16, 32, cpu) == "torch emulated"
    assert engine(RECIPES["per tensor"], 16, 16, 32, torch.device("meta")) == "torch emulated"


# --- the layer and the model


@given(lead=st.lists(st.integers(1, 4), max_size=3), name=st.sampled_from(list(RECIPES)))
def test_layer_is_its_exact_product_for_any_leading_sizes(lead, name):
    layer = FP8Linear(randn(32, 160), RECIPES[name])
    x = randn(*lead, 160, seed=2)
    want = layer.exact(x.reshape(-1, 160)).view(*lead, 32)
    got = layer(x)
    assert got.shape == want.shape
    assert (got.double() - want).norm() <= 0.01 * want.norm()


def test_layer_of_nothing():
    layer = FP8Linear(randn(8, 16), RECIPES["per tensor, stale"])
    assert layer(torch.empty(0, 16)).shape == (0, 8)
    assert layer(torch.empty(2, 0, 16)).shape == (2, 0, 8)
    assert layer.amax is None


def test_stale_scale_is_that_of_the_call_before():
    layer, dynamic = (FP8Linear(randn(16, 32), RECIPES[name]) for name in ("per tensor, stale", "per tensor"))
    x = randn(16, 32, seed=3)
    assert torch.equal(layer(x), dynamic(x))  # there is no call before the first
    once = layer(100 * x)  # saturates nearly all of it
    assert once.norm() < 0.1 * dynamic(100 * x).norm()
    assert layer.amax == (100 * x).abs().amax()
    assert torch.equal(layer(100 * x), dynamic(100 * x))


def test_channels_are_undone_in_the_weights():
    x, w, before = randn(8, 32).double(), randn(4, 32, seed=1).double(), randn(8, 32, seed=2).double()
    want, was = x @ w.t(), before.clone()
    xs, ws, after = with_channels(x.clone(), w.clone(), before, slice(1, 32, 8), 2.0**16)
    assert torch.equal(xs @ ws.t(), want) or torch.allclose(xs @ ws.t(), want, rtol=1e-12)
    assert torch.equal(after[:, 1], was[:, 1] * 2.0**16)
    assert not torch.equal(xs, x)


# --- bad input


def _bad():
    x = randn(32, 64)
    q, one = x.to(E4M3), torch.ones(1, 1)
    tensor, row = RECIPES["per tensor"], RECIPES["per row"]
    layer = FP8Linear(x, tensor)
    return {
        "quantize integers": (lambda: quantize(x.int(), (1, None)), TypeError, "quantize: x is torch.int32"),
        "quantize a vector": (lambda: quantize(x[0], (1, None)), ValueError, r"quantize: x has shape \[64\]"),
        "quantize nothing": (lambda: quantize(x[:0], (1, None)), ValueError, r"quantize: x has shape \[0, 64\]"),
        "amax of blocks": (lambda: quantize(x, (1, None), amax=one), ValueError, r"for blocks of \(1, 64\)"),
        "amax for each row": (
            lambda: quantize(x, (None, None), amax=torch.ones(32)), ValueError, r"quantize: amax \[32\]",
        ),
        "bfloat16 operand": (lambda: multiply(x.bfloat16(), one, q, one, tensor), TypeError, "multiply: q is torch.bf"),
        "bfloat16 weight": (lambda: multiply(q, one, x, one, tensor), TypeError, "multiply: weight is torch.float32"),
        "inner sizes": (lambda: multiply(q, one, q[:, :32], one, tensor), ValueError, r"need \[M, K\] and \[N, K\]"),
        "no rows": (lambda: multiply(q[:0], one, q, one, tensor), ValueError, r"q \[0, 64\].* not empty"),
        "one scale for rows": (lambda: multiply(q, one, q, one, row), ValueError, r"scale has shape \[1, 1\]"),
        "half a scale": (lambda: multiply(q, one.half(), q, one, tensor), TypeError, "scale is torch.float16"),
        "a scale of zero": (lambda: multiply(q, one * 0, q, one, tensor), ValueError, "scale has 1 of 1 values"),
        "a scale of NaN": (lambda: multiply(q, one, q, one * math.nan, tensor), ValueError, "weight_scale has 1 of 1"),
        "AMD's format": (lambda: quantize(x, (1, None), torch.float8_e4m3fnuz), TypeError, "dtype is .*fnuz; pass"),
        "a number for amax": (lambda: quantize(x, (None, None), amax=3.0), ValueError, r"quantize: amax 3\.0 for"),
        "no scale": (lambda: multiply(q, 1.0, q, one, tensor), TypeError, "scale is float"),
        "scale elsewhere": (lambda: multiply(q, one, q, one.to("meta"), tensor), ValueError, "weight_scale is on meta"),
        "layer of another width": (lambda: layer(x[:, :63]), ValueError, "the last sizes must agree"),
    }  # fmt: skip


BAD = _bad()


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


# --- what only a GPU shows


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(1024, 2048, 4096), (17, 33, 130), (256, 512, 512)])
def test_products_on_a_gpu(name, shape):
    (m, n, k), recipe = shape, RECIPES[name]
    h = harness()
    x, w = h.randn(m, k, dtype=torch.bfloat16), h.randn(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    q, scale, _ = quantize_input(x, recipe)
    qw, w_scale = quantize(w, recipe.w_block, power=recipe.power)
    want, want_scale, _ = quantize_input(x.cpu(), recipe)
    assert same_bits(q.cpu(), want)  # a GPU rounds as the CPU does
    assert same_bits(scale.cpu(), want_scale)
    h.check(
        lambda *args: multiply(*args, recipe), lambda *args: product64(*args, recipe), q, scale, qw, w_scale,
        dtype=torch.bfloat16, terms=k, poison=False, acc=accumulator(engine(recipe, m, n, k, h.device), h.device),
    )  # fmt: skip


@pytest.mark.gpu
def test_compiled_quantizers_on_a_gpu():
    h = harness(timing=False)
    price(h)
    assert len(h.record.tables[0]["rows"]) == 1 + len(TIMED)
    torch.compiler.reset()
