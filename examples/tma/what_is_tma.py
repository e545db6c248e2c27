"""What TMA is and is not: a cache hint on tl.load leaves an ordinary load; a descriptor load is another instruction.

Technique  TMA, the Tensor Memory Accelerator, is a unit of the SM that copies a whole box of a tensor between memory
           and shared memory. One elected thread issues the copy with coordinates; the unit computes the addresses and
           checks the bounds, and an mbarrier counts the bytes that have arrived. What proves it is
           cp.async.bulk.tensor in the PTX, UTMALDG and UTMASTG in the machine code. Here y = factor * x is computed in
           tiles by every relative of it, on the same tile:
           pointers             tl.load: each thread computes its own addresses and bounds, data come to its registers;
           evict_last           the same with a hint, which the chapter takes for TMA: where L2 keeps the lines;
           cp.async             pointers in a loop with num_stages: sm_80's copies to shared memory, asynchronous as
                                TMA's are, but each thread still issues its own, 16 bytes at a time;
           descriptor           descriptor.load and store: TMA;
           descriptor, ahead    the same in that loop with num_stages: TMA for tiles to come.
           Below sm_90 there is no such unit, and Triton turns the descriptor back into pointers.
Question   Is a load with an eviction policy a TMA load, and what does each of the two give?
Needs      triton
Shapes     x [M, N], contiguous rows (for the descriptors: start and row stride multiples of 16 bytes) -> y [M, N].
Dtypes     float32, float16, bfloat16; the product is float32, y has x's dtype.
Errors     TypeError for another dtype or a factor that is no number; ValueError for rank, an inner stride other than 1,
           sizes of 2**31 - 256 or more, a layout TMA cannot load, an eviction policy that does not exist or a number
           of stages outside 1 to 4; RuntimeError for a device without Triton or an input that requires grad.
Wins when  other threads need the tile (the operands of tl.dot), or registers and instructions are short. Data that
           pass through a thread once need no shared memory. A hint is for data that are read again; the last lines say
           what it saves there, on an H200 next to nothing.
Source     chapter section "TMA in Triton", whose `eviction_policy="evict_last"  # TMA hint` is the second form here.
Run        python examples/tma/what_is_tma.py
"""

from __future__ import annotations

import functools
import math
import random
import re
import statistics
from collections import Counter

from harness import Harness, Work, device_limits, require_tma_layout, require_triton_device, run, tma_descriptor
from harness.codegen import CodegenError, compile_for, dump

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK_M, BLOCK_BYTES, WARPS = 64, 256, 4  # 16 KiB a tile: 128 bytes of it a thread, or two boxes of TMA
STAGES, PROGRAMS_PER_SM = 4, 3  # of the loops; their 48 or 64 KiB of shared memory fit an SM of sm_90 three times
EVICTIONS = ("", "evict_first", "evict_last")
LARGEST = 2**31 - 256  # coordinates are int32, and a tile may reach past the end


@triton.jit
def _corner(tile, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    tiles_n = tl.cdiv(N, BLOCK_N)
    return tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N


@triton.jit
def _scale_pointers(
    tile, x_ptr, y_ptr, M, N, stride_xm, stride_ym, factor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    row, col = _corner(tile, N, BLOCK_M, BLOCK_N)
    rows, cols = row + tl.arange(0, BLOCK_M)[:, None], col + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < M) & (cols < N)
    rows = rows.to(tl.int64)
    x = tl.load(x_ptr + rows * stride_xm + cols, mask=inside, eviction_policy=EVICTION)
    y = (x.to(tl.float32) * factor).to(x.dtype)
    tl.store(y_ptr + rows * stride_ym + cols, y, mask=inside)


@triton.jit
def _scale_descriptors(tile, x_desc, y_desc, N, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col = _corner(tile, N, BLOCK_M, BLOCK_N)
    x = x_desc.load([row, col])
    y_desc.store([row, col], (x.to(tl.float32) * factor).to(x.dtype))


@triton.jit
def scale_pointers_kernel(
    x_ptr, y_ptr, M, N, stride_xm, stride_ym, factor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    _scale_pointers(
        tl.program_id(0), x_ptr, y_ptr, M, N, stride_xm, stride_ym, factor, BLOCK_M, BLOCK_N, EVICTION
    )  # fmt: skip


@triton.jit
def scale_pointers_ahead_kernel(
    x_ptr, y_ptr, M, N, stride_xm, stride_ym, factor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        _scale_pointers(tile, x_ptr, y_ptr, M, N, stride_xm, stride_ym, factor, BLOCK_M, BLOCK_N, "")


@triton.jit
def scale_descriptors_kernel(x_desc, y_desc, N, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    _scale_descriptors(tl.program_id(0), x_desc, y_desc, N, factor, BLOCK_M, BLOCK_N)


@triton.jit
def scale_descriptors_ahead_kernel(
    x_desc, y_desc, M, N, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        _scale_descriptors(tile, x_desc, y_desc, N, factor, BLOCK_M, BLOCK_N)


def _check(name: str, x: torch.Tensor, factor: float, num_stages: int | None = None) -> float:
    require_triton_device(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype} is not one of {DTYPES}")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(f"{name}: factor is a {type(factor).__name__}; pass a Python number")
    if x.ndim != 2:
        raise ValueError(f"{name}: need a matrix [M, N], got shape {tuple(x.shape)}; call x.reshape first")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{name}: strides {x.stride()}; the columns must be adjacent, call x.contiguous() first")
    if max(x.shape) >= LARGEST:
        raise ValueError(f"{name}: shape {tuple(x.shape)}; each size must be below {LARGEST}, split the matrix")
    if num_stages is not None and (type(num_stages) is not int or not 1 <= num_stages <= 4):
        raise ValueError(f"{name}: num_stages is {num_stages!r}; pass an int from 1 to 4")
    return float(factor)


def _output(x: torch.Tensor) -> torch.Tensor:
    """Memory for y, its rows apart by a multiple of 16 bytes as a descriptor wants, in every form alike.

    What lies between belongs to y: a TMA store may write there, as it ends at a multiple of 16 bytes.
    """
    step = 16 // x.element_size()
    rows = torch.empty((x.shape[0], triton.cdiv(x.shape[1], step) * step), dtype=x.dtype, device=x.device)
    return rows[:, : x.shape[1]]


def _tile(x: torch.Tensor) -> tuple[int, int]:
    return BLOCK_M, BLOCK_BYTES // x.element_size()


def _tiles(x: torch.Tensor) -> int:
    return math.prod(triton.cdiv(size, block) for size, block in zip(x.shape, _tile(x), strict=True))


def _programs(x: torch.Tensor) -> int:
    return min(_tiles(x), PROGRAMS_PER_SM * device_limits(x.device).sms)


def _descriptors(x: torch.Tensor, y: torch.Tensor) -> tuple:
    return tma_descriptor(x, list(_tile(x))), tma_descriptor(y, list(_tile(x)))


def scale_pointers(x: torch.Tensor, factor: float, eviction: str = "") -> torch.Tensor:
    """factor * x by tl.load, with one of EVICTIONS as its hint; "evict_last" is the chapter's load."""
    factor = _check("scale_pointers", x, factor)
    if not isinstance(eviction, str) or eviction not in EVICTIONS:
        raise ValueError(f"scale_pointers: eviction is {eviction!r}; take one of {EVICTIONS}")
    y = _output(x)
    if x.numel():
        scale_pointers_kernel[(_tiles(x),)](
            x, y, *x.shape, x.stride(0), y.stride(0), factor, *_tile(x), EVICTION=eviction, num_warps=WARPS
        )
    return y


def scale_pointers_ahead(x: torch.Tensor, factor: float, num_stages: int = STAGES) -> torch.Tensor:
    """factor * x by a few programs that walk over the tiles, num_stages - 1 tl.loads ahead: cp.async."""
    factor = _check("scale_pointers_ahead", x, factor, num_stages)
    y = _output(x)
    if x.numel():
        scale_pointers_ahead_kernel[(_programs(x),)](
            x, y, *x.shape, x.stride(0), y.stride(0), factor, *_tile(x), STAGES=num_stages, num_warps=WARPS
        )
    return y


def scale_descriptors(x: torch.Tensor, factor: float) -> torch.Tensor:
    """factor * x by TMA."""
    factor = _check("scale_descriptors", x, factor)
    require_tma_layout("scale_descriptors", x=x)
    y = _output(x)
    if x.numel():
        scale_descriptors_kernel[(_tiles(x),)](*_descriptors(x, y), x.shape[1], factor, *_tile(x), num_warps=WARPS)
    return y


def scale_descriptors_ahead(x: torch.Tensor, factor: float, num_stages: int = STAGES) -> torch.Tensor:
    """factor * x by a few programs that walk over the tiles, with the TMA loads of tiles to come on their way."""
    factor = _check("scale_descriptors_ahead", x, factor, num_stages)
    require_tma_layout("scale_descriptors_ahead", x=x)
    y = _output(x)
    if x.numel():
        scale_descriptors_ahead_kernel[(_programs(x),)](
            *_descriptors(x, y), *x.shape, factor, *_tile(x), STAGES=num_stages, num_warps=WARPS
        )
    return y


def reference(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.double() * torch.tensor(factor, dtype=torch.float32).double().item()  # factor is float32 on the device


# Each form, and what of its PTX and of its machine code on sm_90 says what it is.
FORMS = {
    "pointers": (scale_pointers, "ld.global", "LDG"),
    "evict_last": (functools.partial(scale_pointers, eviction="evict_last"), "ld.global", "LDG"),
    "cp.async": (scale_pointers_ahead, "cp.async.c", "LDGSTS"),
    "descriptor": (scale_descriptors, "cp.async.bulk.tensor", "UTMALDG"),
    "descriptor, ahead": (scale_descriptors_ahead, "cp.async.bulk.tensor", "UTMALDG"),
}


def scale_each(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, ...]:
    """factor * x once in every form."""
    return tuple(fn(x, factor) for fn, _, _ in FORMS.values())


def references(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, ...]:
    return (reference(x, factor),) * len(FORMS)


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


def form_on(form: str, sm: int, x: torch.Tensor) -> tuple[dict[str, str], dict[str, int | str]]:
    """The text of every stage of a form, and a row of the table: what a thread of it executes and takes."""
    fn, _, _ = FORMS[form]
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
    """The telling PTX of the hint and of the descriptor one after the other, then every form's machine code counted."""
    if not h.shows_code:
        return
    tma = ("cp.async.bulk.tensor", "mbarrier")
    x = h.meta(8192, 8192, dtype=torch.float16)
    h.codegen(scale_descriptors, x, 2.5, find={80: (), 89: (), 90: tma, 100: tma, 120: tma})
    rows, lines = {}, {}
    with h.progress("compiling every form"):
        for form, sm in [*((form, 90) for form in FORMS), ("pointers", 80), ("descriptor", 80)]:
            texts, rows[f"{form}, sm_{sm}"] = form_on(form, sm, x)
            found = lines[f"{form}, sm_{sm}"] = telling_lines(texts["ptx"])
            _, in_ptx, in_sass = FORMS[form if sm >= 90 else "pointers"]
            is_tma = any("cp.async.bulk" in line or "mbarrier" in line for line in found)
            proofs = [line for line in found if in_ptx in line], _named(machine_code(texts["sass"]), in_sass)
            if not all(proofs) or is_tma != (in_sass == "UTMALDG"):
                raise CodegenError(f"{form} on sm_{sm}: expected {in_ptx} and {in_sass}, found {found}")
    for form in ("evict_last, sm_90", "descriptor, sm_90", "descriptor, sm_80"):
        h.fact(f"PTX of {form}", {line: f"x{n}" for line, n in lines[form].items()})
    h.table("machine code of each form: a thread's instructions, a loop's counted once", rows)

    plain, hint, one = (rows[f"{form}, sm_90"] for form in ("pointers", "evict_last", "descriptor"))
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
    rows = h.fit(rows, bytes_each=40 * cols)
    x, factor = h.randn(rows, cols, dtype=h.half), 1.5
    variants = {"torch": torch.mul} | {f"triton {form}": fn for form, (fn, _, _) in FORMS.items()}
    table = h.compare(
        variants, reference, x, factor, baseline="torch", work=Work(bytes=2 * x.nbytes), terms=0, roundings=1,
        comparators=[f"triton {form}" for form in FORMS if not form.startswith("descriptor")],
    )  # fmt: skip
    if not table or table.rows[-1].ms is None:
        return
    ms = {row.variant.removeprefix("triton "): row.ms for row in table.rows}
    ratios = {form: round(ms["pointers"] / ms[form], 3) for form in FORMS}
    h.fact(f"speed beside plain tl.load, {rows}x{cols}", ratios)
    best = min(FORMS, key=ms.get)
    h.say(
        f"data that pass once: the hint gives {ratios['evict_last']:.3f}x, TMA {ratios['descriptor']:.3f}x, TMA ahead "
        f"{ratios['descriptor, ahead']:.3f}x the speed of tl.load; fastest here: {best}, {ms['torch'] / ms[best]:.3f}x "
        "torch"
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


def demo(h: Harness) -> None:
    step = 16 // h.half.itemsize
    for M, N in [(0, step), (1, 1), (3, 781), (BLOCK_M + 1, 129), (2 * BLOCK_M, 7 * 128)]:
        x = h.randn(M, triton.cdiv(N, step) * step, dtype=h.half)[:, :N]  # rows apart, as TMA needs them
        what = f"every form {M}x{N} {str(x.dtype).removeprefix('torch.')}"
        h.check(scale_each, references, x, -2.5, what=what, terms=0, roundings=1)
    show_code(h)
    small = h.pick(interpreted=(130, 264), quick=(4096, 4096), full=(16384, 16384))
    show_speed(h, *(small if h.timing else (130, 264)))
    if h.device.type == "cuda" and h.timing and not h.profile:
        show_hint(h)


if __name__ == "__main__":
    run(demo)
