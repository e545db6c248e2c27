"""Study of accuracy: one channel in 512 of x ever larger, its weights ever smaller, so that the product is the same."""

from __future__ import annotations

import math

from harness import Harness

import torch

from examples.fp8.accuracy import ALL_RECIPES, measure
from examples.fp8.accuracy_data import spaced, with_channels
from examples.fp8.accuracy_layer import Recipe

BROKEN_DB = 3.0  # lost against no outlier: half a bit of a value
OUTLIERS = tuple(2.0**e for e in (0, 4, 8, 10, 12, 14, 16, 20))


def show_outliers(h: Harness, recipes: dict[str, Recipe | None] = ALL_RECIPES) -> None:
    m, k, n = h.pick(quick=(128, 1024, 256), full=(2048, 4096, 2048))
    x, w = h.randn(m, k, dtype=torch.bfloat16), h.randn(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    want = x.double() @ w.double().t()  # factors are powers of two, so this is the product at every factor
    found: dict[str, dict[str, float]] = {}
    for name, recipe in recipes.items():
        if recipe is not None and recipe.delayed:
            continue  # a delayed scale made of the same batch is that of "per tensor"
        for factor in OUTLIERS:
            xs, ws, _ = with_channels(x.clone(), w.clone(), x[:0], spaced(k, 512), factor)
            found.setdefault(name, {})[f"2**{math.log2(factor):.0f}"] = measure(xs, ws, recipe, want)["dB"]
    h.table(f"SNR, dB, where one channel in 512 is larger by ({m}x{n}x{k})", found)
    for name, each in found.items():
        first, *_, last = each
        broken = [factor for factor, db in each.items() if db < each[first] - BROKEN_DB]
        held = f"breaks at {broken[0]}" if broken else f"holds up to {last}"
        h.say(f"{name}: {held}; {each[last]} dB are left at {last}")


def study(h: Harness) -> None:
    if not h.profile:
        show_outliers(h)
