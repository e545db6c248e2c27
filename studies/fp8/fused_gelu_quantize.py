"""Study of fused_gelu_quantize: scales, saturation, the exact GELU.

1. Scales against float64, and results under a scale that is given, on ragged rows.
2. The code of every recipe: accesses of 16 bytes.
3. What a given scale that is too small costs, and that amax tells.
4. The exact GELU per group.
"""

from __future__ import annotations

from harness import Harness

import torch

from examples.common.fp8 import E4M3, fp8_max
from examples.common.quantize import READ_BACK, scales_of
from examples.fp8.fused_gelu_quantize import compare, fused_gelu_quantize, fused_gelu_quantize_static, reference


def checks(h: Harness) -> None:
    scale = torch.full((1,), 4.0 / fp8_max(E4M3), device=h.device)
    for rows, cols in [(3, 5), (3, 781), (1, 17000)]:
        x = h.randn(rows, cols, dtype=h.half, scale=2.0)
        for per, approximate in [("row", "tanh"), ("row", "none"), ("group", "tanh"), ("group", "none")]:
            h.check(
                lambda x, a, per=per: fused_gelu_quantize(x, per, a)[1],
                lambda x, a, per=per: scales_of(reference(x, a), per),
                x, approximate, what=f"scales of {rows}x{cols} per {per}, {approximate}",
                dtype=torch.float32, terms=0, roundings=64, constant_ok=True,
            )  # fmt: skip
        h.check(
            lambda x, scale: fused_gelu_quantize_static(x, scale)[0].float() * scale,
            # GELU has no large negative values to cut.
            lambda x, scale: torch.minimum(reference(x), scale.double() * fp8_max(E4M3)),
            x, scale, what=f"GELU with a given scale, {rows}x{cols}", **READ_BACK,
        )  # fmt: skip


def saturation(h: Harness, x: torch.Tensor) -> dict[str, dict[str, float]]:
    """What a scale that is too small cuts off and costs, and what amax says about it."""
    y, seen = reference(x), {}
    for share in (1.0, 0.5, 0.1):
        scale = (share * y.abs().amax() / fp8_max(E4M3)).float().reshape(1)
        q, amax = fused_gelu_quantize_static(x, scale)
        cut = (q.float().abs() == fp8_max(E4M3)).double().mean().item()
        error = ((q.double() * scale.double() - y).norm() / y.norm()).item()
        reported = amax.max().item() / (scale.item() * fp8_max(E4M3))
        seen[f"scale for {share:g} of amax"] = {
            "at the maximum": float(f"{cut:.2g}"), "error": float(f"{error:.2g}"), "amax / range": round(reported, 2),
        }  # fmt: skip
    return seen


def study(h: Harness) -> None:
    checks(h)
    x, scale, wide = h.meta(16384, 8192), h.meta(1, dtype=torch.float32), ("ld.global.v4", "st.global.v4")
    for per in ("group", "row"):
        for approximate in ("tanh", "none"):
            h.codegen(fused_gelu_quantize, x, per, approximate, find={90: wide})
    h.codegen(fused_gelu_quantize_static, x, scale, check_scales=False, find={90: wide})
    if not h.profile:
        h.table("a given scale that is too small, 64x1024", saturation(h, h.randn(64, 1024, dtype=h.half)))
    rows, cols = h.pick(interpreted=(16, 1024), quick=(16384, 8192), full=(16384, 8192))
    compare(h, h.randn(h.fit(rows, bytes_each=60 * cols), cols, dtype=h.half, scale=2.0), "group", "none")
