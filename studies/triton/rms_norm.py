"""rms_norm, measured: forward, and each kernel of the backward by itself.

1. The code of the kernels that the lesson does not show.
2. Row lengths from 1024 to 131072: forward, and backward by every kernel that takes the length, beside what Inductor
   makes of torch's; backward with the gradient of x + residual too.
"""

from __future__ import annotations

from harness import Harness, Work, geomean

import torch

from examples.common.compiled import compiled_modes
from examples.triton.rms_norm import reference, rms_norm_forward, torch_norm
from examples.triton.rms_norm_backward import (
    BACKWARD_ROWS_MAX,
    reference_backward,
    rms_norm_backward_loop,
    rms_norm_backward_rows,
    rms_norm_backward_split,
)

WIDTHS = (1024, 4096, 8192, 16384, 32768, 65536, 131072)


def torch_backward(dy, x, weight, rstd, dsum) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, for Inductor, on the rstd that ours get: what autograd calls saves no rstd of its own."""
    x_hat, wide = x.float() * rstd[:, None], dy.float()
    grad = wide * weight.float()
    dx = (grad - x_hat * (grad * x_hat).mean(1, keepdim=True)) * rstd[:, None]
    return (dx + dsum.float()).to(x.dtype), (wide * x_hat).sum(0).to(weight.dtype)


def short_of_rows(dy, x, weight, rstd, dsum) -> tuple[torch.Tensor, torch.Tensor]:
    """dx as it is; dweight without the last 4 rows."""
    short = reference_backward(dy[:-4], x[:-4], weight, rstd[:-4], dsum[:-4])[1]
    return reference_backward(dy, x, weight, rstd, dsum)[0], short


def code(h: Harness) -> None:
    x, weight, rstd = h.meta(4096, 65536), h.meta(65536), h.meta(4096, dtype=torch.float32)
    h.codegen(rms_norm_forward, x, weight, x, find=dict.fromkeys((80, 90, 100), ("cp.async", "st.global.v4")))
    for backward, cols, sms, find in (
        (rms_norm_backward_rows, 4096, (90,), ("cp.async",)),
        (rms_norm_backward_split, 65536, (90, 100), ("cp.async", "atom")),
    ):
        x, weight = h.meta(4096, cols), h.meta(cols)
        h.codegen(backward, x, x, weight, rstd, x, find=dict.fromkeys(sms, find))


def sweep(h: Harness, rows: int, cols: int):
    """The tables of one row length, of which it returns backward's."""
    x, dsum = (h.rows(rows, cols, dtype=h.half) for _ in range(2))
    weight, dy, case = h.randn(cols, dtype=h.half), h.randn(rows, cols, dtype=h.half), f"{rows}x{cols}"
    forward = {"torch": torch_norm} | compiled_modes(h, torch_norm)
    forward["triton"] = lambda *args: rms_norm_forward(*args)[0]  # without rstd, which is float32
    h.compare(
        forward, reference, x, weight, title="forward", case=case, baseline="torch", work=Work(bytes=2 * x.nbytes),
        terms=cols,
    )  # fmt: skip
    backward = {"torch": torch_backward} | compiled_modes(h, torch_backward)
    if cols <= BACKWARD_ROWS_MAX:
        backward["triton rows"] = rms_norm_backward_rows
    else:
        backward["triton loop"] = rms_norm_backward_loop
        if not h.interpreted:
            backward["triton split"] = rms_norm_backward_split
    rstd = rms_norm_forward(x, weight)[2]
    return h.compare(
        backward, reference_backward, dy, x, weight, rstd, dsum, title="backward with residual", case=case,
        baseline="torch", work=Work(bytes=4 * x.nbytes), terms=max(rows, cols),
        wrong={"without 4 rows of dweight": short_of_rows}, library={"operand_eps": torch.finfo(h.half).eps / 2},
    )  # fmt: skip


def study(h: Harness) -> None:
    code(h)
    elements = h.fit(h.pick(interpreted=1 << 15, quick=1 << 26, full=1 << 28), bytes_each=100)
    widths = h.pick(interpreted=(1024, 20000), quick=(1024, 16384, 65536), full=WIDTHS)
    tables = [sweep(h, elements // cols, cols) for cols in widths]
    if waits := [table for table in tables if table.timed and "triton split" in table]:
        gain = geomean(waits, "triton loop", "triton split")
        shares = " and ".join(f"{table['triton split'].of_ceiling:.0%}" for table in waits)
        h.say(
            f"backward of long rows: programs that exchange sums are {gain:.2f}x as fast as reading x and dy twice "
            f"(6 passes for 4 would make 1.5x), at {shares} of a copy"
        )
