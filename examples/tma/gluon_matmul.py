"""Matmul in Gluon: layouts, barriers and roles of warps written by hand, one step at a time, beside what Triton writes.

Technique  tl.dot in a loop leaves to the compiler where tiles lie in shared memory, which thread holds which sum, how
           many loads run ahead, when a buffer may be written again and when the tensor cores are waited for. Gluon is
           the same language one floor down: all of that is in the source, and nothing else happens, except that the
           compiler still puts the barriers among the threads of one role. Six steps on one tile of 128 x 256 x 64:
           one buffer  TMA load, wait, wgmma, wait: one thing at a time. Other programs on the SM could fill the gaps,
                       but the accumulators of one take half of its registers.
           ring        STAGES buffers, and the load of a step starts STAGES - 1 steps before it: what tl.range
                       (num_stages=) does. All warps multiply, then all wait until a buffer may be loaded again.
           roles       a producer, one warp, does nothing but load; two consumers, a warpgroup each, multiply the upper
                       and the lower half of the tile. They meet at barriers in shared memory, and setmaxnreg moves
                       registers to those who sum.
           persistent  the same code, one program per SM: the producer loads the next tile while this one is stored.
           in flight   a consumer starts the products of a step before it waits for those of the step before.
           staggered   BEHIND steps before the end of a tile the second consumer waits until the first has summed its
                       half: one stores while the other multiplies.
           The ring of the roles has two barriers for each of its buffers, and its n-th use is phase n of both:
           full        counts one arrival, the producer's, and the bytes of the loads. Consumers wait for phase n.
           empty       counts two arrivals, of a consumer each when its products are done: those in flight when the
                       next step's have started, or at the end of the tile. The producer waits for phase n - 1, which
                       for n = 0 a new barrier reports as over. Its slot starts with parity 1 for that.
           summed      is one more, and phase t of it a program's t-th tile. It counts one arrival, the first
                       consumer's after the last products of its half, and the second waits for it.
           A wait names a phase by its parity alone, so no barrier may be two phases ahead of who waits at it. None can:
           full completes phase n + 1 after the producer saw phase n of empty, for which both consumers came past phase
           n of full; empty completes phase n after both came past phase n of full, which the producer began after it
           saw phase n - 1 of empty. summed completes phase t + 1 after the last step of tile t + 1 was loaded, and the
           use of its buffer before, STAGES steps earlier, was emptied by the second. Where a tile has as many steps as
           the ring has buffers, that use is the last of tile t or later, so the second came past phase t. Shorter
           tiles are not staggered.
           Nor can they lock. All three go through tiles and steps in one order, and the waits for full and empty are
           for something earlier in it: with products in flight a step is emptied a step late, which two buffers allow.
           The wait for summed is for something later, the first's last step. Of the second, that step needs only that
           it has emptied the step STAGES earlier, whose buffer it takes. It has: of what lies before that wait it has
           emptied all but the latest step, which may be in flight, and STAGES is more than BEHIND. So the ring needs
           BEHIND + 1 buffers.
Question   What does the compiler do for a matmul on Hopper, and what does doing it by hand buy?
Needs      triton, sm_90
Shapes     a [M, K] with contiguous rows, b [K, N] with contiguous rows or columns (weight.t()), K and N multiples of 8,
           any M (0 too) -> c [M, N], contiguous.
Dtypes     float16, bfloat16, both the same; sums are float32.
Errors     TypeError for another dtype or two dtypes; ValueError for rank, inner sizes that differ, a layout TMA cannot
           load or a step that does not exist; RuntimeError for any architecture but sm_90 (others lack its wgmma, and
           compiling it for them ends the process), where Gluon would have to be interpreted, or for an input that
           requires grad.
Wins when  the compiler's schedule leaves the tensor cores waiting, and one architecture is enough. The table has both.
Source     chapter section "Warp specialization"; the roles are those of fp8_matmul.py.
Run        python examples/tma/gluon_matmul.py
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import statistics

from harness import (
    Harness,
    Work,
    device_limits,
    gluon_descriptor,
    hardware,
    require_tma_layout,
    require_triton_device,
    run,
)
from harness.codegen import dump

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

DTYPES = (torch.float16, torch.bfloat16)
STEPS = ("one buffer", "ring", "roles", "persistent", "in flight", "staggered")
# BLOCK_M, BLOCK_N, BLOCK_K; steps of K in the ring; in how many parts a consumer stores its half, through how many
# buffers. Together nearly all of Hopper's shared memory. A row of 64 elements is 128 bytes, the widest swizzle.
TILE, STAGES, PARTS, BUFFERS = (128, 256, 64), 4, 4, 2
# Steps that the second consumer has left when the first has summed its half, for about as long as the first stores.
BEHIND = 2
# Registers of a thread: a consumer needs 128 for its sums alone; a producer needs next to none.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
GROUP_M = 8


@gluon.jit
def _tile_of(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """Rows and columns at which a tile starts, in bands of GROUP_M rows of tiles, so that L2 serves most loads."""
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    band = gl.minimum(tiles_m - first_m, GROUP_M)
    tile_m = first_m + tile % (GROUP_M * tiles_n) % band
    tile_n = tile % (GROUP_M * tiles_n) // band
    return tile_m * BLOCK_M, tile_n * BLOCK_N


@gluon.jit
def _load(a_desc, b_desc, a_buf, b_buf, full, row, col, k, B_COLUMNS: gl.constexpr, pred=True):
    """Start both loads of a step; `full` completes its phase when all bytes are there. What lies past the edge of a
    matrix is filled with zeros and counts."""
    A: gl.constexpr = a_desc.block_shape[0] * a_desc.block_shape[1]
    B: gl.constexpr = b_desc.block_shape[0] * b_desc.block_shape[1]
    # The arrival, and what it waits for.
    mbarrier.expect(full, (A + B) * a_desc.dtype.primitive_bitwidth // 8, pred=pred)
    tma.async_copy_global_to_shared(a_desc, [row, k], full, a_buf, pred=pred)
    if B_COLUMNS:
        tma.async_copy_global_to_shared(b_desc, [col, k], full, b_buf, pred=pred)
    else:
        tma.async_copy_global_to_shared(b_desc, [k, col], full, b_buf, pred=pred)


@gluon.jit
def _multiply(acc, a_buf, b_buf, use_acc, B_COLUMNS: gl.constexpr):
    """Start acc += a @ b, both read from shared memory by the tensor cores; the first step needs no zeros."""
    b = b_buf.permute((1, 0)) if B_COLUMNS else b_buf  # another name for the same bytes
    return warpgroup_mma(a_buf, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _store(c_desc, c_buf, acc, row, col):
    """Through shared memory, as TMA stores from there; the fence shows it what threads have written."""
    c_buf.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, col], c_buf)


@gluon.jit
def gluon_matmul_one_buffer_kernel(a_desc, b_desc, c_desc, M, N, K, B_COLUMNS: gl.constexpr, GROUP_M: gl.constexpr):
    BLOCK_M: gl.constexpr = c_desc.block_shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    a_buf = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b_buf = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    row, col = _tile_of(gl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, MMA)
    phase = 0
    for k in range(0, K, a_desc.block_shape[1]):
        _load(a_desc, b_desc, a_buf, b_buf, full, row, col, k, B_COLUMNS)
        mbarrier.wait(full, phase)
        acc = _multiply(acc, a_buf, b_buf, k > 0, B_COLUMNS)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        phase ^= 1
    mbarrier.invalidate(full)
    c_buf = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_shape, c_desc.layout)  # where a and b were
    _store(c_desc, c_buf, acc, row, col)
    tma.store_wait(0)


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The next buffer of the ring; the phase that its barriers wait for changes with every round."""
    slot += 1
    again = slot == STAGES
    return gl.where(again, 0, slot), gl.where(again, phase ^ 1, phase)


@gluon.jit
def _buffers(a_desc, b_desc, STAGES: gl.constexpr):
    """A ring of STAGES buffers for the operands of a step, each with a barrier that says when it is full."""
    A: gl.constexpr = a_desc.block_shape
    B: gl.constexpr = b_desc.block_shape
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, A[0], A[1]], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, B[0], B[1]], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    return a_bufs, b_bufs, full


@gluon.jit
def gluon_matmul_ring_kernel(
    a_desc, b_desc, c_desc, M, N, K, B_COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr
):
    BLOCK_M: gl.constexpr = c_desc.block_shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_shape[1]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    a_bufs, b_bufs, full = _buffers(a_desc, b_desc, STAGES)
    fence_async_shared()
    row, col = _tile_of(gl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    for i in gl.static_range(STAGES - 1):
        k = i * BLOCK_K
        _load(a_desc, b_desc, a_bufs.index(i), b_bufs.index(i), full.index(i), row, col, k, B_COLUMNS, pred=k < K)
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, MMA)
    slot = 0
    phase = 0
    before = STAGES - 1  # the buffer of the step before
    for k in range(0, K, BLOCK_K):
        mbarrier.wait(full.index(slot), phase)
        acc = _multiply(acc, a_bufs.index(slot), b_bufs.index(slot), k > 0, B_COLUMNS)
        # All but the latest products are done, in every warp once the compiler's barrier is passed: the buffer of the
        # step before is free, and no second barrier in shared memory has to say so.
        acc = warpgroup_mma_wait(1, deps=(acc,))
        ahead = k + (STAGES - 1) * BLOCK_K
        ready = full.index(before)
        _load(
            a_desc, b_desc, a_bufs.index(before), b_bufs.index(before), ready, row, col, ahead, B_COLUMNS,
            pred=ahead < K,
        )  # fmt: skip
        before = gl.where(before == STAGES - 1, 0, before + 1)
        slot, phase = _next(slot, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))
    c_buf = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_shape, c_desc.layout)
    _store(c_desc, c_buf, acc, row, col)
    tma.store_wait(0)


@gluon.jit
def _produce(ring, a_desc, b_desc, M, N, K, B_COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr):
    """One warp: the operands of every step of every tile, as soon as both consumers have emptied a buffer."""
    a_bufs, b_bufs, full, empty = ring
    BLOCK_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[0] if B_COLUMNS else b_desc.block_shape[1]
    slot = 0
    phase = 1  # of a barrier at which nobody has arrived: all is empty
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = _tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(0, K, a_desc.block_shape[1]):
            mbarrier.wait(empty.index(slot), phase)
            _load(a_desc, b_desc, a_bufs.index(slot), b_bufs.index(slot), full.index(slot), row, col, k, B_COLUMNS)
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _release_before(empty, slot, STAGES: gl.constexpr):
    """The buffer of the step before may be loaded again."""
    mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)))


@gluon.jit
def _add_step(
    acc, ring, slot, phase, B_COLUMNS: gl.constexpr, STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr, HALF: gl.constexpr,
    FIRST: gl.constexpr,
):  # fmt: skip
    """acc and the products of a step, of one half of the rows of a; IN_FLIGHT, only those of the step before are done.
    Whether a step is the first is known when this is compiled: no product has to look."""
    a_bufs, b_bufs, full, empty = ring
    HALF_M: gl.constexpr = a_bufs.shape[1] // 2
    mbarrier.wait(full.index(slot), phase)
    a = a_bufs.index(slot).slice(HALF * HALF_M, HALF_M, dim=0)
    acc = _multiply(acc, a, b_bufs.index(slot), not FIRST, B_COLUMNS)
    acc = warpgroup_mma_wait(1 if IN_FLIGHT else 0, deps=(acc,))
    if not IN_FLIGHT:
        mbarrier.arrive(empty.index(slot))
    elif not FIRST:
        _release_before(empty, slot, STAGES)
    slot, phase = _next(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def _store_parts(
    c_desc, c_bufs, acc, row, col, HALF: gl.constexpr, FIRST: gl.constexpr, PARTS: gl.constexpr, BUFFERS: gl.constexpr
):
    """A consumer's half of a tile, through BUFFERS in turn: one is written while another is read."""
    if PARTS > 1:
        width: gl.constexpr = acc.shape[1] // 2
        left, right = acc.reshape(acc.shape[0], 2, width).permute(0, 2, 1).split()
        _store_parts(c_desc, c_bufs, left, row, col, HALF, FIRST, PARTS // 2, BUFFERS)
        _store_parts(c_desc, c_bufs, right, row, col + width, HALF, FIRST + PARTS // 2, PARTS // 2, BUFFERS)
    else:
        tma.store_wait(BUFFERS - 1)  # all but the latest have been read: this buffer too
        _store(c_desc, c_bufs.index(BUFFERS * HALF + FIRST % BUFFERS), acc, row, col)


@gluon.jit
def _consume(
    ring, c_desc, c_bufs, summed, M, N, K, B_COLUMNS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    IN_FLIGHT: gl.constexpr, BEHIND: gl.constexpr, GROUP_M: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup: one half of the rows of every tile."""
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
        row, col = _tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = gl.zeros((BLOCK_M // 2, BLOCK_N), gl.float32, MMA)
        acc, slot, phase = _add_step(acc, ring, slot, phase, B_COLUMNS, STAGES, IN_FLIGHT, HALF, True)
        for k in range(BLOCK_K, K, BLOCK_K):
            if BEHIND and HALF == 1:
                mbarrier.wait(summed, tile_phase, pred=k == pause)
            acc, slot, phase = _add_step(acc, ring, slot, phase, B_COLUMNS, STAGES, IN_FLIGHT, HALF, False)
        if IN_FLIGHT:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _release_before(ring[3], slot, STAGES)
        if BEHIND and HALF == 0:
            mbarrier.arrive(summed)
        tile_phase ^= 1
        PARTS: gl.constexpr = BLOCK_N // c_desc.block_shape[1]
        _store_parts(c_desc, c_bufs, acc, row + HALF * (BLOCK_M // 2), col, HALF, 0, PARTS, BUFFERS)
    tma.store_wait(0)  # shared memory must outlive its last reader


@gluon.jit
def gluon_matmul_roles_kernel(
    a_desc, b_desc, c_desc, M, N, K, B_COLUMNS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    IN_FLIGHT: gl.constexpr, BEHIND: gl.constexpr, GROUP_M: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles p, p + programs, ...: with as many programs as tiles the loops over them run once."""
    a_bufs, b_bufs, full = _buffers(a_desc, b_desc, STAGES)
    C: gl.constexpr = c_desc.block_shape
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS, C[0], C[1]], c_desc.layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(summed, count=1)
    fence_async_shared()
    ring = (a_bufs, b_bufs, full, empty)
    gl.warp_specialize([
        (_consume, (ring, c_desc, c_bufs, summed, M, N, K, B_COLUMNS, STAGES, BUFFERS, IN_FLIGHT, BEHIND, GROUP_M, 0)),
        (_consume, (ring, c_desc, c_bufs, summed, M, N, K, B_COLUMNS, STAGES, BUFFERS, IN_FLIGHT, BEHIND, GROUP_M, 1)),
        (_produce, (ring, a_desc, b_desc, M, N, K, B_COLUMNS, STAGES, GROUP_M)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip  # of the last two; the first keeps what is left


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU, or of that compiled for; None where there is none."""
    if hardware.OFFLINE_SM:
        return divmod(hardware.OFFLINE_SM, 10)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def gluon_matmul(a: torch.Tensor, b: torch.Tensor, step: str = "staggered") -> torch.Tensor:
    """a @ b by one of STEPS, each a step from the one before; limits and errors are in the module docstring."""
    name = "gluon_matmul"
    require_triton_device(name, a, b)
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise TypeError(f"{name}: dtypes {a.dtype} and {b.dtype}; both must be the same one of {DTYPES}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    if not isinstance(step, str) or step not in STEPS:
        raise ValueError(f"{name}: step {step!r} is not one of {STEPS}")
    M, K = a.shape
    N = b.shape[1]
    if K % 8 or N % 8:
        raise ValueError(f"{name}: K is {K} and N {N}; TMA needs rows of 16-byte multiples: pad both to multiples of 8")
    columns = b.stride(1) != 1 and b.stride(0) == 1  # wgmma reads 16-bit operands either way
    require_tma_layout(name, a=a, **({"b.t()": b.t()} if columns else {"b": b}))
    if (have := capability(a.device)) != (9, 0):
        here = f"this is sm_{have[0]}{have[1]}" if have else "Gluon kernels are not interpreted"
        raise RuntimeError(f"{name}: needs sm_90, for its wgmma ({here}): use matmul_persistent")
    if not (M and N and K):
        return torch.zeros((M, N), dtype=a.dtype, device=a.device)  # nothing to sum, or nothing to write
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    block_m, block_n, block_k = TILE
    a_desc = gluon_descriptor(a, [block_m, block_k])
    b_desc = gluon_descriptor(b.t(), [block_n, block_k]) if columns else gluon_descriptor(b, [block_k, block_n])
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    same = {"B_COLUMNS": columns, "GROUP_M": GROUP_M}
    if step in STEPS[:2]:
        kernel = gluon_matmul_one_buffer_kernel if step == "one buffer" else gluon_matmul_ring_kernel
        more = {} if step == "one buffer" else {"STAGES": STAGES}
        c_desc = gluon_descriptor(c, [block_m, block_n])
        kernel[(tiles,)](a_desc, b_desc, c_desc, M, N, K, **same, **more, num_warps=8)
        return c
    gluon_matmul_roles_kernel[(tiles if step == "roles" else min(tiles, device_limits(a.device).sms),)](
        a_desc, b_desc, gluon_descriptor(c, [block_m // 2, block_n // PARTS]), M, N, K, **same,
        STAGES=STAGES, BUFFERS=BUFFERS, IN_FLIGHT=step in ("in flight", "staggered"),
        BEHIND=BEHIND if step == "staggered" and triton.cdiv(K, block_k) >= STAGES > BEHIND else 0,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def shared_byte(layout: gl.NVMMASharedLayout, rows: int, row: int, col: int) -> int:
    """Where an element of a tile of so many rows lies in shared memory: in strips as wide as the swizzle, one after
    another, and within a row of a strip in a piece of 16 bytes that has changed places by the number of the row."""
    width = layout.swizzle_byte_width
    strip, byte = divmod(col * layout.element_bitwidth // 8, width)
    piece = byte // 16 ^ row * width // 128 % (width // 16)
    return (strip * rows + row) * width + 16 * piece + byte % 16


def holder(row: int, col: int) -> tuple[int, int, int]:
    """Warp, lane and register that hold a sum of a tile with 16 rows for each warp, in the layout of wgmma."""
    return row // 16, 4 * (row % 8) + col % 8 // 2, 4 * (col // 8) + 2 * (row % 16 // 8) + col % 2


def explain_layouts(h: Harness) -> None:
    """What the two layouts of the source say: where TMA puts the bytes of a tile, and who holds the sums."""
    block_m, block_n, block_k = TILE
    layout = gl.NVMMASharedLayout.get_default_for([block_m, block_k], gl.bfloat16)
    pieces = range(0, block_k, 8)
    lie = [[shared_byte(layout, block_m, row, col) % 128 // 16 for col in pieces] for row in range(8)]
    h.fact(
        f"pieces of 16 bytes in the first rows of a [{block_m} x {block_k}], {layout.swizzle_byte_width}-byte swizzle",
        {f"row {row}": " ".join(map(str, places)) for row, places in enumerate(lie)},
    )
    groups = {places[0] for places in lie}
    h.say(
        f"wgmma reads 8 rows of 16 bytes at a time: they lie in {len(groups)} of the 8 groups of banks, and would all "
        f"lie in 1 if each row began with its first piece"
    )
    layout = gl.NVMMASharedLayout.get_default_for([block_k, block_n], gl.bfloat16)
    starts = [shared_byte(layout, block_k, 0, col) for col in range(block_n)]
    strips = [col for col in range(block_n) if starts[col] % (block_k * layout.swizzle_byte_width) == 0]
    h.say(f"b [{block_k} x {block_n}] lies in strips that begin at columns {', '.join(map(str, strips))}: a box each")
    mine = [(r, c) for r in range(block_m // 2) for c in range(block_n) if holder(r, c)[:2] == (0, 5)]
    held = [", ".join(map(str, sorted({place[axis] for place in mine})[:6])) for axis in (0, 1)]
    h.say(f"lane 5 of warp 0 of a consumer holds {len(mine)} sums: rows {held[0]}, columns {held[1]}, ...")


# How TTGIR, the first form of a kernel in which all of it is explicit, writes what Gluon has its author write.
WRITTEN = {
    "buffers": "ttg.local_alloc", "barriers": "ttng.init_barrier", "loads": "ttng.async_tma_copy_global_to_local",
    "expects": "ttng.barrier_expect", "waits": "ttng.wait_barrier", "arrivals": "ttng.arrive_barrier",
    "products": "ttng.warp_group_dot", "product waits": "ttng.warp_group_dot_wait",
    "fences": "ttng.fence_async_shared", "stores": "ttng.async_tma_copy_local_to_global",
    "store waits": "ttng.async_tma_store_wait",
}  # fmt: skip


def operations(ttgir: str) -> dict[str, int]:
    """How often each of WRITTEN is in it, and among how many roles it is divided."""
    counts = {label: len(re.findall(rf"\b{re.escape(name)}\b", ttgir)) for label, name in WRITTEN.items()}
    return counts | {"roles": 1 + len(re.findall(r"\bpartition\d+\(", ttgir))}


def show_code(h: Harness) -> None:
    """The instructions of every step, and what the compiler writes where the Triton kernel says load, dot and store."""
    from examples.triton.persistent_matmul import matmul_persistent, matmul_tile_kernel

    x, hopper = h.meta(4096, 4096), ("cp.async.bulk.tensor", "mbarrier", "wgmma")
    h.codegen(gluon_matmul, x, x, find={80: (), 89: (), 90: (*hopper, "setmaxnreg"), 100: (), 120: ()})
    codes = [step for step in STEPS if step != "persistent"]  # which has the code of roles
    for step in codes[:-1]:
        h.codegen(gluon_matmul, x, x, step, find={90: hopper if step in STEPS[:2] else (*hopper, "setmaxnreg")})
    if not h.shows_code:
        return
    kernel = h.record.codegen[-1]
    threads = 32 * kernel["warps"]
    left = kernel["registers"] * threads // 128 - CONSUMER_REGISTERS - PRODUCER_REGISTERS
    h.say(
        f"roles: {threads} threads start with {kernel['registers']} registers each; setmaxnreg makes that {left} and "
        f"{CONSUMER_REGISTERS} for those of the consumers, {PRODUCER_REGISTERS} for those of the producer's warpgroup"
    )
    counts = {f"triton {each}": operations(dump(matmul_persistent, (x, x, each), sm=90)["ttgir"]) for each in BESIDE}
    for step in codes:
        counts[f"gluon {step}"] = operations(dump(gluon_matmul, (x, x, step), sm=90)["ttgir"])
    rows = {label: {kernel: count[label] for kernel, count in counts.items()} for label in (*WRITTEN, "roles")}
    h.table("what TTGIR says explicitly", rows)
    said = inspect.getsource(matmul_tile_kernel.fn)
    source = ", ".join(f"{said.count(f'{word}(')} {word}" for word in ("desc.load", "tl.dot", "desc.store"))
    h.say(f"the source of triton tile says {source}: all else is the compiler's; in gluon all of it is the author's")


BESIDE = ("tile", "split")  # of persistent_matmul.py: one program per tile, and its last step; the same tile


def runnable(h: Harness) -> bool:
    return not h.interpreted and h.machine.sm == 90


def explain(h: Harness, table, M: int, N: int) -> dict[str, float]:
    """What each step won, as time per tile and SM; what the last one takes of the time of the best other."""
    rows = {row.variant: row for row in table.rows}
    tiles = triton.cdiv(M, TILE[0]) * triton.cdiv(N, TILE[1])
    waves = triton.cdiv(tiles, h.machine.sms)
    won = ", ".join(
        f"{after} {1000 * (rows[f'gluon {before}'].ms - rows[f'gluon {after}'].ms) / waves:+.2f} us"
        for before, after in itertools.pairwise(STEPS)
    )
    first = 1000 * rows[f"gluon {STEPS[0]}"].ms / waves
    h.say(f"{tiles} tiles on {h.machine.sms} SMs, {waves} waves; of {first:.1f} us a wave each step won: {won}")
    compiled = {name: row.speedup for name, row in rows.items() if name.startswith("triton")}
    best = max(compiled, key=compiled.get)
    by_hand = {step: rows[f"gluon {step}"].speedup / compiled[best] for step in STEPS}
    fastest = max(by_hand, key=by_hand.get)
    h.say(f"by hand ({fastest}) {by_hand[fastest]:.3f}x of what the compiler makes (triton {best.split()[-1]})")
    return {step: round(ratio, 4) for step, ratio in by_hand.items()}


def compare(h: Harness, n: int) -> tuple[dict[str, float], dict[str, float]]:
    """One table: each step over cuBLAS, and over the better of the compiler's kernels."""
    from examples.triton.persistent_matmul import matmul_persistent

    a, b = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half)
    variants = {"cuBLAS": torch.matmul}
    compiled = {f"triton {each}": functools.partial(matmul_persistent, variant=each) for each in BESIDE}
    variants |= compiled | {f"gluon {step}": functools.partial(gluon_matmul, step=step) for step in STEPS}
    work = Work(bytes=3 * 2 * n * n, flops=2 * n**3, dtype=h.half)
    case = f"{n}x{n}x{n} {str(h.half).removeprefix('torch.')}"
    table = h.compare(
        variants, reference, a, b, baseline="cuBLAS", work=work, case=case, terms=n, comparators=compiled
    )  # fmt: skip
    if not table or table.rows[-1].ms is None:
        return {}, {}
    return {row.variant: row.speedup for row in table.rows[1:]}, explain(h, table, n, n)


def demo(h: Harness) -> None:
    if runnable(h):
        # One row, tails in each dimension, tiles shorter than the ring and longer, nothing to sum; b either way.
        for M, N, K in [(1, 8, 8), (129, 264, 72), (300, 520, 328), (5, 16, 0)]:
            for step in STEPS:
                a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
                fn = functools.partial(gluon_matmul, step=step)
                h.check(fn, reference, a, b, terms=K, what=f"gluon_matmul {step} {M}x{N}x{K}")
                turned = b.t().contiguous().t()
                h.check(fn, reference, a, turned, terms=K, what=f"gluon_matmul {step} {M}x{N}x{K}, columns of b")
    else:
        h.say("nothing is run here: these kernels need sm_90, and Gluon is not interpreted; they are compiled for it")

    show_code(h)
    if not h.profile:
        explain_layouts(h)

    over, by_hand = {}, {}
    sizes = h.pick(quick=(4096,), full=(4096, 8192)) if h.timing else (520,)
    for n in sizes if runnable(h) else ():
        over[f"{n}x{n}x{n}"], by_hand[f"{n}x{n}x{n}"] = compare(h, n)
    if over and all(over.values()):
        names = next(iter(over.values()))
        ratios = {name: [case[name] for case in over.values()] for name in names}
        h.fact("geometric mean over cuBLAS", {k: round(statistics.geometric_mean(r), 4) for k, r in ratios.items()})
        h.fact("least over cuBLAS", {name: round(min(each), 4) for name, each in ratios.items()})
        h.fact("by hand over the best of the compiler", by_hand)


if __name__ == "__main__":
    run(demo)
