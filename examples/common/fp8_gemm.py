"""FP8 GEMMs with scales per tensor, per row or in blocks: checks, random operands, the calls they are put beside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import triton

from examples.common.device import require_triton_device
from examples.common.fp8 import E4M3, quantize_reference, require_scales
from examples.common.operands import check_fp8_gemm
from examples.common.quantize import GROUP


def check_scaled_gemm(
    name: str, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None, out_dtype: torch.dtype, check_scales: bool,
) -> tuple[int, int, int]:  # fmt: skip
    """M, N and K of (a * scale_a) @ (b * scale_b) + bias, with scales per tensor or row.

    Raises what check_fp8_gemm and require_scales do; for a bias TypeError unless it is of out_dtype, ValueError unless
    it is [N], contiguous.
    """
    M, N, K = check_fp8_gemm(name, a, b, out_dtype)
    scales = {"scale_a": (scale_a, ((), (1,), (M, 1))), "scale_b": (scale_b, ((), (1,), (1, N)))}
    require_scales(name, a, check_scales, **scales)
    require_triton_device(name, a, scale_a, scale_b, *([] if bias is None else [bias]))
    if bias is not None and bias.dtype is not out_dtype:
        raise TypeError(f"{name}: bias is {bias.dtype}; it must be that of the result, {out_dtype}")
    if bias is not None and (tuple(bias.shape) != (N,) or (N > 1 and bias.stride(0) != 1)):
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}, strides {bias.stride()}; need [{N}], contiguous")
    return M, N, K


def operands(h, M: int, N: int, K: int, rows: bool, dtypes=(E4M3, E4M3)) -> tuple[torch.Tensor, ...]:
    """a [M, K], b [K, N] (a transposed view of weights [N, K]), scale_a, scale_b; rows of different magnitudes.

    With `rows` a scale for each row of a and each column of b, else one for each tensor.
    """
    quantized = []
    for n, dtype in zip((M, N), dtypes, strict=True):
        x = h.randn(n, K).mul_(h.randn(n, 1, scale=0.5).exp_())
        q, scale = quantize_reference(x, (1, K) if rows else (n, K), dtype)
        quantized += [q, scale if rows else scale.reshape(())]
    a, scale_a, w, scale_w = quantized
    return a, w.t(), scale_a, scale_w.t()


def torch_dequantized(a, b, scale_a, scale_b) -> torch.Tensor:
    return ((a.float() * scale_a) @ (b.float() * scale_b)).bfloat16()


def m_major(scale: torch.Tensor) -> torch.Tensor:
    """The same scales [M, K / 128] with M contiguous and columns a multiple of 4 apart, as TMA loads them."""
    M, groups = scale.shape
    return torch.empty_strided(
        (M, groups), (1, triton.cdiv(max(M, 1), 4) * 4), dtype=scale.dtype, device=scale.device
    ).copy_(scale)


def _spread(blocks: torch.Tensor) -> torch.Tensor:
    """One number for each block of 128x128 -> one for each element."""
    return blocks.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)


def blockwise_operands(h, M: int, N: int, K: int, dtypes=(E4M3, E4M3)) -> tuple[torch.Tensor, ...]:
    """a [M, K], b [K, N] (a transposed view of weights [N, K]), scale_a of 1x128 groups, scale_b of 128x128 blocks.

    Groups and blocks have different magnitudes.
    """
    x, w = h.randn(M, K), h.randn(N, K)
    x.view(M, -1, GROUP).mul_(h.randn(M, K // GROUP, 1, scale=0.5).exp_())
    w.mul_(_spread(h.randn(triton.cdiv(N, GROUP), K // GROUP, scale=0.5).exp_())[:N])
    a, scale_a = quantize_reference(x, (1, GROUP), dtypes[0])
    w, scale_b = quantize_reference(w, (GROUP, GROUP), dtypes[1])
    return a, w.t(), m_major(scale_a), scale_b.t()


def torch_blockwise(a, b, scale_a, scale_b) -> torch.Tensor:
    weight = b.float() * _spread(scale_b)[:, : b.shape[1]]
    return ((a.float() * scale_a.repeat_interleave(GROUP, 1)) @ weight).bfloat16()


def scaled_mm_blockwise(a, b, scale_a, scale_b, out_dtype=torch.bfloat16) -> torch.Tensor:
    """cuBLASLt's product of operands that lie as blockwise_operands makes them."""
    from torch.nn.functional import ScalingType, scaled_mm

    one_row, block = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return scaled_mm(a, b, scale_a, one_row, scale_b, block, output_dtype=out_dtype)


def blockwise_library(*inputs) -> dict[str, Callable]:
    """The library's row of a table, {name: function}: cuBLASLt, or torch on floats where it refuses these inputs."""
    with contextlib.suppress(ImportError, NotImplementedError, RuntimeError, TypeError, ValueError):
        if inputs[0].is_cuda and scaled_mm_blockwise(*inputs) is not None:
            return {"_scaled_mm blockwise": scaled_mm_blockwise}
    return {"torch": torch_blockwise}
