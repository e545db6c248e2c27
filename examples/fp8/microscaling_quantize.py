"""Quantizers to mxfp8, mxfp4 and nvfp4: a tensor is read once, nvfp4 twice unless the tensor's scale is given.

Values are written two FP4 to a byte, the first in the low half, and scales as [M, K / group] or in the tiles of 128 x 4
that the tensor cores take. Also here: tiles and random operands of a product, and the library's call for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits, interpreted, require_triton_device
from examples.common.fp8 import E4M3, FLOOR, dequantize_reference, quantize_reference
from examples.common.microscaling import (
    FORMATS,
    NV_SPAN,
    RECIPES,
    RULES,
    bytes_of,
    check_tensor_scale,
    dequantize,
    format_of,
    reference_quantize,
    scales_shape,
)
from examples.common.quantize import check_quantize

QUANTIZE_VALUES, MAX_COLS = 4096, 1024  # of a program
# BLOCK_M and BLOCK_N (multiples of 128) of a product, BLOCK_K, warps, stages. Native tiles count BLOCK_K in bytes.
LARGE, SMALL = (128, 256, 128, 8, 4), (128, 128, 128, 8, 3)
EMULATED = (128, 128, 128, 8, 3)  # BLOCK_K in values: 4 groups of 32, one tile of scales


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


def mx_quantize(
    x: torch.Tensor, fmt: str, rule: str = "floor", tensor_scale: torch.Tensor | None = None, swizzled: bool = False,
    check_scales: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """x [M, K] -> values, scales and the tensor's scale (float32 [1] for nvfp4, else None); fmt is one of FORMATS.

    x is float32, float16 or bfloat16 with contiguous rows, K a multiple of the group. Values are float8_e4m3fn [M, K]
    or float4_e2m1fn_x2 [M, K / 2]; scales float8_e8m0fnu or (nvfp4) float8_e4m3fn, [M, K / group], swizzled
    [ceil(M / 128), ceil(K / group / 4), 32, 16]. By the rule "floor" the largest of a group may saturate, "up" takes
    the next power of two. A `tensor_scale` that is known, of one float32, saves nvfp4 its second reading of x. A group
    with NaN or an infinity gets a NaN scale, so it reads back as NaN, and no other does; zeros stay zeros.

    Raises TypeError for another dtype; ValueError for an unknown format or rule, rank, K, an inner stride other than 1,
    a tensor's scale that is superfluous or not positive and finite (check_scales=False does not read it, which waits
    for the GPU); RuntimeError for no Triton, a GPU before sm_89 or an input that requires grad.
    """
    name = "mx_quantize"
    require_triton_device(name, x, *([tensor_scale] if isinstance(tensor_scale, torch.Tensor) else []))
    form = format_of(name, fmt)
    check_quantize(name, x, E4M3)
    if not isinstance(rule, str) or rule not in RULES or (rule != "floor" and fmt == "nvfp4"):
        raise ValueError(f"{name}: rule {rule!r} is not one of {RULES}, of which nvfp4 has none but the first")
    if x.shape[1] % form.group:
        raise ValueError(
            f"{name}: shape {tuple(x.shape)}; need [M, K] with K a multiple of {form.group}, the group of {fmt}: pad it"
        )
    if tensor_scale is not None:
        check_tensor_scale(name, fmt, tensor_scale, x, check_scales)
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


def quantized_bytes(x: torch.Tensor, fmt: str, rule: str = "floor", tensor_scale: torch.Tensor | None = None) -> tuple:
    q, scale, _ = mx_quantize(x, fmt, rule, tensor_scale, check_scales=False)
    return bytes_of(q), bytes_of(scale)


def expected_bytes(*args) -> tuple:
    return tuple(x.double() for x in reference_quantize(*args))


def round_trip(x: torch.Tensor, fmt: str, rule: str = "floor") -> torch.Tensor:
    """What x stands for once it is quantized, in float64."""
    q, scale, tensor_scale = mx_quantize(x, fmt, rule)
    return dequantize(q, scale, fmt, tensor_scale)


def losses(h, rows: int, cols: int) -> dict[str, dict[str, float]]:
    """What each format loses of ordinary values, alone and beside outliers, whose own error does not count."""
    plain, outlier = h.randn(rows, cols), h.randint(256, rows, cols) == 0
    row = (1, cols)
    ways = {"e4m3, a scale per row": (8 + 32 / cols, lambda x: dequantize_reference(*quantize_reference(x, row), row))}
    ways |= {name: (FORMATS[how[0]].bits, lambda x, how=how: round_trip(x, *how)) for name, how in RECIPES.items()}
    table = {name: {"bits a value": round(bits, 3)} for name, (bits, _) in ways.items()}
    for name, times in itertools.product(ways, (1, 100, 10_000)):
        x = torch.where(outlier, plain * times, plain)
        lost, kept = (ways[name][1](x) - x.double())[~outlier], x.double()[~outlier]
        loss = (lost.square().mean() / kept.square().mean()).sqrt().item()
        table[name][f"outliers x{times}" if times > 1 else "normal"] = round(loss, 4)
    return table


def native() -> bool:
    """Whether tl.dot_scaled becomes a block-scaled instruction on the current device: from sm_100 on."""
    return not interpreted() and triton.runtime.driver.active.get_current_target().arch >= 100


def tile_for(device: torch.device, form, emulate: bool) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, warps, stages: what spills nothing (emulated, on sm_90) and on sm_120 fits 99 KiB."""
    if emulate or not native():
        return EMULATED
    block_m, block_n, bytes_k, warps, stages = LARGE if device_limits(device).shared_bytes > 200 * 1024 else SMALL
    return block_m, block_n, bytes_k * form.pack, warps, stages


class Operands(NamedTuple):
    """Two matrices in one format: packed, with the tensors' scales, and decoded but for those, exactly, in 16 bits."""

    fmt: str
    packed: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]  # of groups, as rows of x and not in tiles
    tensor_scales: tuple[torch.Tensor | None, ...]
    decoded: tuple[torch.Tensor, ...]

    @classmethod
    def random(cls, h, M: int, N: int, K: int, fmt: str) -> Operands:
        data = [h.randn(rows, K, dtype=h.half) for rows in (M, N)]
        both, plain = ([mx_quantize(x, fmt, swizzled=each) for x in data] for each in (True, False))
        packed = tuple(x for q, scale, _ in both for x in (q, scale))
        scales, wholes = tuple(scale for _, scale, _ in plain), tuple(whole for *_, whole in both)
        return cls(fmt, packed, scales, wholes, tuple(dequantize(*each[:2], fmt).to(h.half) for each in plain))

    def reference(self, a_q: torch.Tensor, _, b_q: torch.Tensor, *__, short: int = 0) -> torch.Tensor:
        """The product in float64; as a fault, without the last `short` of K."""
        whole = zip((a_q, b_q), self.scales, self.tensor_scales, strict=True)
        a, b = (dequantize(q, scale, self.fmt, tensor_scale) for q, scale, tensor_scale in whole)
        K = a.shape[1] - short
        return a[:, :K] @ b[:, :K].T

    @property
    def wholes(self) -> dict[str, torch.Tensor | None]:
        """The tensors' scales, as keywords of mx_matmul."""
        return dict(zip(("a_tensor_scale", "b_tensor_scale"), self.tensor_scales, strict=True))


def scaled_mm(x: Operands, fmt: str, dtype: torch.dtype) -> Callable:
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
