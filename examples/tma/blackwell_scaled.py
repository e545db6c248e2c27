"""Block-scaled GEMMs by hand for Blackwell, mxfp8, mxfp4 and nvfp4: the tensor cores read the scales themselves.

The partitions are those of blackwell.py. TMA also loads the scales of each 32 or 16 values, tcgen05.cp copies them to
tensor memory, and tcgen05.mma with block_scale reads them there. Their columns leave room for one accumulator only.
Like that file, it is compiled, and run on the tests' model of an SM, but never on a GPU.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma_scaled,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from examples.common.device import device_limits, require_triton_device
from examples.common.fp8 import E4M3
from examples.common.gluon import async_load, barriers, buffers, init_ring, next_slot, reinterpret
from examples.common.microscaling import FORMATS, check_operand, check_tensor_scale, format_of
from examples.common.tiles import tile_coords
from examples.common.tma import gluon_descriptor
from examples.common.untraced import untraced
from examples.tma import blackwell_plan as plan
from examples.tma.blackwell_store import epilogue_partition


@gluon.jit
def _load_scaled(
    ring, scales, a_desc, b_desc, a_scale_desc, b_scale_desc, M, N, K,
    GROUP: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warp. A box that is partly out of bounds is filled with zeros and still signals its full byte count."""
    a_bufs, b_bufs, full, empty = ring
    a_scale_bufs, b_scale_bufs, _a_scales, _b_scales = scales
    BLOCK_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1] * PACK
    OPERANDS: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    SCALES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K // GROUP
    slot = 0
    phase = 1  # of a new barrier, at which nobody has arrived: every slot is empty
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, OPERANDS + SCALES)
            async_load(a_desc, [row, k // PACK], ready, a_bufs.index(slot))
            async_load(b_desc, [col, k // PACK], ready, b_bufs.index(slot))
            at = k // (4 * GROUP)
            async_load(a_scale_desc, [row // 128, at, 0, 0], ready, a_scale_bufs.index(slot))
            async_load(b_scale_desc, [col // 128, at, 0, 0], ready, b_scale_bufs.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _copy_scales(tiles, columns, ROWS: gl.constexpr, GROUPS: gl.constexpr):
    """Tiles of scales, 128 rows by 4 groups each, from shared to tensor memory, as tcgen05.mma reads them."""
    target = reinterpret(columns, tiles.dtype, [ROWS, GROUPS], TensorMemoryScalesLayout())
    tiles = tiles.reshape((ROWS // 128, GROUPS // 4, 32, 4, 4)).permute((0, 3, 2, 1, 4)).reshape((ROWS, GROUPS))
    tcgen05_copy(tiles, target)
    return target


@gluon.jit
def _mma_scaled(
    ring, scales, accs, M, N, K, GROUP: gl.constexpr, PACK: gl.constexpr, FORMAT: gl.constexpr, STAGES: gl.constexpr,
    ACCS: gl.constexpr,
):  # fmt: skip
    """One warp, of which one thread issues. It waits for operands and for an accumulator that is empty, never for an
    MMA. MMAs signal by themselves, those to the same accumulator in the order in which they were issued."""
    a_bufs, b_bufs, full, empty = ring
    a_scale_bufs, b_scale_bufs, a_scales, b_scales = scales
    acc_bufs, acc_full, acc_empty = accs
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    BLOCK_N: gl.constexpr = b_bufs.shape[1]
    BLOCK_K: gl.constexpr = a_bufs.shape[2] * PACK
    slot = 0
    phase = 0
    acc_slot = 0
    acc_phase = 1
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for _tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        mbarrier.wait(acc_empty.index(acc_slot), acc_phase)
        acc = acc_bufs.index(acc_slot)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(full.index(slot), phase)
            a = a_bufs.index(slot)
            b = b_bufs.index(slot).permute((1, 0))
            done = empty.index(slot)
            # PTX orders an MMA after the copies before it, but not a copy after an earlier MMA. So scales have a place
            # for each slot of the ring, which is known to be free when the slot is.
            a_scale = _copy_scales(a_scale_bufs.index(slot), a_scales.index(slot), BLOCK_M, BLOCK_K // GROUP)
            b_scale = _copy_scales(b_scale_bufs.index(slot), b_scales.index(slot), BLOCK_N, BLOCK_K // GROUP)
            tcgen05_mma_scaled(a, b, acc, a_scale, b_scale, FORMAT, FORMAT, use_acc=k > 0, mbarriers=[done])
            slot, phase = next_slot(slot, phase, STAGES)
        tcgen05_commit(acc_full.index(acc_slot))
        acc_slot, acc_phase = next_slot(acc_slot, acc_phase, ACCS)


@gluon.jit
def matmul_scaled_kernel(
    a_desc, b_desc, a_scale_desc, b_scale_desc, c_desc, a_whole_ptr, b_whole_ptr, M, N, K,
    GROUP: gl.constexpr, PACK: gl.constexpr, FORMAT: gl.constexpr, STAGES: gl.constexpr, ACCS: gl.constexpr,
    BUFFERS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """A scale for GROUP values, PACK of them in a byte; a_whole and b_whole, scales of the tensors, only for nvfp4."""
    BLOCK_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[0]
    BYTES: gl.constexpr = a_desc.block_shape[1]
    ACC: gl.constexpr = TensorMemoryLayout((BLOCK_M, BLOCK_N), col_stride=1)
    a_bufs = buffers(a_desc, STAGES)
    b_bufs = buffers(b_desc, STAGES)
    c_bufs = buffers(c_desc, BUFFERS)
    acc_bufs = allocate_tensor_memory(gl.float32, [ACCS, BLOCK_M, BLOCK_N], ACC)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    acc_full = barriers(ACCS)
    acc_empty = barriers(ACCS)
    # A column holds four scales for 32 rows, in each quarter of the lanes. Gluon has no array of scales, so these are
    # columns until one is used. Triton 3.6 adds to their address by OR: the larger first, so each begins at a multiple.
    PER_128: gl.constexpr = BYTES * PACK // GROUP
    B_COLUMNS: gl.constexpr = TensorMemoryLayout((128, PER_128 * BLOCK_N // 128), col_stride=1)
    A_COLUMNS: gl.constexpr = TensorMemoryLayout((128, PER_128 * BLOCK_M // 128), col_stride=1)
    gl.static_assert(BLOCK_N >= BLOCK_M)
    b_scales = allocate_tensor_memory(gl.float32, [STAGES, 128, PER_128 * BLOCK_N // 128], B_COLUMNS)
    a_scales = allocate_tensor_memory(gl.float32, [STAGES, 128, PER_128 * BLOCK_M // 128], A_COLUMNS)
    a_scale_bufs = buffers(a_scale_desc, STAGES)
    b_scale_bufs = buffers(b_scale_desc, STAGES)
    scales = (a_scale_bufs, b_scale_bufs, a_scales, b_scales)
    init_ring(full, empty, STAGES, 1)
    init_ring(acc_full, acc_empty, ACCS, 1)
    fence_async_shared()
    ring = (a_bufs, b_bufs, full, empty)
    accs = (acc_bufs, acc_full, acc_empty)
    gl.warp_specialize([
        (epilogue_partition, (accs, c_desc, c_bufs, a_whole_ptr, b_whole_ptr, M, N, BLOCK_N, ACCS, BUFFERS, GROUP_M)),
        (_mma_scaled, (ring, scales, accs, M, N, K, GROUP, PACK, FORMAT, STAGES, ACCS)),
        (_load_scaled, (ring, scales, a_desc, b_desc, a_scale_desc, b_scale_desc, M, N, K,
                          GROUP, PACK, STAGES, GROUP_M)),
    ], [1, 1], [24, 24])  # fmt: skip  # warps of the last two, and registers of their threads


def _scale_descriptor(scale: torch.Tensor, rows: int, groups: int) -> TensorDescriptor:
    """Tiles of scales, unswizzled: swizzled, tcgen05.cp could not read them. No box of TMA is wider than 256."""
    tiles = scale.view(*scale.shape[:2], 2, 256)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=4)
    return TensorDescriptor(tiles, list(tiles.shape), list(tiles.stride()), [rows // 128, groups // 4, 2, 256], layout)


def _launch_scaled(a, b, c, K: int, fmt: str, scales, wholes) -> None:
    form = FORMATS[fmt]
    groups = plan.BLOCK_BYTES * form.pack // form.group
    limits, (M, N) = device_limits(a.device), c.shape
    block_m, block_n, width, c_buffers, stages, accs = plan.by_hand_plan(limits.shared_bytes, groups)
    boxes = [_scale_descriptor(x, m, groups) for x, m in zip(scales, (block_m, block_n), strict=True)]
    matmul_scaled_kernel[(min(triton.cdiv(M, block_m) * triton.cdiv(N, block_n), limits.sms),)](
        gluon_descriptor(a, [block_m, plan.BLOCK_BYTES]), gluon_descriptor(b, [block_n, plan.BLOCK_BYTES]), *boxes,
        gluon_descriptor(c, [block_m, width]), *wholes, M, N, K, GROUP=form.group, PACK=form.pack, FORMAT=form.dot,
        STAGES=stages, ACCS=accs, BUFFERS=c_buffers, GROUP_M=plan.GROUP_M, num_warps=plan.EPILOGUE_WARPS,
    )  # fmt: skip


@untraced
def blackwell_mx_matmul(
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    b_q: torch.Tensor,
    b_scale: torch.Tensor,
    fmt: str,
    out_dtype: torch.dtype = torch.bfloat16,
    a_tensor_scale: torch.Tensor | None = None,
    b_tensor_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b.T of values with scales in one of FORMATS -> [M, N] float16 or bfloat16.

    Values [rows, K / values in a byte], K a multiple of 32, N one of 8: float8_e4m3fn or float4_e2m1fn_x2; scales
    float8_e8m0fnu or (nvfp4, with a scale for each tensor, too) float8_e4m3fn, swizzled to [ceil(rows / 128),
    ceil(K / group / 4), 32, 16] as fp8/microscaling_quantize.py writes them.

    Raises TypeError for another dtype; ValueError for an unknown format, rank, inner sizes that differ, a layout that
    TMA cannot load, scales of another shape, or a tensor's scale that is missing or superfluous; RuntimeError for an
    architecture without tensor memory, the interpreter, a device without Triton, or an input that requires grad.
    """
    name = "blackwell_mx_matmul"
    wholes = (a_tensor_scale, b_tensor_scale)
    require_triton_device(name, a_q, a_scale, b_q, b_scale, *(x for x in wholes if x is not None))
    format_of(name, fmt)
    for label, q, scale, whole in (("a", a_q, a_scale, a_tensor_scale), ("b", b_q, b_scale, b_tensor_scale)):
        check_operand(name, label, q, scale, fmt)
        check_tensor_scale(name, fmt, whole, q, values=False)
    M, N, K = a_q.shape[0], b_q.shape[0], a_q.shape[1] * FORMATS[fmt].pack
    if b_q.shape[1] != a_q.shape[1]:
        raise ValueError(f"{name}: shapes {tuple(a_q.shape)} and {tuple(b_q.shape)}; K must be the same")
    plan.check_out(name, out_dtype, N)
    plan.require_tensor_memory(name, a_q.device, "mx_matmul of examples/fp8/microscaling.py")
    if not (M and N and K):
        return torch.zeros((M, N), dtype=out_dtype, device=a_q.device)
    c = torch.empty((M, N), dtype=out_dtype, device=a_q.device)
    # Gluon knows FP4 and powers of two as bytes; e4m3 scales are what makes it choose nvfp4's instruction.
    as_bytes = [x if x.dtype is E4M3 else x.view(torch.uint8) for x in (a_q, b_q, a_scale, b_scale)]
    _launch_scaled(*as_bytes[:2], c, K, fmt, as_bytes[2:], wholes)
    return c
