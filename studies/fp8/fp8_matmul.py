"""Study of fp8_matmul: the code of every variant on every GPU, and every call of cuBLASLt over sizes and layers.

1. The code of each variant: no tensor-core instruction but FP8's, for e4m3 by e5m2.
2. Squares and the layers of a transformer, scales per tensor and per row, beside all that torch._scaled_mm can be asked
   for. Its calls with scales by row are its fastest except where K is 14336, so scales per tensor are also handed to it
   expanded to rows; `promoted` calls (use_fast_accum=False) add partial sums in float32, as blockwise_matmul does.
"""

from __future__ import annotations

import statistics

from harness import Harness, Table
from harness.codegen import CodegenError

import torch

from examples.common.fp8_gemm import torch_dequantized
from examples.fp8.fp8_matmul import E4M3, E5M2, compare, fp8_matmul, operands

# What each variant must hold in its PTX.
CODE = {
    "pointers": {89: ("mma f8", "mma.sync", "cp.async"), 90: ("mma f8", "wgmma", "cp.async")},
    "persistent": {
        90: ("mma f8", "wgmma", "cp.async.bulk.tensor"),
        100: ("mma f8", "tcgen05.mma", "cp.async.bulk.tensor"),
        120: ("mma f8", "mma.sync", "cp.async.bulk.tensor"),
    },
    "warp specialized": {90: ("mma f8", "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg")},
}
SQUARES = [(n, n, n) for n in (2048, 4096, 8192, 16384)]
LAYERS = [(4096, 14336, 4096), (4096, 4096, 14336), (8192, 28672, 8192)]


def require_only_fp8(variant: str, kernels: list) -> None:
    """Raises CodegenError where another tensor-core instruction than FP8's multiplies."""
    for kernel in kernels:
        used = {x: kernel.found[x] for x in ("mma.sync", "wgmma", "tcgen05.mma") if x in kernel.found}
        if sum(used.values()) != kernel.found["mma f8"]:
            raise CodegenError(f"{variant} on sm_{kernel.sm}: {used}, FP8 only in {kernel.found['mma f8']}")


def libraries(h: Harness, *inputs: torch.Tensor) -> dict:
    """The calls of torch._scaled_mm that take these inputs; else torch on floats."""
    a, b, *scales = inputs
    by_row = scales[0].expand(a.shape[0], 1).contiguous(), scales[1].expand(1, b.shape[1]).contiguous()
    asked = {"_scaled_mm": (by_row, True), "_scaled_mm promoted": (by_row, False)}
    if scales[0].numel() == 1:
        asked |= {"_scaled_mm tensor": (scales, True), "_scaled_mm tensor promoted": (scales, False)}
    found = {}
    for name, (given, fast) in asked.items() if not h.interpreted else ():

        def call(a, b, *_, given=given, fast=fast):
            return torch._scaled_mm(a, b, *given, out_dtype=torch.bfloat16, use_fast_accum=fast)

        try:
            call(a, b)
            found[name] = call
        except (RuntimeError, ValueError) as error:
            h.say(f"no {name} for scales of {tuple(given[0].shape)} here: {str(error).splitlines()[0]}")
    return found or {"torch": torch_dequantized}


def over_fastest(table: Table) -> dict[str, float]:
    """How many times as fast as the fastest library call each of ours is; nothing where none was timed."""
    known = [row for row in table.rows if row.variant.startswith("_scaled_mm")]
    if not (table and known):
        return {}
    fastest = min(known, key=lambda row: row.ms).variant
    return {row.variant: table.over(fastest, row.variant) for row in table.rows if row.ours}


def summary(cases: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Geometric mean and least of each variant over all cases."""
    return {
        name: {
            "geometric mean": round(statistics.geometric_mean([case[name] for case in cases]), 4),
            "least": round(min(case[name] for case in cases), 4),
        }
        for name in cases[0]
    }


def study(h: Harness) -> None:
    a, b = h.meta(4096, 4096, dtype=E4M3), h.meta(4096, 4096, dtype=E5M2).t()
    scales = h.meta(4096, 1, dtype=torch.float32), h.meta(1, 4096, dtype=torch.float32)
    for variant, find in CODE.items():
        require_only_fp8(variant, h.codegen(fp8_matmul, a, b, *scales, variant=variant, find=find))
    for kind in ("per tensor", "per row"):
        cases = []
        for size in h.pick(interpreted=[(260, 264, 656)], quick=SQUARES[:2], full=SQUARES + LAYERS):
            inputs = operands(h, *size, rows=kind == "per row")
            cases.append(over_fastest(compare(h, inputs, libraries(h, *inputs), title=f"scales {kind}")))
        if all(cases):
            h.table(f"over the fastest _scaled_mm, {kind}", summary(cases))
