"""Study of the Gluon matmul: what each step wins, what the compiler writes for Triton's source, and what layouts mean.

1. Every step beside the kernels that Triton's compiler makes of the same tile (one program per tile, and persistent
   with the tile stored in halves), as time for each wave of tiles.
2. TTGIR is the first form of a kernel in which all is explicit. Its operations are counted for both languages: what
   the compiler adds to `desc.load`, `tl.dot` and `desc.store`, the author of a Gluon kernel writes.
3. Where TMA puts the bytes of a tile (a swizzle against bank conflicts), and which thread holds which element of the
   accumulator. The tests hold both to the compiler's own layouts.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re

from harness import Harness, Table, geomean
from harness.codegen import dump

import triton
from triton.experimental.gluon import language as gl

from examples.tma.gluon_matmul import CONSUMER_REGISTERS, PRODUCER_REGISTERS, STEPS, compare, gluon_matmul
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
    kernel = h.record.codegen[-1]
    threads = 32 * kernel["warps"]
    left = kernel["registers"] * threads // 128 - CONSUMER_REGISTERS - PRODUCER_REGISTERS
    h.say(
        f"partitions: {threads} threads start with {kernel['registers']} registers each; setmaxnreg makes that {left} "
        f"and {CONSUMER_REGISTERS} for the consumers, {PRODUCER_REGISTERS} for the producer's warpgroup"
    )
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
    said = inspect.getsource(compiled.matmul_tile_kernel.fn)
    source = ", ".join(f"{said.count(f'{word}(')} {word}" for word in ("desc.load", "tl.dot", "desc.store"))
    h.say(f"the source of triton tile has {source}: all else is the compiler's; in Gluon all of it is the author's")


def shared_byte(layout: gl.NVMMASharedLayout, rows: int, row: int, col: int) -> int:
    """Where an element of a tile of so many rows lies in shared memory: in strips as wide as the swizzle, one after
    another; within a row of a strip, in a chunk of 16 bytes whose place is XORed with the number of the row."""
    width = layout.swizzle_byte_width
    strip, byte = divmod(col * layout.element_bitwidth // 8, width)
    chunk = byte // 16 ^ row * width // 128 % (width // 16)
    return (strip * rows + row) * width + 16 * chunk + byte % 16


def holder(row: int, col: int) -> tuple[int, int, int]:
    """Warp, lane and register that hold an element of an accumulator with 16 rows for each warp, as wgmma has it."""
    return row // 16, 4 * (row % 8) + col % 8 // 2, 4 * (col // 8) + 2 * (row % 16 // 8) + col % 2


def explain_layouts(h: Harness) -> None:
    """What the two layouts of the source mean: where TMA puts the bytes of a tile, and who holds the accumulator."""
    block_m, block_n, block_k = TILE
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
    layout = gl.NVMMASharedLayout.get_default_for([block_k, block_n], gl.bfloat16)
    starts = [shared_byte(layout, block_k, 0, col) for col in range(block_n)]
    strips = [col for col in range(block_n) if starts[col] % (block_k * layout.swizzle_byte_width) == 0]
    h.say(f"b [{block_k} x {block_n}] lies in strips that begin at columns {', '.join(map(str, strips))}: a box each")
    mine = [(r, c) for r in range(block_m // 2) for c in range(block_n) if holder(r, c)[:2] == (0, 5)]
    held = [", ".join(map(str, sorted({place[axis] for place in mine})[:6])) for axis in (0, 1)]
    h.say(
        f"lane 5 of warp 0 of a consumer holds {len(mine)} elements of the accumulator: rows {held[0]}, "
        f"columns {held[1]}, ..."
    )


def explain(h: Harness, table: Table, n: int) -> dict[str, float]:
    """What each step won, as time per tile and SM; its speed over that of the better of the compiler's kernels."""
    tiles = triton.cdiv(n, TILE[0]) * triton.cdiv(n, TILE[1])
    waves = triton.cdiv(tiles, h.machine.sms)
    won = ", ".join(
        f"{after} {1000 * (table[before].ms - table[after].ms) / waves:+.2f} us"
        for before, after in itertools.pairwise(KERNELS)
    )
    first = 1000 * table["one buffer"].ms / waves
    h.say(f"{tiles} tiles on {h.machine.sms} SMs, {waves} waves; of {first:.1f} us a wave each step won: {won}")
    best = min((row for row in table.rows if row.peer), key=lambda row: row.ms).variant
    return {step: round(table.over(best, step), 4) for step in KERNELS}


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
        h.table(
            "over cuBLAS",
            {
                name: {
                    "geometric mean": round(geomean(tables, "cuBLAS", name), 4),
                    "least": round(min(table.over("cuBLAS", name) for table in tables), 4),
                }
                for name in variants
            },
        )
        by_hand = {f"{n}x{n}x{n}": explain(h, table, n) for n, table in zip(sizes, tables, strict=True)}
        h.table("by hand over the better of the compiler's kernels", by_hand)
