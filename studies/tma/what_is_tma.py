"""what_is_tma, measured: each kernel's machine code counted, and what the hint is for.

1. Every kernel's machine code: LDG or UTMALDG, and what else a thread executes; below sm_90 there is no UTMALDG.
2. The hint where it could help: x is read, then much else, then x again.
"""

from __future__ import annotations

import functools
import random
import re
import statistics
from collections import Counter

from harness import Harness
from harness.codegen import CodegenError, compile_for, dump

import torch

from examples.tma.what_is_tma import EVICTIONS, KERNELS, scale_pointers

INTEGER = re.compile(r"U?(?:IMAD|IADD|IADD3|VIADD|LEA|SHF|LOP3|ISETP|IABS|IMNMX|VIMNMX)\b(?!\.(?:MOV|U32\b))")
OPCODE = re.compile(r"^\S+\t(?:@!?\w+ )?([A-Z]\S*)", re.MULTILINE)


def machine_code(sass: str) -> Counter[str]:
    """How often each instruction is in the machine code, the padding behind its end left out."""
    return Counter(name.rstrip(";") for name in OPCODE.findall(sass) if not name.startswith("NOP"))


def code_of(name: str, sm: int, x: torch.Tensor) -> dict:
    """A row of the table: what a thread of a kernel executes and takes."""
    fn = KERNELS[name]
    wrapper, options = (fn.func, fn.keywords) if isinstance(fn, functools.partial) else (fn, {})
    (kernel,) = compile_for(wrapper, (x, 2.5), options, sms=(sm,))
    codes = machine_code(dump(wrapper, (x, 2.5), options, sm=sm)["sass"])

    def named(*starts: str) -> list[str]:
        return [f"{name} x{n}" for name, n in codes.items() if name.split(".")[0] in starts]

    return {
        "loads": named("LDG", "UTMALDG"),
        "stores": named("STG", "UTMASTG"),
        "shared loads and stores": sum(n for name, n in codes.items() if name.split(".")[0] in ("LDS", "STS")),
        "barriers": sum(n for name, n in codes.items() if name.split(".")[0] in ("BAR", "SYNCS")),
        "integer": sum(n for name, n in codes.items() if INTEGER.match(name)),
        "instructions": codes.total(),
        "registers": kernel.registers,
        "shared bytes": kernel.shared,
    }


def show_code(h: Harness) -> None:
    """Every kernel's machine code counted; raises where a load is not what its kernel is there to show."""
    x = h.meta(8192, 8192, dtype=torch.float16)
    cases = [*((name, 90) for name in KERNELS), ("pointers", 80), ("descriptor", 80)]
    rows = {f"{name}, sm_{sm}": code_of(name, sm, x) for name, sm in cases}
    for kernel, row in rows.items():
        wanted = "UTMALDG" if kernel == "descriptor, sm_90" else "LDG"
        if not all(load.startswith(wanted) for load in row["loads"]):
            raise CodegenError(f"{kernel}: expected {wanted}, found {row['loads']}")
    h.table("machine code of each kernel: a thread's instructions, a loop's counted once", rows)
    plain, hint, one = (rows[f"{name}, sm_90"] for name in KERNELS)
    fewer = ", ".join(f"{key} {plain[key]} -> {one[key]}" for key in ("integer", "instructions", "registers"))
    h.say(
        f"the hint turns {plain['loads'][0]} into {hint['loads'][0]}, issued by every thread; the descriptor's "
        f"{one['loads'][0]} stands once in the code, and one thread of a warp issues it for a whole box: {fewer}"
    )


def show_hint(h: Harness) -> None:
    """What the hint is for: x is read with each hint, then much else is read and written, then x is read again."""
    cache = torch.cuda.get_device_properties(h.device).L2_cache_size
    x = h.randn(cache // 4 // 2 // 4096, 4096, dtype=h.half)
    other = torch.zeros(cache, dtype=torch.float32, device=h.device)  # four bytes each: four times the cache
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def again_us(eviction: str, at_once: bool = False) -> float:
        scale_pointers(x, 1.5, eviction)
        other.mul_(1.0)  # long enough for the host to launch the rest meanwhile
        if at_once:
            x.sum()
        start.record()
        x.sum()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end)

    cases = {eviction or "no hint": (eviction,) for eviction in EVICTIONS} | {"at once": ("", True)}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(30):
        for name in random.Random(turn).sample(list(cases), len(cases)):
            times[name].append(again_us(*cases[name]))
    us = {name: round(statistics.median(each), 2) for name, each in times.items()}
    h.fact("us to read x again after the other data", us)
    lost = us["no hint"] - us["at once"]
    saved = (
        f"{(us['no hint'] - us['evict_last']) / lost:.0%} of what there is to save" if lost > 0 else "nothing to save"
    )
    h.say(
        f"data read again: {us['no hint']:.1f} us without a hint, {us['evict_last']:.1f} us after evict_last, "
        f"{us['at once']:.1f} us straight after itself: {saved}"
    )


def study(h: Harness) -> None:
    if h.shows_code:
        show_code(h)
    if h.device.type == "cuda" and h.timing and not h.profile:
        show_hint(h)
