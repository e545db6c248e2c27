"""Study of the Gluon matmul: what each step wins, what the compiler writes for Triton's source, and what layouts mean.

1. Every step beside the kernels that Triton's compiler makes of the same tile (one program per tile, and persistent
   with the tile stored in halves), as time for each wave of tiles.
2. TTGIR is the first form of a kernel in which all is explicit. Its operations are counted for both languages: what
   the compiler adds to `desc.load`, `tl.dot` and `desc.store`, the author of a Gluon kernel writes.
3. Where TMA puts the bytes of a tile: a swizzle against bank conflicts.
"""

from __future__ import annotations

import functools
import itertools
import re

from harness import Harness, Table, geomean
from harness.codegen import dump

import triton
from triton.experimental.gluon import language as gl

from examples.tma.gluon_matmul import STEPS, compare, gluon_matmul
from examples.tma.gluon_matmul_ring import TILE, gluon_matmul_one_buffer, gluon_matmul_ring

KERNELS = {"one buffer": gluon_matmul_one_buffer, "ring": gluon_matmul_ring} | {
    step: functools.partial(gluon_matmul, step=step) for step in STEPS
}
# Kernels of triton/persistent_matmul.py on the same tile: one program per tile, and that file's last step.
COMPILED = ("tile", "split")
# How TTGIR writes what Gluon has its author write.
WRITTEN = {
    "buffers": "ttg.local_alloc", "barriers": "ttng.init_barrier", "loads": "ttng.async_tma_copy_global_to_local",
    "expects": "ttng.barrier_expect", "waits": "ttng.wait_barrier", "arrivals": "ttng.arrive_barrier",
    "MMAs": "ttng.warp_group_dot", "MMA waits": "ttng.warp_group_dot_wait", "fences": "ttng.fence_async_shared",
    "stores": "ttng.async_tma_copy_local_to_global", "store waits": "ttng.async_tma_store_wait",
}  # fmt: skip


def operations(ttgir: str) -> dict[str, int]:
    """How often each of WRITTEN is in it, and among how many partitions it is divided."""
    counts = {label: len(re.findall(rf"\b{re.escape(name)}\b", ttgir)) for label, name in WRITTEN.items()}
    return counts | {"partitions": 1 + len(re.findall(r"\bpartition\d+\(", ttgir))}


def show_code(h: Harness) -> None:
    """The instructions of every step, and what the compiler writes where the Triton kernel says load, dot and store."""
    compiled = h.peer("triton/persistent_matmul")
    x, hopper = h.meta(4096, 4096), ("cp.async.bulk.tensor", "mbarrier", "wgmma")
    for kernel in (gluon_matmul_one_buffer, gluon_matmul_ring):
        h.codegen(kernel, x, x, find={90: hopper})
    for step in STEPS[::2]:  # "persistent" has the code of "partitions", and the lesson shows the last
        h.codegen(gluon_matmul, x, x, step, find={90: (*hopper, "setmaxnreg")})
    if not h.shows_code:
        return
    counts = {
        f"triton {each}": operations(dump(compiled.matmul_persistent, (x, x, each), sm=90)["ttgir"])
        for each in COMPILED
    }
    for step, fn in KERNELS.items():
        if step != "persistent":
            wrapper, args = (fn.func, (x, x, step)) if step in STEPS else (fn, (x, x))
            counts[step] = operations(dump(wrapper, args, sm=90)["ttgir"])
    rows = {label: {kernel: count[label] for kernel, count in counts.items()} for label in (*WRITTEN, "partitions")}
    h.table("what TTGIR says explicitly", rows)


def shared_byte(layout: gl.NVMMASharedLayout, rows: int, row: int, col: int) -> int:
    """Where an element of a tile of so many rows lies in shared memory: in strips as wide as the swizzle, one after
    another; within a row of a strip, in a chunk of 16 bytes whose place is XORed with the number of the row."""
    width = layout.swizzle_byte_width
    strip, byte = divmod(col * layout.element_bitwidth // 8, width)
    chunk = byte // 16 ^ row * width // 128 % (width // 16)
    return (strip * rows + row) * width + 16 * chunk + byte % 16


def explain_layouts(h: Harness) -> None:
    """Where TMA puts the bytes of a tile."""
    block_m, _, block_k = TILE
    layout = gl.NVMMASharedLayout.get_default_for([block_m, block_k], gl.bfloat16)
    chunks = range(0, block_k, 8)
    lie = [[shared_byte(layout, block_m, row, col) % 128 // 16 for col in chunks] for row in range(8)]
    h.fact(
        f"chunks of 16 bytes in the first rows of a [{block_m} x {block_k}], {layout.swizzle_byte_width}-byte swizzle",
        {f"row {row}": " ".join(map(str, places)) for row, places in enumerate(lie)},
    )
    groups = {places[0] for places in lie}
    h.say(
        f"wgmma reads 8 rows of 16 bytes at a time: they lie in {len(groups)} of the 8 groups of banks, and would all "
        "lie in 1 without the swizzle, an 8-way bank conflict"
    )


def explain(h: Harness, table: Table, n: int) -> None:
    """What each step won, as time per tile and SM."""
    tiles = triton.cdiv(n, TILE[0]) * triton.cdiv(n, TILE[1])
    waves = triton.cdiv(tiles, h.machine.sms)
    won = ", ".join(
        f"{after} {1000 * (table[before].ms - table[after].ms) / waves:+.2f} us"
        for before, after in itertools.pairwise(KERNELS)
    )
    first = 1000 * table["one buffer"].ms / waves
    h.say(f"{tiles} tiles on {h.machine.sms} SMs, {waves} waves; of {first:.1f} us a wave each step won: {won}")


def study(h: Harness) -> None:
    show_code(h)
    if not h.profile:
        explain_layouts(h)
    if h.interpreted or h.machine.sm != 90:
        h.say("no step is run here: they need sm_90, and Gluon is not interpreted")
        return
    matmul = h.peer("triton/persistent_matmul").matmul_persistent
    variants = {f"triton {each}": functools.partial(matmul, variant=each) for each in COMPILED} | KERNELS
    sizes = h.pick(quick=(4096,), full=(4096, 8192))
    tables = [compare(h, n, variants) for n in sizes]
    if all(table.timed for table in tables):
        means = {name: {"geometric mean": round(geomean(tables, "cuBLAS", name), 4)} for name in variants}
        h.table("over cuBLAS", means)
        for n, table in zip(sizes, tables, strict=True):
            explain(h, table, n)
