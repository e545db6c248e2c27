"""TMA copy: how many bytes in flight saturate memory, and what a tile's detour through registers costs.

A copy computes nothing, so all there is to do is to keep memory busy. By Little's law bytes in flight = bandwidth x
latency: some tens of KiB in each SM at all times. Ordinary loads have them because thousands of threads wait at once,
each for 16 bytes in registers. The ring below, in Gluon, has them with two warps per SM: TMA loads tiles into a ring of
buffers, TMA stores them out of the same ones, and no value enters a register. So no thread reads a buffer, bank
conflicts cannot occur, and it needs no swizzle: a row of a box may be longer than the widest swizzle's 128 bytes.

Edges take no code, while pointers need a mask, which keeps them from wide accesses where rows are no multiple of 16
bytes long. A TMA load ends at the element; what lies outside arrives as zeros. A store ends at the next multiple of 16
bytes in the row, and writes the tile's zeros there: in memory of its own that is padding; an `out` whose rows end
elsewhere is refused. (The interpreter, and Triton's code for GPUs without TMA, stop at the element.)

Question   Is TMA slower than ordinary loads for a plain copy, why, and what makes it as fast as torch's?
Needs      triton, sm_90
Wins when  the copy is part of something else. A copy alone is torch's: x.clone(). On ragged rows all are slower, but
           TMA loses less of its bandwidth than pointers do.
Variants   tma_copy_triton.py (by pointers; by TMA with one tile a program, persistent, and pipelined)
Study      studies/tma/tma_copy.py, studies/tma/tma_copy_edges.py (what a store writes beyond its row)
Source     chapter section "TMA", whose claim is a faster copy; Little's law for memory as in vendor tuning guides;
           where a store ends: seen on an H200, and triton issue 11583.
"""

from __future__ import annotations

import dataclasses
import functools

from harness import Harness, Work, geomean, run

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from examples.common.device import device_limits, interpreted, require_triton_device
from examples.common.gluon import async_load, async_store, gluon_architecture
from examples.common.operands import check_choice
from examples.common.tma import gluon_descriptor, require_tma_layout
from examples.tma.tma_copy_triton import (
    PLANS,
    Plan,
    check_out,
    grid_of,
    launch_triton,
    make_plan,
    per_sm,
    shared_bytes,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
VARIANTS = tuple(PLANS)
LARGEST = 2**31 - 256  # coordinates are int32, and a tile may reach past the end


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
    ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_N], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
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


def lag(stages: int) -> int:
    """Turns that a store gets to read its buffer; the other buffers have loads in flight."""
    return 1 if stages > 2 else 0


def loads_in_flight(variant: str, plan: Plan) -> int:
    """Tiles that a program has asked for and not yet received, at most."""
    return plan.stages - lag(plan.stages) if variant == "ring" else max(1, plan.stages - 1)


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    """Memory for a copy of x, its rows apart by a multiple of 16 bytes as a descriptor wants, whatever the variant."""
    step = 16 // x.element_size()
    rows = torch.empty((x.shape[0], triton.cdiv(x.shape[1], step) * step), dtype=x.dtype, device=x.device)
    return rows[:, : x.shape[1]]


def _ring_descriptor(x: torch.Tensor, block: list[int]):
    """Unswizzled: a box is then as wide as the tile, up to 256 elements, and not 128 bytes at a time."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * x.element_size(), rank=2)
    return dataclasses.replace(gluon_descriptor(x, block), layout=layout)


def launch_copy(x: torch.Tensor, y: torch.Tensor, variant: str, plan: Plan) -> None:
    """The copy, without a check. By TMA it writes y's rows up to the next multiple of 16 bytes."""
    if variant != "ring":
        launch_triton(x, y, variant, plan)
        return
    x_desc, y_desc = (_ring_descriptor(each, [plan.rows, plan.row_bytes // x.element_size()]) for each in (x, y))
    copy_ring_kernel[(grid_of(x, plan),)](
        x_desc, y_desc, *x.shape, STAGES=plan.stages, LAG=lag(plan.stages), num_warps=plan.warps
    )  # fmt: skip


def runnable() -> tuple[str, ...]:
    return tuple(variant for variant in VARIANTS if variant != "ring" or not interpreted())


def tma_copy(
    x: torch.Tensor,
    variant: str | None = None,
    out: torch.Tensor | None = None,
    rows: int | None = None,
    row_bytes: int | None = None,
    stages: int | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """A copy of x [M, N], bit by bit, by one of VARIANTS (None: the ring; "pipelined" in the interpreter).

    float32, float16 or bfloat16; contiguous rows, by TMA with start and row stride in multiples of 16 bytes; any sizes
    (0 too) below 2**31 - 256. The copy's rows are apart by a multiple of 16 bytes. The last four arguments replace what
    PLANS has for the variant.

    Raises TypeError for another dtype; ValueError for rank, strides, sizes, a layout that TMA cannot load, an unknown
    variant, an `out` of another kind, in x's own memory or, for TMA, whose rows are no multiple of 16 bytes long, or a
    tile, stages or programs that cannot be; RuntimeError for a device without Triton, an input that requires grad or,
    for the ring, the interpreter or a GPU before sm_90.
    """
    require_triton_device("tma_copy", x, *([] if out is None else [out]))
    if x.dtype not in DTYPES:
        raise TypeError(f"tma_copy: dtype {x.dtype} is not one of {DTYPES}; view the bits as one of their size")
    if x.ndim != 2:
        raise ValueError(f"tma_copy: need a matrix [M, N], got shape {tuple(x.shape)}; call x.reshape first")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"tma_copy: strides {x.stride()}; the columns must be adjacent, call x.contiguous() first")
    if max(x.shape) >= LARGEST:
        raise ValueError(f"tma_copy: shape {tuple(x.shape)}; each size must be below {LARGEST}, split the matrix")
    check_choice("tma_copy", (None, *VARIANTS), variant=variant)
    variant = variant or ("pipelined" if interpreted() else "ring")
    plan = make_plan(variant, rows, row_bytes, stages, programs)
    if out is not None:
        check_out(x, out, variant)
    if variant != "pointers":
        require_tma_layout("tma_copy", x=x, **({} if out is None else {"out": out}))
    if variant == "ring" and (gluon_architecture(x.device) or 0) < 90:
        sm = gluon_architecture(x.device)
        here = f"this is sm_{sm}" if sm else "Gluon kernels are not interpreted"
        raise RuntimeError(f"tma_copy: 'ring' needs sm_90, for its TMA ({here}): use variant='pipelined'")
    shared, limit = shared_bytes(plan), device_limits(x.device).shared_bytes
    if variant != "pointers" and shared > limit:
        raise ValueError(
            f"tma_copy: {plan.stages} tiles of {plan.rows} rows x {plan.row_bytes} bytes take {shared} bytes of shared "
            f"memory, and a program may have {limit} here; pass fewer stages or smaller tiles"
        )
    y = rows_apart(x) if out is None else out
    if x.numel():
        launch_copy(x, y, variant, plan)
    return y


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.double()


def torch_copy(x: torch.Tensor) -> torch.Tensor:
    return rows_apart(x).copy_(x)


def compare(h: Harness, x: torch.Tensor, ours: dict, **options):
    """The table of one matrix: `ours` beside torch's copy; rows named "pointers..." are no TMA."""
    variants = {"torch copy": torch_copy} | ours
    peers = [name for name in ours if name.startswith("pointers")]
    case = f"{x.shape[0]}x{x.shape[1]} {str(x.dtype).removeprefix('torch.')}"
    return h.compare(
        variants, reference, x, baseline="torch copy", work=Work(bytes=2 * x.nbytes), terms=0, peers=peers,
        **{"case": case} | options,
    )  # fmt: skip


def answer(tables: list, fastest: str, limit: int) -> str:
    def kib(variant: str) -> int:
        plan = PLANS[variant]
        return per_sm(plan, limit) * loads_in_flight(variant, plan) * plan.rows * plan.row_bytes >> 10

    tile, few, most = (geomean(tables, *names) for names in
                       (("pointers", "tile"), ("torch copy", "persistent"), ("torch copy", fastest)))  # fmt: skip
    slower = "slower than" if tile < 0.98 else "faster than" if tile > 1.02 else "as fast as"
    return (
        f"One tile a program, TMA is {slower} ordinary loads: {tile:.2f}x. In a loop the bytes in flight decide: with "
        f"{kib('persistent')} KiB an SM it reaches {few:.2f}x torch's copy, with {kib(fastest)} KiB ({fastest}) "
        f"{most:.2f}x: {'as fast' if most > 0.98 else 'still slower'}."
    )


def demo(h: Harness) -> None:
    dtype = torch.float16
    for M, N in [(0, 8), (1, 1), (3, 781), (65, 129), (129, 640)]:
        x = torch_copy(h.randn(M, N, dtype=dtype))
        for variant in runnable():
            h.check(functools.partial(tma_copy, variant=variant), reference, x, what=f"{variant} {M}x{N}", terms=0)

    x, find = h.meta(16384, 16384, dtype=dtype), ("cp.async.bulk.tensor", "mbarrier")
    h.codegen(tma_copy, x, "ring", find={80: (), 89: (), 90: find, 100: find, 120: find})

    fastest = "ring" if "ring" in runnable() else "pipelined"  # what tma_copy takes
    ours = {name: functools.partial(tma_copy, variant=name) for name in ("pointers", "tile", "persistent", fastest)}
    sizes = h.pick(interpreted=[(133, 261)], quick=[(4096, 4096)], full=[(16384, 16384), (4096, 4096)])
    tables = []
    for M, N in sizes if h.timing or h.profile else [(133, 261)]:
        x = torch_copy(h.randn(h.fit(M, bytes_each=30 * N), N, dtype=dtype))
        tables.append(compare(h, x, ours))
    h.answer(lambda: answer(tables, fastest, device_limits(h.device).shared_bytes))


if __name__ == "__main__":
    run(demo)
