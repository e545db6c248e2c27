"""Study of blockwise_matmul: every variant on every GPU, over sizes and layers, and the error by the length of K.

1. The code of each variant, tiles of two and of three warpgroups: no tensor-core instruction but FP8's.
2. Squares and the layers of a transformer, beside cuBLASLt's call that takes these very layouts.
3. The error of one sum in the tensor cores, of promoted sums and of the library's calls against float64, on the same
   numbers; a mean of 1 keeps products from cancelling, so that the sum grows with K.
"""

from __future__ import annotations

import functools

from harness import Harness, Table, geomean
from harness.codegen import CodegenError

import torch

from examples.fp8.blockwise_matmul import (
    E4M3,
    GROUP,
    blockwise_matmul,
    compare,
    library,
    operands,
    runnable,
    scaled_mm_blockwise,
)

# What each variant must hold in its PTX; show_code also counts that no other tensor-core instruction is there.
CODE = {
    "tiles": {
        89: ("mma f8", "mma.sync", "cp.async"),
        90: ("mma f8", "wgmma", "cp.async"),
        100: ("mma f8", "tcgen05.mma", "cp.async"),
        120: ("mma f8", "mma.sync", "cp.async"),
    },
    "warp specialized": {90: ("mma f8", "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg")},
}
SQUARES = [(n, n, n) for n in (2048, 4096, 8192, 16384)]
LAYERS = [(4096, 14336, 4096), (4096, 4096, 14336), (8192, 28672, 8192)]


def show_code(h: Harness) -> None:
    """The FP8 instruction of every variant, of tiles of two and three warpgroups; raises where any other multiplies."""
    for variant, find in CODE.items():
        for n in (4096,) if variant == "tiles" else (4096, 8192):
            a, w = h.meta(n, n, dtype=E4M3), h.meta(n, n, dtype=E4M3)
            scale_a, scale_b = (h.meta(n // GROUP, m, dtype=torch.float32) for m in (n, n // GROUP))
            args = a, w.t(), scale_a.t(), scale_b.t()
            for kernel in h.codegen(blockwise_matmul, *args, variant=variant, find=find):
                used = {x: kernel.found[x] for x in ("mma.sync", "wgmma", "tcgen05.mma") if x in kernel.found}
                if sum(used.values()) != kernel.found["mma f8"]:
                    raise CodegenError(f"{variant} on sm_{kernel.sm}: {used}, FP8 only in {kernel.found['mma f8']}")


def summarize(h: Harness, tables: list[Table]) -> None:
    """Geometric mean and least of each variant over the library, where there is one."""
    known = tables[0].baseline
    if all(tables) and known != "torch":
        rows = {
            row.variant: {
                "geometric mean": round(geomean(tables, known, row.variant), 4),
                "least": round(min(table.over(known, row.variant) for table in tables), 4),
            }
            for row in tables[0].rows[1:]
        }
        h.table(f"over {known}", rows)


def error_of(got: torch.Tensor, want: torch.Tensor) -> list[float]:
    """The error's root mean square and its largest, over the root mean square of what is wanted; three digits."""
    error, size = got.double() - want, want.square().mean().sqrt()
    return [float(f"{x / size:.2e}") for x in (error.square().mean().sqrt(), error.abs().max())]


def errors_by_length(h: Harness) -> None:
    """The error of one sum and of promoted ones against float64, on the same numbers, by the length of K."""
    M, N = h.pick(interpreted=(64, 128), quick=(1024, 1024), full=(4096, 4096))
    lengths = h.pick(interpreted=(512, 2048), quick=(512, 4096, 32768), full=[2**n for n in range(9, 16)])
    rows, chained, promoted = {}, "fp8_matmul, one sum", f"blockwise {runnable(h.device)[-1]}"
    one_sum = functools.partial(h.peer("fp8/fp8_matmul").fp8_matmul, variant="pointers", check_scales=False)
    one = torch.ones((), device=h.device)
    for mean in (0, 1):
        for K in lengths:
            a, w = ((h.randn(n, K) + mean).to(E4M3) for n in (M, N))
            b, float32 = w.t(), torch.float32
            # Laid out as the library takes them: M and K contiguous.
            scales = (
                torch.ones(K // GROUP, M, device=h.device).t(),
                torch.ones(N // GROUP, K // GROUP, device=h.device).t(),
            )
            calls = {chained: functools.partial(one_sum, a, b, one, one, out_dtype=float32)}
            if not h.interpreted:
                for name, fast in (("_scaled_mm fast", True), ("_scaled_mm", False)):
                    calls[name] = functools.partial(
                        torch._scaled_mm, a, b, one, one, out_dtype=float32, use_fast_accum=fast
                    )
                calls["_scaled_mm blockwise"] = functools.partial(scaled_mm_blockwise, a, b, *scales, float32)
            for variant in runnable(h.device):
                calls[f"blockwise {variant}"] = functools.partial(blockwise_matmul, a, b, *scales, float32, variant)
            want, cells = a.double() @ b.double(), {}
            for name, call in calls.items():
                try:
                    cells[name] = error_of(call(), want)
                except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                    if not name.startswith("_"):
                        raise
                    h.say(f"no {name} with K = {K} to float32 here: {str(error).strip().splitlines()[0]}")
            rows[f"K = {K}, mean {mean}"] = cells
    h.table("rms and largest error over the rms of the result, float32 out, all scales 1", rows)
    if h.interpreted:
        h.say("the interpreter sums in float32 throughout: what Hopper's tensor cores drop does not show in it")
    for mean in (0, 1):
        shortest, longest = (rows[f"K = {K}, mean {mean}"] for K in (lengths[0], lengths[-1]))
        h.say(
            f"mean {mean}, K = {lengths[0]} -> {lengths[-1]}, rms: one sum {shortest[chained][0]:.1e} -> "
            f"{longest[chained][0]:.1e}, promoted {shortest[promoted][0]:.1e} -> {longest[promoted][0]:.1e}"
        )


def study(h: Harness) -> None:
    show_code(h)
    ours = {name: functools.partial(blockwise_matmul, variant=name, check_scales=False) for name in runnable(h.device)}
    tables = []
    for size in h.pick(interpreted=[(130, 264, 768)], quick=SQUARES[:2], full=SQUARES + LAYERS):
        inputs = operands(h, *size)
        tables.append(compare(h, inputs, library(*inputs) | ours))
    summarize(h, tables)
    if not h.profile:
        errors_by_length(h)
