"""persistent_matmul, in detail: more sizes, the layers of a large language model, and what each step wins in a wave."""

from __future__ import annotations

import itertools

from harness import Harness, Table, geomean

import triton

from examples.triton.persistent_matmul import BLOCK_M, VARIANTS, compare, fitting_tile, matmul_persistent

LAYERS = [(4096, 14336, 4096), (4096, 4096, 14336), (2048, 28672, 8192), (8192, 28672, 8192)]


def study(h: Harness) -> None:
    x = h.meta(4096, 4096)
    for variant in VARIANTS[:-1]:
        h.codegen(matmul_persistent, x, x, variant, find={90: ("cp.async.bulk.tensor", "mbarrier", "wgmma")})

    cases = h.pick(interpreted=[(130, 8, 264)], quick=LAYERS[:1], full=[(16384, 16384, 16384), *LAYERS])
    tables = [*h.lesson, *(compare(h, *case) for case in cases)]
    for table in filter(None, tables):
        explain(h, table)
    if any(tables):
        library = tables[0].baseline
        means = {variant: round(geomean(tables, library, variant), 4) for variant in VARIANTS}
        h.fact(f"geometric mean over {library}, lesson and study", means)


def explain(h: Harness, table: Table) -> None:
    """What each step won, as time per tile and SM."""
    M, N, _ = map(int, table.case.split("x"))
    tiles, sms = triton.cdiv(M, BLOCK_M) * triton.cdiv(N, fitting_tile(h.device, split=True)[0]), h.machine.sms
    waves = triton.cdiv(tiles, sms)
    steps = ", ".join(
        f"{after} {1000 * (table[before].ms - table[after].ms) / waves:+.2f} us"
        for before, after in itertools.pairwise(VARIANTS)
    )
    h.say(
        f"{table.case}: {tiles} tiles on {sms} SMs are {tiles / sms:.2f} waves, paid as {waves}; won per wave of "
        f"{1000 * table['tile'].ms / waves:.1f} us by each step: {steps}"
    )
