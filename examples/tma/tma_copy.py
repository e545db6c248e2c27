"""TMA copy: how many bytes in flight saturate memory, and a ring whose tiles never enter registers.

A copy has to keep memory busy: by Little's law bytes in flight = bandwidth x latency, some tens of KiB in each SM at
all times. Ordinary loads reach that because thousands of threads wait at once, each for registers to fill. The ring
below, in Gluon, needs only two warps per SM: TMA loads tiles into a ring of buffers, TMA stores them out of the same
ones, and no value enters a register. So no thread reads a buffer, bank conflicts cannot occur, and it needs no swizzle.

Edges need no code. A TMA load stops at the edge, and what lies outside arrives as zeros. A store ends at the next
multiple of 16 bytes in the row: in an output made here that is padding; an `out` whose rows end elsewhere is refused.

Question   Is TMA slower than ordinary loads for a plain copy, why, and what makes it as fast as torch's?
Needs      triton, sm_90
Wins when  rows are ragged, each padded to a multiple of 16 bytes: torch's copy loses the most bandwidth there, TMA less
           than pointers on an H200, more on an H100. Else x.clone(). For a matmul's loads: tma_matmul.
Variants   tma_copy_triton.py (by pointers; by TMA with one tile a program, persistent, and pipelined; plans and checks)
Study      studies/tma/tma_copy.py
Source     chapter section "4. `triton_tma_blackwell.py` - TMA in Triton (NVIDIA GPU)", which claims loads 20-30 %
           faster: this copy is 2 to 3 % slower with one tile a program (H200); where a store ends: triton issue 11583
"""

from __future__ import annotations

import dataclasses
import functools

from harness import Harness, Work, run

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from examples.common.device import device_limits, interpreted
from examples.common.gluon import async_load, async_store, barriers, buffers
from examples.common.tma import gluon_descriptor, rows_for_tma
from examples.common.untraced import untraced
from examples.tma import tma_copy_triton as others
from examples.tma.tma_copy_triton import PLANS, Plan, lag, runnable


@gluon.jit
def _load_tile(x_desc, ring, full, slot, tile, tiles, tiles_n):
    """Start the load of a tile into a slot of the ring; past the last tile there is nothing to load or to wait for."""
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = x_desc.block_shape[1]
    wanted = tile < tiles
    ready = full.index(slot)
    mbarrier.expect(ready, x_desc.block_type.nbytes, pred=wanted)
    corner = [tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N]
    async_load(x_desc, corner, ready, ring.index(slot), pred=wanted)


@gluon.jit
def copy_ring_kernel(x_desc, y_desc, M, N, STAGES: gl.constexpr, LAG: gl.constexpr):
    """A buffer is loaded again LAG turns after its store was issued: by then that store has read it."""
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = x_desc.block_shape[1]
    ring = buffers(x_desc, STAGES)
    full = barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()  # TMA must see the barriers
    tiles_n = gl.cdiv(N, BLOCK_N)
    tiles = gl.cdiv(M, BLOCK_M) * tiles_n
    step = gl.num_programs(0)
    AHEAD: gl.constexpr = STAGES - LAG
    for i in gl.static_range(AHEAD):
        _load_tile(x_desc, ring, full, i, gl.program_id(0) + i * step, tiles, tiles_n)
    for turn in range(0, gl.cdiv(tiles - gl.program_id(0), step)):
        slot = turn % STAGES
        tile = gl.program_id(0) + turn * step
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        async_store(y_desc, [tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N], ring.index(slot))
        tma.store_wait(LAG)  # all stores but the last LAG have read their buffers
        _load_tile(x_desc, ring, full, (turn + AHEAD) % STAGES, tile + AHEAD * step, tiles, tiles_n)
    tma.store_wait(0)  # shared memory must outlive the reads of the last stores


def launch_copy(x: torch.Tensor, y: torch.Tensor, variant: str, plan: Plan) -> None:
    """The copy, without a check. By TMA it writes y's rows up to the next multiple of 16 bytes."""
    if variant != "ring":
        others.launch_triton(x, y, variant, plan)
        return
    # Unswizzled: a box is then as wide as the tile, up to 256 elements, and not 128 bytes at a time.
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * x.element_size(), rank=2)
    block = [plan.rows, plan.row_bytes // x.element_size()]
    x_desc, y_desc = (dataclasses.replace(gluon_descriptor(each, block), layout=layout) for each in (x, y))
    copy_ring_kernel[(others.grid_of(x, plan),)](
        x_desc, y_desc, *x.shape, STAGES=plan.stages, LAG=lag(plan.stages), num_warps=plan.warps
    )


def taken() -> str:
    """The variant that tma_copy takes by itself."""
    return "pipelined" if interpreted() else "ring"


@untraced
def tma_copy(
    x: torch.Tensor, variant: str | None = None, out: torch.Tensor | None = None, plan: Plan | None = None
) -> torch.Tensor:
    """A copy of x [M, N], bit by bit, by `variant`: "pointers", "tile", "persistent", "pipelined" or "ring".

    None is "ring", in the interpreter "pipelined". x is float32, float16 or bfloat16, with contiguous rows, by TMA with
    start and row stride in multiples of 16 bytes; any sizes (0 too) below 2**31 - 256. The copy's rows are apart by a
    multiple of 16 bytes. `plan` replaces that of PLANS.

    Raises TypeError for another dtype; ValueError for rank, strides, sizes, a layout that TMA cannot load, an unknown
    variant, an `out` of another shape, in x's own memory or, for TMA, whose rows are no multiple of 16 bytes long, or a
    plan that does not fit shared memory; RuntimeError for a device without Triton, an input that requires grad or, for
    the ring, the interpreter or a GPU before sm_90.
    """
    variant = variant or taken()
    plan = plan or PLANS.get(variant, PLANS["tile"])
    others.check_copy(x, out, variant, plan)
    y = rows_for_tma(x) if out is None else out
    if x.numel():
        launch_copy(x, y, variant, plan)
    return y


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.double()


def torch_copy(x: torch.Tensor) -> torch.Tensor:
    return rows_for_tma(x).copy_(x)


def compare(h: Harness, x: torch.Tensor, ours: dict, **options):
    """The table of one matrix: `ours` beside torch's copy; rows named "pointers..." are no TMA."""
    case = f"{x.shape[0]}x{x.shape[1]} {str(x.dtype).removeprefix('torch.')}"
    return h.compare(
        {"torch copy": torch_copy} | ours, reference, x, baseline="torch copy", work=Work(bytes=2 * x.nbytes), terms=0,
        peers=[name for name in ours if name.startswith("pointers")], case=case, **{"default": taken()} | options,
    )  # fmt: skip


def answer(tables: list, ragged, fastest: str, limit: int) -> str:
    """`tables` of plain copies; `ragged`, the table of one whose rows are no multiple of 16 bytes."""
    kib = {name: others.kib_in_flight(name, PLANS[name], limit) for name in ("persistent", fastest)}
    over = {
        name: " and ".join(f"{table.over('torch copy', name):.2f}x" for table in tables)
        for name in ("pointers", "tile", *kib)
    }
    sizes = " and ".join(table.case.split()[0] for table in tables)
    rows = {name: ragged.over("torch copy", name) for name in (fastest, "pointers")}
    won = "TMA wins" if rows[fastest] > 1.02 * max(1.0, rows["pointers"]) else "TMA does not win"
    return (
        f"Over torch's copy at {sizes}: loads {over['pointers']}, TMA {over['tile']}, looping "
        f"{over['persistent']} ({kib['persistent']} KiB an SM in flight), {fastest} {over[fastest]} ({kib[fastest]}). "
        f"Ragged rows: loads {rows['pointers']:.2f}x, {fastest} {rows[fastest]:.2f}x, {won}."
    )


def demo(h: Harness) -> None:
    dtype = torch.float16
    for M, N in [(0, 8), (1, 1), (3, 781), (65, 129), (129, 640)]:
        x = torch_copy(h.randn(M, N, dtype=dtype))
        for variant in runnable():
            h.check(functools.partial(tma_copy, variant=variant), reference, x, what=f"{variant} {M}x{N}", terms=0)

    x, find = h.meta(16384, 16384, dtype=dtype), ("cp.async.bulk.tensor", "mbarrier")
    h.codegen(tma_copy, x, "ring", find={80: (), 89: (), 90: find, 100: find, 120: find})

    fastest = taken()
    ours = {name: functools.partial(tma_copy, variant=name) for name in ("pointers", "tile", "persistent", fastest)}
    small = [(133, 264), (133, 261)]  # the last one's rows are no multiple of 16 bytes, here and below
    whole = [(16384, 16384), (4096, 4096)]
    sizes = h.pick(interpreted=small, quick=[(4096, 4096), (4093, 4083)], full=[*whole, (16381, 16371)])
    *tables, ragged = [
        compare(h, torch_copy(h.randn(h.fit(M, bytes_each=30 * N), N, dtype=dtype)), ours)
        for M, N in (sizes if h.timing or h.profile else small)
    ]
    h.answer(lambda: answer(tables, ragged, fastest, device_limits(h.device).shared_bytes))


if __name__ == "__main__":
    run(demo)
