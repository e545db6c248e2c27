"""Accuracy: quantizers to the bit, products to float64, the error theory against measurement, and what breaks what."""

import json
import math

from harness import dequantize_reference, fp8_max, quantize_reference
from harness.catalog import Needs
from harness.fp8 import E4M3, E5M2, FLOOR
from harness.session import Harness
from harness.settings import settings_kept
from harness.transformer import Config, Transformer

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from examples.fp8 import accuracy
from examples.fp8.accuracy import (
    ALL_RECIPES,
    OUTLIERS,
    RECIPES,
    SMALL,
    TIMED,
    FP8Linear,
    Recipe,
    accumulator,
    closed_form_db,
    compare_logits,
    decibel,
    demo,
    engine,
    expected_noise,
    in_fp8,
    multiply,
    power_of_two,
    product64,
    quantize,
    quantize_input,
    show_price,
    sized,
    spread,
    study,
    with_channels,
    with_outliers,
)

TINY = Config(width=64, layers=2, heads=4, kv_heads=2, hidden=96, vocab=50)


def harness(**options):
    return Harness("accuracy", Needs.parse("torch"), console=Console(quiet=True), **options)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# --- the demo


@pytest.fixture(scope="module")
def facts():
    h = harness(timing=False)
    with settings_kept("accuracy", 0):
        demo(h)
    assert all(check["passed"] for check in h.record.checks)
    assert len(h.record.checks) == len(RECIPES)
    (table,) = h.record.comparisons
    variants = [row["variant"] for row in table["rows"]]
    assert all(variant.endswith(name) for variant, name in zip(variants, ("bfloat16", *TIMED), strict=True))
    json.dumps(h.record.facts, allow_nan=False)
    return h.record.facts


def fact(facts, start):
    (found,) = (value for name, value in facts.items() if name.startswith(start))
    return found


def test_prediction_meets_measurement(facts):
    found = fact(facts, "SNR of the layer")
    assert list(found) == list(ALL_RECIPES)
    for name, each in found.items():
        for data, (measured, predicted) in each.items():
            assert abs(measured - predicted) < 1, (name, data)


def test_what_breaks_and_what_holds(facts):
    snr = {name: {data: db for data, (db, _) in each.items()} for name, each in fact(facts, "SNR of the layer").items()}
    token = {name: {data: db for data, (db,) in each.items()} for name, each in fact(facts, "SNR of its worst").items()}
    e4m3 = [name for name in RECIPES if "e5m2" not in name]
    assert all(27 < snr[name]["plain"] < 31 for name in e4m3)
    assert 23 < snr["per tensor, e5m2"]["plain"] < 26
    assert snr["per tensor"]["outlier channels"] < 20 < snr["per tensor, e5m2"]["outlier channels"]
    assert token["per tensor"]["outlier tokens"] < 20 < token["per row"]["outlier tokens"]
    assert snr["per row"]["small groups"] < 5 < 27 < snr["1x128 by 128x128"]["small groups"]
    assert snr["per tensor, stale"]["grown 4x"] < 15 < snr["per tensor"]["grown 4x"]
    assert list(fact(facts, "% of activations saturated")) == ["per tensor, stale"]
    flushed = fact(facts, "% flushed to zero")
    assert flushed["per tensor"]["small groups"][0] > 45
    assert flushed["1x128 by 128x128"]["small groups"] == [0, 0]


def test_outliers_that_grow(facts):
    found = fact(facts, "SNR, dB, where one channel")
    assert all(len(each) == len(OUTLIERS) for each in found.values())
    assert len(set(found["bfloat16"].values())) == 1  # powers of two change no bit
    assert found["per tensor"]["2**10"] > 27  # the window is wide: mild outliers cost nothing
    assert found["per tensor"]["2**20"] < found["1x128 by 128x128"]["2**20"] < found["1x32 by 1x32, 2**n"]["2**20"]


def test_logits(facts):
    levels = [value for name, value in facts.items() if name.startswith("logits of")]
    assert len(levels) == 3
    for level in levels:
        assert list(level) == list(ALL_RECIPES)
        assert level["bfloat16"] == levels[0]["bfloat16"]
        assert level["bfloat16"]["relative error"] < 0.03
        assert all(one["KL, nats"] >= 0 for one in level.values())
    first, last = levels[0], levels[-1]
    assert last["per tensor"]["relative error"] > 2 * first["per tensor"]["relative error"]
    assert last["1x32 by 1x32, 2**n"]["relative error"] < last["per tensor"]["relative error"] / 2


def test_price_is_a_call_per_variant_under_profile():
    h = harness(profile=True)
    assert show_price(h) is None
    assert not h.record.facts
    assert not h.record.comparisons


def test_demo_under_profile_states_nothing():
    h = harness(profile=True)
    demo(h)
    assert not h.record.facts
    assert not h.record.checks


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


@pytest.mark.parametrize(("formats", "bits"), [((E4M3, E4M3), (3, 3)), ((E5M2, E4M3), (2, 3)), ((E4M3,), (3,))])
def test_closed_form_is_what_even_mantissas_leave(formats, bits):
    generator = torch.Generator().manual_seed(1)
    x = torch.exp2(4 * torch.rand(100_000, generator=generator, dtype=torch.float64))  # four binades of normal numbers
    noise = sum((((x.to(dtype).double() - x) ** 2).sum() / (x**2).sum()).item() for dtype in formats)
    assert abs(-10 * math.log10(noise) - closed_form_db(*bits)) < 0.1


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("exponent", [-20, -12, -8, -4, 0, 4, 7, 10, 18])
def test_expected_noise_at_both_ends_of_the_format(dtype, exponent):
    x = randn(200_000, seed=exponent + 100).double() * 2.0**exponent
    scale = torch.full((), 0.75)
    most = fp8_max(dtype)
    got = ((x / scale).clamp(-most, most).to(torch.float32).to(dtype).double() * scale.double() - x).square().sum()
    want = expected_noise(x, scale, dtype).sum()
    assert abs(10 * math.log10(got / want)) < 0.1


def test_expected_noise_of_the_largest_of_a_block_is_none():
    assert expected_noise(torch.tensor([448.0, 447.0]), torch.ones(()), E4M3)[0] == 0


def test_decibels_stay_in_json():
    assert decibel(torch.tensor(100.0)) == 20
    assert decibel(torch.tensor(math.inf)) == 300
    assert decibel(torch.tensor(0.0)) == -300


def test_bfloat16_is_studied_with_the_theory_of_its_rounding():
    x, w = randn(32, 64, dtype=torch.bfloat16), randn(48, 64, seed=1, dtype=torch.bfloat16)
    found = study(x, w, None, x.double() @ w.double().t())
    assert abs(found["dB"] - found["predicted"]) < 1
    assert set(found) == {"dB", "predicted", "worst token"}


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
    monkeypatch.setattr(accuracy, "engine", lambda *_: "torch scaled_mm")
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

    monkeypatch.setattr(accuracy, "engine", lambda *_: "_scaled_mm")
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


def test_model_in_fp8_leaves_the_model_alone():
    model = Transformer.random(TINY, torch.device("cpu"), torch.bfloat16)
    ids = torch.arange(12).view(3, 4)
    before = model(ids)
    fp8 = in_fp8(model, RECIPES["per row"])
    layers = [module for module in fp8.modules() if isinstance(module, FP8Linear)]
    assert len(layers) == 4 * TINY.layers
    assert not any(isinstance(module, FP8Linear) for module in model.modules())
    assert torch.equal(model(ids), before)
    assert 0 < compare_logits(fp8(ids), model.float64(ids))["relative error"] < 0.3


@pytest.mark.parametrize("factor", [1.0, 2.0**10, 2.0**-6, 2.0**16])
def test_outliers_change_no_bit_of_bfloat16(factor):
    model = Transformer.random(TINY, torch.device("cpu"), torch.bfloat16)
    ids = torch.arange(12).view(3, 4)
    outliers = with_outliers(model, [3, 40], factor)
    assert torch.equal(outliers(ids), model(ids))
    assert torch.equal(outliers.float64(ids), model.float64(ids))
    assert (model.blocks[0].attention_norm.weight == 1).all()
    assert outliers.blocks[1].mlp_norm.weight[40] == factor


def test_channels_are_undone_in_the_weights():
    x, w, before = randn(8, 32).double(), randn(4, 32, seed=1).double(), randn(8, 32, seed=2).double()
    want, was = x @ w.t(), before.clone()
    xs, ws, after = with_channels(x.clone(), w.clone(), before, slice(1, 32, 8), 2.0**16)
    assert torch.equal(xs @ ws.t(), want) or torch.allclose(xs @ ws.t(), want, rtol=1e-12)
    assert torch.equal(after[:, 1], was[:, 1] * 2.0**16)
    assert not torch.equal(xs, x)
    assert power_of_two(2.0**16) == "2**16"


def test_logits_compared_with_themselves():
    logits = randn(6, 40)
    assert compare_logits(logits, logits.double()) == {"relative error": 0, "KL, nats": 0, "same top 1": 1}
    other = compare_logits(logits.flip(-1), logits.double())
    assert other["KL, nats"] > 0.1
    assert other["same top 1"] < 1
    assert other["relative error"] > 0.5


# --- bad input


def _bad():
    x = randn(32, 64)
    q, one = x.to(E4M3), torch.ones(1, 1)
    tensor, row = RECIPES["per tensor"], RECIPES["per row"]
    model = Transformer.random(TINY, torch.device("cpu"), torch.bfloat16)
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
        "factor of three": (lambda: with_outliers(model, [0], 3.0), ValueError, "factor 3.0 is no power of two"),
        "factor below zero": (lambda: with_outliers(model, [0], -2.0), ValueError, "is no power of two"),
        "channel beyond": (lambda: with_outliers(model, [64], 2.0), ValueError, "the model has 0 to 63"),
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
    show_price(h)
    assert len(h.record.comparisons[0]["rows"]) == 1 + len(TIMED)
    torch.compiler.reset()


def test_sizes_fit_the_recipes():
    for size in (SMALL.width, SMALL.hidden, SMALL.width + 2 * SMALL.kv_width, 2 * SMALL.hidden):
        assert size % 128 == 0
    assert set(TIMED) <= set(RECIPES)
    assert all(isinstance(recipe, Recipe) for recipe in RECIPES.values())
