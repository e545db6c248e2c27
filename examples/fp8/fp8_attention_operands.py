"""Q, K and V for fp8_attention: quantized with a scale for each head or tensor, V transposed and its keys reordered.

Also their checks, and the reference that a result is held to.
"""

from __future__ import annotations

import torch

from examples.common.attention import attention_reference
from examples.common.fp8 import E4M3, quantize_reference, require_fp8, require_scales
from examples.common.tma import require_tma_layout

GROUP = 16  # keys that share one order in V


def check_dtypes(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    require_fp8(name, q=q, k=k, v=v)
    if not q.dtype == k.dtype == v.dtype == E4M3:
        raise TypeError(f"{name}: dtypes {q.dtype}, {k.dtype}, {v.dtype}; quantize all three to {E4M3}")


def check_operands(name: str, q, k, v, q_scale, k_scale, v_scale, check_scales: bool) -> None:
    """Checks what check_attention does not: V's sizes, the scales, and that TMA can load all three."""
    (B, H, _, D), (_, H_kv, S_kv, _) = q.shape, k.shape
    packed = (B, H_kv, D, -(-S_kv // GROUP) * GROUP)
    if v.shape != packed:
        raise ValueError(f"{name}: v has shape {tuple(v.shape)}; v must be {packed}, as pack_values() makes it")
    scales = {"q_scale": (q_scale, [(), (B, H)])}
    scales |= {"k_scale": (k_scale, [(), (B, H_kv)]), "v_scale": (v_scale, [(), (B, H_kv)])}
    require_scales(name, q, check_scales, **scales)
    require_tma_layout(name, q=q, k=k, v=v)


def pack_values(v: torch.Tensor) -> torch.Tensor:
    """[B, H_kv, S_kv, D] -> [B, H_kv, D, S_kv rounded up to 16 with zeros], each 16 keys as 0 1 8 9 2 3 10 11 ..."""
    groups = torch.nn.functional.pad(v, (0, 0, 0, -v.shape[2] % GROUP)).unflatten(2, (-1, 2, 4, 2))
    return groups.permute(0, 1, 6, 2, 4, 3, 5).flatten(3).contiguous()


def unpack_values(v: torch.Tensor, S_kv: int) -> torch.Tensor:
    """What pack_values() was given."""
    return v.unflatten(3, (-1, 4, 2, 2)).permute(0, 1, 3, 5, 4, 6, 2).flatten(2, 5)[:, :, :S_kv]


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, per_head: bool = True, power_of_two: bool = False
) -> tuple[torch.Tensor, ...]:
    """q, k, v [B, heads, rows, D] of 16 or 32 bits -> the first six arguments of fp8_attention. Plain torch.

    `power_of_two` rounds each scale up to a power of two: what comes out, times its scale, is then exact in bfloat16.
    """
    data, scales = [], []
    for x in (q, k, pack_values(v)):
        rows = x.reshape(x.shape[0] * x.shape[1] if per_head else 1, -1)
        if not x.numel():  # no amax
            quantized, scale = x.to(E4M3), torch.ones(len(rows), device=x.device)
        else:
            quantized, scale = quantize_reference(rows, (1, rows.shape[1]), E4M3)
        if power_of_two and x.numel():
            mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
            scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
            quantized = (rows.float() / scale).to(E4M3)
        data.append(quantized.view(x.shape))
        scales.append(scale.view(x.shape[:2]) if per_head else scale.view(()))
    return (*data, *scales)


def dequantize(q, k, v, q_scale, k_scale, v_scale) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the six stand for: q, k, v [B, heads, rows, D] in float64."""
    data = (q, k, unpack_values(v, k.shape[2]))
    return tuple(
        x.double() * (s if s.ndim == 0 else s[..., None, None]).double()
        for x, s in zip(data, (q_scale, k_scale, v_scale), strict=True)
    )


def reference(q, k, v, q_scale, k_scale, v_scale, causal: bool = False, scale: float | None = None) -> torch.Tensor:
    return attention_reference(*dequantize(q, k, v, q_scale, k_scale, v_scale), causal, scale)


def off_by(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square of a head's error over that of its answer, the mean over heads."""
    return ((got.double() - want).norm(dim=(2, 3)) / want.norm(dim=(2, 3))).mean().item()
