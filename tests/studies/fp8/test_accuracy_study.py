"""The study of accuracy: the error theory against measurement, value by value."""

import math

import pytest
import torch

from examples.common.fp8 import E4M3, E5M2, fp8_max
from examples.fp8.accuracy import RECIPES, datasets, measure
from studies.fp8.accuracy import expected_noise, predicted


def test_prediction_meets_measurement(h):
    for data, x, w, before in datasets(h.randn, 64, 512, 128):
        for recipe in (None, *RECIPES.values()):
            args = (x, w, recipe, x.double() @ w.double().t(), before)
            # Of infinite variance, a few values decide.
            assert abs(measure(*args)["dB"] - predicted(*args)) < (2 if data == "heavy tails" else 1), (data, recipe)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_expected_noise_at_both_ends_of_the_format(h, dtype):
    most, scale = fp8_max(dtype), torch.full((), 0.75)
    for exponent in (-20, -12, -8, -4, 0, 4, 7, 10, 18):
        x = h.randn(50_000).cpu().double() * 2.0**exponent
        got = ((x / scale).clamp(-most, most).float().to(dtype).double() * scale.double() - x).square().sum()
        assert abs(10 * math.log10(got / expected_noise(x, scale, dtype).sum())) < 0.15
    # The largest of a block loses nothing.
    assert expected_noise(torch.tensor([448.0, 447.0]), torch.ones(()), E4M3)[0] == 0
