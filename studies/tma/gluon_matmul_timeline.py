"""gluon_matmul, when each partition does what: the schedule of its last step, with the SM's clock read at each event.

The kernel has the lesson's partitions, ring and stagger, less its other options, and a short K, so that two whole tiles
of a program are a few dozen events. Thread 0 of each partition of program 0 reads %clock64 and stores it; all
partitions of a program run on one SM, so they read the same clock. Here a partition's MMA lasts until the MMAs of the
step before are done, as one step is in flight.

Reading the clock costs a little: the same kernel is also timed without. The picture shows the kernel that reads it.
"""

from __future__ import annotations

from harness import Harness, Work

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from examples.common.device import device_limits
from examples.common.gluon import (
    async_load,
    barriers,
    buffers,
    init_ring,
    next_slot,
    release_previous,
    require_wgmma,
    store_parts,
)
from examples.common.operands import short_of_k
from examples.common.shown import require
from examples.common.tiles import tile_coords
from examples.common.tma import gluon_descriptor
from examples.tma.gluon_matmul import BEHIND, BUFFERS, CONSUMER_REGISTERS, PARTS, PRODUCER_REGISTERS, reference
from examples.tma.gluon_matmul_ring import GROUP_M, STAGES, TILE

N, STEPS = 4096, 8  # rows and columns: 512 tiles, several for each program; steps of K, 64 wide, of a tile
TILES, CLOCKS = 2, 3  # tiles of a program that are recorded; clocks of a step
LANES = ("producer", "consumer 0", "consumer 1")
EVENTS = "cycles from the first event, event by event"


@gluon.jit
def _note(clocks_ptr, lane: gl.constexpr, i, step, which: gl.constexpr, STEPS: gl.constexpr, TILES: gl.constexpr):
    """Store the clock of this moment, of the first TILES tiles of program 0; with TILES = 0 nothing is compiled."""
    if TILES:
        now = gl.inline_asm_elementwise(
            "mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
        )  # volatile: it stays between the waits before and after it
        at = ((lane * TILES + i) * (STEPS + 1) + step) * 3 + which
        gl.store(clocks_ptr + at, now, mask=(gl.program_id(0) == 0) & (i < TILES))


@gluon.jit
def _produce(ring, a_desc, b_desc, clocks_ptr, M, N, STEPS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
             TILES: gl.constexpr):  # fmt: skip
    a_bufs, b_bufs, full, empty = ring
    BLOCK_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    BLOCK_N: gl.constexpr = b_desc.block_shape[1]
    slot = 0
    phase = 1
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        i = tile // gl.num_programs(0)
        for step in range(STEPS):
            _note(clocks_ptr, 0, i, step, 0, STEPS, TILES)
            mbarrier.wait(empty.index(slot), phase)
            _note(clocks_ptr, 0, i, step, 1, STEPS, TILES)
            ready = full.index(slot)
            mbarrier.expect(ready, 2 * (BLOCK_M + BLOCK_N) * BLOCK_K)
            async_load(a_desc, [row, step * BLOCK_K], ready, a_bufs.index(slot))
            async_load(b_desc, [step * BLOCK_K, col], ready, b_bufs.index(slot))
            _note(clocks_ptr, 0, i, step, 2, STEPS, TILES)
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _consume(
    ring, c_desc, c_bufs, lead, clocks_ptr, M, N, STEPS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    BEHIND: gl.constexpr, GROUP_M: gl.constexpr, TILES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    a_bufs, b_bufs, full, empty = ring
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    BLOCK_N: gl.constexpr = b_bufs.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    PARTS: gl.constexpr = BLOCK_N // c_desc.block_shape[1]
    slot = 0
    phase = 0
    tile_phase = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        i = tile // gl.num_programs(0)
        acc = gl.zeros((BLOCK_M // 2, BLOCK_N), gl.float32, MMA)
        for step in range(STEPS):
            _note(clocks_ptr, 1 + HALF, i, step, 0, STEPS, TILES)
            if HALF == 1:
                mbarrier.wait(lead, tile_phase, pred=step == STEPS - BEHIND)
            mbarrier.wait(full.index(slot), phase)
            _note(clocks_ptr, 1 + HALF, i, step, 1, STEPS, TILES)
            a = a_bufs.index(slot).slice(HALF * (BLOCK_M // 2), BLOCK_M // 2, dim=0)
            acc = warpgroup_mma(a, b_bufs.index(slot), acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            _note(clocks_ptr, 1 + HALF, i, step, 2, STEPS, TILES)
            release_previous(empty, slot, STAGES, pred=step > 0)
            slot, phase = next_slot(slot, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release_previous(empty, slot, STAGES)
        _note(clocks_ptr, 1 + HALF, i, STEPS, 0, STEPS, TILES)
        if HALF == 0:
            mbarrier.arrive(lead)
        tile_phase ^= 1
        store_parts(c_desc, c_bufs, acc, row + HALF * (BLOCK_M // 2), col, HALF * BUFFERS, BUFFERS, 0, PARTS)
        _note(clocks_ptr, 1 + HALF, i, STEPS, 1, STEPS, TILES)
    tma.store_wait(0)


@gluon.jit
def timeline_kernel(
    a_desc, b_desc, c_desc, clocks_ptr, M, N, STEPS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    BEHIND: gl.constexpr, GROUP_M: gl.constexpr, TILES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_bufs = buffers(a_desc, STAGES)
    b_bufs = buffers(b_desc, STAGES)
    c_bufs = buffers(c_desc, 2 * BUFFERS)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    init_ring(full, empty, STAGES, 2)
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(lead, count=1)
    fence_async_shared()
    ring = (a_bufs, b_bufs, full, empty)
    gl.warp_specialize([
        (_consume, (ring, c_desc, c_bufs, lead, clocks_ptr, M, N, STEPS, STAGES, BUFFERS, BEHIND, GROUP_M, TILES, 0)),
        (_consume, (ring, c_desc, c_bufs, lead, clocks_ptr, M, N, STEPS, STAGES, BUFFERS, BEHIND, GROUP_M, TILES, 1)),
        (_produce, (ring, a_desc, b_desc, clocks_ptr, M, N, STEPS, STAGES, GROUP_M, TILES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def timeline(a: torch.Tensor, b: torch.Tensor, tiles: int = TILES) -> tuple[torch.Tensor, torch.Tensor]:
    """a @ b by two consumers and a producer, and [lanes, tiles, steps + 1, CLOCKS] clocks of `tiles` tiles, 0 or more.

    a [M, K] and b [K, N] are contiguous and 16-bit; K is a multiple of 64 of at least STAGES of its steps. The last
    step of a tile holds its epilogue. sm_90 only.
    """
    (M, K), N = a.shape, b.shape[1]
    block_m, block_n, block_k = TILE
    require_wgmma("timeline", a.device, "matmul_tma_persistent")
    require(K % block_k == 0 and K // block_k >= STAGES, f"timeline: K is {K}; pass at least {STAGES} steps of 64")
    c, steps = torch.empty((M, N), dtype=a.dtype, device=a.device), K // block_k
    clocks = torch.zeros((len(LANES), max(1, tiles), steps + 1, CLOCKS), dtype=torch.int64, device=a.device)
    programs = min(triton.cdiv(M, block_m) * triton.cdiv(N, block_n), device_limits(a.device).sms)
    timeline_kernel[(programs,)](
        gluon_descriptor(a, [block_m, block_k]), gluon_descriptor(b, [block_k, block_n]),
        gluon_descriptor(c, [block_m // 2, block_n // PARTS]), clocks, M, N, STEPS=steps, STAGES=STAGES,
        BUFFERS=BUFFERS, BEHIND=BEHIND, GROUP_M=GROUP_M, TILES=tiles, CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
    return c, clocks


def spans(clocks: list) -> dict[str, list[int]]:
    """What each partition does, as start, end, start, end ..., in cycles from the first event."""
    last = len(clocks[0][0]) - 1
    first = min(tile[0][0] for lane in clocks for tile in lane)
    found: dict[str, list[int]] = {}
    for lane, tiles in zip(LANES, clocks, strict=True):
        for tile in tiles:
            for step, (waits, works, ends) in enumerate(tile[:last]):
                if lane == "producer":
                    does = {"waits": (waits, works), "starts loads": (works, ends)}
                else:  # the MMAs of the last step end where the epilogue begins
                    does = {"waits": (waits, works), "MMA": (works, ends if step < last - 1 else tile[last][0])}
                for what, span in does.items():
                    found.setdefault(f"{lane}: {what}", []).extend(at - first for at in span)
            if lane != "producer":
                found.setdefault(f"{lane}: epilogue", []).extend(at - first for at in tile[last][:2])
    return found


def shares(found: dict[str, list[int]]) -> dict[str, dict]:
    """What each partition spends on what it does, in % of the time from its first event to its last."""
    rows = {}
    for lane in LANES:
        does = {name.partition(": ")[2]: each for name, each in found.items() if name.startswith(lane)}
        whole = max(map(max, does.values())) - min(map(min, does.values()))
        busy = {what: sum(each[1::2]) - sum(each[::2]) for what, each in does.items()}
        rows[lane] = {f"{what} %": round(100 * cycles / whole, 1) for what, cycles in busy.items()}
    return rows


def study(h: Harness) -> None:
    x = h.meta(N, STEPS * TILE[2]), h.meta(STEPS * TILE[2], N)
    h.codegen(timeline, *x, find={90: ("cp.async.bulk.tensor", "mbarrier", "wgmma", "setmaxnreg")})
    if h.interpreted or h.machine.sm != 90:
        return
    a, b = h.randn(N, STEPS * TILE[2], dtype=h.half), h.randn(STEPS * TILE[2], N, dtype=h.half)
    plain, timed, K = "no clock read", "clocks read", a.shape[1]
    work = Work(bytes=2 * (a.numel() + b.numel() + N * N), flops=2 * N * N * K, dtype=h.half)
    table = h.compare(
        {plain: lambda a, b: timeline(a, b, 0)[0], timed: lambda a, b: timeline(a, b)[0]}, reference, a, b,
        baseline=plain, work=work, title="timeline", case=f"{N}x{N}x{K}", terms=K, wrong=short_of_k(reference),
    )  # fmt: skip
    if h.profile or h.SANITIZED:
        return
    for _ in range(3):  # the last finds L2 and clocks warm
        clocks = timeline(a, b)[1]
    held = clocks.tolist()
    require(all(at > 0 for lane in held for tile in lane for step in tile[:-1] for at in step), "a clock was not read")
    found = spans(held)
    require(all(start <= stop for each in found.values() for start, stop in zip(each[::2], each[1::2], strict=True)),
            f"events end before they begin: {found}")  # fmt: skip
    h.record.facts[EVENTS] = found  # for the page's picture; what is printed is the sum
    h.table(f"partitions of program 0, {TILES} tiles of {STEPS} steps, from first to last event of each", shares(found))
    if table.timed:
        h.say(f"reading the clocks changes the kernel's time by {table[timed].ms / table[plain].ms - 1:+.1%}")
