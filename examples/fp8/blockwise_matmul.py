"""Blockwise matmul: scales of 1x128 and 128x128 along K, partial sums promoted to fp32 between the FP8 products.

Technique  A scale that varies along K cannot leave the sum: each group of 128 products is a sum of its own, which is
           scaled and added to a float32 accumulator (promoted). That also mends what FP8 tensor cores do on Hopper,
           where a running sum keeps about 14 bits: only 128 products are ever summed so. The price is one
           multiply-add for each element of the tile and group, on other units than the products but in the same
           warps, which leave the tensor cores idle meanwhile. Two kernels, the same sums:
           tiles             plain Triton by pointers, a tile so small that two programs share an SM: one promotes
                             while the other multiplies;
           warp specialized  Gluon for Hopper. One warp fills a ring of buffers by TMA. Two or three warpgroups own
                             64 rows of a tile each and take turns by themselves: while one promotes, another has the
                             tensor cores. Two have registers for two products at a time each: the first is promoted
                             while the second runs.
Question   What do fine scales along K cost in an FP8 GEMM, and what does promotion buy at long K?
Needs      triton, sm_89
Shapes     a [M, K] with contiguous rows, b [K, N] with contiguous columns (weight.t()) -> [M, N], contiguous. K a
           multiple of 128. scale_a [M, K / 128], scale_b [K / 128, ceil(N / 128)]: that of a weight [N, K], transposed.
           tiles: any M, N, any strides of scales. warp specialized: N a multiple of 16 bytes of the result, scale_a
           with M contiguous and columns a multiple of 4 apart, as `rows_contiguous` lays it out.
Dtypes     a, b: float8_e4m3fn or float8_e5m2, also one of each; scales float32; out_dtype bfloat16, float16, float32.
           Two scales are multiplied first: what their float32 product loses (below 2**-126) is lost.
Errors     TypeError for another FP8 variant or dtype, scales that are not float32; ValueError for rank, inner sizes
           that differ, K that groups do not divide, a layout that the tensor cores or TMA cannot take, scales of
           another shape or device, a scale that is not positive and finite (looked for with check_scales, which waits
           for the GPU), a variant that does not exist; RuntimeError for a device without Triton, an architecture
           without FP8, warp specialized anywhere but on sm_90 (Gluon is neither portable nor interpreted), or an input
           that requires grad.
Wins when  ranges differ along K, or K is long and its sums must be good. Else fp8_matmul.py, which never stops to add.
Source     the recipe of DeepSeek-V3's report; layouts as torch.nn.functional.scaled_mm has them (BlockWise1x128 by
           BlockWise128x128).
Run        python examples/fp8/blockwise_matmul.py
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

from harness import (
    Harness,
    Work,
    dequantize_reference,
    device_limits,
    gluon_descriptor,
    hardware,
    quantize_reference,
    require_fp8,
    require_scales,
    require_tma_layout,
    require_triton_device,
    run,
)
from harness.codegen import CodegenError

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUP = 128  # products with one scale, and columns that share one: also the tile's step of K and its columns

# tiles: two programs of 4 warps fit an SM of Hopper or Blackwell. With the little shared memory of GPUs that multiply
# from registers (mma.sync, which keeps a step of K less in it) one program does, and has 8 warps.
TILE = {"BLOCK_M": 64, "num_stages": 4, "GROUP_M": 16}
LITTLE_SHARED = 128 * 1024
# Warp specialized: warpgroups of 64 rows -> products at a time, steps of K in the ring, rows of tiles in a band,
# registers of a thread. More steps do not help: programs drift apart, and no longer find in L2 what others loaded.
CONFIGS = {
    2: {"PAIRS": True, "STAGES": 5, "GROUP_M": 8, "REGISTERS": 240},
    3: {"PAIRS": False, "STAGES": 4, "GROUP_M": 6, "REGISTERS": 160},
}
LARGE = 8192**3  # products of a GEMM that is long enough to be held back by power and L2 rather than by its start


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
def blockwise_matmul_tiles_kernel(
    a_ptr, b_ptr, c_ptr, scale_a_ptr, scale_b_ptr, M, N, K,
    stride_am, stride_bn, stride_cm, stride_sam, stride_sak, stride_sbk, stride_sbn,
    BLOCK_M: tl.constexpr, GROUP: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    row, col = _triton_tile_of(tl.program_id(0), M, N, BLOCK_M, GROUP, GROUP_M)
    rows, cols, inner = row + tl.arange(0, BLOCK_M), col + tl.arange(0, GROUP), tl.arange(0, GROUP)
    # Rows and columns past the edge wrap around: they load something valid, and the store drops what it makes.
    valid_rows, valid_cols = (rows % M).to(tl.int64), (cols % N).to(tl.int64)
    a_ptrs = a_ptr + valid_rows[:, None] * stride_am + inner[None, :]
    b_ptrs = b_ptr + inner[:, None] + valid_cols[None, :] * stride_bn
    scale_a_ptrs = scale_a_ptr + valid_rows * stride_sam
    scale_b_ptr += col // GROUP * stride_sbn
    acc = tl.zeros((BLOCK_M, GROUP), dtype=tl.float32)
    for _ in range(0, K, GROUP):
        scale = tl.load(scale_a_ptrs) * tl.load(scale_b_ptr)
        partial = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs))  # starts from zero: nothing else is summed in 14 bits
        acc += partial * scale[:, None]
        a_ptrs += GROUP
        b_ptrs += GROUP
        scale_a_ptrs += stride_sak
        scale_b_ptr += stride_sbk
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The next buffer of the ring; the phase that its barriers wait for changes with every round."""
    slot += 1
    again = slot == STAGES
    return gl.where(again, 0, slot), gl.where(again, phase ^ 1, phase)


@gluon.jit
def _load_tiles(
    a_desc, bt_desc, scale_a_desc, a_bufs, b_bufs, scale_bufs, full, empty, M, N, K,
    GROUP: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warp: fill the ring, for each group of K of each tile.

    TMA counts the bytes of whole boxes, and fills with zeros what lies outside the matrix.
    """
    BLOCK_M: gl.constexpr = 64 * WARPGROUPS
    BYTES: gl.constexpr = (BLOCK_M + GROUP) * GROUP + 4 * BLOCK_M
    slot = 0
    phase = 1  # of a barrier that nobody has arrived at: all buffers are empty
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, GROUP)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = _gluon_tile_of(tile, M, N, BLOCK_M, GROUP, GROUP_M)
        for k in range(0, K, GROUP):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(bt_desc, [col, k], ready, b_bufs.index(slot))
            for i in gl.static_range(WARPGROUPS):
                at = slot * WARPGROUPS + i
                tma.async_copy_global_to_shared(a_desc, [row + 64 * i, k], ready, a_bufs.index(at))
                tma.async_copy_global_to_shared(scale_a_desc, [k // GROUP, row + 64 * i], ready, scale_bufs.index(at))
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _start_product(
    a_bufs, b_bufs, scale_bufs, scale_b_ptr, full, slot, phase, at, GROUP: gl.constexpr, MMA: gl.constexpr
):
    """Wait for a buffer and start its product: what will hold it, and the scale of each of its rows."""
    scale_b = gl.load(scale_b_ptr)  # on its way while the operands are
    mbarrier.wait(full.index(slot), phase)
    zeros = gl.zeros((64, GROUP), gl.float32, MMA)
    b = b_bufs.index(slot).permute((1, 0))
    partial = warpgroup_mma(a_bufs.index(at), b, zeros, use_acc=False, is_async=True)
    scale_a = scale_bufs.index(at).reshape([64]).load(gl.SliceLayout(1, MMA))
    return partial, scale_a * scale_b


@gluon.jit
def _promote(acc, partial, scale, ORDERED: gl.constexpr):
    """acc + partial * scale. ORDERED: here, where it overlaps the next product.

    Else the assembler may place it where it likes, which is behind the wait for that product.
    """
    if ORDERED:
        return gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [partial, scale[:, None] + gl.zeros_like(partial), acc],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return acc + partial * scale[:, None]


@gluon.jit
def _store(c_desc, c_buf, value, row, col):
    tma.store_wait(0)  # what was stored from this buffer before
    c_buf.store(value.to(c_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, col], c_buf)


@gluon.jit
def _multiply(
    a_bufs, b_bufs, scale_bufs, full, empty, scale_b_ptr, c_desc, c_bufs, M, N, K, stride_sbk, stride_sbn,
    WHICH: gl.constexpr, GROUP: gl.constexpr, WARPGROUPS: gl.constexpr, PAIRS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of each tile. A buffer is empty again when all warpgroups have arrived at its barrier."""
    BLOCK_M: gl.constexpr = 64 * WARPGROUPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, GROUP, 32])
    c_buf = c_bufs.index(WHICH)
    groups = K // GROUP
    slot = 0
    phase = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, GROUP)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = _gluon_tile_of(tile, M, N, BLOCK_M, GROUP, GROUP_M)
        scale_b_at = scale_b_ptr + col // GROUP * stride_sbn
        acc = gl.zeros((64, GROUP), gl.float32, MMA)
        single = groups
        if PAIRS:
            for _ in range(groups // 2):
                partial, scale = _start_product(
                    a_bufs, b_bufs, scale_bufs, scale_b_at, full, slot, phase, slot * WARPGROUPS + WHICH, GROUP, MMA
                )
                first = slot
                slot, phase = _next(slot, phase, STAGES)
                partial_2, scale_2 = _start_product(
                    a_bufs, b_bufs, scale_bufs, scale_b_at + stride_sbk, full, slot, phase,
                    slot * WARPGROUPS + WHICH, GROUP, MMA,
                )  # fmt: skip
                done = warpgroup_mma_wait(1, deps=(partial,))
                mbarrier.arrive(empty.index(first))
                acc = _promote(acc, done, scale, ORDERED=True)
                done = warpgroup_mma_wait(0, deps=(partial_2,))
                mbarrier.arrive(empty.index(slot))
                acc = _promote(acc, done, scale_2, ORDERED=True)
                slot, phase = _next(slot, phase, STAGES)
                scale_b_at += 2 * stride_sbk
            single = groups % 2
        for _ in range(single):
            partial, scale = _start_product(
                a_bufs, b_bufs, scale_bufs, scale_b_at, full, slot, phase, slot * WARPGROUPS + WHICH, GROUP, MMA
            )
            done = warpgroup_mma_wait(0, deps=(partial,))
            mbarrier.arrive(empty.index(slot))
            acc = _promote(acc, done, scale, ORDERED=PAIRS)
            slot, phase = _next(slot, phase, STAGES)
            scale_b_at += stride_sbk
        if PARTS == 1:
            _store(c_desc, c_buf, acc, row + 64 * WHICH, col)
        else:
            left, right = acc.reshape(64, 2, GROUP // 2).permute(0, 2, 1).split()
            _store(c_desc, c_buf, left, row + 64 * WHICH, col)
            _store(c_desc, c_buf, right, row + 64 * WHICH, col + GROUP // 2)
    tma.store_wait(0)


@gluon.jit
def blockwise_matmul_warp_specialized_kernel(
    a_desc, bt_desc, scale_a_desc, scale_b_ptr, c_desc, M, N, K, stride_sbk, stride_sbn,
    GROUP: gl.constexpr, WARPGROUPS: gl.constexpr, PAIRS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    GROUP_M: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * WARPGROUPS, 64, GROUP], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(bt_desc.dtype, [STAGES, GROUP, GROUP], bt_desc.layout)
    scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * WARPGROUPS, 1, 64], scale_a_desc.layout)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, [WARPGROUPS, 64, GROUP // PARTS], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (_multiply, (a_bufs, b_bufs, scale_bufs, full, empty, scale_b_ptr, c_desc, c_bufs, M, N, K, stride_sbk,
                         stride_sbn, 0, GROUP, WARPGROUPS, PAIRS, STAGES, PARTS, GROUP_M)),
            (_multiply, (a_bufs, b_bufs, scale_bufs, full, empty, scale_b_ptr, c_desc, c_bufs, M, N, K, stride_sbk,
                         stride_sbn, 1, GROUP, WARPGROUPS, PAIRS, STAGES, PARTS, GROUP_M)),
            (_load_tiles, (a_desc, bt_desc, scale_a_desc, a_bufs, b_bufs, scale_bufs, full, empty, M, N, K, GROUP,
                           WARPGROUPS, STAGES, GROUP_M)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (a_bufs, b_bufs, scale_bufs, full, empty, scale_b_ptr, c_desc, c_bufs, M, N, K, stride_sbk,
                         stride_sbn, 0, GROUP, WARPGROUPS, PAIRS, STAGES, PARTS, GROUP_M)),
            (_multiply, (a_bufs, b_bufs, scale_bufs, full, empty, scale_b_ptr, c_desc, c_bufs, M, N, K, stride_sbk,
                         stride_sbn, 1, GROUP, WARPGROUPS, PAIRS, STAGES, PARTS, GROUP_M)),
            (_multiply, (a_bufs, b_bufs, scale_bufs, full, empty, scale_b_ptr, c_desc, c_bufs, M, N, K, stride_sbk,
                         stride_sbn, 2, GROUP, WARPGROUPS, PAIRS, STAGES, PARTS, GROUP_M)),
            (_load_tiles, (a_desc, bt_desc, scale_a_desc, a_bufs, b_bufs, scale_bufs, full, empty, M, N, K, GROUP,
                           WARPGROUPS, STAGES, GROUP_M)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


def architecture(device: torch.device) -> int | None:
    """90 for sm_90: that of a GPU, or the one that is compiled for; None where kernels are interpreted."""
    if hardware.OFFLINE_SM or device.type != "cuda":
        return hardware.OFFLINE_SM
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def rows_contiguous(scale: torch.Tensor) -> torch.Tensor:
    """The same scales [M, K / 128] with M contiguous and columns a multiple of 4 apart, as TMA reads them."""
    M, groups = scale.shape
    return torch.empty_strided(
        (M, groups), (1, triton.cdiv(max(M, 1), 4) * 4), dtype=scale.dtype, device=scale.device
    ).copy_(scale)


def _validate(name, a, b, scale_a, scale_b, out_dtype, check_scales) -> None:
    """The checks that all variants share: see Errors in the module docstring."""
    require_triton_device(name, a, b)
    require_fp8(name, a=a, b=b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}; need [M, K] and [K, N]")
    M, K, N = *a.shape, b.shape[1]
    if K % GROUP:
        raise ValueError(f"{name}: K is {K}, but a scale covers {GROUP} of it: pad K to a multiple, with zeros")
    if a.stride(1) != 1 and a.numel():
        raise ValueError(
            f"{name}: a has strides {a.stride()}; FP8 tensor cores take operands with K contiguous: a.contiguous()"
        )
    if b.stride(0) != 1 and b.numel():
        raise ValueError(
            f"{name}: b has strides {b.stride()}; FP8 tensor cores take operands with K contiguous, so b must be "
            f"column-major: keep weights as [N, K] and pass weights.t(), or b.t().contiguous().t()"
        )
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {OUT_DTYPES}")
    groups = K // GROUP
    scales = {"scale_a": (scale_a, ((M, groups),)), "scale_b": (scale_b, ((groups, triton.cdiv(N, GROUP)),))}
    require_scales(name, a, check_scales, **scales)
    require_triton_device(name, a, scale_a, scale_b)
    if (sm := architecture(a.device)) and sm < 89:
        raise RuntimeError(f"{name}: this GPU is sm_{sm}; FP8 tensor cores come with sm_89")


def _launch_tiles(a, b, c, scale_a, scale_b) -> None:
    (M, K), N = a.shape, b.shape[1]
    num_warps = 8 if device_limits(a.device).shared_bytes < LITTLE_SHARED else 4
    blockwise_matmul_tiles_kernel[(triton.cdiv(M, TILE["BLOCK_M"]) * triton.cdiv(N, GROUP),)](
        a, b, c, scale_a, scale_b, M, N, K,
        a.stride(0), b.stride(1), c.stride(0), *scale_a.stride(), *scale_b.stride(),
        GROUP=GROUP, **TILE, num_warps=num_warps,
    )  # fmt: skip


def efficiency(M: int, N: int, warpgroups: int, sms: int) -> float:
    """The share of the SMs' time that goes into the result.

    Lost is what tiles reach over its edges, and SMs without a tile in the last wave.
    """
    tiles = triton.cdiv(M, 64 * warpgroups) * triton.cdiv(N, GROUP)
    waves = triton.cdiv(tiles, sms)
    return M * N / (waves * sms * 64 * warpgroups * GROUP)


def choose_warpgroups(M: int, N: int, K: int, sms: int) -> int:
    """Two, or three for a large GEMM whose waves suffer little from the larger tile.

    A tile of 192 x 128 reads (192 + 128) / (192 * 128) bytes for each product and step of K, one of 128 x 128 a fifth
    more. That is what counts once a GEMM is long enough for L2 and power to limit it; before, two products at a time
    do, for which three warpgroups have no registers.
    """
    large = M * N * K >= LARGE
    return 3 if large and efficiency(M, N, 3, sms) >= efficiency(M, N, 2, sms) - 0.01 else 2


def _launch_warp_specialized(a, b, c, scale_a, scale_b, warpgroups: int | None = None) -> None:
    (M, K), N = a.shape, b.shape[1]
    sms = device_limits(a.device).sms
    warpgroups = warpgroups or choose_warpgroups(M, N, K, sms)
    parts = c.element_size() // 2  # the ring leaves no room for more than 64 x 128 x 2 bytes of each warpgroup
    tiles = triton.cdiv(M, 64 * warpgroups) * triton.cdiv(N, GROUP)
    blockwise_matmul_warp_specialized_kernel[(min(tiles, sms),)](
        gluon_descriptor(a, [64, GROUP]), gluon_descriptor(b.t(), [GROUP, GROUP]),
        gluon_descriptor(scale_a.t(), [1, 64]), scale_b, gluon_descriptor(c, [64, GROUP // parts]), M, N, K,
        *scale_b.stride(), GROUP=GROUP, WARPGROUPS=warpgroups, PARTS=parts, **CONFIGS[warpgroups], num_warps=4,
    )  # fmt: skip


LAUNCH: dict[str, Callable] = {"tiles": _launch_tiles, "warp specialized": _launch_warp_specialized}
VARIANTS = tuple(LAUNCH)


def _require_hopper_layout(name, a, b, scale_a, out_dtype) -> None:
    """What warp specialized needs beyond the checks that all variants share."""
    sm = architecture(a.device)
    if sm != 90:
        here = f"this is sm_{sm}" if sm else "Triton interprets kernels here, but not Gluon's"
        raise RuntimeError(f"{name}: 'warp specialized' is a Gluon kernel for sm_90 ({here}): use variant='tiles'")
    N, multiple = b.shape[1], 16 // out_dtype.itemsize
    if N % multiple:
        raise ValueError(
            f"{name}: N is {N}; TMA needs rows of 16-byte multiples: pad N to a multiple of {multiple}, or use "
            f"variant='tiles'"
        )
    M, groups = scale_a.shape
    if (
        (M > 1 and scale_a.stride(0) != 1)
        or (groups > 1 and (scale_a.stride(1) % 4 or scale_a.stride(1) < M))
        or scale_a.data_ptr() % 16
    ):
        raise ValueError(
            f"{name}: scale_a has strides {scale_a.stride()} and starts {scale_a.data_ptr() % 16} bytes past a "
            f"multiple of 16; TMA reads it along M: pass rows_contiguous(scale_a), or use variant='tiles'"
        )
    require_tma_layout(name, a=a, **{"b.t()": b.t()})


def blockwise_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    variant: str = "tiles",
    check_scales: bool = True,
) -> torch.Tensor:
    """(a * scale_a) @ (b * scale_b), scales by group and block, by one of VARIANTS; limits: see the module docstring.

    check_scales reads the scales, which waits for the GPU; pass False where they are known to be good.
    """
    name = "blockwise_matmul"
    _validate(name, a, b, scale_a, scale_b, out_dtype, check_scales)
    if not isinstance(variant, str) or variant not in VARIANTS:
        raise ValueError(f"{name}: variant {variant!r} is not one of {VARIANTS}")
    if variant == "warp specialized":
        _require_hopper_layout(name, a, b, scale_a, out_dtype)
    shape = a.shape[0], b.shape[1]
    if not a.shape[1]:
        return torch.zeros(shape, dtype=out_dtype, device=a.device)
    c = torch.empty(shape, dtype=out_dtype, device=a.device)
    if c.numel():
        LAUNCH[variant](a, b, c, scale_a, scale_b)
    return c


def reference(a, b, scale_a, scale_b) -> torch.Tensor:
    weight = dequantize_reference(b.t(), scale_b.t(), (GROUP, GROUP))
    return dequantize_reference(a, scale_a, (1, GROUP)) @ weight.t()


# What each variant must hold in its PTX; `show_code` also counts that no other tensor-core instruction is there.
CODE = {
    "tiles": {
        89: ("mma f8", "mma.sync", "cp.async"),
        90: ("mma f8", "wgmma", "cp.async"),
        100: ("mma f8", "tcgen05.mma", "cp.async"),
        120: ("mma f8", "mma.sync", "cp.async"),
    },
    "warp specialized": {90: ("mma f8", "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg")},
}
SQUARES = [(n, n, n) for n in (2048, 4096, 8192, 16384)]
LAYERS = [(4096, 14336, 4096), (4096, 4096, 14336), (8192, 28672, 8192)]


def runnable(h: Harness) -> tuple[str, ...]:
    """The variants that this machine can run."""
    return VARIANTS if not h.interpreted and h.machine.sm == 90 else ("tiles",)


def budget(h: Harness, K: int) -> dict:
    """On Hopper only a group is summed in about 14 bits, however long K is; the interpreter sums all in float32."""
    return {"terms": K} if h.interpreted else {"terms": GROUP, "acc": 2.0**-13, "roundings": GROUP // 32}


def _spread(blocks: torch.Tensor) -> torch.Tensor:
    """One number for each block of 128x128 -> one for each element."""
    return blocks.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)


def operands(h: Harness, M: int, N: int, K: int, dtypes=(E4M3, E4M3)) -> tuple[torch.Tensor, ...]:
    """a, b, scale_a, scale_b of a layer: activations, and weights as [N, K]; groups and blocks of different sizes."""
    x, w = h.randn(M, K), h.randn(N, K)
    x.view(M, -1, GROUP).mul_(h.randn(M, K // GROUP, 1, scale=0.5).exp_())
    w.mul_(_spread(h.randn(triton.cdiv(N, GROUP), K // GROUP, scale=0.5).exp_())[:N])
    a, scale_a = quantize_reference(x, (1, GROUP), dtypes[0])
    w, scale_b = quantize_reference(w, (GROUP, GROUP), dtypes[1])
    return a, w.t(), rows_contiguous(scale_a), scale_b.t()


def torch_dequantized(a, b, scale_a, scale_b) -> torch.Tensor:
    weight = b.float() * _spread(scale_b)[:, : b.shape[1]]
    return ((a.float() * scale_a.repeat_interleave(GROUP, 1)) @ weight).bfloat16()


def scaled_mm_blockwise(a, b, scale_a, scale_b, out_dtype=torch.bfloat16) -> torch.Tensor:
    """cuBLASLt's, which takes these very layouts."""
    from torch.nn.functional import ScalingType, scaled_mm

    one_row, block = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return scaled_mm(a, b, scale_a, one_row, scale_b, block, output_dtype=out_dtype)


def works(h: Harness, name: str, fn: Callable, *inputs) -> bool:
    """Whether a library call takes these inputs; says why not."""
    try:
        fn(*inputs)
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        h.say(f"no {name} here: {str(error).strip().splitlines()[0]}")
        return False
    return True


def show_code(h: Harness) -> None:
    """The FP8 instruction of every variant, of tiles of two and three warpgroups; raises where any other multiplies."""
    for variant, find in CODE.items():
        for n in (4096,) if variant == "tiles" else (4096, 8192):
            a, w = h.meta(n, n, dtype=E4M3), h.meta(n, n, dtype=E4M3)
            scale_a, scale_b = (h.meta(n // GROUP, m, dtype=torch.float32) for m in (n, n // GROUP))
            args = a, w.t(), scale_a.t(), scale_b.t()
            for kernel in h.codegen(blockwise_matmul, *args, variant=variant, find=find):
                used = {x: kernel.found[x] for x in ("mma.sync", "wgmma", "tcgen05.mma") if x in kernel.found}
                if sum(used.values()) != kernel.found["mma f8"]:
                    raise CodegenError(f"{variant} on sm_{kernel.sm}: {used}, FP8 only in {kernel.found['mma f8']}")


def compare(h: Harness, M: int, N: int, K: int) -> dict[str, float]:
    """One table; how many times as fast as the library's call each variant is."""
    inputs = operands(h, M, N, K)
    baseline = "_scaled_mm blockwise"
    known = {baseline: scaled_mm_blockwise}
    if h.interpreted or not works(h, baseline, scaled_mm_blockwise, *inputs):
        known, baseline = {"torch": torch_dequantized}, "torch"
    ours = {
        f"triton {variant}": functools.partial(blockwise_matmul, variant=variant, check_scales=False)
        for variant in runnable(h)
    }
    table = h.compare(
        known | ours, reference, *inputs, baseline=baseline, dtype=torch.bfloat16,
        work=Work(bytes=M * K + K * N + 2 * M * N, flops=2 * M * N * K, dtype=E4M3),
        case=f"{M}x{N}x{K} e4m3 1x128 by 128x128", **budget(h, K),
    )  # fmt: skip
    if not table or table.rows[-1].ms is None or baseline == "torch":
        return {}
    return {row.variant: row.speedup for row in table.rows if row.ours}


def error_of(got: torch.Tensor, want: torch.Tensor) -> list[float]:
    """The error's root mean square and its largest, over the root mean square of what is wanted; three digits."""
    error, size = got.double() - want, want.square().mean().sqrt()
    return [float(f"{x / size:.2e}") for x in (error.square().mean().sqrt(), error.abs().max())]


def one_sum(a, b) -> torch.Tensor:
    """All products of an element in one sum of the tensor cores: this repository's GEMM with a scale per tensor."""
    from examples.fp8.fp8_matmul import fp8_matmul

    one = torch.ones((), device=a.device)
    return fp8_matmul(a, b, one, one, out_dtype=torch.float32, variant="pointers", check_scales=False)


def errors_by_length(h: Harness) -> None:
    """The error of one sum and of promoted ones against float64, on the same numbers, by the length of K."""
    M, N = h.pick(interpreted=(64, 128), quick=(1024, 1024), full=(4096, 4096))
    lengths = h.pick(interpreted=(512, 2048), quick=(512, 4096, 32768), full=[2**n for n in range(9, 16)])
    rows, chained, promoted = {}, "fp8_matmul, one sum", f"blockwise {runnable(h)[-1]}"
    for mean in (0, 1):
        for K in lengths:
            a, w = ((h.randn(n, K) + mean).to(E4M3) for n in (M, N))
            b, one = w.t(), torch.ones((), device=h.device)
            # Laid out as the library takes them: M and K contiguous.
            ones = (
                torch.ones(K // GROUP, M, device=h.device).t(),
                torch.ones(N // GROUP, K // GROUP, device=h.device).t(),
            )
            calls = {chained: functools.partial(one_sum, a, b)}
            if not h.interpreted:
                for name, fast in (("_scaled_mm fast", True), ("_scaled_mm", False)):
                    calls[name] = functools.partial(
                        torch._scaled_mm, a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast
                    )
                calls["_scaled_mm blockwise"] = functools.partial(scaled_mm_blockwise, a, b, *ones, torch.float32)
            for variant in runnable(h):
                calls[f"blockwise {variant}"] = functools.partial(blockwise_matmul, a, b, *ones, torch.float32, variant)
            want = a.double() @ b.double()
            rows[f"K = {K}, mean {mean}"] = {
                name: error_of(call(), want)
                for name, call in calls.items()
                if not name.startswith("_") or works(h, f"{name} with K = {K} to float32", call)
            }
    h.table("rms and largest error over the rms of the result, float32 out, all scales 1", rows)
    if h.interpreted:
        h.say("the interpreter sums in float32 throughout: what Hopper's tensor cores drop does not show in it")
    for mean in (0, 1):
        shortest, longest = (rows[f"K = {K}, mean {mean}"] for K in (lengths[0], lengths[-1]))
        h.say(
            f"mean {mean}, K = {lengths[0]} -> {lengths[-1]}, rms: one sum {shortest[chained][0]:.1e} -> "
            f"{longest[chained][0]:.1e}, promoted {shortest[promoted][0]:.1e} -> {longest[promoted][0]:.1e}"
        )


def demo(h: Harness) -> None:
    # One row; one group; a tail of columns within a block, tails of rows, an odd number of groups; nothing to sum.
    for M, N, K in [(1, 8, 128), (129, 264, 384), (5, 16, 0)]:
        for variant in runnable(h):
            for dtypes, out in [((E4M3, E4M3), torch.bfloat16), ((E5M2, E4M3), torch.float16)]:
                a, b, scale_a, scale_b = operands(h, M, N, K or GROUP, dtypes)
                inputs = (a, b, scale_a, scale_b) if K else (a[:, :0], b[:0], scale_a[:, :0], scale_b[:0])
                fn = functools.partial(blockwise_matmul, out_dtype=out, variant=variant)
                what = f"{variant} {M}x{N}x{K} {' by '.join(str(d)[6:] for d in dtypes)}"
                h.check(fn, reference, *inputs, what=what, dtype=out, **budget(h, K))

    show_code(h)

    ratios: dict[str, dict[str, float]] = {}
    for M, N, K in h.pick(interpreted=[(130, 264, 768)], quick=SQUARES[:2], full=SQUARES + LAYERS):
        for variant, ratio in compare(h, M, N, K).items():
            ratios.setdefault(variant, {})[f"{M}x{N}x{K}"] = ratio
    if ratios:
        means = {name: round(statistics.geometric_mean(cases.values()), 4) for name, cases in ratios.items()}
        h.fact("geometric mean over _scaled_mm blockwise", means)
        h.fact("least over _scaled_mm blockwise", {n: round(min(cases.values()), 4) for n, cases in ratios.items()})
        best, first = max(means, key=means.get), next(iter(means))
        h.say(f"{best} is {means[best] / means[first]:.2f}x {first}, geometric mean of {len(ratios[best])}")

    if not h.profile:
        errors_by_length(h)


if __name__ == "__main__":
    run(demo)
