"""gluon_matmul by clusters: two CTAs, on SMs of their own, compute a tile of 256 x 256 and share its block of b.

Each CTA has a producer and two consumers, as in gluon_matmul, and 128 rows of a tile's 256: its own rows of a, and all
of the block of b. Of that, CTA 0 loads one copy from L2, and TMA writes it into the shared memory of both (multicast)
and signals the barrier `full` of both: a step of K takes 64 KiB from L2 for 8.4 MFLOP, where two programs take 96 KiB.
On an H200 it is no faster than gluon_matmul, and slightly slower at 4096 (studies/tma/gluon_matmul.py, with Triton
3.9): loading a third less from L2 saves no time there.

A slot of b may then be loaded again only when the consumers of both CTAs have released it. `empty` tells a producer
about its own CTA's, which is enough for a. For b each slot has one more barrier, `pair`, which lies in CTA 0 and at
which all four consumers arrive. Gluon does this for two_ctas=True: init doubles the count, either CTA's arrival goes to
CTA 0, and a wait is CTA 0's alone. The cluster.barrier at the end keeps CTA 0 from ending while CTA 1 still arrives at
its barriers. (Triton 3.9 adds one of its own there, and one after the barriers' initialization, which the source leaves
to it.) Why no partition waits for ever: docs/memory_ordering.md.

Source   Gluon tutorial 14 (multi-CTA); CUTLASS's TMA multicast
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from examples.common import gluon as pipelines
from examples.common.device import device_limits
from examples.common.gluon import async_load, buffers, init_ring, next_slot, release_previous, store_parts
from examples.common.operands import check_tma_gemm
from examples.common.tiles import tile_coords
from examples.common.tma import tma_strides
from examples.common.untraced import untraced
from examples.tma.gluon_matmul_ring import DTYPES, GROUP_M, STAGES, TILE

cluster = getattr(hopper, "cluster", None)  # of Triton 3.9


@gluon.jit
def _produce(ring, a_desc, b_desc, M, N, K, STAGES: gl.constexpr, GROUP_M: gl.constexpr):
    """One warp of each CTA. Shapes, rows and columns are the cluster's: TMA loads the part of this CTA."""
    a_bufs, b_bufs, full, empty, pair = ring
    HALF_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    BLOCK_N: gl.constexpr = b_desc.block_shape[0]
    slot = 0
    phase = 1  # a new barrier counts as past this parity
    tiles = gl.cdiv(M, 2 * HALF_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, 2 * HALF_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            ready = full.index(slot)
            mbarrier.wait(pair.index(slot), phase)
            mbarrier.wait(empty.index(slot), phase)
            # The bytes of b count at `full` of both CTAs. In CTA 1 they may arrive before this expect; but the phase
            # also needs the arrival that expect makes, so it cannot end too early.
            mbarrier.expect(ready, 2 * a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
            async_load(b_desc, [col, k], ready, b_bufs.index(slot), multicast=True)
            for half in gl.static_range(2):
                async_load(a_desc, [row + half * HALF_M, k], ready, a_bufs.index(2 * slot + half))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _release_previous(ring, slot, STAGES: gl.constexpr, pred=True):
    """To this CTA's producer, and to that of CTA 0."""
    release_previous(ring[3], slot, STAGES, pred)
    release_previous(ring[4], slot, STAGES, pred)


@gluon.jit
def _consume(
    ring, c_desc, c_bufs, lead, M, N, K, STAGES: gl.constexpr, BUFFERS: gl.constexpr, BEHIND: gl.constexpr,
    GROUP_M: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup of each CTA. Both have half of a tile's upper (HALF = 0) or lower 128 rows."""
    a_bufs, b_bufs, full = ring[0], ring[1], ring[2]
    HALF_M: gl.constexpr = c_desc.block_shape[0]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    BLOCK_N: gl.constexpr = b_bufs.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16], cga_layout=c_desc.layout.cga_layout
    )
    slot = 0
    phase = 0
    tile_phase = 0
    pause = gl.cdiv(K, BLOCK_K) * BLOCK_K - BEHIND * BLOCK_K
    tiles = gl.cdiv(M, 2 * HALF_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, 2 * HALF_M, BLOCK_N, GROUP_M)
        acc = gl.zeros((HALF_M, BLOCK_N), gl.float32, MMA)
        for k in range(0, K, BLOCK_K):
            if BEHIND and HALF == 1:
                mbarrier.wait(lead, tile_phase, pred=k == pause)
            mbarrier.wait(full.index(slot), phase)
            b = b_bufs.index(slot).permute((1, 0))
            acc = warpgroup_mma(a_bufs.index(2 * slot + HALF), b, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            _release_previous(ring, slot, STAGES, k > 0)
            slot, phase = next_slot(slot, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _release_previous(ring, slot, STAGES)
        if BEHIND and HALF == 0:
            mbarrier.arrive(lead)
        tile_phase ^= 1
        PARTS: gl.constexpr = BLOCK_N // c_desc.block_shape[1]
        store_parts(c_desc, c_bufs, acc, row + HALF * HALF_M, col, HALF * BUFFERS, BUFFERS, 0, PARTS)
    tma.store_wait(0)  # shared memory must outlive its last reader


@gluon.jit
def gluon_matmul_cluster_kernel(
    a_desc, b_desc, c_desc, M, N, K, STAGES: gl.constexpr, BUFFERS: gl.constexpr, BEHIND: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """program_id counts clusters. A slot has two buffers for a, one for each consumer: a buffer that is split
    between two CTAs by rows is not sliced by rows as well."""
    a_bufs = buffers(a_desc, 2 * STAGES)
    b_bufs = buffers(b_desc, STAGES)
    c_bufs = buffers(c_desc, 2 * BUFFERS)
    full = mbarrier.allocate_mbarrier(batch=STAGES)  # one in each CTA
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    pair = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)  # one in CTA 0
    init_ring(full, empty, STAGES, 2)
    for i in gl.static_range(STAGES):
        mbarrier.init(pair.index(i), count=2)  # consumers of a CTA
    lead = mbarrier.allocate_mbarrier()
    mbarrier.init(lead, count=1)
    fence_async_shared()
    ring = (a_bufs, b_bufs, full, empty, pair)
    gl.warp_specialize([
        (_consume, (ring, c_desc, c_bufs, lead, M, N, K, STAGES, BUFFERS, BEHIND, GROUP_M, 0)),
        (_consume, (ring, c_desc, c_bufs, lead, M, N, K, STAGES, BUFFERS, BEHIND, GROUP_M, 1)),
        (_produce, (ring, a_desc, b_desc, M, N, K, STAGES, GROUP_M)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    cluster.barrier()  # CTA 1 may still arrive at the barriers of CTA 0


# As in gluon_matmul, for each of the two CTAs.
PARTS, BUFFERS, BEHIND = 4, 2, 2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
ROWS, ALL = [[1, 0]], [[0, 0]]  # of a block: each CTA has half of its rows, or all of it


def lacks_clusters() -> str:
    """Why Gluon cannot compile this kernel; "" where it can."""
    if cluster and hasattr(tma, "async_load") and hasattr(mbarrier, "allocate_mbarrier"):
        return ""
    return f"needs Triton 3.9 or newer: this is {triton.__version__}, whose Gluon does not share a load in a cluster"


def _descriptor(x: torch.Tensor, block_shape: list[int], cga_layout: list[list[int]]):
    """gluon_descriptor for a block of a cluster, of which each CTA has what cga_layout says."""
    layout = gl.NVMMASharedLayout.get_default_for(block_shape, gl.int16, cga_layout=cga_layout)
    return TensorDescriptor(x, list(x.shape), tma_strides(x), block_shape, layout)


@untraced
def gluon_matmul_cluster(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N] -> c [M, N], contiguous; b has contiguous columns (weight.t()).

    Dtypes and sizes as in gluon_matmul. Raises what it does; ValueError also for b with contiguous rows; RuntimeError
    also for a Triton before 3.9.
    """
    M, N, K, columns = check_tma_gemm("gluon_matmul_cluster", a, b, DTYPES)
    if b.numel() and not columns:
        raise ValueError(
            f"gluon_matmul_cluster: b has strides {b.stride()}; its columns must be contiguous: keep weights as [N, K] "
            f"and pass weight.t(), or call gluon_matmul, which takes either"
        )
    pipelines.require_wgmma("gluon_matmul_cluster", a.device, "matmul_tma_persistent")
    if lacking := lacks_clusters():
        raise RuntimeError(f"gluon_matmul_cluster: {lacking}: use gluon_matmul")
    if not (M and N and K):
        return torch.zeros((M, N), dtype=a.dtype, device=a.device)  # nothing to add up, or nothing to write
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    half_m, block_n, block_k = TILE  # of a cluster; with two halves a tile is twice as high
    tiles = triton.cdiv(M, 2 * half_m) * triton.cdiv(N, block_n)
    behind = BEHIND if triton.cdiv(K, block_k) >= STAGES > BEHIND else 0  # else lead could get two phases ahead
    gluon_matmul_cluster_kernel[(min(tiles, device_limits(a.device).sms // 2),)](
        _descriptor(a, [half_m, block_k], ROWS), _descriptor(b.t(), [block_n, block_k], ALL),
        _descriptor(c, [half_m, block_n // PARTS], ROWS), M, N, K,
        STAGES=STAGES, BUFFERS=BUFFERS, BEHIND=behind, GROUP_M=GROUP_M,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4, num_ctas=2,
    )  # fmt: skip
    return c
