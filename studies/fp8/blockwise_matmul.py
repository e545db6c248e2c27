"""Study of blockwise_matmul: the code of every variant on every GPU, sizes and layers.

1. The code of each variant, tiles of two and of three warpgroups: no tensor-core instruction but FP8's.
2. Squares and the layers of a transformer, beside cuBLASLt's call that takes these very layouts.
"""

from __future__ import annotations

from harness import Harness

import torch

from examples.common.quantize import GROUP
from examples.fp8.blockwise_matmul import E4M3, blockwise_matmul, compare, every_variant, library, operands
from studies.fp8.fp8_matmul import LAYERS, SQUARES, require_only_fp8, summary

# What each variant must hold in its PTX.
CODE = {
    "pointers": {
        89: ("mma f8", "mma.sync", "cp.async"),
        90: ("mma f8", "wgmma", "cp.async"),
        100: ("mma f8", "tcgen05.mma", "cp.async"),
        120: ("mma f8", "mma.sync", "cp.async"),
    },
    "warp specialized": {90: ("mma f8", "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg")},
}


def show_code(h: Harness) -> None:
    for variant, find in CODE.items():
        for n in (4096,) if variant == "pointers" else (4096, 8192):
            a, w = h.meta(n, n, dtype=E4M3), h.meta(n, n, dtype=E4M3)
            scale_a, scale_b = (h.meta(n // GROUP, m, dtype=torch.float32) for m in (n, n // GROUP))
            args = a, w.t(), scale_a.t(), scale_b.t()
            require_only_fp8(variant, h.codegen(blockwise_matmul, *args, variant=variant, find=find))


def study(h: Harness) -> None:
    show_code(h)
    ours, cases = every_variant(h.device), []
    for size in h.pick(interpreted=[(130, 264, 768)], quick=SQUARES[:2], full=SQUARES + LAYERS):
        inputs = operands(h, *size)
        table = compare(h, inputs, library(*inputs) | ours)
        cases.append({name: table.over(table.baseline, name) for name in ours if table})
    if all(cases):
        h.table(f"over {table.baseline}", summary(cases))
