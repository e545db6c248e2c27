"""softmax, measured: each kernel at every row length, and whether `softmax` picks the right one.

1. The code of the kernels that the lesson does not show: 128-bit accesses, and the atomic that programs wait on.
2. Row lengths from 256 to 131072: every kernel that takes the length, beside torch, torch.compile and torch.compile
   with max-autotune (which tries more tilings, and compiles longer).
"""

from __future__ import annotations

from harness import Harness, Work, geomean

from examples.triton.softmax import (
    BUDGET,
    RESIDENT_MIN,
    ROWS_MAX,
    reference,
    softmax,
    softmax_resident,
    softmax_rows,
    softmax_split,
    torch_softmax,
)

WIDTHS = (256, 1024, 4096, 16384, 32768, 65536, 131072)
SMS = (80, 90, 100, 120)


def study(h: Harness) -> None:
    h.codegen(softmax_resident, h.meta(4096, 16384), find=dict.fromkeys(SMS, ("ld.global.v4", "st.global.v4")))
    h.codegen(softmax_split, h.meta(4096, 131072), find=dict.fromkeys(SMS, ("ld.global.v4", "atom")))

    elements = h.fit(h.pick(interpreted=1 << 16, quick=1 << 26, full=1 << 28), bytes_each=40)
    widths = h.pick(interpreted=(256, 4096, 40000), quick=(256, 4096, 32768, 131072), full=WIDTHS)
    tables = [sweep(h, elements // cols, cols) for cols in widths]
    if not all(tables):
        return
    lost = max(table["triton"].ms / table.best.ms - 1 for table in tables)
    h.say(f"softmax() takes at most {lost:.0%} longer than the fastest kernel of its row length")
    split, resident = (tables[-1][f"triton {name}"].of_ceiling for name in ("split", "resident"))
    h.say(
        f"at {widths[-1]} columns split reads each element once and reaches {split:.0%} of a copy, its programs "
        f"waiting for each other; resident reads what L1 no longer holds again and reaches {resident:.0%}"
    )
    tuned = geomean(tables, "torch.compile", "torch max-autotune")
    h.say(f"max-autotune makes torch.compile {tuned:.2f}x as fast over these lengths")


def sweep(h: Harness, rows: int, cols: int):
    x = h.randn(rows, cols, dtype=h.half, scale=2.0)
    variants = {
        "torch": torch_softmax,
        "torch.compile": h.compiled(torch_softmax),
        "torch max-autotune": h.compiled(torch_softmax, mode="max-autotune-no-cudagraphs"),
        "triton": softmax,
    }
    if cols <= ROWS_MAX:
        variants["triton rows"] = softmax_rows
    if cols >= RESIDENT_MIN:
        variants["triton resident"] = softmax_resident
    if cols > ROWS_MAX and not h.interpreted:
        variants["triton split"] = softmax_split
    return h.compare(
        variants, reference, x, baseline="torch", title="row lengths", case=f"{rows}x{cols}",
        work=Work(bytes=2 * x.nbytes), **BUDGET,
    )  # fmt: skip
