"""Study of formats: casts number by number, and on each architecture.

1. Triton's cast, and torch's after a clamp, of all 16-bit numbers, ties and their neighbours, held to the definition.
2. How Triton casts on each architecture.
3. On a GPU: all 2^32 codes of float32, cast by Triton as by torch after a clamp.
"""

from __future__ import annotations

import math
import re

from harness import Harness
from harness.check import CheckError
from harness.codegen import CodegenError, compile_for

import torch

from examples.common.fp8 import FORMATS
from examples.fp8.formats import cast, clamp_cast, numbers, short


def encode(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The codes nearest to x, ties to even, beyond the range that of the largest number; -1 for NaN."""
    ladder = numbers(dtype).to(x.device)
    size = x.double().abs().nan_to_num(nan=0.0).clamp(max=ladder[-1])
    above = torch.searchsorted(ladder, size).clamp(min=1)
    to_lower, to_upper = size - ladder[above - 1], ladder[above] - size
    even = torch.where(above % 2 == 0, above, above - 1)
    code = torch.where(to_lower == to_upper, even, torch.where(to_lower < to_upper, above - 1, above))
    return (code + 128 * torch.signbit(x)).masked_fill(x.isnan(), -1)


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


def check_cast(name: str, caster, x: torch.Tensor, dtype: torch.dtype, via: torch.dtype = torch.float32) -> None:
    """Raises CheckError where a cast does not round to the nearest (of what x is in `via`) or does not saturate."""
    got, want = codes_of(caster(x, dtype)), encode(x.to(via), dtype)
    if wrong := torch.nonzero(got != want).flatten().tolist():
        i = wrong[0]
        raise CheckError(
            f"{name} to {dtype}: {len(wrong)} of {x.numel()} numbers are rounded wrongly, the first {x[i].item():.9g} "
            f"to code {int(got[i])}, not {int(want[i])}"
        )


def code_for(dtype: torch.dtype, sms: tuple[int, ...] = (80, 89, 90, 100, 120)) -> dict[str, str]:
    """How Triton casts float32 to dtype, by architecture; CodegenError where it neither saturates nor refuses."""
    found = {}
    for kernel in compile_for(cast, (torch.empty(1 << 20, device="meta"), dtype), sms=sms):
        ways = [way for way in ("cvt f8 by f16", "cvt f8") if kernel.found.get(way)]
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
    return int((codes_of(ours) != codes_of(theirs)).sum())


def all_of_float32(h: Harness, dtype: torch.dtype, via: torch.dtype) -> None:
    """Raises CheckError unless Triton casts every float32 as torch does after a clamp."""
    step = 2**24
    if wrong := sum(differing(first, step, dtype, h.device, via) for first in range(-(2**31), 2**31, step)):
        raise CheckError(f"triton's cast to {dtype} differs from clamp and torch's for {wrong} float32 numbers")
    h.say(f"all 2^32 codes of float32 are cast to {short(dtype)} by triton as by torch after a clamp")


def study(h: Harness) -> None:
    if h.profile:
        return
    h.table("triton's cast of float32", {short(dtype): code_for(dtype) for dtype in FORMATS})
    if h.interpreted:
        h.say("triton is interpreted here, and told to cast as these instructions do; a GPU shows that they do")
    via = torch.float16 if h.machine.sm == 89 else torch.float32  # sm_89 converts by way of float16: it rounds twice
    for dtype in FORMATS:
        x = hard_cases(dtype).to(h.device)
        check_cast("torch after clamp", clamp_cast, x, dtype)
        check_cast("triton", cast, x, dtype, via)
        if h.device.type == "cuda":
            all_of_float32(h, dtype, via)
