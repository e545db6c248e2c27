"""softmax, measured: each kernel at every row length, and whether `softmax` picks the right one.

1. The code of the kernels that the lesson does not show: 128-bit accesses, and the atomic that programs wait on.
2. Row lengths from 256 to 131072: every kernel that takes the length, beside torch and both modes of torch.compile.

Not used, as Triton 3.6 lacks it: in Gluon of Triton 3.9 the CTAs of a cluster write into each other's shared memory
(hopper.async_store). A row that no SM holds could be split over a cluster, whose CTAs exchange maxima and sums there;
the split kernels here, and those of layer_norm, exchange them through global memory.
"""

from __future__ import annotations

from harness import Harness, Work, geomean

from examples.common.compiled import MODES, compiled_modes, over_library
from examples.triton.softmax import (
    BUDGET,
    REGISTERS_BEST,
    REGISTERS_MAX,
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
    h.codegen(softmax_split, h.meta(4096, 131072), find=dict.fromkeys(SMS, ("cp.async", "atom")))

    elements = h.fit(h.pick(interpreted=1 << 16, quick=1 << 26, full=1 << 28), bytes_each=40)
    widths = h.pick(interpreted=(256, 4096, 40000), quick=(256, 4096, 32768, 131072), full=WIDTHS)
    tables = [sweep(h, elements // cols, cols) for cols in widths]
    if not all(tables):
        return
    lost = max(table["triton"].ms / table.best.ms - 1 for table in tables)
    h.say(f"softmax() takes at most {lost:.0%} longer than the fastest kernel of its row length")
    split, resident = (tables[-1][f"triton {name}"].of_ceiling for name in ("split", "resident"))
    h.say(
        f"at {widths[-1]} columns split reads each element once and reaches {split:.0%} of a copy: its programs stay "
        "for many rows, send a maximum and a sum ahead, and have the next rows in flight while they wait. Resident "
        f"reads again what L1 no longer holds and reaches {resident:.0%}"
    )
    h.say(
        f"max-autotune makes torch.compile {geomean(tables, *MODES):.2f}x as fast over these lengths; "
        f"softmax() is {over_library(tables):.2f}x the fastest call of torch"
    )


def sweep(h: Harness, rows: int, cols: int):
    x = h.rows(rows, cols, dtype=h.half)
    variants = {"torch": torch_softmax} | compiled_modes(h, torch_softmax) | {"triton": softmax}
    if cols <= REGISTERS_MAX:
        variants["triton rows"] = softmax_rows
    if cols >= REGISTERS_BEST:
        variants["triton resident"] = softmax_resident
    if cols > REGISTERS_MAX and not h.interpreted:
        variants["triton split"] = softmax_split
    return h.compare(
        variants, reference, x, baseline="torch", title="row lengths", case=f"{rows}x{cols}",
        work=Work(bytes=2 * x.nbytes), **BUDGET,
    )  # fmt: skip
