"""Blackwell: sums in tensor memory, one thread that multiplies, scales that the tensor cores read themselves.

Technique  sm_100 and sm_103 have tensor memory in every SM: 128 lanes of 512 columns of 32 bits. tcgen05.mma adds its
           products there, not in registers; one thread issues it, it reads operands that TMA put into shared memory,
           and it returns at once. tcgen05.commit makes an mbarrier complete when all that was issued has been done;
           tcgen05.ld brings a sum to registers. So no warp is needed to multiply, and warps get roles. sm_120 has TMA,
           but neither tensor memory nor tcgen05: all warps multiply by mma.sync, in 99 KiB of shared memory. One
           persistent GEMM, its operands and result by TMA:
           pipelined    tl.range(flatten=True): all warps load, multiply and store;
           specialized  the same with warp_specialize=True: the compiler gives out roles, or drops the request (Hopper);
           by hand      the roles in Gluon. A warp loads operands into a ring of buffers. A warp issues products into
                        one of two accumulators, 2 x 256 columns: all there are. Eight warps empty the other, store it;
           scaled       by hand, for mxfp8, mxfp4 and nvfp4: TMA loads the scales of 32 or 16 values too, tcgen05.cp
                        copies them to tensor memory, tcgen05.mma with block_scale reads them there. Their columns leave
                        room for one accumulator only: it is emptied into registers before anything is stored.
           Each barrier has a side that signals and one that waits. "full" is completed by the bytes of TMA, "empty" by
           the commit of the products that read the buffer, "acc_full" by a commit at the end of a tile, "acc_empty" by
           the warps that have loaded the sum. A side waits for the other's previous round before it starts its next,
           so neither is ever two rounds ahead, and one bit of phase tells rounds apart. The tests run these very
           functions on a model of an SM where all that is asynchronous is as late, early and disorderly as PTX allows.
Question   What does a GEMM look like on Blackwell, and what of it does the compiler generate for each architecture?
Needs      triton, sm_90
Shapes     a [M, K], b [N, K], rows contiguous -> a @ b.T, [M, N]: any M, N a multiple of 8, K one of 16 bytes (0 too).
           scaled: values [rows, K / values in a byte], K a multiple of 32, scales swizzled to
           [ceil(rows / 128), ceil(K / group / 4), 32, 16] as microscaling.py writes them.
Dtypes     a and b: float16, bfloat16, float8_e4m3fn, float8_e5m2, both the same. scaled: float8_e4m3fn or
           float4_e2m1fn_x2 with float8_e8m0fnu or (nvfp4) float8_e4m3fn. out: float16, bfloat16; sums are float32.
Errors     TypeError for another dtype; ValueError for rank, inner sizes that differ, a layout TMA cannot load, scales
           of another shape, a variant or format that does not exist, a tensor's scale that is missing or superfluous;
           RuntimeError for an architecture without TMA, by hand for one without tensor memory and in the interpreter
           (which has no Gluon), a device without Triton, or an input that requires grad.
Wins when  not yet known: a run's record names the GPU it was made on. Until one of those has tensor memory, by hand and
           scaled have been compiled and modelled, and never run.
Source     PTX ISA, "tcgen05" and "mbarrier"; chapter section "Blackwell". Gluon as both Triton 3.6 and 3.7 have it.
Run        python examples/tma/blackwell.py
"""

from __future__ import annotations

import functools
import statistics
from typing import NamedTuple

from harness import (
    Harness,
    Work,
    device_limits,
    gluon_descriptor,
    hardware,
    interpreted,
    require_tma_layout,
    require_triton_device,
    run,
    tma_descriptor,
)
from harness.codegen import TENSOR_MEMORY, CodegenError, Kernel

import torch
import triton
import triton.language as tl
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
    tcgen05_mma,
    tcgen05_mma_scaled,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

E4M3, E5M2, FP4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
DTYPES = (torch.float16, torch.bfloat16, E4M3, E5M2)
OUT_DTYPES = (torch.float16, torch.bfloat16)
VARIANTS = ("pipelined", "specialized", "by hand")
# BLOCK_M, BLOCK_N, warps, in how many parts a tile is stored, buffers. BLOCK_K is 128 bytes of a row everywhere, the
# widest swizzle of shared memory. The second is for GPUs with 99 KiB. GROUP_M is the rows of tiles in a band.
LARGE, SMALL = (128, 256, 8, 4, 4), (128, 128, 8, 2, 2)
BLOCK_BYTES, GROUP_M = 128, 8
# By hand: BLOCK_M, BLOCK_N, columns of a part that is stored, buffers of such parts. Scales take shared memory too.
BY_HAND, SCALED = (128, 256, 64, 2), (128, 256, 32, 2)
STORING_WARPS = 8  # with four a tile is half of a thread's registers, and some are spilled
COLUMNS = 512  # of tensor memory, each 128 lanes of 32 bits


class Format(NamedTuple):
    element: torch.dtype
    scale: torch.dtype
    group: int
    pack: int  # values in a byte
    dot: str  # what Gluon calls the element
    kind: str  # of tcgen05.mma


FORMATS = {
    "mxfp8": Format(E4M3, torch.float8_e8m0fnu, 32, 1, "e4m3", "kind::mxf8f6f4"),
    "mxfp4": Format(FP4, torch.float8_e8m0fnu, 32, 2, "e2m1", "kind::mxf4"),
    "nvfp4": Format(FP4, E4M3, 16, 2, "e2m1", "kind::mxf4nvf4"),
}


def _tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M):
    """Rows and columns at which a tile starts, in bands of GROUP_M rows of tiles, so that L2 serves most loads."""
    tiles_m, tiles_n = (M + BLOCK_M - 1) // BLOCK_M, (N + BLOCK_N - 1) // BLOCK_N
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    band = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + tile % (GROUP_M * tiles_n) % band
    tile_n = tile % (GROUP_M * tiles_n) // band
    return tile_m * BLOCK_M, tile_n * BLOCK_N


_triton_tile_of, _gluon_tile_of = triton.jit(_tile_of), gluon.jit(_tile_of)  # the same arithmetic in both languages


@triton.jit
def _store_parts(c_desc, acc, row, col, PARTS: tl.constexpr):
    if PARTS > 1:
        width: tl.constexpr = acc.shape[1] // 2
        left, right = acc.reshape(acc.shape[0], 2, width).permute(0, 2, 1).split()
        _store_parts(c_desc, left, row, col, PARTS // 2)
        _store_parts(c_desc, right, row, col + width, PARTS // 2)
    else:
        c_desc.store([row, col], acc.to(c_desc.dtype))


@triton.jit
def matmul_persistent_kernel(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, GROUP_M: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    # Flattened in both: Triton 3.6 can specialize no other loop over tiles.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True, warp_specialize=SPECIALIZE):
        row, col = _triton_tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            acc = tl.dot(a_desc.load([row, k]), b_desc.load([col, k]).T, acc)
        _store_parts(c_desc, acc, row, col, PARTS)


@gluon.jit
def _next(slot, phase, SLOTS: gl.constexpr):
    """The next of a ring; the phase that its barriers wait for changes with every round."""
    slot += 1
    again = slot == SLOTS
    return gl.where(again, 0, slot), gl.where(again, phase ^ 1, phase)


@gluon.jit
def _load_operands(
    ring, scales, a_desc, b_desc, a_scale_desc, b_scale_desc, M, N, K,
    GROUP: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warp. Boxes count whole at their barrier; what lies past the edge is filled with zeros."""
    a_bufs, b_bufs, full, empty = ring
    a_scale_bufs, b_scale_bufs, _a_scales, _b_scales = scales
    BLOCK_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1] * PACK
    OPERANDS: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    SCALES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K // GROUP if GROUP else 0
    slot = 0
    phase = 1  # of a barrier at which nobody has arrived: all is empty
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = _gluon_tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, OPERANDS + SCALES)
            tma.async_copy_global_to_shared(a_desc, [row, k // PACK], ready, a_bufs.index(slot))
            tma.async_copy_global_to_shared(b_desc, [col, k // PACK], ready, b_bufs.index(slot))
            if GROUP:
                at = k // (4 * GROUP)
                tma.async_copy_global_to_shared(a_scale_desc, [row // 128, at, 0, 0], ready, a_scale_bufs.index(slot))
                tma.async_copy_global_to_shared(b_scale_desc, [col // 128, at, 0, 0], ready, b_scale_bufs.index(slot))
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _copy_scales(tiles, columns, ROWS: gl.constexpr, GROUPS: gl.constexpr):
    """Tiles of scales, 128 rows by 4 groups each, from shared to tensor memory, as tcgen05.mma reads them."""
    target = columns._reinterpret(tiles.dtype, [ROWS, GROUPS], TensorMemoryScalesLayout())
    tiles = tiles.reshape((ROWS // 128, GROUPS // 4, 32, 4, 4)).permute((0, 3, 2, 1, 4)).reshape((ROWS, GROUPS))
    tcgen05_copy(tiles, target)
    return target


@gluon.jit
def _multiply(
    ring, scales, sums, M, N, K, GROUP: gl.constexpr, PACK: gl.constexpr, FORMAT: gl.constexpr, STAGES: gl.constexpr,
    ACCS: gl.constexpr,
):  # fmt: skip
    """One warp, of which one thread issues. It waits for operands and for an accumulator that is empty, never for a
    product: those signal by themselves, products to the same accumulator in the order in which they were issued."""
    a_bufs, b_bufs, full, empty = ring
    a_scale_bufs, b_scale_bufs, a_scales, b_scales = scales
    accs, acc_full, acc_empty = sums
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
        acc = accs.index(acc_slot)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(full.index(slot), phase)
            a = a_bufs.index(slot)
            b = b_bufs.index(slot).permute((1, 0))
            done = empty.index(slot)
            if GROUP:
                # PTX orders a product after the copies before it, but no copy after an earlier product. So scales have
                # a place for each buffer of the ring, which is known to be free when the buffer is.
                a_scale = _copy_scales(a_scale_bufs.index(slot), a_scales.index(slot), BLOCK_M, BLOCK_K // GROUP)
                b_scale = _copy_scales(b_scale_bufs.index(slot), b_scales.index(slot), BLOCK_N, BLOCK_K // GROUP)
                tcgen05_mma_scaled(a, b, acc, a_scale, b_scale, FORMAT, FORMAT, use_acc=k > 0, mbarriers=[done])
            else:
                tcgen05_mma(a, b, acc, use_acc=k > 0, mbarriers=[done])
            slot, phase = _next(slot, phase, STAGES)
        tcgen05_commit(acc_full.index(acc_slot))
        acc_slot, acc_phase = _next(acc_slot, acc_phase, ACCS)


@gluon.jit
def _store_tiles(
    sums, c_desc, c_bufs, a_whole_ptr, b_whole_ptr, M, N, BLOCK_N: gl.constexpr, ACCS: gl.constexpr,
    BUFFERS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Eight warps: each can read one quarter of the lanes. A tile of 128 x 256 is 64 registers of two numbers a thread;
    these are free, so it leaves tensor memory at once and its stores hold nobody up."""
    accs, acc_full, acc_empty = sums
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
        row, col = _gluon_tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        mbarrier.wait(acc_full.index(slot), phase)
        acc = accs.index(slot)
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
            tma.async_copy_shared_to_global(c_desc, [row, col + part * WIDTH], c_buf)
        slot, phase = _next(slot, phase, ACCS)
    tma.store_wait(0)


@gluon.jit
def matmul_by_hand_kernel(
    a_desc, b_desc, a_scale_desc, b_scale_desc, c_desc, a_whole_ptr, b_whole_ptr, M, N, K,
    GROUP: gl.constexpr, PACK: gl.constexpr, FORMAT: gl.constexpr, STAGES: gl.constexpr, ACCS: gl.constexpr,
    BUFFERS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Without scales GROUP is 0 and what stands for them None."""
    BLOCK_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[0]
    BYTES: gl.constexpr = a_desc.block_shape[1]
    ACC: gl.constexpr = TensorMemoryLayout((BLOCK_M, BLOCK_N), col_stride=1)
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BYTES], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BYTES], b_desc.layout)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, [BUFFERS, BLOCK_M, c_desc.block_shape[1]], c_desc.layout)
    accs = allocate_tensor_memory(gl.float32, [ACCS, BLOCK_M, BLOCK_N], ACC)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    acc_full = gl.allocate_shared_memory(gl.int64, [ACCS, 1], mbarrier.MBarrierLayout())
    acc_empty = gl.allocate_shared_memory(gl.int64, [ACCS, 1], mbarrier.MBarrierLayout())
    scales = (full, full, full, full)  # stand-ins for what a launch does not have
    if GROUP:
        # A column holds four scales for 32 rows, in each quarter of the lanes. Gluon has no array of scales, so these
        # are columns until one is used. Triton 3.6 adds to their address by OR: the larger must come first, so that
        # each begins at a multiple of its size.
        PER_128: gl.constexpr = BYTES * PACK // GROUP
        B_COLUMNS: gl.constexpr = TensorMemoryLayout((128, PER_128 * BLOCK_N // 128), col_stride=1)
        A_COLUMNS: gl.constexpr = TensorMemoryLayout((128, PER_128 * BLOCK_M // 128), col_stride=1)
        gl.static_assert(BLOCK_N >= BLOCK_M)
        b_scales = allocate_tensor_memory(gl.float32, [STAGES, 128, PER_128 * BLOCK_N // 128], B_COLUMNS)
        a_scales = allocate_tensor_memory(gl.float32, [STAGES, 128, PER_128 * BLOCK_M // 128], A_COLUMNS)
        a_box: gl.constexpr = [STAGES] + a_scale_desc.block_shape  # noqa: RUF005
        b_box: gl.constexpr = [STAGES] + b_scale_desc.block_shape  # noqa: RUF005
        a_scale_bufs = gl.allocate_shared_memory(a_scale_desc.dtype, a_box, a_scale_desc.layout)
        b_scale_bufs = gl.allocate_shared_memory(b_scale_desc.dtype, b_box, b_scale_desc.layout)
        scales = (a_scale_bufs, b_scale_bufs, a_scales, b_scales)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(ACCS):
        mbarrier.init(acc_full.index(i), count=1)
        mbarrier.init(acc_empty.index(i), count=1)
    fence_async_shared()
    ring = (a_bufs, b_bufs, full, empty)
    sums = (accs, acc_full, acc_empty)
    gl.warp_specialize([
        (_store_tiles, (sums, c_desc, c_bufs, a_whole_ptr, b_whole_ptr, M, N, BLOCK_N, ACCS, BUFFERS, GROUP_M)),
        (_multiply, (ring, scales, sums, M, N, K, GROUP, PACK, FORMAT, STAGES, ACCS)),
        (_load_operands, (ring, scales, a_desc, b_desc, a_scale_desc, b_scale_desc, M, N, K,
                          GROUP, PACK, STAGES, GROUP_M)),
    ], [1, 1], [24, 24])  # fmt: skip  # warps of the last two, and registers of their threads


def architecture(device: torch.device) -> int | None:
    """90 for sm_90: of a GPU, or what is compiled for; None where kernels are interpreted."""
    if hardware.OFFLINE_SM or interpreted():
        return hardware.OFFLINE_SM
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _require_tma(name: str, sm: int | None) -> None:
    if sm and sm < 90:
        raise RuntimeError(f"{name}: TMA comes with sm_90 (this is sm_{sm}); use examples/triton/matmul.py")


def _require_tensor_memory(name: str, sm: int | None, instead: str) -> None:
    # Asked before Gluon is: for another architecture its compiler does not fail, it takes the process down.
    if sm is None or sm // 10 not in TENSOR_MEMORY:
        here = f"this is sm_{sm}" if sm else "and Gluon kernels are not interpreted"
        raise RuntimeError(f"{name}: tcgen05 and tensor memory come with sm_100 and sm_103 ({here}); use {instead}")


def scale_columns(block_m: int, block_n: int, groups: int, stages: int) -> int:
    """Columns of tensor memory that the scales of a ring take: a column holds 32 rows by 4 groups."""
    return stages * (block_m + block_n) // 32 * (groups // 4)


def allocated_columns(used: int) -> int:
    """What is taken for so many columns: a power of two, at least 32."""
    return max(32, triton.next_power_of_2(used))


def by_hand_plan(shared_bytes: int, scale_groups: int = 0) -> tuple[int, ...]:
    """BLOCK_M, BLOCK_N, columns of a part, its buffers, then as many stages (2 to 4) and accumulators (1 or 2) as fit.

    `scale_groups` counts the scales of a row in a step of K; 0: there are none.
    """
    block_m, block_n, width, buffers = SCALED if scale_groups else BY_HAND
    for stages in (4, 3, 2):
        ring = stages * (block_m + block_n) * (BLOCK_BYTES + scale_groups)
        if ring + buffers * block_m * width * 2 + 1024 <= shared_bytes:  # parts of two bytes a number, and barriers
            left = COLUMNS - scale_columns(block_m, block_n, scale_groups, stages)
            return block_m, block_n, width, buffers, stages, min(2, left // block_n)
    raise RuntimeError(f"blackwell: no ring of {block_m} x {block_n} fits {shared_bytes} bytes of shared memory")


def _launch_by_hand(a, b, c, K: int, fmt: str = "", scales=(None, None), wholes=(None, None)) -> None:
    form = FORMATS[fmt] if fmt else None
    pack, groups = (form.pack, BLOCK_BYTES * form.pack // form.group) if form else (1, 0)
    limits = device_limits(a.device)
    block_m, block_n, width, buffers, stages, accs = by_hand_plan(limits.shared_bytes, groups)
    block_k = BLOCK_BYTES // a.element_size()
    boxes = (None, None)
    if form:
        boxes = [_scale_descriptor(x, m, groups) for x, m in zip(scales, (block_m, block_n), strict=True)]
    M, N = c.shape
    matmul_by_hand_kernel[(min(triton.cdiv(M, block_m) * triton.cdiv(N, block_n), limits.sms),)](
        gluon_descriptor(a, [block_m, block_k]), gluon_descriptor(b, [block_n, block_k]), *boxes,
        gluon_descriptor(c, [block_m, width]), *wholes, M, N, K,
        GROUP=form.group if form else 0, PACK=pack, FORMAT=form.dot if form else "", STAGES=stages, ACCS=accs,
        BUFFERS=buffers, GROUP_M=GROUP_M, num_warps=STORING_WARPS,
    )  # fmt: skip


def _scale_descriptor(scale: torch.Tensor, rows: int, groups: int) -> TensorDescriptor:
    """Tiles of scales, not swizzled, which tcgen05.cp could not read. No box of TMA is wider than 256."""
    tiles = scale.view(*scale.shape[:2], 2, 256)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=4)
    return TensorDescriptor(tiles, list(tiles.shape), list(tiles.stride()), [rows // 128, groups // 4, 2, 256], layout)


def _launch_by_the_compiler(a, b, c, specialize: bool) -> None:
    (M, K), N = a.shape, b.shape[0]
    limits = device_limits(a.device)
    small = limits.shared_bytes < 200 * 1024
    block_m, block_n, num_warps, parts, buffers = SMALL if small else LARGE
    # mma.sync multiplies from registers: where all warps load, that is one stage more than there are buffers.
    stages = buffers + 1 if small and not specialize else buffers
    block_k = BLOCK_BYTES // a.element_size()
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    matmul_persistent_kernel[(min(tiles, limits.sms),)](
        tma_descriptor(a, [block_m, block_k]), tma_descriptor(b, [block_n, block_k]),
        tma_descriptor(c, [block_m, block_n // parts]), M, N, K,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PARTS=parts, GROUP_M=GROUP_M, SPECIALIZE=specialize,
        num_warps=num_warps, num_stages=stages,
    )  # fmt: skip


def _check_out(name: str, out_dtype: torch.dtype, N: int) -> None:
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {OUT_DTYPES}")
    if N % 8:
        raise ValueError(f"{name}: N is {N}; TMA stores rows of 16-byte multiples: pad b to a multiple of 8 rows")


def blackwell_matmul(
    a: torch.Tensor, b: torch.Tensor, variant: str = "specialized", out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """a @ b.T by one of VARIANTS; limits and errors are in the module docstring.

    out_dtype is that of a unless given, for FP8 bfloat16.
    """
    name = "blackwell_matmul"
    require_triton_device(name, a, b)
    if a.dtype not in DTYPES or b.dtype is not a.dtype:
        raise TypeError(f"{name}: dtypes {a.dtype} and {b.dtype}; both must be the same one of {DTYPES}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [N, K]")
    if not isinstance(variant, str) or variant not in VARIANTS:
        raise ValueError(f"{name}: variant {variant!r} is not one of {VARIANTS}")
    out_dtype = out_dtype or (a.dtype if a.element_size() == 2 else torch.bfloat16)
    (M, K), N = a.shape, b.shape[0]
    _check_out(name, out_dtype, N)
    if K % (each := 16 // a.element_size()):
        raise ValueError(f"{name}: K is {K}; TMA loads rows of 16-byte multiples: pad it to a multiple of {each}")
    require_tma_layout(name, a=a, b=b)
    sm = architecture(a.device)
    _require_tma(name, sm)
    if variant == "by hand":
        _require_tensor_memory(name, sm, "variant='specialized'")
    if not (M and N and K):
        return torch.zeros((M, N), dtype=out_dtype, device=a.device)  # nothing to sum, or nothing to write
    c = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if variant == "by hand":
        _launch_by_hand(a, b, c, K)
    else:
        _launch_by_the_compiler(a, b, c, variant == "specialized")
    return c


def _check_scaled(name: str, label: str, q: torch.Tensor, scale: torch.Tensor, whole, fmt: str) -> None:
    form = FORMATS[fmt]
    if q.dtype is not form.element or scale.dtype is not form.scale:
        raise TypeError(
            f"{name}: {label} is {q.dtype} with scales in {scale.dtype}; {fmt} is {form.element} with {form.scale}"
        )
    if q.ndim != 2 or q.shape[1] * form.pack % 32:
        raise ValueError(
            f"{name}: {label} has shape {tuple(q.shape)}; need [rows, K / {form.pack}] with K a multiple of 32"
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
        raise TypeError(
            f"{name}: the scale of the tensor {label} is {whole.dtype} {list(whole.shape)}; need one float32"
        )
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
    """a @ b.T of values with scales in one of FORMATS, by hand; limits and errors are in the module docstring."""
    name = "blackwell_mx_matmul"
    wholes = (a_tensor_scale, b_tensor_scale)
    require_triton_device(name, a_q, a_scale, b_q, b_scale, *(x for x in wholes if x is not None))
    if not isinstance(fmt, str) or fmt not in FORMATS:
        raise ValueError(f"{name}: format {fmt!r} is not one of {tuple(FORMATS)}")
    _check_scaled(name, "a", a_q, a_scale, a_tensor_scale, fmt)
    _check_scaled(name, "b", b_q, b_scale, b_tensor_scale, fmt)
    M, N, K = a_q.shape[0], b_q.shape[0], a_q.shape[1] * FORMATS[fmt].pack
    if b_q.shape[1] != a_q.shape[1]:
        raise ValueError(f"{name}: shapes {tuple(a_q.shape)} and {tuple(b_q.shape)}; K must be the same")
    _check_out(name, out_dtype, N)
    _require_tensor_memory(name, architecture(a_q.device), "mx_matmul of examples/fp8/microscaling.py")
    if not (M and N and K):
        return torch.zeros((M, N), dtype=out_dtype, device=a_q.device)
    c = torch.empty((M, N), dtype=out_dtype, device=a_q.device)
    # Gluon knows FP4 and powers of two as bytes; e4m3 scales are what makes it choose nvfp4's instruction.
    as_bytes = [x if x.dtype is E4M3 else x.view(torch.uint8) for x in (a_q, b_q, a_scale, b_scale)]
    _launch_by_hand(*as_bytes[:2], c, K, fmt, as_bytes[2:], wholes)
    return c


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double().T


def has_tensor_memory(h: Harness) -> bool:
    return not h.interpreted and h.machine.sm // 10 in TENSOR_MEMORY


def runnable(h: Harness) -> tuple[str, ...]:
    return VARIANTS if has_tensor_memory(h) else VARIANTS[:2]


def budget(h: Harness, K: int, dtype: torch.dtype) -> dict:
    """On Hopper an FP8 instruction cuts 32 products and the sum so far to about 14 bits."""
    rough = dtype in (E4M3, E5M2) and not h.interpreted
    return {"terms": K, "acc": 2.0**-13, "roundings": K // 32} if rough else {"terms": K}


TMA, ROLES = "cp.async.bulk.tensor", ("setmaxnreg", "mbarrier")
TCGEN05 = (TMA, "tcgen05.mma", "tcgen05.alloc", "tcgen05.commit", "tcgen05.ld")
# What each must hold in its PTX; where nothing is required, the answer is still recorded.
FIND = {
    "pipelined": {90: (TMA, "wgmma"), 100: TCGEN05, 103: TCGEN05, 120: (TMA, "mma.sync")},
    "by hand": {90: (), 100: (*TCGEN05, *ROLES), 103: (*TCGEN05, *ROLES), 120: ()},
    # All architectures of the topic's last table. On sm_90 a flattened loop is not specialized.
    "specialized": {
        80: (), 89: (), 90: (TMA, "wgmma"), 100: (*TCGEN05, *ROLES), 103: (*TCGEN05, *ROLES),
        120: (TMA, "mma.sync", *ROLES),
    },
}  # fmt: skip
SHOWN = (
    "wgmma", "mma.sync", "tcgen05.mma", "mma f8", "block_scale", "tcgen05.cp", "tcgen05.ld", "tcgen05.commit",
    "setmaxnreg", TMA,
)  # fmt: skip


def cells(kernel: Kernel) -> dict:
    """One row of the table: what the compiler made of a kernel, or why it did not."""
    if kernel.error:
        reason = kernel.error.split(f"{kernel.kernel}: ")[-1].split("; use")[0]  # of a wrapper, what it says itself
        return {"code": f"cannot, because {reason}"}
    return {
        "warps": kernel.warps, "registers": kernel.registers, "spill bytes": kernel.spills,
        "shared KiB": round(kernel.shared / 1024, 1),
        "tensor memory": "none" if kernel.tensor_memory is None else kernel.tensor_memory,
        "code": ", ".join(f"{kernel.found[name]} {name}" for name in SHOWN if name in kernel.found),
    }  # fmt: skip


def show_code(h: Harness, n: int = 4096) -> dict[str, Kernel]:
    """Every kernel on every architecture, in one table; raises where what is required is missing."""
    from examples.fp8.microscaling import mx_matmul

    half, e4m3, short = h.meta(n, n, dtype=h.half), h.meta(n, n, dtype=E4M3), str(h.half).removeprefix("torch.")
    kernels: dict[str, Kernel] = {}
    columns = {"by hand": COLUMNS}  # on sm_100, counted
    for variant, find in FIND.items():
        for kernel in h.codegen(blackwell_matmul, half, half, variant, find=find):
            kernels[f"{variant} {short}, sm_{kernel.sm}"] = kernel
    for variant in VARIANTS[1:]:  # the same code with other operands
        find = {sm: (*FIND[variant][sm], "mma f8") for sm in (90, 100, 120) if FIND[variant][sm]}
        for kernel in h.codegen(blackwell_matmul, e4m3, e4m3, variant, h.half, find=find):
            kernels[f"{variant} e4m3, sm_{kernel.sm}"] = kernel
    for fmt, form in FORMATS.items():
        q, scale = h.meta(n, n // form.pack, dtype=form.element), h.meta(n // 128, n // form.group // 4, 32, 16)
        scale = scale.to(form.scale)
        whole = h.meta(1, dtype=torch.float32) if fmt == "nvfp4" else None
        operands = (q, scale, q, scale, fmt, h.half, whole, whole)
        native = (*TCGEN05, "block_scale", "tcgen05.cp", form.kind, *ROLES)
        for kernel in h.codegen(blackwell_mx_matmul, *operands, find={90: (), 100: native, 103: native, 120: ()}):
            kernels[f"scaled {fmt}, sm_{kernel.sm}"] = kernel
        for kernel in h.codegen(mx_matmul, *operands, find={120: (TMA, "mma.sync", "block_scale")}):
            kernels[f"tl.dot_scaled {fmt}, sm_{kernel.sm}"] = kernel
        groups = BLOCK_BYTES * form.pack // form.group
        block_m, block_n, _, _, stages, accs = by_hand_plan(hardware.SHARED_LIMIT[100], groups)
        columns[f"scaled {fmt}"] = accs * block_n + scale_columns(block_m, block_n, groups, stages)
    h.table("what becomes of each kernel", {name: cells(kernel) for name, kernel in kernels.items()})
    taken = {}
    for what, used in columns.items():
        kernel = next(kernel for name, kernel in kernels.items() if name.startswith(what) and kernel.sm == 100)
        taken[what] = {"used": used, "taken": kernel.tensor_memory, "of": COLUMNS}
        if kernel.tensor_memory != allocated_columns(used):
            raise CodegenError(f"{what}: {used} columns counted, {kernel.tensor_memory} taken: count them again")
    h.table("columns of tensor memory", taken)
    return kernels


def explain(h: Harness, kernels: dict[str, Kernel]) -> None:
    """What the code says about roles, read from it."""
    for variant in VARIANTS[1:]:
        for name, kernel in kernels.items():
            if name.startswith(variant) and not kernel.error:
                asked = STORING_WARPS if variant == "by hand" else LARGE[2]
                roles = kernel.found.get("setmaxnreg")
                h.say(f"{name}: " + (f"roles, {kernel.warps} warps for {asked}" if roles else "no roles: dropped"))


def products(h: Harness, n: int, dtype: torch.dtype) -> dict[str, float]:
    """One table; how many times as fast as the library each variant is."""
    a, b = h.randn(n, n, dtype=dtype), h.randn(n, n, dtype=dtype)
    one = torch.ones((), device=h.device)
    if h.interpreted:
        known = {"torch": lambda a, b: a.to(h.half) @ b.to(h.half).T}
    elif dtype.itemsize == 2:
        known = {"cuBLAS": lambda a, b: a @ b.T}
    else:
        known = {"_scaled_mm": lambda a, b: torch._scaled_mm(a, b.T, one, one, out_dtype=h.half, use_fast_accum=True)}
    ours = {}
    for variant in runnable(h):
        fn = functools.partial(blackwell_matmul, variant=variant, out_dtype=h.half)
        ours[f"{'gluon' if variant == 'by hand' else 'triton'} {variant}"] = fn
    table = h.compare(
        known | ours, reference, a, b, baseline=next(iter(known)), dtype=h.half, **budget(h, n, dtype),
        work=Work(bytes=2 * n * n * dtype.itemsize + 2 * n * n, flops=2 * n**3, dtype=dtype),
        case=f"{n}x{n}x{n} {str(dtype).removeprefix('torch.')}",
    )  # fmt: skip
    timed = table and table.rows[-1].ms is not None
    return {row.variant: row.speedup for row in table.rows if row.ours} if timed else {}


def scaled_products(h: Harness, n: int) -> None:
    """Scaled by hand beside the library and beside tl.dot_scaled, on a GPU with tensor memory."""
    from examples.fp8.microscaling import Operands, mx_matmul, scaled_mm
    from examples.fp8.microscaling import budget as mx_budget

    for fmt, form in FORMATS.items():
        x = Operands.random(h, n, n, n, fmt)
        wholes = dict(zip(("a_tensor_scale", "b_tensor_scale"), x.tensor_scales, strict=True))
        variants = {} if fmt == "mxfp4" else {"_scaled_mm": scaled_mm(x, fmt, torch.bfloat16)}  # torch has no mxfp4
        variants["triton tl.dot_scaled"] = functools.partial(mx_matmul, fmt=fmt, check_scales=False, **wholes)
        variants["gluon scaled"] = functools.partial(blackwell_mx_matmul, fmt=fmt, **wholes)
        work = Work(bytes=sum(t.nbytes for t in x.packed) + 2 * n * n, flops=2 * n**3, dtype=form.element)
        h.compare(
            variants, x.reference, *x.packed, baseline=next(iter(variants)), work=work, title=f"scaled {fmt}",
            case=f"{n}x{n}x{n} {fmt}", dtype=torch.bfloat16, comparators=["triton tl.dot_scaled"], **mx_budget(n),
        )  # fmt: skip


# Nothing but a tail; one more than a tile in each dimension, which steps of K do not divide; nothing to sum.
EDGES = [(1, 8, 16), (129, 264, 144), (5, 16, 0)]


def demo(h: Harness) -> None:
    for dtype in (h.half, E4M3):
        for M, N, K in EDGES:
            a, b = h.randn(M, K, dtype=dtype), h.randn(N, K, dtype=dtype)
            for variant in runnable(h):
                fn = functools.partial(blackwell_matmul, variant=variant, out_dtype=h.half)
                what = f"blackwell_matmul {variant} {M}x{N}x{K} {str(dtype).removeprefix('torch.')}"
                h.check(fn, reference, a, b, what=what, dtype=h.half, **budget(h, K, dtype))
    if h.shows_code:
        explain(h, show_code(h))
        h.fact("tensor memory", "there is, so all of this ran" if has_tensor_memory(h) else "none here: compiled only")

    sizes = h.pick(interpreted=(160,), quick=(4096,), full=(4096, 8192)) if h.timing else (160,)
    ratios = {dtype: [products(h, n, dtype) for n in sizes] for dtype in (h.half, E4M3)}
    for n in sizes if has_tensor_memory(h) else ():
        scaled_products(h, n)
    for dtype, found in ratios.items():
        for variant in found[0] if all(found) else ():
            mean = statistics.geometric_mean(each[variant] for each in found)
            library = "cuBLAS" if dtype.itemsize == 2 else "_scaled_mm"
            h.fact(f"{variant}, {str(dtype).removeprefix('torch.')}: geometric mean over {library}", round(mean, 3))


if __name__ == "__main__":
    run(demo)
