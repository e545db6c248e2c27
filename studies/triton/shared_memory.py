"""shared_memory, in detail: what the compiler's IR calls zeros and buffers, and where the loaded bytes come from."""

from __future__ import annotations

import re
from itertools import pairwise

from harness import Harness, Table
from harness.codegen import CodegenError, dump
from harness.hardware import ceilings

import torch

from examples.triton.shared_memory import STAGES, TILES, loaded_bytes, matmul_tile
from examples.triton.shared_memory_single_use import BLOCK, column_sum


def study(h: Harness) -> None:
    show_layouts(h)
    for table in filter(None, h.lesson):
        show_reuse(h, table)


def allocations(ttgir: str) -> list[str]:
    """The shared buffers that a kernel's TTGIR allocates: buffers x shape x dtype."""
    return re.findall(r"ttg\.local_alloc.*?!ttg\.memdesc<([^,]+),", ttgir)


def show_layouts(h: Harness) -> None:
    """What the compiler's own IR calls the zeros of an accumulator, and what it allocates."""
    if not h.shows_code:
        return
    x, a, rows = h.meta(4096, 4096, dtype=torch.float32), h.meta(4096, 4096), {}
    for label, wrapper, args, shape in (
        ("column_sum, 1 stage", column_sum, (x, 1), f"{BLOCK}"),
        ("column_sum, 4 stages", column_sum, (x, 4), f"{BLOCK}"),
        ("matmul_tile, 3 stages", matmul_tile, (a, a, 128, 128, STAGES), "128x128"),
    ):
        ttgir = dump(wrapper, args, sm=90)["ttgir"]
        zeros = re.search(rf"dense<0\.0+e\+00> : (tensor<{shape}xf32, #(?:blocked|mma)\d*>)", ttgir)
        if not zeros:
            raise CodegenError(f"{label} on sm_90: no zeros in registers in its TTGIR")
        rows[label] = {"tl.zeros": zeros[1], "shared buffers": ", ".join(allocations(ttgir)) or "none"}
    h.table("TTGIR on sm_90", rows)


def show_reuse(h: Harness, table: Table) -> None:
    """Of the lesson's table: bytes loaded, the rate at which they arrive, and whether fewer bytes are less time."""
    n = int(table.case.split("x")[0])
    tiles = {"strip of a row": (1, min(n, BLOCK))} | {f"{rows}x{cols}": (rows, cols) for rows, cols in TILES}
    loaded = {name: loaded_bytes(n, n, n, *tile, h.half.itemsize) for name, tile in tiles.items()}
    rates = {name: count / table[name].ms / 1e9 for name, count in loaded.items()}
    h.table(f"bytes loaded by {table.case}", {
        name: {"GB": round(count / 1e9, 2), "times each value": round(count / (2 * n * n * h.half.itemsize)),
               "TB/s": round(rates[name], 1)}
        for name, count in loaded.items()
    })  # fmt: skip
    if max(rates.values()) > (copy := ceilings().copy_tbps()):
        h.say(f"memory itself copies {copy:.1f} TB/s here: what comes faster comes from L2 and L1")
    for first, second in pairwise(list(loaded)[1:]):  # tile to tile: one kernel, one change
        fewer = loaded[first] / loaded[second]
        h.say(f"{first} to {second}: {fewer:.2f}x fewer bytes, {table.over(first, second):.2f}x the speed")
