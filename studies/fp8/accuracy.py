"""Study of accuracy: the error predicted, outliers that grow, and accuracy by price.

1. The error of the layer predicted from the spacing of the format at each value, beside what is measured.
2. One channel in 512 further and further above the rest, in a layer that computes the same.
3. The time of the lesson's layers beside their signal-to-noise ratio.
"""

from __future__ import annotations

import math

from harness import Harness

import torch
import torch.nn.functional as F

from examples.fp8.accuracy import ALL_RECIPES, BROKEN_DB, E4M3, RECIPES, breaks, datasets, decibel, layers, measure
from examples.fp8.accuracy_data import spaced, with_channels
from examples.fp8.accuracy_layer import Recipe, quantize, quantize_input, sized, spread

OUTLIERS = tuple(2.0**e for e in (0, 4, 8, 10, 12, 14, 16, 20))


def closed_form_db(*mantissa_bits: int) -> float:
    """SNR of a product whose operands keep so many bits: each error even over one step, mantissas even in logarithm.

    The step is 2**-bits of the power of two below a value, whose square is on average 3 / (2 ln 2) times that power's.
    """
    noise = sum(4.0**-bits / 12 / (1.5 / math.log(2)) for bits in mantissa_bits)
    return -10 * math.log10(noise)


def expected_noise(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The squared error that rounding x to `dtype` should leave: step**2 / 12, or all that is lost at either end."""
    info, v = torch.finfo(dtype), (x.double() / scale).abs()
    step = torch.exp2(v.clamp(min=info.smallest_normal).log2().floor()) * info.eps
    noise = step.square() / 12
    noise = torch.where(v <= info.smallest_normal * info.eps / 2, v.square(), noise)  # rounds to zero
    # A block's largest value is the format's largest number, but for the rounding of its scale: it loses nothing.
    noise = torch.where(v > info.max * (1 - 2**-20), (v - info.max).square(), noise)
    return noise * scale.double().square()


def predicted(
    x: torch.Tensor, w: torch.Tensor, recipe: Recipe | None, want: torch.Tensor, before: torch.Tensor
) -> float:
    """What measure() should say, from theory."""
    noise = expected_noise(want, want.new_ones(()), torch.bfloat16).sum()  # of the result's own rounding
    if recipe is not None:
        _, scale, _ = quantize_input(x, recipe, before.abs().amax() if recipe.stale else None)
        _, w_scale = quantize(w, recipe.w_block, power=recipe.power)
        scale = spread(scale, sized(recipe.x_block, x), x.shape)
        w_scale = spread(w_scale, sized(recipe.w_block, w), w.shape)
        # Errors at different k have independent signs, so their squares add: over all tokens and outputs, by k.
        x_noise, w_noise = (
            expected_noise(t, s, dtype).sum(0) for t, s, dtype in ((x, scale, recipe.x_format), (w, w_scale, E4M3))
        )
        x_power, w_power = (t.double().square().sum(0) for t in (x, w))
        noise += (x_noise * w_power + x_power * w_noise + x_noise * w_noise).sum()
    return decibel(want.square().sum() / noise)


def digits(value: float) -> float:
    return float(f"{value:.3g}")


def power_of_two(factor: float) -> str:
    return f"2**{int(math.log2(factor))}"


def show_data(h: Harness) -> None:
    m, k, n = h.pick(quick=(128, 1024, 256), full=(4096, 4096, 4096))
    measured: dict[str, dict] = {name: {} for name in ALL_RECIPES}
    theory: dict[str, dict] = {name: {} for name in ALL_RECIPES}
    for data, x, w, before in datasets(h.randn, m, k, n):
        want = x.double() @ w.double().t()
        for name, recipe in ALL_RECIPES.items():
            measured[name][data] = measure(x, w, recipe, want, before)
            theory[name][data] = predicted(x, w, recipe, want, before)
    formats = {"e4m3 by e4m3": (3, 3), "e5m2 by e4m3": (2, 3)}
    h.fact("SNR in theory, dB", {name: round(closed_form_db(*bits), 1) for name, bits in formats.items()})
    h.table(f"SNR of the layer, dB, predicted from the spacing at each value ({m}x{n}x{k})", theory)
    off = {(r, d): abs(one["dB"] - theory[r][d]) for r, each in measured.items() for d, one in each.items()}
    worst = max(off, key=off.get)
    h.say(f"the prediction is at most {off[worst]:.1f} dB from the measurement ({worst[0]} on {worst[1]})")
    plain = measured["per tensor"]["plain"]["dB"]
    h.say(f"{plain} dB, per tensor on plain data, is a relative error of {10 ** (-plain / 20):.1%}")
    for name in RECIPES:
        said = ", ".join(f"{data} (down to {db} dB)" for data, db in breaks(measured[name]).items())
        h.say(f"{name}: breaks on {said or 'none of these'}")


def show_outliers(h: Harness, recipes: dict[str, Recipe | None] = ALL_RECIPES) -> None:
    """One channel in 512 further and further above the rest, in a layer that computes the same."""
    m, k, n = h.pick(quick=(128, 1024, 256), full=(2048, 4096, 2048))
    x, w = h.randn(m, k, dtype=torch.bfloat16), h.randn(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    want = x.double() @ w.double().t()  # factors are powers of two, so this is the product at every factor
    found: dict[str, dict[str, float]] = {}
    for name, recipe in recipes.items():
        if recipe is not None and recipe.stale:
            continue  # of the same batch: as per tensor
        for factor in OUTLIERS:
            xs, ws, _ = with_channels(x.clone(), w.clone(), x[:0], spaced(k, 512), factor)
            found.setdefault(name, {})[power_of_two(factor)] = measure(xs, ws, recipe, want)["dB"]
    h.table(f"SNR, dB, where one channel in 512 is larger by ({m}x{n}x{k})", found)
    for name, each in found.items():
        first, last = each[power_of_two(OUTLIERS[0])], power_of_two(OUTLIERS[-1])
        broken = [factor for factor, db in each.items() if db < first - BROKEN_DB]
        held = f"holds up to {last}" if not broken else f"breaks at {broken[0]}"
        h.say(f"{name}: {held}; {each[last]} dB are left at {last}")


def show_price(h: Harness) -> None:
    """The lesson's layers on plain data: what each costs, and how accurate it is."""
    (table,) = h.lesson
    m, n, k = map(int, table.case.split()[0].split("x"))
    x, w = h.randn(m, k, dtype=torch.bfloat16), h.randn(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    want, rows = x.double() @ w.double().t(), {}
    for name, fn in ({"torch bfloat16": lambda x: F.linear(x, w)} | layers(w, m)).items():
        fn(h.randn(m, k, dtype=torch.bfloat16))  # what a stale scale is made of
        ratio = want.square().sum() / (fn(x).double() - want).square().sum()
        rows[name] = {"ms": digits(table[name].ms), "x bfloat16": round(table[name].speedup, 2)}
        rows[name]["SNR, dB"] = decibel(ratio)
    h.table(f"price and accuracy of the layer, its input quantized in every call ({m}x{n}x{k})", rows)


def study(h: Harness) -> None:
    if h.profile:
        return
    show_data(h)
    show_outliers(h)
    if h.lesson and all(h.lesson):
        show_price(h)
