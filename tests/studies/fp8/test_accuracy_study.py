"""The study of accuracy: the error theory against measurement, what breaks what, and the logits of a model."""

import json
import math

from harness.bench import Row, Table
from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from rich.console import Console

from examples.common.fp8 import E4M3, E5M2, fp8_max
from examples.common.transformer import Config, Transformer
from examples.fp8.accuracy import ALL_RECIPES, RECIPES, TIMED
from examples.fp8.accuracy_layer import FP8Linear, Recipe
from studies.fp8 import accuracy_model
from studies.fp8.accuracy import (
    OUTLIERS,
    analyse,
    closed_form_db,
    expected_noise,
    power_of_two,
    show_price,
    study,
)
from studies.fp8.accuracy_model import SMALL, compare_logits, in_fp8, with_outliers

TINY = Config(width=64, layers=2, heads=4, kv_heads=2, hidden=96, vocab=50)


def harness(**options):
    return Harness("accuracy", Needs.parse("torch"), console=Console(quiet=True), **options)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(scope="module")
def facts():
    h = harness(timing=False, lesson=[])
    with settings_kept("accuracy", 0):
        study(h)
        accuracy_model.study(h)
    json.dumps(h.record.facts, allow_nan=False)
    return h.record.facts


def fact(facts, start):
    (found,) = (value for name, value in facts.items() if name.startswith(start))
    return found


def test_prediction_meets_measurement(facts):
    measured, predicted = (fact(facts, f"SNR of the layer, dB, {which}") for which in ("measured", "predicted"))
    assert list(measured) == list(predicted) == list(ALL_RECIPES)
    for name, each in measured.items():
        for data, db in each.items():  # of infinite variance, a few values decide
            assert abs(db - predicted[name][data]) < (2 if data == "heavy tails" else 1), (name, data)


def test_what_breaks_and_what_holds(facts):
    snr, token = fact(facts, "SNR of the layer, dB, measured"), fact(facts, "SNR of its worst")
    e4m3 = [name for name in RECIPES if "e5m2" not in name]
    assert all(27 < snr[name]["plain"] < 31 for name in e4m3)
    assert 23 < snr["per tensor, e5m2"]["plain"] < 26
    assert snr["per tensor"]["outlier channels"] < 20 < snr["per tensor, e5m2"]["outlier channels"]
    assert token["per tensor"]["outlier tokens"] < 20 < token["per row"]["outlier tokens"]
    assert snr["per row"]["small groups"] < 5 < 27 < snr["1x128 by 128x128"]["small groups"]
    assert snr["per tensor, stale"]["grown 4x"] < 15 < snr["per tensor"]["grown 4x"]
    assert list(fact(facts, "% of activations saturated")) == ["per tensor, stale"]
    for what in ("% of activations flushed", "% of weights flushed"):
        assert fact(facts, what)["per tensor"]["small groups"] > 45
        assert fact(facts, what)["1x128 by 128x128"]["small groups"] == 0


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


def test_bfloat16_is_studied_with_the_theory_of_its_rounding():
    x, w = randn(32, 64, dtype=torch.bfloat16), randn(48, 64, seed=1, dtype=torch.bfloat16)
    found = analyse(x, w, None, x.double() @ w.double().t())
    assert abs(found["dB"] - found["predicted"]) < 1
    assert set(found) == {"dB", "predicted", "worst token"}


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


def test_logits_compared_with_themselves():
    logits = randn(6, 40)
    assert compare_logits(logits, logits.double()) == {"relative error": 0, "KL, nats": 0, "same top 1": 1}
    other = compare_logits(logits.flip(-1), logits.double())
    assert other["KL, nats"] > 0.1
    assert other["same top 1"] < 1
    assert other["relative error"] > 0.5


def test_power_of_two():
    assert power_of_two(2.0**16) == "2**16"


@pytest.mark.parametrize(
    ("channels", "factor", "message"),
    [
        ([0], 3.0, r"factor 3\.0 is no power of two"),
        ([0], -2.0, "is no power of two"),
        ([64], 2.0, "the model has 0 to 63"),
    ],
)
def test_bad_outliers(channels, factor, message):
    with pytest.raises(ValueError, match=message):
        with_outliers(Transformer.random(TINY, torch.device("cpu"), torch.bfloat16), channels, factor)


def test_sizes_fit_the_recipes():
    for size in (SMALL.width, SMALL.hidden, SMALL.width + 2 * SMALL.kv_width, 2 * SMALL.hidden):
        assert size % 128 == 0
    assert set(TIMED) <= set(RECIPES)
    assert all(isinstance(recipe, Recipe) for recipe in RECIPES.values())


def test_price_beside_accuracy():
    h = harness(lesson=[])
    names = ["torch bfloat16", *(f"torch emulated {name}" for name in TIMED)]
    rows = [Row(name, False, 1.0, 0.1, ms, ms, ms, 1.0, 1.0, 0.5, 1.0 / ms) for ms, name in enumerate(names, 1)]
    h.lesson = [Table("linear layer", "16x32x128 bfloat16", names[0], rows)]
    show_price(h)
    found = fact(h.record.facts, "price and accuracy of the layer")
    assert list(found) == names
    assert found[names[0]]["SNR, dB"] > 50 > 32 > found[names[1]]["SNR, dB"] > 25
    assert found[names[2]]["x bfloat16"] == 0.33
    assert "fastest in FP8: torch emulated per tensor, 0.5x bfloat16" in h.record.conclusions[0]
