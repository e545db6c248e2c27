"""Packed weights of weight_only_matmul: words of 4-bit or FP8 weights, and what makes 16-bit weights of them again.

A word of 16 bits has `parts` weights, 4 or 2, which are WORDS columns apart: bits 0 to 3 (0 to 7) of words 0 to 63 are
columns 0 to 63, the next bits columns 64 to 127, and so on; the next 64 words continue from there. So ldmatrix gives a
thread the words that it would get from a 16-bit matrix, and each part of them is what the MMA wants from that thread. A
32-bit register holds two words, so each instruction makes two weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from examples.common.device import architecture, interpreted, require_triton_device
from examples.common.operands import check_choice

WORDS = tl.constexpr(64)  # of a row in a step: 128 bytes, the widest swizzle of shared memory
DTYPES = (torch.float16, torch.bfloat16)
FORMATS = {"int4": 4, "fp8": 2}  # weights in a word
GROUP = 128  # columns that share a scale, of int4; FP8 has a scale for a row
ASSEMBLY = tl.constexpr(not interpreted())


@triton.constexpr_function
def assembly(PART, INT4, BF16):
    """Two words -> two weights of the 16-bit type: the bits where its exponent and mantissa are, then one operation."""
    if INT4:
        moved = f"shr.b32 t, $1, {4 * PART}; mov.b32 s, {'0x43004300' if BF16 else '0x64006400'};"  # 128, 1024
        mask, last = "0x000f000f", "sub.rn.bf16x2 $0, t, d;" if BF16 else "sub.rn.f16x2 $0, t, d;"
        operand = "0x43084308" if BF16 else "0x64086408"  # 136, 1032
    else:
        sign = "mov.b32 s, $1;" if PART else "shl.b32 s, $1, 8;"
        left = (-4 if PART else 4) if BF16 else (-1 if PART else 7)
        shift = f"shl.b32 t, $1, {left};" if left > 0 else f"shr.b32 t, $1, {-left};"
        moved = f"{sign} and.b32 s, s, 0x80008000; {shift}"
        mask, last = ("0x07f007f0", "mul.rn.bf16x2 $0, t, d;") if BF16 else ("0x3f803f80", "mul.rn.f16x2 $0, t, d;")
        operand = "0x7b807b80" if BF16 else "0x5c005c00"  # 2^120, 2^8
    return f"{{ .reg .b32 s, t, d; mov.b32 d, {operand}; {moved} lop3.b32 t, t, {mask}, s, 0xea; {last} }}"


@triton.jit
def dequantize(words, PART: tl.constexpr, INT4: tl.constexpr, dtype: tl.constexpr):
    """The weights of one part of each word, exact in float16 and bfloat16."""
    if ASSEMBLY:
        text: tl.constexpr = assembly(PART, INT4, dtype == tl.bfloat16)
        half = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16  # no constexpr, which this call does not unwrap
        return tl.inline_asm_elementwise(text, "=r,r", [words], dtype=half, is_pure=True, pack=2)
    elif INT4:
        return (((words.to(tl.int32) >> (4 * PART)) & 15) - 8).to(dtype)
    else:
        code = (words.to(tl.int32) >> (8 * PART)) & 255
        return (((code & 128) << 24 | (code & 127) << 20).to(tl.float32, bitcast=True) * 2.0**120).to(dtype)


@triton.jit
def two_parts(words, PART: tl.constexpr, INT4: tl.constexpr, dtype: tl.constexpr):
    """Parts PART and PART + 1 side by side: 128 columns of weights. A thread keeps what it has."""
    left, right = dequantize(words, PART, INT4, dtype), dequantize(words, PART + 1, INT4, dtype)
    return tl.join(left, right).permute(0, 2, 1).reshape(words.shape[0], 2 * words.shape[1])


class PackedWeight(NamedTuple):
    """Packed weights [N, K]: int16 words [N, 64 * steps], their scales, K before padding, and quantize_weight's format.

    A step is 256 columns in int4, 128 in FP8. Scales: int4's [steps, N, 2] in the weights' dtype, one for each group of
    128 columns; FP8's [N], float32.
    """

    words: torch.Tensor
    scales: torch.Tensor
    K: int
    format: str


def quantize_weight(w: torch.Tensor, format: str) -> PackedWeight:
    """w [N, K], float16 or bfloat16, as "int4" (-8 to 7, a scale of w's dtype for 128 columns) or "fp8" (float8_e4m3fn,
    a float32 scale for a row). NaN or an infinity makes what shares its scale NaN.

    Raises TypeError for another dtype; ValueError for another rank or format; and what require_triton_device does.
    """
    require_triton_device("quantize_weight", w)
    check_choice("quantize_weight", tuple(FORMATS), format=format)
    if w.dtype not in DTYPES:
        raise TypeError(f"quantize_weight: dtype {w.dtype} is not one of {DTYPES}")
    if w.ndim != 2:
        raise ValueError(f"quantize_weight: shape {tuple(w.shape)}; need [N, K]")
    K, parts = w.shape[1], FORMATS[format]
    padded = torch.nn.functional.pad(w, (0, -K % (parts * WORDS.value))).float()
    groups = padded.unflatten(1, (-1, GROUP)) if format == "int4" else padded[:, None]
    most, kept = (7.0, w.dtype) if format == "int4" else (448.0, torch.float32)
    scales = (groups.abs().amax(-1) / most if groups.numel() else groups.sum(-1)).to(kept)
    divisors = scales.float()[..., None]
    codes = torch.where((divisors > 0) & divisors.isfinite(), groups / divisors, 0.0).flatten(1)
    if format == "int4":
        codes = codes.round().clamp(-8, 7).to(torch.int32) + 8
    else:
        codes = codes.clamp(-most, most).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)
    codes = codes.unflatten(1, (-1, parts, WORDS.value))
    words = sum(codes[:, :, i] << (16 // parts * i) for i in range(parts)).flatten(1)
    scales = scales.unflatten(1, (-1, 2)).transpose(0, 1) if format == "int4" else scales[:, 0]
    return PackedWeight(words.to(torch.int16).contiguous(), scales.contiguous(), K, format)


def check_packed(name: str, x: torch.Tensor, packed: PackedWeight) -> tuple[int, int, int]:
    """M, N, K of wrapper `name`, which takes x [M, K] and packed weights [N, K], or what weight_only_matmul raises."""
    if not isinstance(packed, PackedWeight):
        raise TypeError(f"{name}: weights are {type(packed).__name__}; pass what quantize_weight returns")
    require_triton_device(name, x)
    require_triton_device(name, x, packed.words, packed.scales)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype} is not one of {DTYPES}")
    if packed.format == "int4" and packed.scales.dtype != x.dtype:
        raise TypeError(f"{name}: x is {x.dtype}, int4's scales {packed.scales.dtype}; pass x as the weights were")
    if x.ndim != 2 or x.shape[1] != packed.K:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; need [M, {packed.K}]")
    if (sm := architecture(x.device)) < 90:
        raise RuntimeError(f"{name}: TMA and arithmetic of bfloat16 come with sm_90 (this is sm_{sm}): dequantize")
    return x.shape[0], packed.words.shape[0], packed.K


def dequantized(packed: PackedWeight, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The weights that are packed; in float64 these are exact."""
    parts, words = FORMATS[packed.format], packed.words.to(torch.int32)
    bits = 16 // parts
    codes = torch.stack([(words >> bits * i) & (2**bits - 1) for i in range(parts)], 1)  # [N, parts, words]
    codes = codes.unflatten(2, (-1, WORDS.value)).transpose(1, 2).flatten(1)
    if packed.format == "int4":
        scales = packed.scales.transpose(0, 1).flatten(1).repeat_interleave(GROUP, 1)
        weights = codes - 8
    else:
        scales, weights = packed.scales[:, None], codes.to(torch.uint8).view(torch.float8_e4m3fn)
    return (weights.to(dtype) * scales.to(dtype))[:, : packed.K]


def torch_int4pack(packed: PackedWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    """torch's own int4 kernel, of the same codes and scales: (code - 8) * scale + zero, of bfloat16 alone."""
    scales = packed.scales.transpose(0, 1).flatten(1)
    codes = (dequantized(packed) / scales.double().repeat_interleave(GROUP, 1)).round().int() + 8
    tiled = torch._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8), 8)
    zeros = torch.stack([scales.t(), torch.zeros_like(scales.t())], -1)
    return lambda x: torch._weight_int4pack_mm(x, tiled, GROUP, zeros)
