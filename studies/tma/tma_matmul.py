"""tma_matmul, measured: what each step is made of, on more sizes and on the tile that leaves room for two programs.

1. sm_90's machine code of each step: who copies, with how many instructions, and what it leaves of an SM.
2. Each step's speed over the one before, on squares, a transformer's layer and sizes with tails, and the chapter's
   claim judged by all cases whose tiles are whole.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter

from harness import Harness, Table
from harness.codegen import dump

import torch

from examples.tma.tma_matmul import BLOCK_K, BLOCK_M, RAGGED, SMALL, STEPS, WARPS, WHOLE, compare, tma_matmul

CLAIM = (1.20, 1.30)  # the chapter's, for loads by TMA
SQUARES = [WHOLE, (8192, 8192, 8192)]
LAYER = (4096, 14336, 4096)
# block_n and stages: what fills an SM of sm_90 with one program, and what leaves it room for two.
TILES = [(256, 4), (128, 3)]
OPCODE = re.compile(r"^\S+\t(?:@!?\w+ )?([A-Z]\S*)")
LABEL = re.compile(r"^(\w+):$")
BRANCH = re.compile(r"\tBRA (?:\S+ )*?(\w+);?|@!?\w+ BRA (?:\S+ )*?(\w+);?")


def loop_of(sass: str, within: str = "HGMMA") -> Counter[str]:
    """How often each instruction is in the innermost loop that has `within`, by its name without modifiers."""
    lines = [line.strip() for line in sass.splitlines()]
    labels = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    loops = []
    for i, line in enumerate(lines):
        if (found := BRANCH.search(line)) and labels.get(found[1] or found[2], i) < i:
            body = lines[labels[found[1] or found[2]] : i + 1]
            names = Counter(op[1].rstrip(";").split(".")[0] for each in body if (op := OPCODE.match(each)))
            if names[within]:
                loops.append(names)
    return min(loops, key=Counter.total, default=Counter())


def each_step(a: torch.Tensor, b: torch.Tensor, block_n: int, stages: int) -> tuple[torch.Tensor, ...]:
    """a @ b once by every step."""
    return tuple(tma_matmul(a, b, step, (block_n, stages)) for step in STEPS)


def by_step(a: torch.Tensor, b: torch.Tensor, step: str, block_n: int, stages: int) -> torch.Tensor:
    return tma_matmul(a, b, step, (block_n, stages))


def show_code(h: Harness) -> None:
    x = h.meta(4096, 4096)
    for block_n, stages in TILES if h.shows_code else ():
        find = {90: ("cp.async", "cp.async.bulk.tensor", "mbarrier", "wgmma", "st.global.v4")}
        kernels = h.codegen(each_step, x, x, block_n, stages, find=find)
        rows = {}
        for step, kernel in zip(STEPS, kernels, strict=True):
            loop = loop_of(dump(by_step, (x, x, step, block_n, stages), sm=90)["sass"])
            # A TMA copy stands once in the code. A warp for each box issues it, by one thread; a box of a swizzled tile
            # is 128 bytes wide: one for a, several for b.
            boxes = 2 * (BLOCK_K + block_n) // 128 if loop["UTMALDG"] else 0
            rows[step] = {
                "instructions of the loop": loop.total(),
                "copies that a program issues in it": 32 * WARPS * loop["LDGSTS"] + boxes,
                "barriers in it": loop["BAR"] + loop["SYNCS"],
                "registers": kernel.registers,
                "spilled bytes": kernel.spills,
                "shared bytes": kernel.shared,
            }
        h.table(f"each step on sm_90, tile {BLOCK_M}x{block_n}x{BLOCK_K}, {stages} stages", rows)
        pointers, loads = rows["pointers"], rows["loads"]
        changes = ", ".join(f"{name} {pointers[name]} -> {loads[name]}" for name in list(pointers)[:4])
        h.say(f"from pointers to TMA loads: {changes}")


def gains(table: Table) -> dict[str, float]:
    """Each step's speed as a multiple of the step before, both ratios of the same rounds."""
    return {after: round(table.over(before, after), 4) for before, after in itertools.pairwise(STEPS)}


def judge_claim(ratios: list[float]) -> str:
    """What was measured for the loads, beside the claim."""
    within = sum(CLAIM[0] <= ratio <= CLAIM[1] for ratio in ratios)
    return (
        f"loads by TMA: {min(ratios):.3f}x to {max(ratios):.3f}x the speed of pointers; of {len(ratios)} cases, "
        f"{within} are within the {CLAIM[0]:.2f}x to {CLAIM[1]:.2f}x that the chapter claims"
    )


def conclude(h: Harness, tables: list[Table]) -> None:
    """What the tables of the largest tile, and of the one that leaves room for two programs, say together."""
    found = {f"{table.title}, {table.case}": gains(table) for table in tables}
    h.table("speed of each step over the one before", found)
    even = [gains(table) for table in tables if table.case != "x".join(map(str, RAGGED))]
    each = {step: round(statistics.geometric_mean(row[step] for row in even), 4) for step in STEPS[1:]}
    h.fact("geometric mean of each step over the one before, whole tiles", each)
    h.say(judge_claim([row["loads"] for row in even]))


def study(h: Harness) -> None:
    show_code(h)
    tile = TILES[1]
    title = f"tile {BLOCK_M}x{tile[0]}x{BLOCK_K}, {tile[1]} stages"
    if h.interpreted or not (h.timing or h.profile):  # nothing to time
        compare(h, *SMALL, tile, title=title)
        return
    wide = [compare(h, *size) for size in h.pick(quick=[], full=[SQUARES[1], LAYER])]
    two = [compare(h, *size, tile, title=title) for size in h.pick(quick=[WHOLE], full=SQUARES)]
    tables = [*h.lesson, *wide, *two]
    if all(tables):
        conclude(h, tables)
