"""Study of fused_layer_norm_quantize: RMSNorm and scales, its code, and bytes saved beside time saved.

1. RMSNorm, and the scales of LayerNorm, against float64 on ragged rows.
2. The code of both kernels, per row and per group: accesses of 16 bytes.
3. For every table of the lesson, the bytes that fusing saves next to the time that it saves.
"""

from __future__ import annotations

from harness import Harness, Table

import torch

from examples.common.quantize import read_back, scales_of
from examples.fp8.fused_layer_norm_quantize import (
    BUDGET,
    fused_layer_norm_quantize,
    fused_rms_norm_quantize,
    inputs,
    reference,
)

TWO_KERNELS = "torch.compile, two kernels"


def rms_reference(x, weight, eps: float = 1e-6) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.double(), x.shape[1:], weight.double(), eps)


def checks(h: Harness) -> None:
    for rows, cols in [(3, 5), (3, 781), (1, 17000)]:
        x, weight, bias = inputs(h, rows, cols)
        for per in ("row", "group"):
            h.check(
                lambda *args, per=per: read_back(*fused_rms_norm_quantize(*args, per=per), per), rms_reference,
                x, weight, what=f"RMS norm read back, {rows}x{cols} per {per}", **BUDGET,
            )  # fmt: skip
            h.check(
                lambda *args, per=per: fused_layer_norm_quantize(*args, per=per)[1],
                lambda *args, per=per: scales_of(reference(*args), per),
                x, weight, bias, what=f"scales of layer norm, {rows}x{cols} per {per}",
                dtype=torch.float32, terms=0, roundings=64, constant_ok=True,
            )  # fmt: skip


def explain(h: Harness, tables: list[Table]) -> None:
    """The bytes that fusing saves next to the time that it saves; of bfloat16, 7 bytes an element and 3."""
    rows = {}
    for table in tables:
        n_rows, n_cols = map(int, table.case.split()[0].split("x"))
        mib = {way: n_rows * n_cols * each // 2**20 for way, each in ((TWO_KERNELS, 7), ("triton", 3))}
        cells = {f"{way}: MiB / ms": [mib[way], round(table[way].ms, 4)] for way in mib}
        rows[table.case] = cells | {"measured": round(table.over(TWO_KERNELS, "triton"), 2)}
    h.table("two kernels and one", rows)
    h.say(f"bytes allow {7 / 3:.2f}x over two kernels")


def study(h: Harness) -> None:
    checks(h)
    wide = ("ld.global.v4", "st.global.v4")
    for rows, cols in ((16384, 8192), (4096, 32768)):
        x, weight = h.meta(rows, cols), h.meta(cols)
        for per in ("row", "group"):
            find = wide if cols > 8192 else wide[:1]
            h.codegen(fused_layer_norm_quantize, x, weight, weight, per=per, find={90: find})
    if h.lesson and all(h.lesson):
        explain(h, h.lesson)
