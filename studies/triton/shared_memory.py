"""shared_memory, in detail: how many bytes each tile loads, where they come from, whether fewer take less time."""

from __future__ import annotations

from itertools import pairwise

from harness import Harness
from harness.hardware import ceilings

import triton

from examples.triton.shared_memory import TILES
from examples.triton.shared_memory_single_use import BLOCK


def study(h: Harness) -> None:
    for table in h.lesson:
        n = int(table.case.split("x")[0])
        tiles = {"strip of a row": (1, min(n, BLOCK))} | {f"{rows}x{cols}": (rows, cols) for rows, cols in TILES}
        # What the programs load, the same value as often as it is loaded.
        loaded = {
            k: 2 * n * triton.cdiv(n, rows) * triton.cdiv(n, cols) * (rows + cols) for k, (rows, cols) in tiles.items()
        }
        rows = {"GB": {name: round(count / 1e9, 3) for name, count in loaded.items()}}
        if table:
            rows["TB/s"] = {name: round(count / table[name].ms / 1e9, 1) for name, count in loaded.items()}
        h.table(f"what the programs load for {table.case}", rows)
        if not table:
            continue
        h.say(f"memory itself copies {ceilings().copy_tbps():.1f} TB/s: any faster rate comes from L2 and L1")
        for first, second in pairwise(list(loaded)[1:]):  # tile to tile: one kernel, one change
            fewer = loaded[first] / loaded[second]
            h.say(f"{first} to {second}: {fewer:.2f}x fewer bytes, {table.over(first, second):.2f}x the speed")
