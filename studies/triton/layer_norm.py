"""layer_norm, measured: each kernel by itself, forward and backward, and how exact the gradients of the weight are.

1. The code of the kernels that the lesson does not show: asynchronous copies, and the atomic that sends a word.
2. Row lengths from 1024 to 65536: forward and backward apart, every kernel that takes the length, beside the operators
   of torch that autograd calls and what Inductor makes of them.
3. The error of dweight, which torch adds up in parts that it rounds to 16 bits.
"""

from __future__ import annotations

from harness import Harness, Table, Work, geomean

import torch

from examples.common.compiled import compiled_modes
from examples.triton.layer_norm import ROWS_MAX, inputs, layer_norm_forward, reference, torch_layer_norm
from examples.triton.layer_norm_backward import (
    BACKWARD_ROWS_MAX,
    layer_norm_backward_loop,
    layer_norm_backward_rows,
    reference_backward,
)
from examples.triton.layer_norm_backward_split import layer_norm_backward_split
from examples.triton.layer_norm_long import layer_norm_split
from examples.triton.layer_norm_resident import layer_norm_resident

WIDTHS = (1024, 4096, 16384, 65536)


def torch_backward(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, ...]:
    """The operator that autograd calls, on the same mean and rstd that ours get."""
    if x.device.type == "cpu" and x.dtype != torch.float32:  # there it wants them in the dtype of x
        return tuple(t.to(x.dtype) for t in torch_backward(dy.float(), x.float(), weight.float(), mean, rstd))
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, x.shape[-1:], mean[:, None], rstd[:, None], weight, weight, [True, True, True]
    )


def short_of_rows(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, ...]:
    """dx as it is; dweight and dbias without the last 4 rows."""
    short = reference_backward(dy[:-4], x[:-4], weight, mean[:-4], rstd[:-4])
    return reference_backward(dy, x, weight, mean, rstd)[0], *short[1:]


def code(h: Harness) -> None:
    x, weight = h.meta(4096, 16384), h.meta(16384)
    h.codegen(layer_norm_resident, x, weight, weight, find=dict.fromkeys((90, 100), ("ld.global.v4", "st.global.v4")))
    h.codegen(layer_norm_split, h.meta(4096, 65536), *[h.meta(65536)] * 2, find={90: ("cp.async", "atom")})
    for backward, cols, sms, find in (
        (layer_norm_backward_rows, 4096, (90,), ("cp.async",)),
        (layer_norm_backward_split, 65536, (90, 100), ("cp.async", "atom")),
    ):
        x, weight, stats = h.meta(4096, cols), h.meta(cols), h.meta(4096, dtype=torch.float32)
        h.codegen(backward, x, x, weight, stats, stats, find=dict.fromkeys(sms, find))


def sweep(h: Harness, rows: int, cols: int) -> Table:
    """The tables of one row length, of which it returns backward's; also the fact on dweight where it is the first."""
    x, weight, bias, dy = inputs(h, rows, cols)
    case = f"{rows}x{cols}"
    forward = {"torch": torch_layer_norm} | compiled_modes(h, torch_layer_norm)
    # Without mean and rstd, which the table cannot hold to the dtype of y.
    forward["triton"] = lambda *args: layer_norm_forward(*args)[0]
    if cols > ROWS_MAX:
        forward["triton resident"] = lambda *args: layer_norm_resident(*args)[0]
    h.compare(
        forward, reference, x, weight, bias, title="forward", case=case, baseline="torch",
        work=Work(bytes=2 * x.nbytes), terms=cols,
    )  # fmt: skip
    # Inductor as it is by default: the lesson's table has max-autotune beside forward and backward together.
    backward = {"torch": torch_backward, "torch.compile": h.compiled(torch_backward)}
    if cols <= BACKWARD_ROWS_MAX:
        backward["triton rows"] = layer_norm_backward_rows
    else:
        backward["triton loop"] = layer_norm_backward_loop
        if not h.interpreted:
            backward["gluon split"] = layer_norm_backward_split
    _, mean, rstd = layer_norm_forward(x, weight, bias)
    operands = dy, x, weight, mean, rstd
    table = h.compare(
        backward, reference_backward, *operands, title="backward", case=case, baseline="torch",
        work=Work(bytes=3 * x.nbytes), terms=max(rows, cols), wrong={"without 4 rows of dweight": short_of_rows},
        library={"operand_eps": torch.finfo(h.half).eps / 2},  # for its dweight and dbias
    )  # fmt: skip
    if cols == WIDTHS[0] and not h.profile:
        _, want, _ = reference_backward(*operands)
        off = {row.variant: backward[row.variant](*operands)[1].double() - want for row in table.rows}
        errors = {name: float(f"{(error.norm() / want.norm()).item():.2g}") for name, error in off.items()}
        h.fact(f"rms error of dweight over its rms, {case}", errors)
    return table


def study(h: Harness) -> None:
    code(h)
    elements = h.fit(h.pick(interpreted=1 << 15, quick=1 << 26, full=1 << 28), bytes_each=100)
    widths = h.pick(interpreted=(1024, 20000), quick=(1024, 16384, 65536), full=WIDTHS)
    tables = [sweep(h, elements // cols, cols) for cols in widths]
    if waits := [table for table in tables if table.timed and "gluon split" in table]:
        gain = geomean(waits, "triton loop", "gluon split")
        shares = " and ".join(f"{table['gluon split'].of_ceiling:.0%}" for table in waits)
        h.say(
            f"backward of long rows: programs that exchange sums are {gain:.2f}x as fast as reading everything twice "
            f"(5 passes for 3 would make 1.67x), at {shares} of a copy"
        )
