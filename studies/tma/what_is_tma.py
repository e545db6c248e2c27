"""what_is_tma, measured: loads ahead by cp.async and by TMA, each kernel's machine code, and what the hint is for.

1. Two more relatives of TMA on the same tile, in a loop with num_stages:
   cp.async           tl.load ahead: sm_80's copies to shared memory, asynchronous as TMA's are, but each thread still
                      issues its own, 16 bytes at a time;
   descriptor, ahead  descriptor.load ahead: TMA for tiles to come.
2. The telling PTX of the hint and of the descriptor, and every kernel's machine code counted: LDG, LDGSTS or UTMALDG.
3. The hint where it could help: x is read, then much else, then x again.
"""

from __future__ import annotations

import functools
import random
import re
import statistics
from collections import Counter

from harness import Harness, Work
from harness.codegen import CodegenError, compile_for, dump

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.common.tma import tma_descriptor
from examples.tma.what_is_tma import (
    EVICTIONS,
    KERNELS,
    WARPS,
    _scale_descriptors,
    _scale_pointers,
    check_scale,
    reference,
    rows_for_tma,
    scale_pointers,
    tile_of,
    tiles_of,
)

STAGES, PROGRAMS_PER_SM = 4, 3  # of the loops; their 48 or 64 KiB of shared memory fit an SM of sm_90 three times


@triton.jit
def scale_pointers_ahead_kernel(
    x_ptr, y_ptr, M, N, stride_xm, stride_ym, factor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        _scale_pointers(tile, x_ptr, y_ptr, M, N, stride_xm, stride_ym, factor, BLOCK_M, BLOCK_N, "")


@triton.jit
def scale_descriptors_ahead_kernel(
    x_desc, y_desc, M, N, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        _scale_descriptors(tile, x_desc, y_desc, N, factor, BLOCK_M, BLOCK_N)


def _programs(x: torch.Tensor) -> int:
    return min(tiles_of(x), PROGRAMS_PER_SM * device_limits(x.device).sms)


def scale_pointers_ahead(x: torch.Tensor, factor: float, num_stages: int = STAGES) -> torch.Tensor:
    """factor * x by a few programs that walk over the tiles, num_stages - 1 tl.loads ahead: cp.async."""
    factor = check_scale("scale_pointers_ahead", x, factor)
    y = rows_for_tma(x)
    if x.numel():
        scale_pointers_ahead_kernel[(_programs(x),)](
            x, y, *x.shape, x.stride(0), y.stride(0), factor, *tile_of(x), STAGES=num_stages, num_warps=WARPS
        )
    return y


def scale_descriptors_ahead(x: torch.Tensor, factor: float, num_stages: int = STAGES) -> torch.Tensor:
    """factor * x by a few programs that walk over the tiles, with the TMA loads of tiles to come in flight."""
    factor = check_scale("scale_descriptors_ahead", x, factor, tma=True)
    y = rows_for_tma(x)
    if x.numel():
        x_desc, y_desc = (tma_descriptor(each, list(tile_of(x))) for each in (x, y))
        scale_descriptors_ahead_kernel[(_programs(x),)](
            x_desc, y_desc, *x.shape, factor, *tile_of(x), STAGES=num_stages, num_warps=WARPS
        )
    return y


# Each kernel, and what of its PTX and of its machine code on sm_90 says what it is.
PROOFS = {
    "pointers": (KERNELS["pointers"], "ld.global", "LDG"),
    "evict_last": (KERNELS["evict_last"], "ld.global", "LDG"),
    "cp.async": (scale_pointers_ahead, "cp.async.c", "LDGSTS"),
    "descriptor": (KERNELS["descriptor"], "cp.async.bulk.tensor", "UTMALDG"),
    "descriptor, ahead": (scale_descriptors_ahead, "cp.async.bulk.tensor", "UTMALDG"),
}
TELLING = re.compile(r"(?:createpolicy|ld\.global|st\.global|cp\.async|mbarrier|fence\.proxy|ld\.shared|st\.shared)\S*")
INTEGER = re.compile(r"U?(?:IMAD|IADD|IADD3|VIADD|LEA|SHF|LOP3|ISETP|IABS|IMNMX|VIMNMX)\b(?!\.(?:MOV|U32\b))")
OPCODE = re.compile(r"^\S+\t(?:@!?\w+ )?([A-Z]\S*)", re.MULTILINE)


def telling_lines(ptx: str) -> dict[str, int]:
    """The first line of each instruction that moves data or waits for it, and how many there are of it."""
    first: dict[str, str] = {}
    count: Counter[str] = Counter()
    for line in ptx.splitlines():
        text = " ".join(line.split("//")[0].split()).rstrip(";")
        if found := TELLING.match(re.sub(r"^@!?%p\d+ ", "", text)):
            count[found[0]] += 1
            first.setdefault(found[0], text)
    return {first[name]: n for name, n in count.items()}


def machine_code(sass: str) -> Counter[str]:
    """How often each instruction is in the machine code, the padding behind its end left out."""
    return Counter(name.rstrip(";") for name in OPCODE.findall(sass) if not name.startswith("NOP"))


def _named(codes: Counter[str], *starts: str) -> list[str]:
    return [f"{name} x{n}" for name, n in codes.items() if name.split(".")[0] in starts]


def code_of(name: str, sm: int, x: torch.Tensor) -> tuple[dict[str, str], dict[str, int | str]]:
    """The text of every stage of a kernel, and a row of the table: what a thread of it executes and takes."""
    fn, _, _ = PROOFS[name]
    wrapper, options = (fn.func, fn.keywords) if isinstance(fn, functools.partial) else (fn, {})
    texts = dump(wrapper, (x, 2.5), options, sm=sm)
    (kernel,) = compile_for(wrapper, (x, 2.5), options, sms=(sm,))
    codes = machine_code(texts["sass"])
    return texts, {
        "loads": _named(codes, "LDG", "LDGSTS", "UTMALDG"),
        "stores": _named(codes, "STG", "UTMASTG"),
        "shared loads and stores": sum(n for name, n in codes.items() if name.split(".")[0] in ("LDS", "STS")),
        "barriers": sum(n for name, n in codes.items() if name.split(".")[0] in ("BAR", "SYNCS")),
        "integer": sum(n for name, n in codes.items() if INTEGER.match(name)),
        "instructions": codes.total(),
        "registers": kernel.registers,
        "shared bytes": kernel.shared,
    }


def show_code(h: Harness) -> None:
    """The telling PTX of the hint and of the descriptor, then every kernel's machine code counted."""
    if not h.shows_code:
        return
    x, rows, lines = h.meta(8192, 8192, dtype=torch.float16), {}, {}
    with h.progress("compiling every kernel"):
        for name, sm in [*((name, 90) for name in PROOFS), ("pointers", 80), ("descriptor", 80)]:
            texts, rows[f"{name}, sm_{sm}"] = code_of(name, sm, x)
            found = lines[f"{name}, sm_{sm}"] = telling_lines(texts["ptx"])
            _, in_ptx, in_sass = PROOFS[name if sm >= 90 else "pointers"]
            is_tma = any("cp.async.bulk" in line or "mbarrier" in line for line in found)
            proofs = [line for line in found if in_ptx in line], _named(machine_code(texts["sass"]), in_sass)
            if not all(proofs) or is_tma != (in_sass == "UTMALDG"):
                raise CodegenError(f"{name} on sm_{sm}: expected {in_ptx} and {in_sass}, found {found}")
    for name in ("evict_last, sm_90", "descriptor, sm_90", "descriptor, sm_80"):
        h.fact(f"PTX of {name}", {line: f"x{n}" for line, n in lines[name].items()})
    h.table("machine code of each kernel: a thread's instructions, a loop's counted once", rows)

    plain, hint, one = (rows[f"{name}, sm_90"] for name in ("pointers", "evict_last", "descriptor"))
    h.say(
        f"the hint turns {plain['loads'][0]} into {hint['loads'][0]}, issued by every thread; the descriptor's "
        f"{one['loads'][0]} stands once in the code, and one thread of a warp issues it for a whole box"
    )
    fewer = ", ".join(f"{key} {plain[key]} -> {one[key]}" for key in ("integer", "instructions", "registers"))
    h.say(
        f"pointers to descriptor on sm_90: {fewer}; on the way through {one['shared bytes']} bytes of shared memory "
        f"it costs {one['shared loads and stores']} accesses and {one['barriers']} barriers"
    )
    old, pointers = rows["descriptor, sm_80"], rows["pointers, sm_80"]
    h.say(
        f"on sm_80 the same descriptor is {' and '.join(old['loads'])}, with {old['registers']} registers; tl.load is "
        f"{' and '.join(pointers['loads'])}: there the rewritten code does not know that columns are adjacent"
        if old["loads"] != pointers["loads"]
        else f"on sm_80 the same descriptor is {' and '.join(old['loads'])}, as tl.load is"
    )


def show_speed(h: Harness, rows: int, cols: int) -> None:
    x = h.randn(h.fit(rows, bytes_each=40 * cols), cols, dtype=h.half)
    table = h.compare(
        {"torch": torch.mul} | {name: fn for name, (fn, _, _) in PROOFS.items()}, reference, x, 1.5, baseline="torch",
        work=Work(bytes=2 * x.nbytes), terms=0, roundings=1, title="every kernel",
        peers=[name for name in PROOFS if not name.startswith("descriptor")],
    )  # fmt: skip
    if table:
        ratios = {name: round(table.over("pointers", name), 3) for name in PROOFS}
        h.fact(f"speed beside plain tl.load, {table.case}", ratios)
        best = min(PROOFS, key=lambda name: table[name].ms)
        h.say(f"data that pass once, fastest here: {best}, {table.over('torch', best):.3f}x torch")


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
    mib = {"x": x.nbytes >> 20, "L2": cache >> 20, "other data": other.nbytes >> 20}
    h.fact("MiB", mib)
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
    for name, fn in {"cp.async": scale_pointers_ahead, "descriptor, ahead": scale_descriptors_ahead}.items():
        for M, N in [(1, 1), (3, 781), (400, 140)]:
            x = h.randn(M, triton.cdiv(N, 8) * 8, dtype=h.half)[:, :N]
            h.check(fn, reference, x, -2.5, what=f"{name} {M}x{N}", terms=0, roundings=1)
    show_code(h)
    small = h.pick(interpreted=(130, 264), quick=(4096, 4096), full=(16384, 16384))
    show_speed(h, *(small if h.timing else (130, 264)))
    if h.device.type == "cuda" and h.timing and not h.profile:
        show_hint(h)
