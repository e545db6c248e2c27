"""The study of accuracy: the error theory against measurement, value by value."""

import math

import pytest
import torch

from examples.common.fp8 import E4M3, E5M2, fp8_max
from examples.fp8.accuracy import RECIPES, datasets, measure
from studies.fp8.accuracy import closed_form_db, expected_noise, predicted


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
