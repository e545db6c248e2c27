"""Study of tma_copy: every variant, its code, how long a tile is in its program, tile shapes, and bytes in flight.

1. sm_90's code: what a thread holds, and whether tiles go through it.
2. Every variant on whole and ragged matrices: programs on an SM, bytes in flight, and the time of a tile.
3. The same bytes in tiles of other shapes: how many adjacent bytes should a row of a tile have?
4. The ring with more and more bytes in flight: what Little's law asks for.
"""

from __future__ import annotations

import functools
import re

from harness import Harness
from harness.codegen import compile_for, dump

import torch
import triton

from examples.tma.tma_copy import VARIANTS, compare, loads_in_flight, runnable, tma_copy
from examples.tma.tma_copy_triton import PLANS, make_plan
from studies.tma.tma_copy_edges import padded, with_padding

BY_TMA = VARIANTS[1:]
THROUGH_REGISTERS = re.compile(r"\b(?:ld|st)\.shared\.v\d")  # of a tile; barriers are single words


def copy_each(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A copy of x by every variant that can run here."""
    return tuple(tma_copy(x, variant) for variant in runnable())


def show_code(h: Harness) -> None:
    """Every variant on sm_90: what a thread holds, and whether tiles go through it."""
    x, find = h.meta(16384, 16384, dtype=torch.float16), ("cp.async.bulk.tensor", "mbarrier")
    kernels = h.codegen(copy_each, x, find={90: (*find, "ld.global.v4")})
    if not kernels:
        return
    table = {}
    for variant, kernel in zip(VARIANTS, kernels, strict=True):
        table[variant] = {
            "registers": kernel.registers,
            "shared bytes": kernel.shared,
            "TMA instructions": kernel.found.get("cp.async.bulk.tensor", 0),
            "shared loads and stores": len(THROUGH_REGISTERS.findall(dump(tma_copy, (x, variant), sm=90)["ptx"])),
        }
    h.table("each variant on sm_90; a loop's instructions counted once", table)
    through = [variant for variant in BY_TMA if table[variant]["shared loads and stores"]]
    h.say(
        f"variants by TMA whose tiles go through registers: {', '.join(through) or 'none'}; "
        f"not: {', '.join(variant for variant in BY_TMA if variant not in through)}"
    )


@functools.cache
def resources(variant: str, sm: int, **options) -> tuple[int, int]:
    """Registers of a thread and bytes of shared memory of a program, as compiled for an architecture."""
    x = torch.empty(16384, 16384, dtype=torch.float16, device="meta")
    (kernel,) = compile_for(tma_copy, (x, variant), options, sms=(sm,))
    return kernel.registers, kernel.shared


def on_an_sm(h: Harness, variant: str, **options) -> tuple[int, int]:
    """How many programs of a variant an SM of this GPU holds at a time, and the bytes of loads they have in flight."""
    plan = make_plan(variant, **options)
    registers, shared = resources(variant, h.machine.sm, **options)
    have = torch.cuda.get_device_properties(h.device)
    programs = min(
        32,
        have.max_threads_per_multi_processor // (32 * plan.warps),
        65536 // (triton.cdiv(registers, 8) * 8 * 32 * plan.warps),
        have.shared_memory_per_multiprocessor // (shared + 1024),
        plan.programs or 32,
    )
    return programs, programs * loads_in_flight(variant, plan) * plan.rows * plan.row_bytes


def explain(h: Harness, x: torch.Tensor, table) -> None:
    """How long a tile is in its program, and what that comes from."""
    rows = {row.variant: row for row in table.rows}
    life = {}
    for variant in VARIANTS:
        plan, ms = PLANS[variant], rows[variant].ms
        tiles = triton.cdiv(x.shape[0], plan.rows) * triton.cdiv(x.shape[1] * x.element_size(), plan.row_bytes)
        held, loads = on_an_sm(h, variant)
        life[variant] = {
            "programs on an SM": held,
            "KiB of loads in flight": loads >> 10,
            "TB/s": round(rows[variant].tbps, 3),
            "ns of a program for a tile": round(1e6 * ms * held * h.machine.sms / tiles),
        }
    h.table(f"where the time of a tile goes, {table.case}", life)
    ns = {variant: row["ns of a program for a tile"] for variant, row in life.items()}
    best = max(BY_TMA, key=lambda variant: rows[variant].tbps)
    h.say(
        f"one program per tile: TMA at {rows['pointers'].ms / rows['tile'].ms:.3f}x the speed of pointers; descriptors "
        f"made by each program cost {ns['tile device'] - ns['tile']:+d} ns on {ns['tile']}; made once for many tiles, "
        f"{rows['pipelined'].ms / rows['pipelined device'].ms:.3f}x the speed of the host's"
    )
    h.say(
        f"with one load at a time a persistent program waits {ns['persistent']} ns for each tile: "
        f"{rows['persistent'].tbps:.2f} TB/s; with loads ahead {rows['pipelined'].tbps:.2f}, without the detour "
        f"through registers {rows['ring'].tbps:.2f}"
    )
    h.say(
        f"best by TMA: {best}, {rows[best].of_ceiling:.3f} of the copy ceiling; pointers "
        f"{rows['pointers'].of_ceiling:.3f}, torch {rows['torch copy'].of_ceiling:.3f}"
    )


def show_tiles(h: Harness, x: torch.Tensor, shapes: list[tuple[int, int]]) -> None:
    """The same bytes in tiles of other shapes: what matters is how many adjacent bytes a row of them has."""
    names = {
        f"{variant} {rows} x {width} B": (variant, rows, width)
        for variant in ("pointers", "tile", "ring")
        if variant in runnable()
        for rows, width in shapes
    }
    ours = {
        name: functools.partial(tma_copy, variant=variant, rows=rows, row_bytes=width)
        for name, (variant, rows, width) in names.items()
    }
    table = compare(h, x, ours, title="tile shapes")
    if table:
        rates = {row.variant: row.tbps for row in table.rows}
        grid: dict[str, dict] = {}
        for name, (variant, rows, width) in names.items():
            grid.setdefault(variant, {})[f"{rows} x {width} B"] = round(rates[name], 3)
        h.table(f"TB/s by rows x bytes of a tile, {table.case}", grid)
        for variant, each in grid.items():
            h.say(
                f"{variant}: best with {max(each, key=each.get)}, worst with {min(each, key=each.get)}: "
                f"{max(each.values()) / min(each.values()):.2f}x"
            )


def show_depth(h: Harness, x: torch.Tensor, depths: list[tuple[int, int]]) -> None:
    """The ring with more and more bytes in flight: until memory is busy, the rate is those bytes over the latency."""
    if "ring" not in runnable():
        return
    names = {f"ring {stages} x {programs}": (stages, programs) for stages, programs in depths}
    ours = {
        name: functools.partial(tma_copy, variant="ring", stages=stages, programs=programs)
        for name, (stages, programs) in names.items()
    }
    table = compare(h, x, ours, title="bytes in flight")
    if not table:
        return
    rates = {row.variant: row.tbps for row in table.rows}
    rows = {}
    for name, (stages, programs) in names.items():
        _, loads = on_an_sm(h, "ring", stages=stages, programs=programs)
        # The loads are half of the bytes that a copy moves.
        rows[f"{stages} buffers x {programs} programs"] = {
            "KiB of loads in flight": loads >> 10,
            "TB/s": round(rates[name], 3),
            "ns a load takes": round(loads * h.machine.sms / (rates[name] / 2) / 1e3),
        }
    h.table(f"bytes in flight in an SM and what they give, {table.case}", rows)
    most = max(row["TB/s"] for row in rows.values())
    ordered = sorted(rows.values(), key=lambda row: row["KiB of loads in flight"])
    enough = next(row for row in ordered if row["TB/s"] > 0.97 * most)
    shortest = min(row["ns a load takes"] for row in ordered)
    h.say(
        f"{ordered[0]['KiB of loads in flight']} KiB in flight give {ordered[0]['TB/s']:.2f} TB/s, "
        f"{enough['KiB of loads in flight']} KiB are within 3 % of the most, {most:.2f}; with the shortest latency "
        f"here, {shortest} ns, Little's law asks for {most / 2 * 1e3 * shortest / h.machine.sms / 1024:.0f} KiB"
    )


def show_all(h: Harness, M: int, N: int) -> None:
    """Every variant on one matrix; where rows are padded, also who owns the padding and may copy it, too."""
    x = padded(h, h.fit(M, bytes_each=30 * N), N, torch.float16)
    ours = {variant: functools.partial(tma_copy, variant=variant) for variant in runnable()}
    if x.shape != with_padding(x).shape:  # then it is one stretch of memory
        ours["torch copy, padding too"] = lambda x: with_padding(x).clone()[:, : x.shape[1]]
    if table := compare(h, x, ours, title="every variant"):
        explain(h, x, table)


def study(h: Harness) -> None:
    show_code(h)
    small = h.interpreted or not (h.timing or h.profile)  # nothing to time
    cases = h.pick(quick=[(4096, 4096)], full=[(16384, 16384), (4096, 4096), (16381, 16371)])
    for M, N in [(133, 261)] if small else cases:
        show_all(h, M, N)
    n = 128 if small else h.pick(quick=4096, full=16384)
    x = padded(h, h.fit(n, bytes_each=30 * n), n, torch.float16)
    show_tiles(h, x, [(128, 128), (64, 256), (32, 512), (16, 1024), (8, 2048), (32, 256), (128, 256)])
    show_depth(h, x, [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 2), (6, 2), (3, 4), (12, 1)])
