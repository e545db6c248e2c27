"""Block-scaled GEMMs by hand for Blackwell, mxfp8, mxfp4 and nvfp4: the tensor cores read the scales themselves.

The partitions of blackwell.py. TMA also loads the scales of each 32 or 16 values, tcgen05.cp copies them to tensor
memory, and tcgen05.mma with block_scale reads them there. Their columns leave room for one accumulator only. Compiled,
and run on the tests' model of an SM, but never on a GPU, as all of that file.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    fence_async_shared,
    get_tmem_reg_layout,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma_scaled,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from examples.common.device import device_limits, require_triton_device
from examples.common.fp8 import E4M3
from examples.common.gluon import async_load, async_store, barriers, buffers, init_ring, next_slot
from examples.common.operands import check_choice
from examples.common.tiles import tile_coords
from examples.common.tma import gluon_descriptor, require_tma_layout
from examples.tma.blackwell_plan import (
    BLOCK_BYTES,
    EPILOGUE_WARPS,
    GROUP_M,
    by_hand_plan,
    check_out,
    require_tensor_memory,
)


class Format(NamedTuple):
    element: torch.dtype
    scale: torch.dtype
    group: int
    pack: int  # values in a byte
    dot: str  # what Gluon calls the element
    kind: str  # of tcgen05.mma


FORMATS = {
    "mxfp8": Format(E4M3, torch.float8_e8m0fnu, 32, 1, "e4m3", "kind::mxf8f6f4"),
    "mxfp4": Format(torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, 32, 2, "e2m1", "kind::mxf4"),
    "nvfp4": Format(torch.float4_e2m1fn_x2, E4M3, 16, 2, "e2m1", "kind::mxf4nvf4"),
}


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
    target = columns._reinterpret(tiles.dtype, [ROWS, GROUPS], TensorMemoryScalesLayout())
    tiles = tiles.reshape((ROWS // 128, GROUPS // 4, 32, 4, 4)).permute((0, 3, 2, 1, 4)).reshape((ROWS, GROUPS))
    tcgen05_copy(tiles, target)
    return target


@gluon.jit
def _mma_scaled(
    ring, scales, accs, M, N, K, GROUP: gl.constexpr, PACK: gl.constexpr, FORMAT: gl.constexpr, STAGES: gl.constexpr,
    ACCS: gl.constexpr,
):  # fmt: skip
    """One warp, of which one thread issues. It waits for operands and for an accumulator that is empty, never for an
    MMA: those signal by themselves, MMAs to the same accumulator in the order in which they were issued."""
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
            # PTX orders an MMA after the copies before it, but no copy after an earlier MMA. So scales have a place
            # for each slot of the ring, which is known to be free when the slot is.
            a_scale = _copy_scales(a_scale_bufs.index(slot), a_scales.index(slot), BLOCK_M, BLOCK_K // GROUP)
            b_scale = _copy_scales(b_scale_bufs.index(slot), b_scales.index(slot), BLOCK_N, BLOCK_K // GROUP)
            tcgen05_mma_scaled(a, b, acc, a_scale, b_scale, FORMAT, FORMAT, use_acc=k > 0, mbarriers=[done])
            slot, phase = next_slot(slot, phase, STAGES)
        tcgen05_commit(acc_full.index(acc_slot))
        acc_slot, acc_phase = next_slot(acc_slot, acc_phase, ACCS)


@gluon.jit
def _epilogue_scaled(
    accs, c_desc, c_bufs, a_whole_ptr, b_whole_ptr, M, N, BLOCK_N: gl.constexpr, ACCS: gl.constexpr,
    BUFFERS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Eight warps: each can read one quarter of the lanes. A tile of 128 x 256 is 64 registers of two numbers a thread;
    these are free, so it leaves tensor memory at once and nobody waits for its stores."""
    acc_bufs, acc_full, acc_empty = accs
    BLOCK_M: gl.constexpr = c_desc.block_shape[0]
    WIDTH: gl.constexpr = c_desc.block_shape[1]
    PARTS: gl.constexpr = BLOCK_N // WIDTH
    PART: gl.constexpr = TensorMemoryLayout((BLOCK_M, WIDTH), col_stride=1)
    REGISTERS: gl.constexpr = get_tmem_reg_layout(gl.float32, (BLOCK_M, WIDTH), PART, gl.num_warps())
    whole = 1.0
    if a_whole_ptr is not None:
        whole = gl.load(a_whole_ptr) * gl.load(b_whole_ptr)
    slot = 0
    phase = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        mbarrier.wait(acc_full.index(slot), phase)
        acc = acc_bufs.index(slot)
        parts = ()
        for part in gl.static_range(PARTS):
            c = acc.slice(part * WIDTH, WIDTH).load(REGISTERS)
            if a_whole_ptr is not None:
                c = c * whole
            parts = parts + (c.to(c_desc.dtype),)  # noqa: RUF005  (Gluon has no stars)
        mbarrier.arrive(acc_empty.index(slot))
        for part in gl.static_range(PARTS):
            c_buf = c_bufs.index(part % BUFFERS)
            tma.store_wait(BUFFERS - 1)  # all but the latest have been read: this buffer too
            c_buf.store(parts[part])
            fence_async_shared()
            async_store(c_desc, [row, col + part * WIDTH], c_buf)
        slot, phase = next_slot(slot, phase, ACCS)
    tma.store_wait(0)


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
        (_epilogue_scaled, (accs, c_desc, c_bufs, a_whole_ptr, b_whole_ptr, M, N, BLOCK_N, ACCS, BUFFERS, GROUP_M)),
        (_mma_scaled, (ring, scales, accs, M, N, K, GROUP, PACK, FORMAT, STAGES, ACCS)),
        (_load_scaled, (ring, scales, a_desc, b_desc, a_scale_desc, b_scale_desc, M, N, K,
                          GROUP, PACK, STAGES, GROUP_M)),
    ], [1, 1], [24, 24])  # fmt: skip  # warps of the last two, and registers of their threads


def _scale_descriptor(scale: torch.Tensor, rows: int, groups: int) -> TensorDescriptor:
    """Tiles of scales, not swizzled, which tcgen05.cp could not read. No box of TMA is wider than 256."""
    tiles = scale.view(*scale.shape[:2], 2, 256)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=4)
    return TensorDescriptor(tiles, list(tiles.shape), list(tiles.stride()), [rows // 128, groups // 4, 2, 256], layout)


def _launch_scaled(a, b, c, K: int, fmt: str, scales, wholes) -> None:
    form = FORMATS[fmt]
    groups = BLOCK_BYTES * form.pack // form.group
    limits, (M, N) = device_limits(a.device), c.shape
    block_m, block_n, width, c_buffers, stages, accs = by_hand_plan(limits.shared_bytes, groups)
    boxes = [_scale_descriptor(x, m, groups) for x, m in zip(scales, (block_m, block_n), strict=True)]
    matmul_scaled_kernel[(min(triton.cdiv(M, block_m) * triton.cdiv(N, block_n), limits.sms),)](
        gluon_descriptor(a, [block_m, BLOCK_BYTES]), gluon_descriptor(b, [block_n, BLOCK_BYTES]), *boxes,
        gluon_descriptor(c, [block_m, width]), *wholes, M, N, K, GROUP=form.group, PACK=form.pack, FORMAT=form.dot,
        STAGES=stages, ACCS=accs, BUFFERS=c_buffers, GROUP_M=GROUP_M, num_warps=EPILOGUE_WARPS,
    )  # fmt: skip


def _check_scaled(name: str, label: str, q: torch.Tensor, scale: torch.Tensor, whole, fmt: str) -> None:
    form = FORMATS[fmt]
    if q.dtype is not form.element or scale.dtype is not form.scale:
        raise TypeError(
            f"{name}: {label} is {q.dtype} with scales in {scale.dtype}; {fmt} is {form.element} with {form.scale}"
        )
    if q.ndim != 2 or q.shape[1] * form.pack % 32:
        raise ValueError(
            f"{name}: {label} has shape {tuple(q.shape)}; need [rows, K / {form.pack}], K a multiple of 32"
        )
    need = (triton.cdiv(q.shape[0], 128), triton.cdiv(q.shape[1] * form.pack // form.group, 4), 32, 16)
    if tuple(scale.shape) != need or not scale.is_contiguous():
        raise ValueError(
            f"{name}: scales of {label} have shape {list(scale.shape)}; need {list(need)}, contiguous: swizzle them"
        )
    if (whole is not None) != (fmt == "nvfp4"):
        have = "has no" if fmt != "nvfp4" else "needs a"
        raise ValueError(f"{name}: {fmt} {have} scale for the tensor {label}, got {type(whole).__name__}")
    if whole is not None and (whole.dtype is not torch.float32 or whole.numel() != 1):
        raise TypeError(f"{name}: the scale of tensor {label} is {whole.dtype} {list(whole.shape)}; need one float32")
    require_tma_layout(name, **{label: q, f"scales of {label}": scale})


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
    ceil(K / group / 4), 32, 16] as fp8/microscaling.py writes them.

    Raises TypeError for another dtype; ValueError for an unknown format, rank, inner sizes that differ, a layout that
    TMA cannot load, scales of another shape, or a tensor's scale that is missing or superfluous; RuntimeError for an
    architecture without tensor memory, the interpreter, a device without Triton, or an input that requires grad.
    """
    name = "blackwell_mx_matmul"
    wholes = (a_tensor_scale, b_tensor_scale)
    require_triton_device(name, a_q, a_scale, b_q, b_scale, *(x for x in wholes if x is not None))
    check_choice(name, tuple(FORMATS), format=fmt)
    _check_scaled(name, "a", a_q, a_scale, a_tensor_scale, fmt)
    _check_scaled(name, "b", b_q, b_scale, b_tensor_scale, fmt)
    M, N, K = a_q.shape[0], b_q.shape[0], a_q.shape[1] * FORMATS[fmt].pack
    if b_q.shape[1] != a_q.shape[1]:
        raise ValueError(f"{name}: shapes {tuple(a_q.shape)} and {tuple(b_q.shape)}; K must be the same")
    check_out(name, out_dtype, N)
    require_tensor_memory(name, a_q.device, "mx_matmul of examples/fp8/microscaling.py")
    if not (M and N and K):
        return torch.zeros((M, N), dtype=out_dtype, device=a_q.device)
    c = torch.empty((M, N), dtype=out_dtype, device=a_q.device)
    # Gluon knows FP4 and powers of two as bytes; e4m3 scales are what makes it choose nvfp4's instruction.
    as_bytes = [x if x.dtype is E4M3 else x.view(torch.uint8) for x in (a_q, b_q, a_scale, b_scale)]
    _launch_scaled(*as_bytes[:2], c, K, fmt, as_bytes[2:], wholes)
    return c
