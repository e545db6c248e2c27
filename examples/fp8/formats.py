"""FP8 formats: every number that e4m3fn and e5m2 have, and what a cast makes of the rest.

Technique  A format of 8 bits has 256 codes, so nothing about it need be believed: each is decoded from the definition,
           (-1)^sign * 2^(exponent - bias) * 1.mantissa, and torch and Triton are held to that. e4m3fn spends a bit on
           precision that e5m2 spends on range; its top exponent holds numbers up to 448 and one NaN where e5m2, a
           shortened float16, has infinities and NaNs. Within the range every cast rounds to nearest, ties to even.
           Beyond it casts differ, and that is what scales are for: the run shows which cast gives NaN or an infinity,
           and which the largest number. e4m3fnuz and e5m2fnuz, of some AMD GPUs, are other formats: same bits, other
           numbers.
Question   Which numbers are there in FP8, how far apart are they, and what does a cast do with what lies beyond them?
Needs      triton, sm_89
Shapes     x contiguous, any shape -> the same shape.
Dtypes     float32, float16, bfloat16, float8_e4m3fn and float8_e5m2, cast to any of these by way of float32.
Errors     cast: TypeError for another dtype; ValueError for a layout that is not contiguous; RuntimeError for a device
           without Triton or an input that requires grad. A cast that rounds otherwise than shown fails the run.
Wins when  (which to use) e4m3fn for what is multiplied, weights and activations; e5m2 where range matters more than
           the third bit of the mantissa, as for gradients.
Source     the definition: Micikevicius et al. 2022, "FP8 formats for deep learning".
Run        python examples/fp8/formats.py
"""

from __future__ import annotations

import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from harness import Harness, fp8_max, require_triton_device, run
from harness.catalog import ROOT
from harness.check import CheckError
from harness.codegen import CodegenError, compile_for
from harness.fp8 import E4M3, E5M2, FORMATS

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16, *FORMATS)
BLOCK = 4096
PICTURE = ROOT / "build" / "fp8_formats.png"


class Layout(NamedTuple):
    exponent_bits: int
    mantissa_bits: int
    bias: int
    infinities: bool  # else the codes of the top exponent are numbers, but for one, which is NaN


LAYOUTS = {E4M3: Layout(4, 3, 7, False), E5M2: Layout(5, 2, 15, True)}


@triton.jit
def cast_kernel(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements).to(tl.float32)
    tl.store(y_ptr + offsets, x.to(y_ptr.dtype.element_ty), mask=offsets < n_elements)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in another dtype by Triton's cast from float32, which saturates where dtype is FP8."""
    require_triton_device("cast", x)
    for what, given in (("x", x.dtype), ("dtype", dtype)):
        if given not in DTYPES:
            raise TypeError(f"cast: {what} is {given}, which is not one of {DTYPES}")
    if not x.is_contiguous():
        raise ValueError(f"cast: strides {x.stride()} of shape {tuple(x.shape)}; call x.contiguous() first")
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        cast_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
    return y


def torch_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


def clamp_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.clamp(-fp8_max(dtype), fp8_max(dtype)).to(dtype)


# --- the definition


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.float8_")


def decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that codes from 0 to 255 stand for, in float64, from the definition of the format."""
    exponent_bits, mantissa_bits, bias, infinities = LAYOUTS[dtype]
    device, codes = codes.device, codes.long().cpu()  # the arithmetic of one machine for all
    sign = 1.0 - 2.0 * (codes >> 7)
    exponent = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = (codes & (2**mantissa_bits - 1)).double() / 2**mantissa_bits
    # Exponent 0 has no leading 1 and the scale of exponent 1: the subnormal numbers, evenly spaced down to 0.
    value = torch.ldexp(mantissa + (exponent > 0), exponent.clamp(min=1) - bias)
    top = exponent == 2**exponent_bits - 1
    if infinities:
        value = torch.where(top, torch.where(mantissa == 0, math.inf, math.nan), value)
    else:
        value = value.masked_fill(codes & 127 == 127, math.nan)
    return (sign * value).to(device)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """The finite numbers from 0 up, in float64: code i stands for number i."""
    values = decode(torch.arange(128), dtype)
    return values[values.isfinite()]


def encode(x: torch.Tensor, dtype: torch.dtype, saturate: bool) -> torch.Tensor:
    """The codes nearest to x, ties to even, -1 for NaN. Beyond the range: the largest number, or what IEEE 754 says.

    That is to round as if the exponent went on, and to give what the code then found stands for: NaN in e4m3fn, an
    infinity in e5m2.
    """
    finite = numbers(dtype).to(x.device)
    beyond = 2 * finite[-1] - finite[-2]  # what the next code would stand for
    ladder = torch.cat([finite, beyond[None]])
    size = x.double().abs().nan_to_num(nan=0.0).clamp(max=beyond)
    above = torch.searchsorted(ladder, size).clamp(min=1)
    to_lower, to_upper = size - ladder[above - 1], ladder[above] - size
    even = torch.where(above % 2 == 0, above, above - 1)
    code = torch.where(to_lower == to_upper, even, torch.where(to_lower < to_upper, above - 1, above))
    if saturate:
        code = code.clamp(max=len(finite) - 1)
    code = code + 128 * torch.signbit(x)
    not_a_number = x.isnan() if saturate or LAYOUTS[dtype].infinities else x.isnan() | (code % 128 == len(finite))
    return code.masked_fill(not_a_number, -1)


def codes_of(q: torch.Tensor) -> torch.Tensor:
    """The codes of an FP8 tensor, -1 for every NaN, of which e5m2 has several."""
    return q.view(torch.uint8).long().masked_fill_(q.float().isnan(), -1)


# --- what casts do


def hard_cases(dtype: torch.dtype) -> torch.Tensor:
    """float32 numbers on which casts could differ: all of float16 and bfloat16, all ties and their neighbours."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    ladder = numbers(dtype)
    ladder = torch.cat([ladder, 2 * ladder[-1:] - ladder[-2:-1]])
    ties = ((ladder[1:] + ladder[:-1]) / 2).float()
    around = torch.cat([torch.nextafter(ties, torch.tensor(to)) for to in (0.0, math.inf)])
    points = torch.cat([ladder.float(), ties, around])
    return torch.cat([every.view(torch.float16).float(), every.view(torch.bfloat16).float(), points, -points])


def rule_of(name: str, caster, x: torch.Tensor, dtype: torch.dtype, via: torch.dtype = torch.float32) -> str:
    """What a cast makes of numbers beyond the range, "largest", "NaN" or "infinity", when all of x agrees with that.

    Raises CheckError when a number within the range is not rounded to the nearest (of what it is in `via`, for a cast
    that rounds to that first), or those beyond it differ.
    """
    got = codes_of(caster(x, dtype))
    saturated, ieee = (encode(x.to(via), dtype, saturate=saturate) for saturate in (True, False))
    if torch.equal(got, saturated):
        return "largest"
    if torch.equal(got, ieee):
        return "infinity" if LAYOUTS[dtype].infinities else "NaN"
    wrong = (got != saturated) & (got != ieee)
    if not wrong.any():
        raise CheckError(f"{name} to {dtype}: some numbers beyond the range become the largest number and some do not")
    i = int(torch.nonzero(wrong)[0])
    raise CheckError(
        f"{name} to {dtype}: {int(wrong.sum())} of {x.numel()} numbers are rounded wrongly, the first "
        f"{x[i].item():.9g} to code {int(got[i])}, not {int(saturated[i])}"
    )


def differing(
    first: int, count: int, dtype: torch.dtype, device: torch.device, via: torch.dtype = torch.float32
) -> int:
    """How many of `count` float32 numbers, by their bits from `first`, Triton casts unlike clamp and torch's cast."""
    x = torch.arange(first, first + count, device=device).to(torch.int32).view(torch.float32)
    ours, theirs = cast(x, dtype), clamp_cast(x.to(via).float(), dtype)
    same = (ours.view(torch.uint8) == theirs.view(torch.uint8)) | (ours.float().isnan() & theirs.float().isnan())
    return count - int(same.sum())


def worst_errors(dtype: torch.dtype, exponents: range, device: torch.device) -> list[float]:
    """The largest relative error of a saturating cast of numbers from 2^n up to 2^(n + 1), for each exponent n."""
    steps = 1 + (torch.arange(4096, device=device) + 0.5) / 4096  # between numbers, never on one
    x = torch.stack([steps * 2.0**n for n in exponents])
    return ((cast(x, dtype).double() - x) / x).abs().amax(dim=1).tolist()


# --- pictures


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
    last, width = 16, 128
    h.say(f"numbers from 0 to {last}, where {width // last} to the unit can be told apart:")
    for dtype in FORMATS:
        h.say(f"  {short(dtype):8s}{number_line(dtype, last, width)}")
    h.say(f"  {'':8s}{''.join(f'{n:<{2 * width // last}d}' for n in range(0, last + 1, 2))}")

    exponents = range(-18, 18)
    errors = {dtype: worst_errors(dtype, exponents, h.device) for dtype in FORMATS}
    h.say("from 2^n up to 2^(n+1): the spacing, and the largest relative error of a saturating cast")
    h.say(f"  {'n':>4s}" + "".join(f"  {short(dtype):>7s} {'error':>8s} {'':32s}" for dtype in FORMATS).rstrip())
    for i, n in enumerate(exponents):
        cells = ""
        for dtype in FORMATS:
            gap, error = spacing(dtype, n), errors[dtype][i]
            cells += f"  {f'2^{math.log2(gap):.0f}' if gap else '-':>7s} {error:8.2%} {'#' * round(32 * error):32s}"
        h.say(f"  {n:4d}{cells}".rstrip())
    normal = {}
    for dtype in FORMATS:
        first, end = torch.finfo(dtype).smallest_normal, fp8_max(dtype)
        within = [e for n, e in zip(exponents, errors[dtype], strict=True) if first <= 2.0**n and 2.0 ** (n + 1) <= end]
        normal[short(dtype)] = round(max(within), 4)
    h.fact("largest relative error where numbers are normal", normal)
    if find_spec("matplotlib") is None:
        h.say("with matplotlib installed this is drawn as a picture, too")
        return
    draw(path, exponents, errors)
    h.say(f"drawn in {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


# --- what the run shows


def properties(dtype: torch.dtype) -> dict[str, float | int | str]:
    """A format by its codes; raises CheckError where torch.finfo says something else."""
    values, every = numbers(dtype), decode(torch.arange(256), dtype)
    layout, info = LAYOUTS[dtype], torch.finfo(dtype)
    normal = 2.0 ** (1 - layout.bias)
    found = (values[-1].item(), normal, 2.0**-layout.mantissa_bits)
    if found != (info.max, info.smallest_normal, info.eps):
        raise CheckError(f"{dtype}: the definition says {found}, torch {info}")
    return {
        "largest": found[0],
        "smallest normal": f"2^{math.log2(normal):.0f}",
        "smallest": f"2^{math.log2(values[1].item()):.0f}",
        "numbers": int(every.isfinite().sum()) - 1,  # 0 and -0 are one
        "infinities": int(every.isinf().sum()),
        "NaN": int(every.isnan().sum()),
        "largest over smallest normal": found[0] / normal,
    }


def code_for(dtype: torch.dtype, sms: tuple[int, ...] = (80, 89, 90, 100, 120)) -> dict[str, str]:
    """How Triton casts float32 to dtype, by architecture; CodegenError where it neither saturates nor refuses."""
    found = {}
    for kernel in compile_for(cast, (torch.empty(1 << 20, device="meta"), dtype), sms=sms):
        ways = [way for way in ("cvt f8", "cvt f8 by f16") if kernel.found.get(way)]
        if kernel.sm >= 89 and not ways:
            raise CodegenError(f"cast to {dtype} on sm_{kernel.sm}: no saturating conversion; {kernel.error}")
        error = kernel.error or ""
        refused = re.search(r"type fp8\w+ not supported", error) or re.search(r"\w+Error", error)
        found[f"sm_{kernel.sm}"] = ways[0] if ways else f"refused: {refused[0]}" if refused else "integer arithmetic"
    return found


def in_fnuz(dtype: torch.dtype) -> dict[str, float | int]:
    """What the codes of a format stand for in its fnuz namesake, as torch reads them."""
    codes = torch.arange(256, dtype=torch.uint8)
    ours, theirs = codes.view(dtype).float(), codes.view(getattr(torch, f"float8_{short(dtype)[:4]}fnuz")).float()
    return {
        "largest": theirs.nan_to_num(nan=0.0).max().item(),
        "codes of 256 for the same number": int((ours == theirs).sum()),
        "reads a 1 as": theirs[ours == 1.0].item(),
    }


def show_casts(h: Harness, dtype: torch.dtype) -> None:
    name, cpu = short(dtype), torch.device("cpu")
    code = code_for(dtype)
    h.fact(f"triton's cast of float32 to {name}", code)
    # An architecture may convert by way of float16, and so round twice.
    via = torch.float16 if "f16" in code.get(f"sm_{h.machine.sm}", "") else torch.float32

    x = hard_cases(dtype)
    casts = {"torch on cpu": (torch_cast, cpu, torch.float32)}
    if h.device != cpu:
        casts[f"torch on {h.device.type}"] = (torch_cast, h.device, torch.float32)
    casts |= {"torch after clamp": (clamp_cast, h.device, torch.float32), "triton": (cast, h.device, via)}
    rules = {}
    for label, (caster, device, first) in casts.items():
        beyond, infinite = (rule_of(label, caster, t.to(device), dtype, first) for t in (x[~x.isinf()], x[x.isinf()]))
        rules[label] = {"a number": beyond, "an infinity": infinite}
    h.say(f"right  {len(x)} numbers cast to {name}: all of 16 bits, all ties and their neighbours")
    if set(rules["triton"].values()) != {"largest"}:
        raise CheckError(f"triton's cast to {dtype} does not saturate, and the kernels of this topic rely on it")
    h.table(f"what a cast to {name} makes of what lies beyond its range", rules)

    values = numbers(dtype)
    tie, least = (3 * values[-1] - values[-2]) / 2, values[1] / 2
    samples = torch.stack([values[-1], tie, 1.001 * tie, least, 1.001 * least]).float()
    samples = torch.cat([samples, torch.tensor([math.inf, -math.inf, math.nan])])
    made = {label: caster(samples.to(device), dtype).float().tolist() for label, (caster, device, _) in casts.items()}
    rows = {f"{v:.7g}": {label: f"{made[label][i]:g}" for label in made} for i, v in enumerate(samples.tolist())}
    h.table(f"casts to {name}: the largest number, the tie beyond it, the tie above 0, and what is just above", rows)

    twice = encode(x, dtype, saturate=True) != encode(x.half(), dtype, saturate=True)
    h.fact(f"of {len(x)} numbers, rounded to float16 on the way to {name}, end elsewhere", int(twice.sum()))
    if h.device.type == "cuda":
        step = 2**24
        if wrong := sum(differing(first, step, dtype, h.device, via) for first in range(-(2**31), 2**31, step)):
            raise CheckError(f"triton's cast to {dtype} differs from clamp and torch's for {wrong} float32 numbers")
        h.say(f"right  all 2^32 codes of float32 cast to {name} by triton as by torch after a clamp")


def demo(h: Harness) -> None:
    if h.profile:
        h.say("nothing here is timed: there is nothing to profile")
        return
    codes = torch.arange(256, dtype=torch.uint8, device=h.device)
    readers = {"torch": lambda c, dtype: c.view(dtype).float(), "triton": lambda c, d: cast(c.view(d), torch.float32)}
    for dtype in FORMATS:
        for name, reader in readers.items():
            what = f"{name} reads the 256 codes of {short(dtype)}"
            h.check(reader, decode, codes, dtype, dtype=torch.float32, what=what)
    h.table("the formats", {short(dtype): properties(dtype) for dtype in FORMATS})
    h.fact("the fnuz formats are AMD's, and not the same numbers", {f"{short(d)[:4]}fnuz": in_fnuz(d) for d in FORMATS})

    if h.interpreted:
        h.say("triton is interpreted here, and told to cast as these instructions do; a GPU shows that they do")
    for dtype in FORMATS:
        show_casts(h, dtype)
    picture(h)


if __name__ == "__main__":
    run(demo)
