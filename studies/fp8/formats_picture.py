"""Study of formats, drawn: spacing and largest relative error by magnitude, and with matplotlib a picture of both."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

from harness import Harness
from harness.catalog import ROOT

import torch

from examples.common.fp8 import FORMATS, fp8_max
from examples.fp8.formats import cast, numbers, short

PICTURE = ROOT / "build" / "fp8_formats.png"
EXPONENTS = range(-18, 18)


def worst_errors(dtype: torch.dtype, exponents: range, device: torch.device) -> list[float]:
    """The largest relative error of a saturating cast of numbers from 2^n up to 2^(n + 1), for each exponent n."""
    steps = 1 + (torch.arange(4096, device=device) + 0.5) / 4096  # between numbers, never on one
    x = torch.stack([steps * 2.0**n for n in exponents])
    return ((cast(x, dtype).double() - x) / x).abs().amax(dim=1).tolist()


def number_line(dtype: torch.dtype, last: float, width: int) -> str:
    """A line from 0 to `last` with a bar wherever there is a number."""
    at = {round(v * width / last) for v in numbers(dtype).tolist() if v <= last}
    return "".join("|" if i in at else " " for i in range(width + 1))


def spacing(dtype: torch.dtype, exponent: int) -> float | None:
    """From 2^exponent to the next number; None where one of them is no number."""
    first, *following = numbers(dtype)[numbers(dtype) >= 2.0**exponent].tolist() or [0.0]
    return following[0] - first if first == 2.0**exponent and following else None


def draw(path: Path, exponents: range, errors: dict[torch.dtype, list[float]]) -> None:
    """Spacing and error by magnitude as a PNG; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for dtype, colour in zip(FORMATS, ("tab:blue", "tab:orange"), strict=True):
        values = numbers(dtype)
        left.plot(values[1:].tolist(), values.diff().tolist(), ".", markersize=5, color=colour, label=short(dtype))
        right.stairs(errors[dtype], [2.0**n for n in (*exponents, exponents.stop)], color=colour, label=short(dtype))
        for axes in (left, right):
            axes.axvline(fp8_max(dtype), color=colour, linewidth=1, linestyle=":")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlim(2.0**exponents.start, 2.0**exponents.stop)
        axes.set_xlabel("magnitude (dotted: the largest number)")
        axes.grid(alpha=0.3)
        axes.legend()
    left.set_title("distance to the next smaller number")
    right.set_title("largest relative error of a saturating cast")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def picture(h: Harness, path: Path = PICTURE) -> None:
    last, width = 16, 64
    h.say(f"numbers from 0 to {last}, where {width // last} to the unit can be told apart:")
    for dtype in FORMATS:
        h.say(f"{short(dtype):8s}{number_line(dtype, last, width)}")
    h.say(f"{'':8s}{''.join(f'{n:<{2 * width // last}d}' for n in range(0, last + 1, 2))}")

    errors = {dtype: worst_errors(dtype, EXPONENTS, h.device) for dtype in FORMATS}
    rows = {}
    for i, n in enumerate(EXPONENTS):
        row = rows[f"2^{n}"] = {}
        for dtype in FORMATS:
            gap = spacing(dtype, n)
            row[f"{short(dtype)} spacing"] = f"2^{math.log2(gap):.0f}" if gap else "-"
            row[f"{short(dtype)} error"] = f"{errors[dtype][i]:.2%}"
    h.table("from 2^n up to 2^(n+1): spacing, and largest relative error of a saturating cast", rows)
    normal = {}
    for dtype in FORMATS:
        first, end = torch.finfo(dtype).smallest_normal, fp8_max(dtype)
        within = [e for n, e in zip(EXPONENTS, errors[dtype], strict=True) if first <= 2.0**n and 2.0 ** (n + 1) <= end]
        normal[short(dtype)] = round(max(within), 4)
    h.fact("largest relative error where numbers are normal", normal)
    if find_spec("matplotlib") is None:
        h.say("with matplotlib installed this is drawn as a picture, too")
        return
    draw(path, EXPONENTS, errors)
    h.say(f"drawn in {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


def study(h: Harness) -> None:
    if not h.profile:
        picture(h)
