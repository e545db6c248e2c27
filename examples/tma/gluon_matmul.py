"""Matmul in Gluon: the pipeline that Triton's compiler makes for Hopper, written by hand with warp specialization.

tl.dot in a loop leaves to the compiler where tiles lie, how many loads are in flight, when a buffer may be loaded again
and when to wait for an MMA. Gluon is the same language one level down: all of that is written out; only barriers among
the threads of one partition are still left to the compiler. On a tile of 128 x 256 a step of K, 64 wide, loads 48 KiB
and computes 4.2 MFLOP: 0.6 us for an SM of an H200. A load takes about 1 us, so with one buffer the tensor cores idle
most of the time. A ring of four, 192 of 227 KiB, starts each load three steps ahead, as tl.range(num_stages=4) does:
see gluon_matmul_ring.py. Here are four more steps, of which persistent gains the most (1.03x on an H200):

  partitions  a producer, one warp, only loads; two consumers, a warpgroup each, multiply half of a tile's rows each.
              They meet at barriers in shared memory, and setmaxnreg hands the producer's registers to the consumers;
  persistent  one program per SM: the producer loads the next tile while this one is stored;
  in flight   a consumer starts the MMAs of a step before it waits for those of the step before;
  staggered   near the end of a tile the second consumer waits for the first: one stores while the other multiplies.

Question   What does the compiler do for a matmul on Hopper, and what does doing it by hand buy?
Needs      triton, sm_90
Wins when  the compiler's schedule leaves the tensor cores idle, and one architecture is enough.
Variants   gluon_matmul_ring.py (all warps load and multiply together: one buffer, then the ring),
           gluon_matmul_cluster.py (two CTAs share b by multicast: Triton 3.9)
Study      studies/tma/gluon_matmul.py, studies/tma/gluon_matmul_timeline.py
Source     chapter section "Warp Specialization", whose loop has no partitions; Gluon tutorials 05 (wgmma) and 08 (warp
           specialization); CUTLASS's ping-pong kernels
"""

from __future__ import annotations

from harness import Harness, Work, geomean, run

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

from examples.common import gluon as pipelines
from examples.common.device import device_limits
from examples.common.gluon import async_load, barriers, buffers, init_ring, next_slot, release_previous, store_parts
from examples.common.operands import check_choice, check_tma_gemm, short_of_k
from examples.common.tiles import tile_coords
from examples.common.tma import gluon_descriptor
from examples.common.untraced import untraced
from examples.tma.gluon_matmul_ring import DTYPES, GROUP_M, STAGES, TILE, gluon_matmul_one_buffer, gluon_matmul_ring


@gluon.jit
def _produce(ring, a_desc, b_desc, M, N, K, B_COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr):
    """One warp: the operands of every step of every tile, as soon as both consumers have emptied a slot."""
    a_bufs, b_bufs, full, empty = ring
    BLOCK_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    BLOCK_N: gl.constexpr = b_desc.block_shape[0] if B_COLUMNS else b_desc.block_shape[1]
    slot = 0
    phase = 1  # a wait for parity 1 passes at a new barrier: the first STAGES waits do not block
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            a_buf, b_buf, ready = a_bufs.index(slot), b_bufs.index(slot), full.index(slot)
            # Its one arrival, and the bytes it waits for: those past the edge of a matrix arrive too, as zeros.
            mbarrier.expect(ready, 2 * (BLOCK_M + BLOCK_N) * BLOCK_K)
            async_load(a_desc, [row, k], ready, a_buf)
            async_load(b_desc, [col, k] if B_COLUMNS else [k, col], ready, b_buf)
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _add_step(
    acc, ring, slot, phase, B_COLUMNS: gl.constexpr, STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr, HALF: gl.constexpr,
    FIRST: gl.constexpr,
):  # fmt: skip
    """Add the MMAs of a step, for one half of the rows. IN_FLIGHT: on return only the step before is done."""
    a_bufs, b_bufs, full, empty = ring
    HALF_M: gl.constexpr = a_bufs.shape[1] // 2
    mbarrier.wait(full.index(slot), phase)
    a = a_bufs.index(slot).slice(HALF * HALF_M, HALF_M, dim=0)
    b = b_bufs.index(slot).permute((1, 0)) if B_COLUMNS else b_bufs.index(slot)
    acc = warpgroup_mma(a, b, acc, use_acc=not FIRST, is_async=True)
    acc = warpgroup_mma_wait(1 if IN_FLIGHT else 0, deps=(acc,))
    if not IN_FLIGHT:
        mbarrier.arrive(empty.index(slot))
    elif not FIRST:
        release_previous(empty, slot, STAGES)
    slot, phase = next_slot(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def _consume(
    ring, c_desc, c_bufs, lead, M, N, K, B_COLUMNS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    IN_FLIGHT: gl.constexpr, BEHIND: gl.constexpr, GROUP_M: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup: one half of the rows of every tile. Why no partition waits for ever: docs/memory_ordering.md."""
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_K: gl.constexpr = ring[0].shape[2]
    BLOCK_N: gl.constexpr = ring[1].shape[1] if B_COLUMNS else ring[1].shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    slot = 0
    phase = 0
    tile_phase = 0
    pause = gl.cdiv(K, BLOCK_K) * BLOCK_K - BEHIND * BLOCK_K
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = gl.zeros((BLOCK_M // 2, BLOCK_N), gl.float32, MMA)
        acc, slot, phase = _add_step(acc, ring, slot, phase, B_COLUMNS, STAGES, IN_FLIGHT, HALF, True)
        for k in range(BLOCK_K, K, BLOCK_K):
            if BEHIND and HALF == 1:
                mbarrier.wait(lead, tile_phase, pred=k == pause)
            acc, slot, phase = _add_step(acc, ring, slot, phase, B_COLUMNS, STAGES, IN_FLIGHT, HALF, False)
        if IN_FLIGHT:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            release_previous(ring[3], slot, STAGES)
        if BEHIND and HALF == 0:
            mbarrier.arrive(lead)
        tile_phase ^= 1
        PARTS: gl.constexpr = BLOCK_N // c_desc.block_shape[1]
        store_parts(c_desc, c_bufs, acc, row + HALF * (BLOCK_M // 2), col, HALF * BUFFERS, BUFFERS, 0, PARTS)
    tma.store_wait(0)  # shared memory must outlive its last reader


@gluon.jit
def gluon_matmul_kernel(
    a_desc, b_desc, c_desc, M, N, K, B_COLUMNS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    IN_FLIGHT: gl.constexpr, BEHIND: gl.constexpr, GROUP_M: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles p, p + programs, ...: with as many programs as tiles the loops over them run once."""
    a_bufs = buffers(a_desc, STAGES)
    b_bufs = buffers(b_desc, STAGES)
    c_bufs = buffers(c_desc, 2 * BUFFERS)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    init_ring(full, empty, STAGES, 2)  # full: the producer arrives, and the bytes of its loads; empty: both consumers
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(lead, count=1)  # the first consumer arrives at the end of a tile
    fence_async_shared()
    ring = (a_bufs, b_bufs, full, empty)
    gl.warp_specialize([
        (_consume, (ring, c_desc, c_bufs, lead, M, N, K, B_COLUMNS, STAGES, BUFFERS, IN_FLIGHT, BEHIND, GROUP_M, 0)),
        (_consume, (ring, c_desc, c_bufs, lead, M, N, K, B_COLUMNS, STAGES, BUFFERS, IN_FLIGHT, BEHIND, GROUP_M, 1)),
        (_produce, (ring, a_desc, b_desc, M, N, K, B_COLUMNS, STAGES, GROUP_M)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip  # of the last two; the first keeps what is left


STEPS = ("partitions", "persistent", "in flight", "staggered")
PARTS, BUFFERS = 4, 2  # that a consumer's half is stored in, and through: with the ring, nearly all shared memory
BEHIND = 2  # steps at the end of a tile that the second consumer stays behind the first: about the time of a store
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # of a thread: a consumer needs 128 for its accumulator alone


@untraced
def gluon_matmul(a: torch.Tensor, b: torch.Tensor, step: str = "staggered") -> torch.Tensor:
    """a [M, K] @ b [K, N] -> c [M, N], contiguous, by one of STEPS, each of which adds to the one before it.

    float16 or bfloat16, both the same, with a float32 accumulator. a has contiguous rows, b contiguous rows or columns
    (weight.t()); K and N are multiples of 8, M is any (0 too).

    Raises TypeError for another dtype or two dtypes; ValueError for rank, inner sizes that differ, a layout that TMA
    cannot load or an unknown step; RuntimeError for any architecture but sm_90, in the interpreter, which has no Gluon,
    or for an input that requires grad.
    """
    M, N, K, columns = check_tma_gemm("gluon_matmul", a, b, DTYPES)
    check_choice("gluon_matmul", STEPS, step=step)
    pipelines.require_wgmma("gluon_matmul", a.device, "matmul_tma_persistent")
    if not (M and N and K):
        return torch.zeros((M, N), dtype=a.dtype, device=a.device)  # nothing to add up, or nothing to write
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    block_m, block_n, block_k = TILE
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    # With fewer steps a tile than the ring has slots, lead could get two phases ahead.
    behind = BEHIND if step == "staggered" and triton.cdiv(K, block_k) >= STAGES > BEHIND else 0
    gluon_matmul_kernel[(tiles if step == "partitions" else min(tiles, device_limits(a.device).sms),)](
        gluon_descriptor(a, [block_m, block_k]),
        gluon_descriptor(b.t(), [block_n, block_k]) if columns else gluon_descriptor(b, [block_k, block_n]),
        gluon_descriptor(c, [block_m // 2, block_n // PARTS]), M, N, K,
        B_COLUMNS=columns, STAGES=STAGES, BUFFERS=BUFFERS, IN_FLIGHT=step in STEPS[2:], BEHIND=behind, GROUP_M=GROUP_M,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def compare(h: Harness, n: int, variants: dict):
    """The table of n x n x n; variants named "triton ..." are other techniques', made by Triton's compiler."""
    a, b = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half)
    library = "cuBLAS" if a.is_cuda else "torch"
    return h.compare(
        {library: torch.matmul} | variants, reference, a, b, baseline=library, case=f"{n}x{n}x{n}", terms=n,
        work=Work(bytes=3 * a.nbytes, flops=2 * n**3, dtype=h.half), peers=[x for x in variants if "triton" in x],
        wrong=short_of_k(reference), default="gluon" if "gluon" in variants else None,
    )  # fmt: skip


def answer(tables: list) -> str:
    compiled = f"{geomean(tables, tables[0].baseline, 'triton'):.2f}x {tables[0].baseline}"
    if "gluon" not in tables[0]:
        return f"By hand nothing: these kernels need sm_90. Triton's compiler reaches {compiled} here."
    by_hand = geomean(tables, "triton", "gluon")
    gains = ", ".join(f"{step} {geomean(tables, 'one buffer', step):.2f}x" for step in ("ring", *STEPS))
    sizes = " and ".join(table.case.split("x")[0] for table in tables)
    verdict = "it pays" if by_hand > 1.02 else "it does not pay" if by_hand < 0.98 else "it buys little"
    return (
        f"Over one buffer, at {sizes}: {gains}. Triton's compiler makes a ring, too, at {compiled}; by hand, with all "
        f"steps, {by_hand:.2f}x Triton's: {verdict}."
    )


def demo(h: Harness) -> None:
    here = not h.interpreted and h.machine.sm == 90
    # One row, tails in each dimension, tiles shorter than the ring and longer, nothing to add up; b either way.
    for M, N, K in [(1, 8, 8), (129, 264, 72), (300, 520, 328), (5, 16, 0)] if here else ():
        a, w = h.randn(M, K, dtype=h.half), h.randn(N, K, dtype=h.half)
        for fn in (gluon_matmul_one_buffer, gluon_matmul_ring, gluon_matmul):
            for b in (w.t(), w.t().contiguous()):
                h.check(fn, reference, a, b, terms=K)
    if not here:
        h.say("nothing is run here: these kernels need sm_90, and Gluon is not interpreted; they are compiled")
    x, hopper = h.meta(4096, 4096), ("cp.async.bulk.tensor", "mbarrier", "wgmma", "setmaxnreg")
    h.codegen(gluon_matmul, x, x, find={80: (), 89: (), 90: hopper, 100: (), 120: ()})

    variants = {"triton": h.peer("tma/tma_persistent_matmul").matmul_tma_persistent}
    if here:
        variants |= {"one buffer": gluon_matmul_one_buffer, "ring": gluon_matmul_ring, "gluon": gluon_matmul}
        variants |= {step: lambda a, b, step=step: gluon_matmul(a, b, step) for step in STEPS}
    tables = [compare(h, n, variants) for n in h.pick(interpreted=(264,), quick=(4096,), full=(4096, 8192))]
    h.answer(lambda: answer(tables))


if __name__ == "__main__":
    run(demo)
