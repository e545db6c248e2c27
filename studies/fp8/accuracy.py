"""Study of accuracy: the error predicted, what is flushed and saturated, outliers that grow, and accuracy by price.

1. The error of the layer predicted from the spacing of the format at each value, beside what is measured; its worst
   token; how many values round to zero and how many saturate.
2. One channel in 512 further and further above the rest, in a layer that computes the same.
3. The time of the lesson's layers beside their signal-to-noise ratio.
"""

from __future__ import annotations

import math

from harness import Harness

import torch
import torch.nn.functional as F

from examples.fp8.accuracy import (
    ALL_RECIPES,
    BROKEN_DB,
    E4M3,
    RECIPES,
    breaks,
    datasets,
    decibel,
    engine,
    layers,
    measure,
    spaced,
    with_channels,
)
from examples.fp8.accuracy_layer import Recipe, fp8_max, quantize, quantize_input, sized, spread

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


def analyse(
    x: torch.Tensor, w: torch.Tensor, recipe: Recipe | None, want: torch.Tensor, before: torch.Tensor | None = None
) -> dict[str, float]:
    """measure(), the same from theory, and in % what is lost at either end of the format."""
    noise = expected_noise(want, want.new_ones(()), torch.bfloat16).sum()  # of the result's own rounding
    lost = {}
    if recipe is not None:
        q, scale, _ = quantize_input(x, recipe, None if before is None or not recipe.stale else before.abs().amax())
        qw, w_scale = quantize(w, recipe.w_block, power=recipe.power)
        scale = spread(scale, sized(recipe.x_block, x), x.shape)
        w_scale = spread(w_scale, sized(recipe.w_block, w), w.shape)
        # Errors at different k have independent signs, so their squares add: over all tokens and outputs, by k.
        x_noise, w_noise = (
            expected_noise(t, s, dtype).sum(0) for t, s, dtype in ((x, scale, recipe.x_format), (w, w_scale, E4M3))
        )
        x_power, w_power = (t.double().square().sum(0) for t in (x, w))
        noise += (x_noise * w_power + x_power * w_noise + x_noise * w_noise).sum()
        beyond = (x.double() / scale).abs() > fp8_max(recipe.x_format) * (1 + 2**-20)
        zeros, w_zeros = (q.float() == 0) & (x != 0), (qw.float() == 0) & (w != 0)
        lost = {"flushed": percent(zeros), "saturated": percent(beyond), "weights flushed": percent(w_zeros)}
    return measure(x, w, recipe, want, before) | {"predicted": decibel(want.square().sum() / noise)} | lost


def percent(which: torch.Tensor) -> float:
    return round(100 * which.double().mean().item(), 2)


def digits(value: float) -> float:
    return float(f"{value:.3g}")


def power_of_two(factor: float) -> str:
    return f"2**{int(math.log2(factor))}"


def show_data(h: Harness) -> None:
    m, k, n = h.pick(quick=(128, 1024, 256), full=(4096, 4096, 4096))
    found: dict[str, dict[str, dict]] = {name: {} for name in ALL_RECIPES}
    for data, x, w, before in datasets(h.randn, m, k, n):
        want = x.double() @ w.double().t()
        for name, recipe in ALL_RECIPES.items():
            found[name][data] = analyse(x, w, recipe, want, before)

    def table(title: str, column: str) -> None:
        cells = {
            name: {data: one[column] for data, one in each.items()}
            for name, each in found.items() if column in each["plain"]
        }  # fmt: skip
        h.table(f"{title} ({m}x{n}x{k})", cells)

    formats = {"e4m3 by e4m3": (3, 3), "e5m2 by e4m3": (2, 3)}
    h.fact("SNR in theory, dB", {name: round(closed_form_db(*bits), 1) for name, bits in formats.items()})
    table("SNR of the layer, dB, measured", "dB")
    table("SNR of the layer, dB, predicted from the spacing at each value", "predicted")
    table("SNR of its worst token, dB", "worst token")
    table("% of activations flushed to zero", "flushed")
    table("% of weights flushed to zero", "weights flushed")
    cut = {name: {d: one["saturated"] for d, one in found[name].items() if one["saturated"]} for name in RECIPES}
    h.fact("% of activations saturated", {name: each for name, each in cut.items() if each})
    off = {(name, d): abs(one["dB"] - one["predicted"]) for name, each in found.items() for d, one in each.items()}
    worst = max(off, key=off.get)
    plain = found["per tensor"]["plain"]["dB"]
    h.say(f"the prediction is at most {off[worst]:.1f} dB from the measurement ({worst[0]} on {worst[1]})")
    h.say(f"{plain} dB, per tensor on plain data, is a relative error of {10 ** (-plain / 20):.1%}")
    for name in RECIPES:
        both = {data: {key: one[key] for key in ("dB", "worst token")} for data, one in found[name].items()}
        said = ", ".join(f"{data} (down to {db} dB)" for data, db in breaks(both).items())
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
    if not (h.lesson and all(h.lesson)):
        return
    (table,) = h.lesson
    m, n, k = map(int, table.case.split()[0].split("x"))
    x, w = h.randn(m, k, dtype=torch.bfloat16), h.randn(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    want, batch_before = x.double() @ w.double().t(), h.randn(m, k, dtype=torch.bfloat16)
    variants = {"torch bfloat16": lambda x: F.linear(x, w)} | layers(w, m)
    rows = {}
    for name, fn in variants.items():
        fn(batch_before)  # what a stale scale is made of
        ratio = want.square().sum() / (fn(x).double() - want).square().sum()
        row = table[name]
        rows[name] = {"ms": digits(row.ms), "x bfloat16": round(row.speedup, 2), "SNR, dB": decibel(ratio)}
    h.table(f"price and accuracy of the layer, its input quantized in every call ({m}x{n}x{k})", rows)
    best = table.best.variant
    h.say(
        f"fastest in FP8: {best}, {rows[best]['x bfloat16']}x bfloat16 at {rows[best]['SNR, dB']} dB against "
        f"{rows['torch bfloat16']['SNR, dB']} dB"
        + ("" if h.device.type == "cuda" else "; on a CPU that says nothing about FP8")
    )


def study(h: Harness) -> None:
    if h.profile:
        return
    how = {name: engine(recipe, 1024, 2048, 4096, h.device) for name, recipe in RECIPES.items()}
    h.fact("computed by, 1024x2048x4096", how)
    show_data(h)
    show_outliers(h)
    show_price(h)
