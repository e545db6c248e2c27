"""Study of formats: casts number by number, and on each architecture.

1. Every cast of all 16-bit numbers, ties and their neighbours, held to the definition.
2. How Triton casts on each architecture.
3. On a GPU: all 2^32 codes of float32, cast by Triton as by torch after a clamp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from harness import Harness
from harness.check import CheckError
from harness.codegen import CodegenError, compile_for

import torch

from examples.common.fp8 import FORMATS
from examples.fp8.formats import LAYOUTS, cast, clamp_cast, numbers, short


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


def casts_of(h: Harness) -> dict[str, tuple[Callable, torch.device, torch.dtype]]:
    """Casts by name, with the device they run on and what they round to first."""
    cpu, whole = torch.device("cpu"), torch.float32
    casts = {"torch on cpu": (torch.Tensor.to, cpu, whole)}
    if h.device != cpu:
        casts[f"torch on {h.device.type}"] = (torch.Tensor.to, h.device, whole)
    via = torch.float16 if h.machine.sm == 89 else whole  # sm_89 converts by way of float16, and so rounds twice
    return casts | {"torch after clamp": (clamp_cast, h.device, whole), "triton": (cast, h.device, via)}


def check_rules(h: Harness, dtype: torch.dtype) -> None:
    """Every cast on the hard cases; raises CheckError where one rounds wrongly, or Triton's does not saturate."""
    x, rules = hard_cases(dtype), {}
    for label, (fn, device, first) in casts_of(h).items():
        number, infinite = (rule_of(label, fn, t.to(device), dtype, first) for t in (x[~x.isinf()], x[x.isinf()]))
        rules[label] = {"a number": number, "an infinity": infinite}
    if set(rules["triton"].values()) != {"largest"}:
        raise CheckError(f"triton's cast to {dtype} does not saturate, and the kernels of this topic rely on it")
    h.table(f"{len(x)} numbers cast to {short(dtype)} are right; beyond the range", rules)


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


def differing(
    first: int, count: int, dtype: torch.dtype, device: torch.device, via: torch.dtype = torch.float32
) -> int:
    """How many of `count` float32 numbers, by their bits from `first`, Triton casts unlike clamp and torch's cast."""
    x = torch.arange(first, first + count, device=device).to(torch.int32).view(torch.float32)
    ours, theirs = cast(x, dtype), clamp_cast(x.to(via).float(), dtype)
    same = (ours.view(torch.uint8) == theirs.view(torch.uint8)) | (ours.float().isnan() & theirs.float().isnan())
    return count - int(same.sum())


def all_of_float32(h: Harness, dtype: torch.dtype) -> None:
    """Raises CheckError unless Triton casts every float32 as torch does after a clamp."""
    via, step = torch.float16 if h.machine.sm == 89 else torch.float32, 2**24
    if wrong := sum(differing(first, step, dtype, h.device, via) for first in range(-(2**31), 2**31, step)):
        raise CheckError(f"triton's cast to {dtype} differs from clamp and torch's for {wrong} float32 numbers")
    h.say(f"all 2^32 codes of float32 are cast to {short(dtype)} by triton as by torch after a clamp")


def study(h: Harness) -> None:
    if h.profile:
        return
    h.table("triton's cast of float32", {short(dtype): code_for(dtype) for dtype in FORMATS})
    if h.interpreted:
        h.say("triton is interpreted here, and told to cast as these instructions do; a GPU shows that they do")
    for dtype in FORMATS:
        check_rules(h, dtype)
        if h.device.type == "cuda":
            all_of_float32(h, dtype)
