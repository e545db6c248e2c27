"""Microscaling: FP8 and FP4 with a scale for every 32 or 16 values, which Blackwell's tensor cores multiply themselves.

Technique  A group of 32 or 16 values along K shares a scale of 8 bits:
           mxfp8  e4m3 values, one power of two (e8m0) for 32: 8.25 bits a value;
           mxfp4  e2m1 values, one power of two for 32: 4.25 bits;
           nvfp4  e2m1 values, one e4m3 scale for 16 and one float32 scale for the tensor: 4.5 bits.
           The quantizers read a tensor once (nvfp4 twice, unless the tensor's scale is given) and write values, two FP4
           to a byte with the first in the low half, and scales: as [M, K / group], or in the tiles of 128 x 4 that the
           tensor cores take. tl.dot_scaled hands both to the instruction: tcgen05.mma with block_scale on sm_100,
           mma.sync with block_scale on sm_120. Before those the same kernel decodes both to 16-bit operands (in the
           interpreter to 32-bit ones): exact, but an emulation, in which no block-scaled instruction runs.
Question   What do mxfp8, mxfp4 and nvfp4 lose, and what does a GPU without their instructions gain by them?
Needs      triton, sm_90
Shapes     quantize: x [M, K], contiguous rows, K a multiple of the group -> q [M, K], packed [M, K / 2], and scales.
           matmul: a [M, K], b [N, K] with swizzled scales [ceil(rows / 128), ceil(K / group / 4), 32, 16] -> a @ b.T,
           [M, N]; any M and N, K a multiple of 32.
Dtypes     x: float32, float16, bfloat16; q: float8_e4m3fn or float4_e2m1fn_x2; scales: float8_e8m0fnu or float8_e4m3fn;
           out: bfloat16, float16, float32, from float32 sums.
Errors     TypeError for another dtype; ValueError for a format or rule that does not exist, rank, K, inner sizes that
           differ, a layout TMA cannot load, scales of another shape, a tensor's scale that is missing, superfluous or
           not positive and finite (reading it waits for the GPU: check_scales=False), or values and scales on two
           devices; RuntimeError for a device without Triton or an input that requires grad. No errors: a group with
           NaN or an infinity gets a NaN scale, so it reads back as NaN, and no other does; zeros stay zeros.
Wins when  the GPU has the instructions. Before those it saves memory; the tables say what it costs in time.
Source     OCP Microscaling Formats (MX) 1.0, section 6.3; NVIDIA's description of NVFP4; scale tiles as in cuBLAS.
Run        python examples/fp8/microscaling.py
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from harness import (
    Harness,
    Work,
    dequantize_reference,
    device_limits,
    interpreted,
    quantize_reference,
    require_tma_layout,
    require_triton_device,
    run,
    tma_descriptor,
)
from harness.fp8 import FLOOR

import torch
import triton
import triton.language as tl


class Format(NamedTuple):
    element: torch.dtype
    scale: torch.dtype
    group: int
    pack: int  # values in a byte
    dot: str  # what tl.dot_scaled calls the element
    largest: float
    emulated: tl.dtype  # holds a value times its scale exactly (bfloat16 down to 2**-133: an mxfp8 group with an
    # amax below 2**-119 may lose bits)

    @property
    def bits(self) -> float:
        return 8 / self.pack + 8 / self.group


FP4, E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
FORMATS = {
    "mxfp8": Format(torch.float8_e4m3fn, E8M0, 32, 1, "e4m3", 448.0, tl.bfloat16),
    "mxfp4": Format(FP4, E8M0, 32, 2, "e2m1", 6.0, tl.bfloat16),
    "nvfp4": Format(FP4, torch.float8_e4m3fn, 16, 2, "e2m1", 6.0, tl.float16),
}
# The kind of block-scaled instruction on sm_100 and on sm_120, as PTX names it.
KINDS = {
    "mxfp8": ("kind::mxf8f6f4", "kind::mxf8f6f4"),
    "mxfp4": ("kind::mxf4", "kind::mxf4nvf4"),
    "nvfp4": ("kind::mxf4nvf4", "kind::mxf4nvf4"),
}
RULES = ("floor", "up")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST_E4M3 = 2.0**-9
NV_SPAN = 448.0 * 6.0  # largest scale times largest value: what the tensor's scale maps its amax to

QUANTIZE_VALUES, MAX_COLS = 4096, 1024  # of a program
# BLOCK_M and BLOCK_N (multiples of 128), BLOCK_K, warps, stages. Native tiles count BLOCK_K in bytes: rows of 128.
LARGE, SMALL = (128, 256, 128, 8, 4), (128, 128, 128, 8, 3)
EMULATED = (128, 128, 128, 8, 3)  # BLOCK_K in values: 4 groups of 32, one tile of scales
GROUP_M = 8


@triton.jit
def amax_kernel(x_ptr, amax_ptr, M, K, stride_xm, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64) * stride_xm + cols, mask=(rows < M) & (cols < K), other=0.0).to(tl.float32)
    # Magnitudes are ordered as their bits are; what is not finite ruins its own group only, so it does not count here.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(amax_ptr, tl.max(tl.where(bits < 0x7F800000, bits, 0)))


@triton.jit
def _e2m1(x):
    """The code of e2m1 nearest to x, ties to even, at most 6: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign."""
    a = tl.minimum(tl.abs(x), 6.0)
    # In [2**e, 2**(e + 1)) codes are 2**(e - 1) apart, below 1 as in [1, 2). Adding 2**(e + 22) leaves a's bits below
    # that step no room, so the hardware's own rounding counts the steps in the last bits of the sum.
    big = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, 127 << 23) + (22 << 23)
    steps = (a + big.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - big
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return (steps + (big >> 22) - 2 * (127 + 22)) | sign


@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, scale_ptr, tensor_scale_ptr, M, K, stride_xm,
    GROUP: tl.constexpr, PACK: tl.constexpr, NV: tl.constexpr, EMAX: tl.constexpr, CARRY: tl.constexpr,
    SWIZZLED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    rows_long = rows.to(tl.int64)
    x = tl.load(x_ptr + rows_long * stride_xm + cols, mask=(rows < M) & (cols < K), other=0.0).to(tl.float32)
    x = x.reshape(BLOCK_M, BLOCK_K // GROUP, GROUP)
    # As integers NaN and infinity are above every number, so the maximum finds them too.
    amax_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    finite = amax_bits < 0x7F800000
    if NV:
        tensor_scale = tl.load(tensor_scale_ptr)
        scale = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), 6.0 * tensor_scale)
        scale = tl.maximum(scale, 0.001953125).to(tl.float8e4nv)  # 2**-9, the smallest; beyond 448 it saturates
        factor = tl.div_rn(1.0, scale.to(tl.float32) * tensor_scale)
        code = tl.where(finite, scale.to(tl.uint8, bitcast=True).to(tl.int32), 0x7F)
    else:
        # floor(log2(amax)) - EMAX, plus 1 where CARRY makes a fraction above that of the largest element overflow.
        code = tl.maximum(((amax_bits + CARRY) >> 23) - EMAX, 0)
        factor = ((254 - code) << 23).to(tl.float32, bitcast=True)  # a power of two: scaling rounds nothing
        code = tl.where(finite, code, 0xFF)
    x = tl.where(finite[:, :, None], x * factor[:, :, None], 0.0)

    bytes_k = K // PACK
    at = tl.program_id(1) * (BLOCK_K // PACK) + tl.arange(0, BLOCK_K // PACK)[None, :]
    if PACK == 2:
        low, high = tl.split(_e2m1(x).reshape(BLOCK_M, BLOCK_K // 2, 2))
        q = (low | (high << 4)).to(tl.uint8)
    else:
        q = x.reshape(BLOCK_M, BLOCK_K).to(tl.float8e4nv)  # saturates
    tl.store(q_ptr + rows_long * bytes_k + at, q, mask=(rows < M) & (at < bytes_k))

    groups = tl.program_id(1) * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP)[None, :]
    n_groups = K // GROUP
    inside = (rows < M) & (groups < n_groups)
    if SWIZZLED:
        tiles_k = tl.cdiv(n_groups, 4)
        tile = rows_long // 128 * tiles_k + groups // 4
        scale_at = tile * 512 + rows % 32 * 16 + rows % 128 // 32 * 4 + groups % 4
        written = (rows < tl.cdiv(M, 128) * 128) & (groups < tiles_k * 4)  # the padding too, as nothing else would
        tl.store(scale_ptr + scale_at, tl.where(inside, code, 0).to(tl.uint8), mask=written)
    else:
        tl.store(scale_ptr + rows_long * n_groups + groups, code.to(tl.uint8), mask=inside)


def _format(name: str, fmt: str) -> Format:
    if not isinstance(fmt, str) or fmt not in FORMATS:
        raise ValueError(f"{name}: format {fmt!r} is not one of {tuple(FORMATS)}")
    return FORMATS[fmt]


def _check_tensor_scale(name: str, fmt: str, scale: torch.Tensor | None, like: torch.Tensor, values: bool) -> None:
    if (scale is not None) != (fmt == "nvfp4"):
        have = "has no" if fmt != "nvfp4" else "needs a"
        raise ValueError(f"{name}: {fmt} {have} scale for the tensor, got {type(scale).__name__}")
    if scale is None:
        return
    if not isinstance(scale, torch.Tensor) or scale.dtype is not torch.float32:
        got = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
        raise TypeError(f"{name}: the tensor's scale is {got}; pass a float32 tensor of one element")
    if scale.numel() != 1 or scale.device != like.device:
        raise ValueError(
            f"{name}: the tensor's scale has shape {list(scale.shape)} and is on {scale.device}; need one element on "
            f"{like.device}"
        )
    if values and scale.device.type != "meta" and not 0 < scale.item() < float("inf"):
        raise ValueError(f"{name}: the tensor's scale is {scale.item()}; it must be positive and finite")


def scales_shape(rows: int, groups: int, swizzled: bool) -> tuple[int, ...]:
    return (triton.cdiv(rows, 128), triton.cdiv(groups, 4), 32, 16) if swizzled else (rows, groups)


def mx_quantize(
    x: torch.Tensor,
    fmt: str,
    rule: str = "floor",
    tensor_scale: torch.Tensor | None = None,
    swizzled: bool = False,
    check_scales: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x [M, K] -> values, scales and, for nvfp4, the tensor's scale, in one of FORMATS; errors: the module docstring.

    `rule` rounds a power of two: "floor", as the MX specification has it, lets the largest values of a group saturate;
    "up" takes the next power where they would. A `tensor_scale` that is known saves nvfp4 its second reading of x.
    """
    name = "mx_quantize"
    require_triton_device(name, x, *([tensor_scale] if isinstance(tensor_scale, torch.Tensor) else []))
    form = _format(name, fmt)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype} is not one of {DTYPES}")
    if not isinstance(rule, str) or rule not in RULES or (rule != "floor" and fmt == "nvfp4"):
        raise ValueError(f"{name}: rule {rule!r} is not one of {RULES}, of which nvfp4 has none but the first")
    if x.ndim != 2 or x.shape[1] % form.group:
        raise ValueError(
            f"{name}: shape {tuple(x.shape)}; need [M, K] with K a multiple of {form.group}, the group of {fmt}: pad it"
        )
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"{name}: strides {x.stride()}; rows must be contiguous: call x.contiguous() first")
    if tensor_scale is not None:
        _check_tensor_scale(name, fmt, tensor_scale, x, check_scales)
    M, K = x.shape
    block_k = min(MAX_COLS, max(128, triton.next_power_of_2(K)))  # 128 columns hold a tile's 4 groups of scales
    block_m = QUANTIZE_VALUES // block_k
    if triton.cdiv(K, block_k) > 65535:  # the second dimension of a grid
        raise ValueError(f"{name}: K is {K}; quantize at most {65535 * MAX_COLS} columns at a time")
    if fmt == "nvfp4" and tensor_scale is None:
        amax = torch.zeros(1, dtype=torch.int32, device=x.device)
        if x.numel():
            grid = (triton.cdiv(M, 4 * block_m), triton.cdiv(K, block_k))
            amax_kernel[grid](x, amax, M, K, x.stride(0), BLOCK_M=4 * block_m, BLOCK_K=block_k, num_warps=8)
        tensor_scale = amax.view(torch.float32).clamp(min=FLOOR) * (1 / NV_SPAN)
    q = torch.empty(M, K // form.pack, dtype=torch.uint8, device=x.device).view(form.element)
    shape = scales_shape(M, K // form.group, swizzled)
    scale = torch.empty(shape, dtype=torch.uint8, device=x.device)
    if x.numel():
        rows, cols = (shape[0] * 128, shape[1] * 4 * form.group) if swizzled else (M, K)
        fraction = 0x600000 if form.dot == "e4m3" else 0x400000  # of 448 = 1.75 * 2**8, of 6 = 1.5 * 2**2
        quantize_kernel[(triton.cdiv(rows, block_m), triton.cdiv(cols, block_k))](
            x, q if form.pack == 1 else q.view(torch.uint8), scale, tensor_scale, M, K, x.stride(0),
            GROUP=form.group, PACK=form.pack, NV=fmt == "nvfp4", EMAX=8 if form.dot == "e4m3" else 2,
            CARRY=0x7FFFFF - fraction if rule == "up" else 0, SWIZZLED=swizzled, BLOCK_M=block_m, BLOCK_K=block_k,
            num_warps=4,
        )  # fmt: skip
    return q, scale.view(form.scale), tensor_scale


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales [rows, groups] as the tensor cores read them: [ceil(rows / 128), ceil(groups / 4), 32, 16], padded with 0.

    A tile holds 128 rows by 4 groups: row r and group g of it are byte 4 * (r // 32) + g of line r % 32.
    """
    rows, groups = scale.shape
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, -groups % 4, 0, -rows % 128))
    tiles = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0, 3, 2, 1, 4)
    return tiles.flatten(3).contiguous().view(scale.dtype)


def unswizzle_scales(scale: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """swizzle_scales undone."""
    tiles = scale.view(torch.uint8).unflatten(3, (4, 4)).permute(0, 3, 2, 1, 4)
    return tiles.flatten(3).flatten(0, 2)[:rows, :groups].contiguous().view(scale.dtype)


@triton.jit
def _decode(q, scale, FP4: tl.constexpr, GROUP: tl.constexpr, OPERAND: tl.constexpr):
    """[rows, K] in OPERAND of values and scales, without rounding: OPERAND has bits enough for each product."""
    if FP4:
        WIDE: tl.constexpr = tl.float32 == OPERAND
        MANTISSA: tl.constexpr = 23 if WIDE else (7 if tl.bfloat16 == OPERAND else 10)
        # The bits of e2m1 at the ends of a wider format's exponent and fraction are its value but for the bias.
        BIAS: tl.constexpr = 2.0**14 if tl.float16 == OPERAND else 2.0**126
        codes = tl.join(q & 15, q >> 4).reshape(q.shape[0], 2 * q.shape[1]).to(tl.uint32 if WIDE else tl.uint16)
        bits = ((codes & 7) << (MANTISSA - 1)) | ((codes & 8) << (28 if WIDE else 12))
        values = bits.to(OPERAND, bitcast=True) * tl.full((), BIAS, OPERAND)
    else:
        values = q.to(OPERAND)
    if scale.dtype == tl.uint8:
        # An exponent of a float32; its code 0 is 2**-127, a subnormal there, and 255 is NaN.
        bits = scale.to(tl.uint32) << 23
        scale = tl.where(scale == 0, 0x400000, tl.where(scale == 255, 0x7FC00000, bits)).to(tl.float32, bitcast=True)
    scales = scale.to(OPERAND)[:, :, None]
    return (values.reshape(scale.shape[0], scale.shape[1], GROUP) * scales).reshape(values.shape)


@triton.jit
def _unswizzled(tiles, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """[tiles of rows, tiles of K, 2, 256] bytes of scales as [ROWS, GROUPS]."""
    tiles = tiles.reshape(ROWS // 128, GROUPS // 4, 32, 4, 4).trans(0, 3, 2, 1, 4)
    return tiles.reshape(ROWS, GROUPS)


@triton.jit
def mx_matmul_kernel(
    a_desc, a_scale_desc, b_desc, b_scale_desc, c_ptr, a_tensor_scale_ptr, b_tensor_scale_ptr, M, N, K, stride_cm,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, NV: tl.constexpr,
    EMULATE: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    band = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + tile % (GROUP_M * tiles_n) % band
    tile_n = tile % (GROUP_M * tiles_n) // band
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a = a_desc.load([tile_m * BLOCK_M, k // PACK])
        b = b_desc.load([tile_n * BLOCK_N, k // PACK])
        step = k // GROUP // 4
        a_scale = _unswizzled(a_scale_desc.load([tile_m * (BLOCK_M // 128), step, 0, 0]), BLOCK_M, GROUPS)
        b_scale = _unswizzled(b_scale_desc.load([tile_n * (BLOCK_N // 128), step, 0, 0]), BLOCK_N, GROUPS)
        if EMULATE:
            a = _decode(a, a_scale, PACK == 2, GROUP, OPERAND)
            b = _decode(b, b_scale, PACK == 2, GROUP, OPERAND)
            acc = tl.dot(a, b.T, acc)
        else:
            acc = tl.dot_scaled(a, a_scale, FORMAT, b.T, b_scale, FORMAT, acc)
    if NV:
        acc *= tl.load(a_tensor_scale_ptr) * tl.load(b_tensor_scale_ptr)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    c = acc.to(c_ptr.dtype.element_ty)
    tl.store(c_ptr + rows.to(tl.int64) * stride_cm + cols, c, mask=(rows < M) & (cols < N))


def native() -> bool:
    """Whether tl.dot_scaled becomes a block-scaled instruction on the current device: from sm_100 on."""
    return not interpreted() and triton.runtime.driver.active.get_current_target().arch >= 100


def tile_for(device: torch.device, form: Format, emulate: bool) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, warps, stages: what spills nothing, and on sm_120 fits 99 KiB of shared memory.

    Emulated, that holds for sm_90; where the instruction exists, emulation is for comparison and may spill.
    """
    if emulate or not native():
        return EMULATED
    block_m, block_n, bytes_k, warps, stages = LARGE if device_limits(device).shared_bytes > 200 * 1024 else SMALL
    return block_m, block_n, bytes_k * form.pack, warps, stages


def _check_operand(name: str, label: str, q: torch.Tensor, scale: torch.Tensor, fmt: str) -> None:
    form = FORMATS[fmt]
    if q.dtype is not form.element or scale.dtype is not form.scale:
        raise TypeError(
            f"{name}: {label} is {q.dtype} with scales in {scale.dtype}; {fmt} is {form.element} with {form.scale}"
        )
    if q.ndim != 2:
        raise ValueError(f"{name}: {label} has shape {tuple(q.shape)}; need [rows, K / {form.pack}]")
    rows, K = q.shape[0], q.shape[1] * form.pack
    if K % 32:
        raise ValueError(f"{name}: K of {label} is {K}; need a multiple of 32 (the groups, and TMA's 16 bytes): pad it")
    need = scales_shape(rows, K // form.group, swizzled=True)
    if tuple(scale.shape) != need or not scale.is_contiguous():
        raise ValueError(
            f"{name}: scales of {label} have shape {list(scale.shape)}; need {list(need)}, contiguous: quantize with "
            f"swizzled=True, or call swizzle_scales on [{rows}, {K // form.group}]"
        )
    require_tma_layout(name, **{label: q, f"scales of {label}": scale})


def mx_matmul(
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    b_q: torch.Tensor,
    b_scale: torch.Tensor,
    fmt: str,
    out_dtype: torch.dtype = torch.bfloat16,
    a_tensor_scale: torch.Tensor | None = None,
    b_tensor_scale: torch.Tensor | None = None,
    emulate: bool | None = None,
    check_scales: bool = True,
) -> torch.Tensor:
    """a @ b.T for a [M, K] and b [N, K] quantized in `fmt`, scales swizzled; limits and errors: the module docstring.

    `emulate` decodes in the kernel: by default where there are no block-scaled instructions. False there leaves the
    decoding to tl.dot_scaled, which Triton then turns into bfloat16 products; ValueError for nvfp4, or interpreted.
    """
    name = "mx_matmul"
    given = [x for x in (a_tensor_scale, b_tensor_scale) if isinstance(x, torch.Tensor)]
    require_triton_device(name, a_q, a_scale, b_q, b_scale, *given)
    form = _format(name, fmt)
    if out_dtype not in DTYPES:
        raise TypeError(f"{name}: out_dtype {out_dtype} is not one of {DTYPES}")
    for label, q, scale in (("a", a_q, a_scale), ("b", b_q, b_scale)):
        _check_operand(name, label, q, scale, fmt)
    for tensor_scale in (a_tensor_scale, b_tensor_scale):
        _check_tensor_scale(name, fmt, tensor_scale, a_q, check_scales)
    if a_q.shape[1] != b_q.shape[1]:
        raise ValueError(
            f"{name}: K is {a_q.shape[1] * form.pack} of a and {b_q.shape[1] * form.pack} of b; both are [rows, K]"
        )
    M, N, K = a_q.shape[0], b_q.shape[0], a_q.shape[1] * form.pack
    if not (M and N and K):
        return torch.zeros((M, N), dtype=out_dtype, device=a_q.device)  # nothing to sum, or nothing to write
    c = torch.empty((M, N), dtype=out_dtype, device=a_q.device)
    emulate = not native() if emulate is None else emulate
    if not emulate and not native() and (interpreted() or fmt == "nvfp4"):
        where = "in the interpreter" if interpreted() else "before sm_100"
        raise ValueError(f"{name}: tl.dot_scaled cannot decode {fmt} {where}; leave out emulate=False")
    block_m, block_n, block_k, warps, stages = tile_for(a_q.device, form, emulate)
    bytes_of = [x if x.dtype is torch.float8_e4m3fn else x.view(torch.uint8) for x in (a_q, a_scale, b_q, b_scale)]
    descriptors = []
    for x, rows in zip(bytes_of, (block_m, block_m, block_n, block_n), strict=True):
        if x.ndim == 2:
            descriptors.append(tma_descriptor(x, [rows, block_k // form.pack]))
        else:
            box = [rows // 128, block_k // form.group // 4, 2, 256]  # as TMA wants it: no box is wider than 256
            descriptors.append(tma_descriptor(x.view(*x.shape[:2], 2, 256), box))
    mx_matmul_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
        *descriptors, c, a_tensor_scale, b_tensor_scale, M, N, K, c.stride(0),
        FORMAT=form.dot, GROUP=form.group, PACK=form.pack, NV=fmt == "nvfp4",
        EMULATE=emulate, OPERAND=tl.float32 if interpreted() and form.emulated == tl.bfloat16 else form.emulated,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=GROUP_M, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return c


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2**exponents in float64, from its bits: exact on any device."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)


def _values(exponent_bits: int, fraction_bits: int, device: torch.device) -> torch.Tensor:
    """The values of the positive codes of a small float, in their order, by the definition of such a format."""
    codes = torch.arange(2 ** (exponent_bits + fraction_bits), device=device)
    exponents, fractions = codes >> fraction_bits, codes % 2**fraction_bits
    significands = fractions + (exponents > 0) * 2**fraction_bits
    bias = 2 ** (exponent_bits - 1) - 1
    values = significands * _power(exponents.clamp(min=1) - bias - fraction_bits)
    return values[:-1] if exponent_bits == 4 else values  # e4m3 keeps its last code for NaN


def _nearest(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The code of the value nearest to |x|, ties to the even code, what is larger than all to the last."""
    between = (values[1:] + values[:-1]) / 2
    code = torch.searchsorted(between, x.abs())  # the lower one of a tie
    tie = between[code.clamp(max=len(between) - 1)] == x.abs()
    return code + (tie & (code % 2 == 1))


def reference_quantize(
    x: torch.Tensor, fmt: str, rule: str = "floor", tensor_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of mx_quantize's values and plain scales, written from the formats' descriptions, in float64.

    nvfp4 is described in float32 steps, which are taken here as in the kernel, so that the bytes can be the same.
    """
    form = FORMATS[fmt]
    elements = _values(2, 1, x.device) if form.pack == 2 else _values(4, 3, x.device)
    groups = x.double().unflatten(1, (-1, form.group))
    finite = groups.isfinite().all(2)
    groups = groups.where(finite[..., None], 0.0)
    amax = groups.abs().amax(2)
    if fmt == "nvfp4":
        if tensor_scale is None:
            largest = x.double().where(x.isfinite(), 0.0).abs().max() if x.numel() else x.new_zeros(()).double()
            tensor_scale = largest.float().clamp(min=FLOOR) * (1 / NV_SPAN)
        scales = _values(4, 3, x.device)
        code = _nearest((amax.float() / (6 * tensor_scale)).double(), scales).clamp(min=1)
        factor = 1 / (scales[code].float() * tensor_scale)
        scaled = (groups.float() * factor[..., None]).double()
        code = code.where(finite, 0x7F)
    else:
        emax = torch.frexp(elements[-1])[1] - 1
        exponent = torch.frexp(amax)[1] - 1 - emax
        if rule == "up":
            exponent = exponent + (amax > elements[-1] * _power(exponent))
        exponent = exponent.where(amax > 0, -127).clamp(-127, 127)
        scaled = groups * _power(-exponent)[..., None]
        code = (exponent + 127).where(finite, 0xFF)
    q = (_nearest(scaled, elements) | (scaled.signbit() * (8 if form.pack == 2 else 0x80))).flatten(1)
    q = q[:, ::2] | q[:, 1::2] << 4 if form.pack == 2 else q
    return q.to(torch.uint8), code.to(torch.uint8)


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, fmt: str, tensor_scale: torch.Tensor | None = None, swizzled: bool = False
) -> torch.Tensor:
    """What quantized values stand for, in float64."""
    form = FORMATS[fmt]
    if form.pack == 2:
        codes = torch.stack([_bytes(q) & 15, _bytes(q) >> 4], dim=2).flatten(1).long()
        values = _values(2, 1, q.device)[codes & 7] * (1.0 - 2.0 * (codes >> 3))
    else:
        values = q.double()
    if swizzled:
        scale = unswizzle_scales(scale, q.shape[0], values.shape[1] // form.group)
    if fmt == "nvfp4":
        scales = scale.double() if tensor_scale is None else scale.double() * tensor_scale.double()
    else:
        exponents = _bytes(scale).int() - 127
        scales = _power(exponents).where(exponents < 128, torch.nan)
    return (values.unflatten(1, (-1, form.group)) * scales[..., None]).flatten(1)


def quantize_torch(x: torch.Tensor, fmt: str, tensor_scale: torch.Tensor | None = None) -> tuple:
    """mx_quantize in torch's operations, to be compiled: the baseline, with the same bits."""
    form = FORMATS[fmt]
    groups = x.float().unflatten(1, (-1, form.group))
    amax = (groups.view(torch.int32) & 0x7FFFFFFF).amax(2)
    finite = amax < 0x7F800000
    if fmt == "nvfp4":
        # Divided in float64 and rounded to float32: the same number, also where a compiler's float32 division is not.
        code = (amax.view(torch.float32).double() / (6 * tensor_scale).double()).float()
        code = code.clamp(SMALLEST_E4M3, 448.0).where(finite, torch.nan).to(form.scale)
        factor = (1 / (code.float() * tensor_scale).double()).float()
    else:
        code = ((amax >> 23) - (8 if form.pack == 1 else 2)).clamp(min=0)
        factor = ((254 - code) << 23).view(torch.float32)
        code = code.where(finite, 0xFF).to(torch.uint8)
    scaled = (groups * factor[..., None]).where(finite[..., None], 0.0).flatten(1)
    if form.pack == 1:
        return scaled.clamp(-448.0, 448.0).to(form.element), code
    a = scaled.abs().clamp(max=6.0)
    big = (a.view(torch.int32) & 0x7F800000).clamp(min=127 << 23) + (22 << 23)
    q = (a + big.view(torch.float32)).view(torch.int32) - big + (big >> 22) - 2 * (127 + 22)
    q = q | ((scaled.view(torch.int32) >> 28) & 8)
    return (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8), code


def quantized_bytes(x: torch.Tensor, fmt: str, rule: str = "floor", tensor_scale: torch.Tensor | None = None) -> tuple:
    q, scale, _ = mx_quantize(x, fmt, rule, tensor_scale, check_scales=False)
    return _bytes(q), _bytes(scale)


def expected_bytes(*args) -> tuple:
    return tuple(x.double() for x in reference_quantize(*args))


OUTLIERS = (1, 100, 10_000)  # how many times larger one value in 256 is


def show_accuracy(h: Harness, rows: int, cols: int) -> None:
    """What each format loses of ordinary values, alone and beside outliers, whose own error does not count."""
    plain = h.randn(rows, cols)
    outlier = h.randint(256, rows, cols) == 0
    recipes = {f"{fmt}, scales {rule}": (fmt, rule) for fmt in ("mxfp8", "mxfp4") for rule in RULES}
    table = {}
    for name, recipe in {"e4m3, a scale per row": None, **recipes, "nvfp4": ("nvfp4", "floor")}.items():
        table[name] = {"bits a value": round(8 + 32 / cols if recipe is None else FORMATS[recipe[0]].bits, 3)}
        for times in OUTLIERS:
            x = torch.where(outlier, plain * times, plain)
            if recipe is None:
                back = dequantize_reference(*quantize_reference(x, (1, cols)), (1, cols))
            else:
                q, scale, tensor_scale = mx_quantize(x, *recipe)
                back = dequantize(q, scale, recipe[0], tensor_scale)
            lost, kept = (back - x.double())[~outlier], x.double()[~outlier]
            loss = (lost.square().mean() / kept.square().mean()).sqrt().item()
            table[name][f"outliers x{times}" if times > 1 else "normal"] = round(loss, 4)
    h.table("relative rms error of ordinary values", table)


def show_quantizers(h: Harness, rows: int, cols: int) -> None:
    x = h.randn(rows, cols, dtype=h.half)
    library = "torch.compile" if x.is_cuda else "torch"
    for fmt, form in FORMATS.items():
        tensor_scale = mx_quantize(x, fmt)[2]
        in_torch = h.compiled(quantize_torch) if x.is_cuda else quantize_torch
        variants = {
            library: lambda x, f=in_torch, n=fmt, t=tensor_scale: tuple(map(_bytes, f(x, n, t))),
            "triton": functools.partial(quantized_bytes, fmt=fmt, tensor_scale=tensor_scale),
        }
        table = h.compare(
            variants, lambda x, n=fmt, t=tensor_scale: expected_bytes(x, n, "floor", t), x, baseline=library,
            work=Work(bytes=x.nbytes + int(x.numel() * form.bits / 8)), title=f"quantize to {fmt}", dtype=torch.uint8,
        )  # fmt: skip
        if table and table.rows[-1].of_ceiling:
            row = table.rows[-1]
            pace = "memory sets its pace" if row.of_ceiling >= 0.8 else "it is not memory that sets its pace"
            h.say(f"{fmt}: {row.of_ceiling:.0%} of the copy ceiling, so {pace}; {row.speedup:.2f}x {library}")


class Operands(NamedTuple):
    """Two matrices in one format: packed, with the tensors' scales, and decoded but for those, exactly, in 16 bits."""

    packed: tuple[torch.Tensor, ...]
    tensor_scales: tuple[torch.Tensor | None, ...]
    decoded: tuple[torch.Tensor, ...]

    @classmethod
    def random(cls, h: Harness, M: int, N: int, K: int, fmt: str) -> Operands:
        both = [mx_quantize(h.randn(rows, K, dtype=h.half), fmt, swizzled=True) for rows in (M, N)]
        decoded = [dequantize(q, scale, fmt, swizzled=True).to(h.half) for q, scale, _ in both]
        packed = [x for q, scale, _ in both for x in (q, scale)]
        return cls(tuple(packed), tuple(whole for *_, whole in both), tuple(decoded))

    def reference(self, *_) -> torch.Tensor:
        a, b = (
            x.double() if whole is None else x.double() * whole.double()
            for x, whole in zip(self.decoded, self.tensor_scales, strict=True)
        )
        return a @ b.T


def scaled_mm(x: Operands, fmt: str, dtype: torch.dtype):
    """The library's product as a function of the packed operands; torch has none of mxfp4 for NVIDIA's GPUs."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    recipe, swizzle = [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    wholes = [[], []]
    if fmt == "nvfp4":
        recipe, swizzle = [ScalingType.BlockWise1x16, ScalingType.TensorWise], [*swizzle, SwizzleType.NO_SWIZZLE]
        wholes = [[scale] for scale in x.tensor_scales]

    def call(a, a_scale, b, b_scale):
        a_scales, b_scales = [a_scale.flatten(), *wholes[0]], [b_scale.flatten(), *wholes[1]]
        return scaled_mm(a, b.t(), a_scales, recipe, b_scales, recipe, swizzle, swizzle, output_dtype=dtype)

    return call


def show_matmul(h: Harness, n: int, fmt: str) -> dict | None:
    """One table, and what it says of the format as a row of the last one."""
    x, real, half = Operands.random(h, n, n, n, fmt), native(), str(h.half).removeprefix("torch.")
    (a, b), on_gpu = x.decoded, x.decoded[0].is_cuda
    alpha = math.prod(1.0 if scale is None else scale.item() for scale in x.tensor_scales)
    unused = torch.empty_like(a)  # beta=0: it is not read
    library = f"{'cuBLAS' if on_gpu else 'torch'} {half}, decoded before"
    variants = {library: lambda *_: torch.addmm(unused, a, b.T, beta=0, alpha=alpha)}
    ours = functools.partial(
        mx_matmul, fmt=fmt, out_dtype=h.half, a_tensor_scale=x.tensor_scales[0], b_tensor_scale=x.tensor_scales[1],
        check_scales=False,
    )  # fmt: skip
    if real and fmt != "mxfp4":
        variants["_scaled_mm"] = scaled_mm(x, fmt, h.half)
    variants["triton block-scaled" if real else "triton emulation"] = ours
    if not real and on_gpu and fmt != "nvfp4":  # which Triton cannot lower there
        variants["triton emulation by tl.dot_scaled"] = functools.partial(ours, emulate=False)
    packed, decoded = (sum(t.nbytes for t in each) for each in (x.packed, x.decoded))
    dtype = FORMATS[fmt].element if real else h.half
    table = h.compare(
        variants, x.reference, *x.packed, baseline=library, title=f"{fmt} matmul", case=f"{n}x{n}x{n}",
        work=Work(bytes=packed + n * n * h.half.itemsize, flops=2 * n**3, dtype=dtype), dtype=h.half, **budget(n),
    )  # fmt: skip
    if not table or table.rows[-1].ms is None:
        return None
    cell = {"bytes of operands": round(packed / decoded, 3)}
    return cell | {row.variant: round(row.speedup, 3) for row in table.rows[1:]}


def budget(K: int) -> dict:
    """How an instruction adds up the products of one step is not documented for all: it gets a wider budget."""
    return {"terms": K, "roundings": 2} | ({"acc": 2.0**-13} if native() else {})


def explain(h: Harness, cells: dict[str, dict]) -> None:
    """What was emulated and what that cost, from this run's tables."""
    h.table("x over the product of 16-bit operands that were decoded before", cells)
    for case, cell in cells.items() if not native() else ():
        best = max(value for name, value in cell.items() if name.startswith("triton"))
        h.say(
            f"{case}: {cell['bytes of operands']:.2f} of the bytes; emulated, {best:.2f}x of the speed: in time that "
            + ("pays here" if best > 1 else "does not pay")
        )


def demo(h: Harness) -> None:
    # One group; a tail in each dimension and more than one tile of scales; nothing.
    for shape in [(1, 32), (130, 160), (0, 64)]:
        x = h.randn(*shape, dtype=h.half, scale=3.0)
        for fmt, rule in [("mxfp8", "floor"), ("mxfp8", "up"), ("mxfp4", "floor"), ("mxfp4", "up"), ("nvfp4", "floor")]:
            what = f"mx_quantize {fmt} {rule} {shape[0]}x{shape[1]}, every bit"
            h.check(quantized_bytes, expected_bytes, x, fmt, rule, what=what, dtype=torch.uint8)
    for M, N, K in [(1, 1, 32), (130, 129, 160)]:
        for fmt in FORMATS:
            x = Operands.random(h, M, N, K, fmt)
            wholes = dict(zip(("a_tensor_scale", "b_tensor_scale"), x.tensor_scales, strict=True))
            fn = functools.partial(mx_matmul, fmt=fmt, out_dtype=torch.float32, **wholes)
            what = f"mx_matmul {fmt} {M}x{N}x{K}"
            h.check(fn, x.reference, *x.packed, what=what, dtype=torch.float32, **budget(K))

    for fmt, form in FORMATS.items():
        q = h.meta(4096, 4096 // form.pack, dtype=form.element)
        scale = h.meta(*scales_shape(4096, 4096 // form.group, swizzled=True), dtype=form.scale)
        whole = h.meta(1, dtype=torch.float32) if fmt == "nvfp4" else None
        tma, (sm_100, sm_120) = "cp.async.bulk.tensor", KINDS[fmt]
        find = {
            90: (tma, "wgmma"),
            100: (tma, "tcgen05.mma", "block_scale", sm_100),
            120: (tma, "mma.sync", "block_scale", sm_120),
        }
        h.codegen(mx_matmul, q, scale, q, scale, fmt, h.half, whole, whole, find=find)

    ran = "run here" if native() else "do not run here: the products below are emulations"
    h.fact("block-scaled instructions", ran)
    if not h.profile:
        show_accuracy(h, *h.pick(interpreted=(32, 512), quick=(4096, 4096), full=(4096, 4096)))
    show_quantizers(h, *h.pick(interpreted=(32, 512), quick=(8192, 8192), full=(16384, 16384)))
    cells = {}
    for n in h.pick(interpreted=(160,), quick=(4096,), full=(4096, 8192)):
        for fmt in FORMATS:
            if cell := show_matmul(h, n, fmt):
                cells[f"{fmt} {n}"] = cell
    if cells:
        explain(h, cells)


if __name__ == "__main__":
    run(demo)
