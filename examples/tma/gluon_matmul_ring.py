"""The steps before gluon_matmul: all warps load and multiply together, with one buffer, then with a ring of buffers.

one buffer  TMA load, wait, wgmma, wait: one thing at a time. A second program on the SM could fill the gaps, but does
            not fit: the accumulator of one takes half of the SM's registers.
ring        STAGES buffers, and the load of a step starts STAGES - 1 steps ahead: what tl.range(num_stages=STAGES) does.
            All warps multiply, and all wait before a buffer is loaded again.
"""

from __future__ import annotations

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

from examples.common.gluon import async_load, barriers, buffers, next_slot, require_wgmma, store_tile
from examples.common.operands import check_tma_gemm
from examples.common.tiles import tile_coords
from examples.common.tma import gluon_descriptor
from examples.common.untraced import untraced

DTYPES = (torch.float16, torch.bfloat16)
# BLOCK_M, BLOCK_N, BLOCK_K; a row of 64 elements is 128 bytes, the widest swizzle. Slots of the ring. GROUP_M.
TILE, STAGES, GROUP_M = (128, 256, 64), 4, 8


@gluon.jit
def _load(a_desc, b_desc, a_buf, b_buf, full, row, col, k, B_COLUMNS: gl.constexpr, pred=True):
    """Start both loads of a step. `full` completes its phase when all bytes have arrived; a box that is partly out of
    bounds is filled with zeros and still signals its full byte count."""
    A: gl.constexpr = a_desc.block_shape[0] * a_desc.block_shape[1]
    B: gl.constexpr = b_desc.block_shape[0] * b_desc.block_shape[1]
    mbarrier.expect(full, (A + B) * a_desc.dtype.primitive_bitwidth // 8, pred=pred)  # arrives, and waits for the bytes
    async_load(a_desc, [row, k], full, a_buf, pred=pred)
    async_load(b_desc, [col, k] if B_COLUMNS else [k, col], full, b_buf, pred=pred)


@gluon.jit
def _multiply(acc, a_buf, b_buf, use_acc, B_COLUMNS: gl.constexpr):
    """Start acc += a @ b, both read from shared memory by the tensor cores; the first step needs no zeros."""
    b = b_buf.permute((1, 0)) if B_COLUMNS else b_buf  # a view of the same bytes
    return warpgroup_mma(a_buf, b, acc, use_acc=use_acc, is_async=True)


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
    row, col = tile_coords(gl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
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
    store_tile(c_desc, c_buf, acc, row, col)
    tma.store_wait(0)


@gluon.jit
def gluon_matmul_ring_kernel(
    a_desc, b_desc, c_desc, M, N, K, B_COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr
):
    BLOCK_M: gl.constexpr = c_desc.block_shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_shape[1]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    a_bufs = buffers(a_desc, STAGES)
    b_bufs = buffers(b_desc, STAGES)
    full = barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    row, col = tile_coords(gl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    for i in gl.static_range(STAGES - 1):
        k = i * BLOCK_K
        _load(a_desc, b_desc, a_bufs.index(i), b_bufs.index(i), full.index(i), row, col, k, B_COLUMNS, pred=k < K)
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, MMA)
    slot = 0
    phase = 0
    before = STAGES - 1  # the slot of the step before
    for k in range(0, K, BLOCK_K):
        mbarrier.wait(full.index(slot), phase)
        acc = _multiply(acc, a_bufs.index(slot), b_bufs.index(slot), k > 0, B_COLUMNS)
        # All MMAs but the latest are done, in every warp once the compiler's barrier is passed: the slot of the step
        # before is free, and no second barrier in shared memory has to say so.
        acc = warpgroup_mma_wait(1, deps=(acc,))
        ahead = k + (STAGES - 1) * BLOCK_K
        ready = full.index(before)
        _load(
            a_desc, b_desc, a_bufs.index(before), b_bufs.index(before), ready, row, col, ahead, B_COLUMNS,
            pred=ahead < K,
        )  # fmt: skip
        before = gl.where(before == STAGES - 1, 0, before + 1)
        slot, phase = next_slot(slot, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))
    c_buf = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_shape, c_desc.layout)
    store_tile(c_desc, c_buf, acc, row, col)
    tma.store_wait(0)


def _matmul(name: str, kernel, a: torch.Tensor, b: torch.Tensor, **stages) -> torch.Tensor:
    M, N, K, columns = check_tma_gemm(name, a, b, DTYPES)
    require_wgmma(name, a.device, "matmul_tma_persistent")
    if not (M and N and K):
        return torch.zeros((M, N), dtype=a.dtype, device=a.device)  # nothing to add up, or nothing to write
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    block_m, block_n, block_k = TILE
    b_desc = gluon_descriptor(b.t(), [block_n, block_k]) if columns else gluon_descriptor(b, [block_k, block_n])
    kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
        gluon_descriptor(a, [block_m, block_k]), b_desc, gluon_descriptor(c, [block_m, block_n]), M, N, K,
        B_COLUMNS=columns, GROUP_M=GROUP_M, **stages, num_warps=8,
    )  # fmt: skip
    return c


@untraced
def gluon_matmul_one_buffer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with one buffer; shapes, dtypes and errors as in gluon_matmul."""
    return _matmul("gluon_matmul_one_buffer", gluon_matmul_one_buffer_kernel, a, b)


@untraced
def gluon_matmul_ring(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with a ring of STAGES buffers; shapes, dtypes and errors as in gluon_matmul."""
    return _matmul("gluon_matmul_ring", gluon_matmul_ring_kernel, a, b, STAGES=STAGES)
