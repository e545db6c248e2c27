"""Study of fp8_matmul: every variant on every GPU, every call of cuBLASLt over sizes and layers, and 16-bit kernels.

1. The code of each variant: no tensor-core instruction but FP8's, for e4m3 by e5m2.
2. Squares and the layers of a transformer, scales per tensor and per row, beside all that torch._scaled_mm can be asked
   for. Its calls with scales by row are its fastest, so scales per tensor are also handed to it expanded to rows;
   `promoted` calls (use_fast_accum=False) add partial sums in float32, as blockwise_matmul does.
3. The same numbers, which bfloat16 holds exactly, by the fastest kernels of this repository in 16 bits.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

from harness import Harness, Table, Work
from harness.codegen import CodegenError

import torch

from examples.fp8.fp8_matmul import (
    E4M3,
    E5M2,
    VARIANTS,
    budget,
    compare,
    fp8_matmul,
    operands,
    reference,
    runnable,
    torch_dequantized,
)

# What each variant must hold in its PTX; show_code also counts that no other tensor-core instruction is there.
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


def show_code(h: Harness, n: int = 4096) -> None:
    """The FP8 instruction of every variant, for e4m3 by e5m2 and scales per row; raises where any other multiplies."""
    a, b = h.meta(n, n, dtype=E4M3), h.meta(n, n, dtype=E5M2).t()
    scales = h.meta(n, 1, dtype=torch.float32), h.meta(1, n, dtype=torch.float32)
    for variant, find in CODE.items():
        for kernel in h.codegen(fp8_matmul, a, b, *scales, variant=variant, find=find):
            used = {x: kernel.found[x] for x in ("mma.sync", "wgmma", "tcgen05.mma") if x in kernel.found}
            if sum(used.values()) != kernel.found["mma f8"]:
                raise CodegenError(f"{variant} on sm_{kernel.sm}: {used}, but FP8 only in {kernel.found['mma f8']}")


def libraries(h: Harness, *inputs: torch.Tensor) -> dict[str, Callable]:
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


def summarize(h: Harness, kind: str, tables: list[Table]) -> None:
    """Geometric mean and least of each variant over all cases, and of what one would choose case by case."""
    cases = [found for table in tables if (found := over_fastest(table))]
    if not cases:
        return
    ratios = {name: [case[name] for case in cases] for name in cases[0]}
    ratios["best of each case"] = [max(case.values()) for case in cases]
    rows = {
        name: {"geometric mean": round(statistics.geometric_mean(each), 4), "least": round(min(each), 4)}
        for name, each in ratios.items()
    }
    h.table(f"over the fastest _scaled_mm, {kind}", rows)


def compare_with_16_bits(h: Harness, n: int) -> dict[str, float]:
    """How many times as fast as the fastest of this repository's 16-bit kernels each variant is."""
    compiled = h.peer("triton/persistent_matmul")
    a, b, one = h.randn(n, n, dtype=E4M3), h.randn(n, n, dtype=E4M3).t(), torch.ones((), device=h.device)
    wide = a.to(h.half), b.to(h.half).contiguous()
    peers = {f"triton {step}": functools.partial(compiled.matmul_persistent, *wide, step) for step in compiled.VARIANTS}
    if "warp specialized" in runnable(h.device):
        peers["tma_persistent"] = functools.partial(h.peer("tma/tma_persistent_matmul").matmul_tma_persistent, *wide)
        peers["gluon"] = functools.partial(h.peer("tma/gluon_matmul").gluon_matmul, *wide)
    variants = {name: lambda a, b, fn=fn: fn() for name, fn in peers.items()}
    variants |= {
        f"FP8 {v}": lambda a, b, v=v: fp8_matmul(a, b, one, one, None, h.half, v, check_scales=False)
        for v in runnable(h.device)
    }
    table = h.compare(
        variants, lambda a, b: reference(a, b, one, one), a, b, baseline=next(iter(variants)), dtype=h.half,
        work=Work(flops=2 * n**3, dtype=E4M3), title="FP8 and 16 bits", case=f"{n}x{n}x{n}", peers=list(peers),
        **budget(h, n),
    )  # fmt: skip
    if not table:
        return {}
    fastest = min((row for row in table.rows if row.peer), key=lambda row: row.ms).variant
    return {f"over {fastest}, {v}": round(table.over(fastest, f"FP8 {v}"), 3) for v in VARIANTS if f"FP8 {v}" in table}


def study(h: Harness) -> None:
    show_code(h)
    sizes = h.pick(interpreted=[(260, 264, 656)], quick=SQUARES[:2], full=SQUARES + LAYERS)
    for kind in ("per tensor", "per row"):
        tables = []
        for size in sizes:
            inputs = operands(h, *size, rows=kind == "per row")
            tables.append(compare(h, inputs, libraries(h, *inputs), title=f"scales {kind}"))
        summarize(h, kind, tables)
    for n in h.pick(interpreted=(272,), quick=(4096,), full=(4096, 8192)):
        if over := compare_with_16_bits(h, n):
            h.fact(f"{n}x{n}x{n}, FP8 over the fastest 16-bit GEMM of this repository", over)
