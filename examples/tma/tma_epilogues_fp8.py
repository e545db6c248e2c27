"""linear_fp8: bias, activation and an FP8 quantizer in the store of a TMA matmul.

The result is quantized by a given scale, or by one per group of 128 columns of a row, which a tile holds whole. A scale
per row does not fit into this store: a row is spread over many tiles, and the first would have to wait for the last.
Write y and quantize its rows afterwards, or take the scale from earlier steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.activations import ACTIVATIONS, activate
from examples.common.fp8 import E4M3, fp8_max, require_scales
from examples.common.operands import check_choice
from examples.common.tiles import tile_coords
from examples.common.untraced import untraced
from examples.tma.tma_epilogues_hopper import launch_warp_specialized
from examples.tma.tma_epilogues_shared import (
    GROUP,
    check_layer,
    halves,
    launch_persistent,
    load_bias,
    scale_and_inverse,
)


@triton.jit
def _quantize_and_store(
    q_desc, acc, bias, inverse, scale_ptr, row, col, M, N,
    ACT: tl.constexpr, BIAS: tl.constexpr, PER: tl.constexpr, MOST: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile, a group of columns at a time."""
    rows: tl.constexpr = acc.shape[0]
    columns: tl.constexpr = acc.shape[1]
    if columns > q_desc.block_shape[1]:
        left, right, bias_left, bias_right = halves(acc, bias, BIAS)
        _quantize_and_store(q_desc, left, bias_left, inverse, scale_ptr, row, col, M, N, ACT, BIAS, PER, MOST, FAST)
        col += columns // 2
        _quantize_and_store(q_desc, right, bias_right, inverse, scale_ptr, row, col, M, N, ACT, BIAS, PER, MOST, FAST)
    else:
        if BIAS:
            acc += bias[None, :].to(tl.float32)
        y = activate(acc, ACT, FAST)
        if PER == "tensor":
            y *= inverse
        else:
            scale, inverse = scale_and_inverse(tl.max(tl.abs(y).to(tl.int32, bitcast=True), 1), MOST)
            at = row + tl.arange(0, rows)
            tl.store(scale_ptr + (col // GROUP).to(tl.int64) * M + at, scale, mask=(at < M) & (col < N))
            y *= inverse[:, None]
        q_desc.store([row, col], y.to(q_desc.dtype))  # to FP8 it saturates


@triton.jit
def linear_fp8_persistent_kernel(
    x_desc, w_desc, q_desc, bias_ptr, scale_ptr, M, N, K,
    ACT: tl.constexpr, PER: tl.constexpr, MOST: tl.constexpr, FAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    BIAS: tl.constexpr = bias_ptr is not None
    tl.assume(K > 0)  # else the flattened loop comes with a second epilogue, for tiles without a step
    inverse = tl.div_rn(1.0, tl.load(scale_ptr)) if PER == "tensor" else 1.0
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            acc = tl.dot(x_desc.load([row, k]), w_desc.load([col, k]).T, acc)
        bias = load_bias(bias_ptr, col, N, BLOCK_N)
        _quantize_and_store(q_desc, acc, bias, inverse, scale_ptr, row, col, M, N, ACT, BIAS, PER, MOST, FAST)


@untraced
def linear_fp8(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none",
    scale: torch.Tensor | None = None, variant: str | None = None, check_scales: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(q, scales) of linear(): q [M, N] float8_e4m3fn, and q * scales approximates its result y.

    A given `scale`, float32 [1], is that of all of q, and is returned. Without one each group of 128 columns of a row
    has its own: scales float32 [M, ceil(N / 128)] with strides (1, M), as a GEMM reads 1x128 scales. They are amax /
    448 with amax at least 2**-100; q = y * (448 / amax), or y * (1 / scale), saturated. N is a multiple of 16.
    check_scales reads `scale`, which waits for the GPU; pass False where it is known to be good.

    Raises what linear does, and TypeError or ValueError for a scale of another dtype, shape or device, or that is not
    positive and finite.
    """
    variant = check_layer("linear_fp8", x, bias, variant, 1, w=w)
    check_choice("linear_fp8", ACTIVATIONS, activation=activation)
    if scale is not None:
        require_scales("linear_fp8", x, check_scales, scale=(scale, ((1,),)))
    M, N = x.shape[0], w.shape[0]
    q = torch.empty(M, N, dtype=E4M3, device=x.device)
    per = "group" if scale is None else "tensor"
    if scale is None:
        scale = torch.empty(triton.cdiv(N, GROUP.value), M, dtype=torch.float32, device=x.device).t()
    if variant == "warp specialized" and q.numel():
        launch_warp_specialized(x, w, w, q, bias, scale, activation, per)
    elif q.numel():
        launch_persistent(
            linear_fp8_persistent_kernel, x, (w,), q, bias, scale, ACT=activation, PER=per, MOST=fp8_max(E4M3)
        )
    return q, scale
