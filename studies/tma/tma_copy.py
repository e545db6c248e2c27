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

from examples.tma.tma_copy import compare, tma_copy
from examples.tma.tma_copy_triton import PLANS, VARIANTS, Plan, loads_in_flight, runnable
from studies.tma.tma_copy_edges import padded

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
    h.say(f"by TMA, but through registers: {[name for name in BY_TMA if table[name]['shared loads and stores']]}")


def copy_planned(x: torch.Tensor, variant: str, *plan: int) -> torch.Tensor:
    return tma_copy(x, variant, plan=Plan(*plan))


@functools.cache
def resources(variant: str, plan: Plan, sm: int) -> tuple[int, int]:
    """Registers of a thread and bytes of shared memory of a program, as compiled for an architecture."""
    x = torch.empty(16384, 16384, dtype=torch.float16, device="meta")
    (kernel,) = compile_for(copy_planned, (x, variant, *plan), sms=(sm,))
    return kernel.registers, kernel.shared


def on_an_sm(h: Harness, variant: str, plan: Plan) -> tuple[int, int]:
    """How many programs of a variant an SM of this GPU holds at a time, and the bytes of loads they have in flight."""
    registers, shared = resources(variant, plan, h.machine.sm)
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
    life = {}
    for variant, plan in PLANS.items():
        tiles = triton.cdiv(x.shape[0], plan.rows) * triton.cdiv(x.shape[1] * x.element_size(), plan.row_bytes)
        held, loads = on_an_sm(h, variant, plan)
        life[variant] = {
            "programs on an SM": held,
            "KiB of loads in flight": loads >> 10,
            "TB/s": round(table[variant].tbps, 3),
            "ns of a program for a tile": round(1e6 * table[variant].ms * held * h.machine.sms / tiles),
        }
    h.table(f"where the time of a tile goes, {table.case}", life)
    h.say(
        f"with one load at a time a persistent program waits {life['persistent']['ns of a program for a tile']} ns for "
        f"each tile: {table['persistent'].tbps:.2f} TB/s; with loads ahead {table['pipelined'].tbps:.2f}, without the "
        f"detour through registers {table['ring'].tbps:.2f}"
    )


def show_tiles(h: Harness, x: torch.Tensor, shapes: list[tuple[int, int]]) -> None:
    """The same bytes in tiles of other shapes: what matters is how many adjacent bytes a row of them has."""
    ours = {
        f"{variant} {rows} x {width} B": functools.partial(
            tma_copy, variant=variant, plan=PLANS[variant]._replace(rows=rows, row_bytes=width)
        )
        for variant in ("pointers", "tile", "ring")
        if variant in runnable()
        for rows, width in shapes
    }
    if table := compare(h, x, ours, title="tile shapes"):
        for variant in ("pointers", "tile", "ring"):
            ms = {name: table[name].ms for name in ours if name.startswith(variant)}
            best, worst = min(ms, key=ms.get), max(ms, key=ms.get)
            h.say(f"best {best}, worst {worst}: {ms[worst] / ms[best]:.2f}x")


def show_depth(h: Harness, x: torch.Tensor, depths: list[tuple[int, int]]) -> None:
    """The ring with more and more bytes in flight: until memory is busy, the rate is those bytes over the latency."""
    if "ring" not in runnable():
        return
    plans = {f"ring {stages} x {n}": PLANS["ring"]._replace(stages=stages, programs=n) for stages, n in depths}
    ours = {name: functools.partial(tma_copy, variant="ring", plan=plan) for name, plan in plans.items()}
    table = compare(h, x, ours, title="bytes in flight")
    if not table:
        return
    rows = {}
    for name, plan in plans.items():
        _, loads = on_an_sm(h, "ring", plan)
        # The loads are half of the bytes that a copy moves.
        rows[name] = {
            "KiB of loads in flight": loads >> 10,
            "TB/s": round(table[name].tbps, 3),
            "ns a load takes": round(loads * h.machine.sms / (table[name].tbps / 2) / 1e3),
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


def study(h: Harness) -> None:
    show_code(h)
    small = h.interpreted or not (h.timing or h.profile)  # nothing to time
    cases = h.pick(quick=[(4096, 4096)], full=[(16384, 16384), (4096, 4096), (16381, 16371)])
    ours = {variant: functools.partial(tma_copy, variant=variant) for variant in runnable()}
    for M, N in [(133, 261)] if small else cases:
        x = padded(h, h.fit(M, bytes_each=30 * N), N, torch.float16)
        if table := compare(h, x, ours, title="every variant"):
            explain(h, x, table)
    n = 128 if small else h.pick(quick=4096, full=16384)
    x = padded(h, h.fit(n, bytes_each=30 * n), n, torch.float16)
    show_tiles(h, x, [(128, 128), (64, 256), (32, 512), (16, 1024), (8, 2048)])
    show_depth(h, x, [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (6, 2), (12, 1)])
