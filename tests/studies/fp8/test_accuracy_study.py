"""The study of accuracy: the error theory against measurement, and outliers that change no bit of a model."""

import math

import pytest
import torch

from examples.common.fp8 import E4M3, E5M2, fp8_max
from examples.common.transformer import Config, Transformer
from examples.fp8.accuracy import RECIPES, datasets, measure
from examples.fp8.accuracy_layer import FP8Linear
from studies.fp8.accuracy import closed_form_db, expected_noise, predicted
from studies.fp8.accuracy_model import compare_logits, in_fp8, with_outliers

TINY = Config(width=64, layers=2, heads=4, kv_heads=2, hidden=96, vocab=50)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def model():
    return Transformer.random(TINY, torch.device("cpu"), torch.bfloat16)


def test_prediction_meets_measurement(h):
    for data, x, w, before in datasets(h.randn, 128, 1024, 256):
        for recipe in (None, *RECIPES.values()):
            args = (x, w, recipe, x.double() @ w.double().t(), before)
            # Of infinite variance, a few values decide.
            assert abs(measure(*args)["dB"] - predicted(*args)) < (2 if data == "heavy tails" else 1), (data, recipe)


@pytest.mark.parametrize(("formats", "bits"), [((E4M3, E4M3), (3, 3)), ((E5M2, E4M3), (2, 3)), ((E4M3,), (3,))])
def test_closed_form_is_what_even_mantissas_leave(formats, bits):
    generator = torch.Generator().manual_seed(1)
    x = torch.exp2(4 * torch.rand(100_000, generator=generator, dtype=torch.float64))  # four binades of normal numbers
    noise = sum((((x.to(dtype).double() - x) ** 2).sum() / (x**2).sum()).item() for dtype in formats)
    assert abs(-10 * math.log10(noise) - closed_form_db(*bits)) < 0.1


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_expected_noise_at_both_ends_of_the_format(dtype):
    most, scale = fp8_max(dtype), torch.full((), 0.75)
    for exponent in (-20, -12, -8, -4, 0, 4, 7, 10, 18):
        x = randn(50_000, seed=exponent + 100).double() * 2.0**exponent
        got = ((x / scale).clamp(-most, most).float().to(dtype).double() * scale.double() - x).square().sum()
        assert abs(10 * math.log10(got / expected_noise(x, scale, dtype).sum())) < 0.15
    # The largest of a block loses nothing.
    assert expected_noise(torch.tensor([448.0, 447.0]), torch.ones(()), E4M3)[0] == 0


def test_model_in_fp8_leaves_the_model_alone(model):
    ids = torch.arange(12).view(3, 4)
    before, fp8 = model(ids), in_fp8(model, RECIPES["per row"])
    assert sum(isinstance(module, FP8Linear) for module in fp8.modules()) == 4 * TINY.layers
    assert torch.equal(model(ids), before)
    assert 0 < compare_logits(fp8(ids), model.float64(ids))["relative error"] < 0.3


def test_outliers_change_no_bit_of_bfloat16(model):
    ids = torch.arange(12).view(3, 4)
    for factor in (2.0**10, 2.0**-6, 2.0**16):
        outliers = with_outliers(model, [3, 40], factor)
        assert torch.equal(outliers(ids), model(ids))
        assert torch.equal(outliers.float64(ids), model.float64(ids))
        assert (model.blocks[0].attention_norm.weight == 1).all()
        assert outliers.blocks[1].mlp_norm.weight[40] == factor
