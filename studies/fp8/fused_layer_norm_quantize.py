"""Study of fused_layer_norm_quantize: RMSNorm, which has no table, against float64, and the code per row and group."""

from __future__ import annotations

from harness import Harness

import torch

from examples.common.quantize import READ_BACK, read_back
from examples.fp8.fused_layer_norm_quantize import fused_layer_norm_quantize, fused_rms_norm_quantize, inputs


def rms_reference(x, weight, eps: float = 1e-6) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.double(), x.shape[1:], weight.double(), eps)


def study(h: Harness) -> None:
    x, weight = h.meta(16384, 8192), h.meta(8192)
    for per in ("row", "group"):
        for rows, cols in [(3, 5), (3, 781), (1, 9000)]:
            h.check(
                lambda *args, per=per: read_back(*fused_rms_norm_quantize(*args, per=per), per), rms_reference,
                *inputs(h, rows, cols)[:2], what=f"RMS norm read back, {rows}x{cols} per {per}", **READ_BACK,
            )  # fmt: skip
        h.codegen(fused_layer_norm_quantize, x, weight, weight, per=per, find={90: ("ld.global.v4",)})
