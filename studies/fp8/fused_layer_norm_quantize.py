"""Study of fused_layer_norm_quantize: RMSNorm, which has no table, and the scales; the code of both kernels.

1. RMSNorm, and the scales of LayerNorm, against float64 on ragged rows.
2. The code of both kernels, per row and per group: accesses of 16 bytes.
"""

from __future__ import annotations

from harness import Harness

import torch

from examples.common.quantize import READ_BACK, read_back, scales_of
from examples.fp8.fused_layer_norm_quantize import fused_layer_norm_quantize, fused_rms_norm_quantize, inputs, reference


def rms_reference(x, weight, eps: float = 1e-6) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.double(), x.shape[1:], weight.double(), eps)


def study(h: Harness) -> None:
    for rows, cols in [(3, 5), (3, 781), (1, 17000)]:
        x, weight, bias = inputs(h, rows, cols)
        for per in ("row", "group"):
            h.check(
                lambda *args, per=per: read_back(*fused_rms_norm_quantize(*args, per=per), per), rms_reference,
                x, weight, what=f"RMS norm read back, {rows}x{cols} per {per}", **READ_BACK,
            )  # fmt: skip
            h.check(
                lambda *args, per=per: fused_layer_norm_quantize(*args, per=per)[1],
                lambda *args, per=per: scales_of(reference(*args), per),
                x, weight, bias, what=f"scales of layer norm, {rows}x{cols} per {per}",
                dtype=torch.float32, terms=0, roundings=64, constant_ok=True,
            )  # fmt: skip
    wide = ("ld.global.v4", "st.global.v4")
    for rows, cols, find in ((16384, 8192, wide[:1]), (4096, 32768, wide)):
        for per in ("row", "group"):
            h.codegen(fused_layer_norm_quantize, h.meta(rows, cols), *[h.meta(cols)] * 2, per=per, find={90: find})
