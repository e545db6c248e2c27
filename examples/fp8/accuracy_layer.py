"""A linear layer in FP8 under any scaling recipe: quantizers, the product by the fastest call there is, the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from examples.common.fp8 import (
    E4M3,
    E5M2,
    FLOOR,
    FORMATS,
    dequantize_reference,
    fp8_max,
    quantize_reference,
)
from examples.common.fp8_gemm import scaled_mm_blockwise

ALL = None  # a block's side that is as long as the matrix


@dataclass(frozen=True)
class Recipe:
    """Blocks of activations and of weights that share a scale, each (rows, columns); ALL for the whole side."""

    x_block: tuple[int | None, int | None] = (ALL, ALL)
    w_block: tuple[int | None, int | None] = (ALL, ALL)
    x_format: torch.dtype = E4M3
    delayed: bool = False  # the activations' scale is that of the call before
    power: bool = False  # scales are powers of two


def sized(block: tuple[int | None, int | None], x: torch.Tensor) -> tuple[int, int]:
    return block[0] or x.shape[0], block[1] or x.shape[1]


def spread(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Each value's own scale; one for all is left to be broadcast."""
    if scale.numel() == 1:
        return scale
    return scale.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def quantize(
    x: torch.Tensor, block: tuple, dtype: torch.dtype = E4M3, power: bool = False, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x -> q in `dtype` and its scales, as quantize_reference; `amax` replaces x's own: what is above it saturates.

    `power` rounds each scale up to a power of two, but not one that is made of `amax`. Raises TypeError for another
    `dtype`; ValueError for what is no matrix or is empty, and for an amax that is not a tensor of one number or comes
    with blocks.
    """
    if dtype not in FORMATS:
        raise TypeError(f"quantize: dtype is {dtype}; pass {E4M3} or {E5M2}")
    if x.ndim != 2 or not x.numel():
        raise ValueError(f"quantize: x has shape {list(x.shape)}; need a matrix with values, to have a largest one")
    block, most = sized(block, x), fp8_max(dtype)
    if amax is not None:
        if not isinstance(amax, torch.Tensor) or amax.numel() != 1 or block != tuple(x.shape):
            raise ValueError(f"quantize: amax {amax} for blocks of {block}; it is a tensor of one number for all of x")
        amax = amax.float().clamp(min=FLOOR).reshape(1, 1)
        top = amax.new_full((), most)
        scale, factor = amax / top, top / amax
    else:
        q, scale = quantize_reference(x, block, dtype)
        if not power:
            return q, scale
        # Any bit of the mantissa carries into the exponent: the next power of two, if it is none already.
        above = (scale.view(torch.int32) + 0x7FFFFF & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isfinite(), above, scale)
        factor = spread(1 / scale, block, x.shape)
    return (x.float() * factor).clamp(-most, most).to(dtype), scale


def quantize_input(x: torch.Tensor, recipe: Recipe, amax: torch.Tensor | None = None):
    """q and scales of a layer's input, and what a delayed scale is made of next time."""
    q, scale = quantize(x, recipe.x_block, recipe.x_format, recipe.power, amax)
    if recipe.x_block == (1, 128):  # cuBLASLt reads the scales of one group for all rows together
        scale = scale.t().contiguous().t()
    return q, scale, x.abs().amax() if recipe.delayed else None


def engine(recipe: Recipe, m: int, n: int, k: int, device: torch.device) -> str:
    """What multiplies here: "_scaled_mm", "torch scaled_mm" (torch.nn.functional's, for blocks) or "float32 matmul".

    It looks at x_block alone: w_block must be the one that accuracy.RECIPES pairs with it, or a GPU's call refuses it.
    """
    whole, rows = recipe.x_block == (ALL, ALL), recipe.x_block == (1, ALL)
    # Not a CPU's _scaled_mm: where oneDNN has only a reference, it takes minutes for what takes milliseconds here.
    if device.type != "cuda" or torch.version.cuda is None or m % 16 or n % 16 or k % 16:
        return "float32 matmul"
    sm = torch.cuda.get_device_capability(device)
    if (whole and sm >= (8, 9)) or (rows and sm >= (9, 0)):
        return "_scaled_mm"
    cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    hopper = sm[0] == 9 and cuda >= (12, 9) and k % 512 == n % 128 == 0
    return "torch scaled_mm" if hopper and recipe.x_block == (1, 128) else "float32 matmul"


def by_rows(q: torch.Tensor) -> bool:
    """Whether _scaled_mm is faster with one scale written out for every row: its kernels for scales by row, of e4m3 on
    sm_90, are its fastest in all but one size of studies/fp8/fp8_matmul.py."""
    return q.dtype is E4M3 and torch.cuda.get_device_capability(q.device) >= (9, 0)


def multiply(
    q: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """(q * scale) @ (weight * weight_scale).T in bfloat16; the sum is in the accumulator of what multiplies.

    q [M, K] and weight [N, K] are float8, scales float32, one for each block of the recipe: quantize() makes
    both. Raises ValueError for sizes that are 0 or differ.
    """
    if q.ndim != 2 or weight.ndim != 2 or q.shape[1] != weight.shape[1] or not q.numel() or not weight.numel():
        raise ValueError(f"multiply: q {list(q.shape)}, weight {list(weight.shape)}; need [M, K] and [N, K], not empty")
    how = engine(recipe, q.shape[0], *weight.shape, q.device)
    if how == "float32 matmul":
        x = q.float() * spread(scale, sized(recipe.x_block, q), q.shape)
        w = weight.float() * spread(weight_scale, sized(recipe.w_block, weight), weight.shape)
        return (x @ w.t()).bfloat16()
    if how == "torch scaled_mm":
        scale = scale if scale.stride(0) == 1 else scale.t().contiguous().t()
        return scaled_mm_blockwise(q, weight.t(), scale, weight_scale.t())
    if recipe.x_block == (ALL, ALL):
        if by_rows(q):
            scale, weight_scale = scale.expand(len(q), 1), weight_scale.expand(1, len(weight))
            scale, weight_scale = scale.contiguous(), weight_scale.contiguous()
        else:
            scale, weight_scale = scale.reshape(()), weight_scale.reshape(())
    else:
        scale, weight_scale = scale.contiguous(), weight_scale.t().contiguous()
    return torch._scaled_mm(q, weight.t(), scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def product64(q, scale, weight, weight_scale, recipe: Recipe) -> torch.Tensor:
    x = dequantize_reference(q, scale, sized(recipe.x_block, q))
    return x @ dequantize_reference(weight, weight_scale, sized(recipe.w_block, weight)).t()


class FP8Linear(nn.Module):
    """A linear layer without bias, for inference: its weight is quantized once, its input at every call.

    weight [N, K] and x [..., K] of any float dtype -> bfloat16 [..., N]. `quantizer` replaces quantize_input, for
    instance by a compiled one. Calling it raises ValueError for an input of another width.
    """

    def __init__(self, weight: torch.Tensor, recipe: Recipe, quantizer: Callable = quantize_input) -> None:
        super().__init__()
        self.recipe, self.quantizer, self.amax = recipe, quantizer, None
        q, scale = quantize(weight.detach(), recipe.w_block, power=recipe.power)
        self.register_buffer("weight", q)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, k = self.weight.shape
        if x.shape[-1] != k:
            raise ValueError(f"FP8Linear: x has shape {list(x.shape)}, the weight {[n, k]}; the last sizes must agree")
        if not x.numel():
            return x.new_empty(*x.shape[:-1], n, dtype=torch.bfloat16)
        q, scale, self.amax = self.quantizer(x.reshape(-1, k), self.recipe, self.amax)
        return multiply(q, scale, self.weight, self.scale, self.recipe).view(*x.shape[:-1], n)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """The float64 product of what forward(x) would multiply now; x is a matrix."""
        q, scale, _ = self.quantizer(x, self.recipe, self.amax)
        return product64(q, scale, self.weight, self.scale, self.recipe)
