"""Study of fused_gelu_quantize: the code of every recipe, accesses of 16 bytes, and the exact GELU per group."""

from __future__ import annotations

from harness import Harness

from examples.fp8.fused_gelu_quantize import compare, fused_gelu_quantize


def study(h: Harness) -> None:
    x, wide = h.meta(16384, 8192), ("ld.global.v4", "st.global.v4")
    for per in ("group", "row"):
        for approximate in ("tanh", "none"):
            h.codegen(fused_gelu_quantize, x, per, approximate, find={90: wide})
    rows, cols = h.pick(interpreted=(16, 1024), quick=(16384, 8192), full=(16384, 8192))
    compare(h, h.rows(h.fit(rows, bytes_each=60 * cols), cols, dtype=h.half), "group", "none")
