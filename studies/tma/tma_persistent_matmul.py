"""Study of the persistent TMA matmul: every schedule over sizes and layers, and how the rule of plan() was found.

1. All five schedules and the rule, beside cuBLAS: squares and the layers of a transformer, as time for each wave.
2. Few tiles, where tiles of 128x256 would leave most SMs idle: in all of one wave, or in the second.
3. GROUP_M, the rows of tiles in a group: what the programs load together should fit L2.
4. b as weight.t(), which nn.Linear has: contiguous columns.
"""

from __future__ import annotations

import functools

from harness import Harness, Table, geomean

import triton

from examples.tma.tma_persistent_matmul import compare, matmul_tma_persistent
from examples.tma.tma_persistent_matmul_schedules import PER_SM, SCHEDULES, plan, runnable

SQUARES = [(n, n, n) for n in (2048, 4096, 8192, 16384)]
LAYERS = [(4096, 14336, 4096), (4096, 4096, 14336), (2048, 28672, 8192), (8192, 28672, 8192)]
FEW_TILES = [(1024, 1024, 1024), (2560, 1664, 4096)]  # on 132 SMs: a quarter of a wave of 128x256 tiles, and 1.06
SMALL = [(257, 264, 264)]  # more tiles than the interpreter has SMs, tails everywhere, more steps than parts


def waves(h: Harness, M: int, N: int, K: int, schedule: str | None = None) -> tuple[int, int]:
    """Tiles of c, and the programs that hold one at a time."""
    p = plan(M, N, K, h.device, schedule)
    return triton.cdiv(M, p.block_m) * triton.cdiv(N, p.block_n), PER_SM[p.schedule] * (h.machine.sms or 4)


def say_what_was_taken(h: Harness, M: int, N: int, K: int) -> None:
    p, (tiles, places) = plan(M, N, K, h.device), waves(h, M, N, K)
    h.say(
        f"{M}x{N}x{K}: the rule took {p.schedule}, {p.stages} stages, groups of {p.group_m}; {tiles} tiles of "
        f"{p.block_m}x{p.block_n}, {places} at a time, are {tiles / places:.2f} waves, paid as "
        f"{triton.cdiv(tiles, places)}"
    )


def compare_schedules(h: Harness, M: int, N: int, K: int) -> Table:
    ours = {name: functools.partial(matmul_tma_persistent, schedule=name) for name in runnable(h.device)}
    table = compare(h, M, N, K, {"triton": matmul_tma_persistent} | ours, title="schedules")
    if table:
        say_what_was_taken(h, M, N, K)
        us = {}
        for name in ("triton", *ours):
            tiles, places = waves(h, M, N, K, None if name == "triton" else name)
            us[name] = 1000 * table[name].ms / triton.cdiv(tiles, places)
        h.say("us of a wave: " + ", ".join(f"{name} {length:.2f}" for name, length in us.items()))
    return table


def summarize(h: Harness, what: str, tables: list[Table]) -> None:
    """Geometric mean and least of each variant over all cases, beside the library."""
    if tables and all(tables):
        library = tables[0].baseline
        rows = {
            row.variant: {
                "geometric mean": round(geomean(tables, library, row.variant), 4),
                "least": round(min(table.over(library, row.variant) for table in tables), 4),
            }
            for row in tables[0].rows[1:]
        }
        h.table(f"over {library}, {what}", rows)


def show_code(h: Harness, n: int = 8192) -> None:
    x, find = h.meta(n, n), {90: ("cp.async.bulk.tensor", "mbarrier", "wgmma")}
    kernels = {
        name: k for name in SCHEDULES for k in h.codegen(matmul_tma_persistent, x, x.t(), schedule=name, find=find)
    }
    held = [f"{name} {kernel.registers} registers, {kernel.shared >> 10} KiB" for name, kernel in kernels.items()]
    h.say(f"on sm_90, a thread and a program: {'; '.join(held)}")


def study(h: Harness) -> None:
    show_code(h)
    sizes = h.pick(interpreted=SMALL, quick=SQUARES[:2], full=SQUARES + LAYERS)
    summarize(h, "schedules", [compare_schedules(h, *size) for size in sizes])

    for size in h.pick(interpreted=[], quick=FEW_TILES[:1], full=FEW_TILES):
        ours = {"triton": matmul_tma_persistent, "split": functools.partial(matmul_tma_persistent, schedule="split")}
        if compare(h, *size, ours, title="few tiles"):
            say_what_was_taken(h, *size)

    for size in h.pick(interpreted=SMALL, quick=SQUARES[1:2], full=[SQUARES[3], LAYERS[0]]):
        groups = {f"groups of {n}": functools.partial(matmul_tma_persistent, group_m=n) for n in (1, 4, 8, 16, 32)}
        if table := compare(h, *size, groups, title="groups"):
            h.say(f"{table.case}: fastest {table.best.variant}; the rule takes {plan(*size, h.device).group_m}")

    sizes = h.pick(interpreted=SMALL, quick=SQUARES[1:2], full=[*SQUARES[1:3], *LAYERS[:2]])
    ours = {"triton": matmul_tma_persistent}
    summarize(h, "b.t()", [compare(h, *size, ours, columns=True, title="b.t()") for size in sizes])
