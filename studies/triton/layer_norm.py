"""layer_norm, measured: each kernel by itself, forward and backward, and how exact the gradients of the weight are.

1. Each kernel on ragged sizes, beyond the lengths that `layer_norm` gives it.
2. The code of the kernels that the lesson does not show: asynchronous copies, and the atomic that sends a word.
3. Row lengths from 1024 to 65536: forward and backward apart, every kernel that takes the length, beside the operators
   of torch that autograd calls and what Inductor makes of them.
4. The error of dweight, which torch adds up in parts that it rounds to 16 bits.
"""

from __future__ import annotations

from harness import Harness, Table, Work, geomean

import torch

from examples.triton.layer_norm import (
    BACKWARD_ROWS_MAX,
    ROWS_MAX,
    inputs,
    layer_norm_backward_loop,
    layer_norm_backward_rows,
    layer_norm_backward_split,
    layer_norm_forward,
    layer_norm_resident,
    layer_norm_rows,
    reference,
    torch_layer_norm,
)
from examples.triton.layer_norm_backward import reference_backward

WIDTHS = (1024, 4096, 16384, 65536)


def torch_backward(dy, x, weight, mean, rstd) -> tuple[torch.Tensor, ...]:
    """The operator that autograd calls, on the same mean and rstd that ours get."""
    if x.device.type == "cpu" and x.dtype != torch.float32:  # there it wants them in the dtype of x
        return tuple(t.to(x.dtype) for t in torch_backward(dy.float(), x.float(), weight.float(), mean, rstd))
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, x.shape[-1:], mean[:, None], rstd[:, None], weight, weight, [True, True, True]
    )


def only_y(forward):
    """forward() without mean and rstd, which the tables cannot hold to the dtype of y."""
    return lambda *args: forward(*args)[0]


def checks(h: Harness) -> None:
    backwards = [layer_norm_backward_rows, layer_norm_backward_loop]
    backwards += [] if h.interpreted else [layer_norm_backward_split]
    for rows, cols in [(1, 1), (3, 781), (9, 4097)]:
        x, weight, bias, dy = inputs(h, rows, cols)
        for forward in (layer_norm_rows, layer_norm_resident) if cols <= ROWS_MAX else (layer_norm_resident,):
            what = f"{forward.__name__} {rows}x{cols}"
            h.check(only_y(forward), reference, x, weight, bias, terms=cols, what=what)
        if cols == 1:  # its dx is 0, and what float64 makes of 0 is noise
            continue
        _, mean, rstd = layer_norm_forward(x, weight, bias)
        for backward in backwards:
            h.check(backward, reference_backward, dy, x, weight, mean, rstd, terms=max(rows, cols))
    if h.interpreted:
        h.say("layer_norm_backward_split is compiled but not run here: its programs wait for each other")


def code(h: Harness) -> None:
    def meta(cols):
        return h.meta(4096, cols), h.meta(cols), h.meta(4096, dtype=torch.float32)

    x, weight, _ = meta(16384)
    h.codegen(layer_norm_resident, x, weight, weight, find=dict.fromkeys((90, 100), ("ld.global.v4", "st.global.v4")))
    x, weight, stats = meta(4096)
    h.codegen(layer_norm_backward_rows, x, x, weight, stats, stats, find={90: ("cp.async",)})
    x, weight, stats = meta(65536)
    find = dict.fromkeys((90, 100), ("cp.async", "atom"))
    h.codegen(layer_norm_backward_split, x, x, weight, stats, stats, find=find)


def sweep(h: Harness, rows: int, cols: int) -> tuple[Table, Table]:
    """The tables of one row length; also the fact on dweight where it is the first."""
    x, weight, bias, dy = inputs(h, rows, cols)
    forward = {"torch": torch_layer_norm, "torch.compile": h.compiled(torch_layer_norm)}
    if cols <= ROWS_MAX:
        forward["triton rows"] = only_y(layer_norm_rows)
    else:
        forward["triton resident"] = only_y(layer_norm_resident)
    backward = {"torch": torch_backward, "torch.compile": h.compiled(torch_backward)}
    if cols <= BACKWARD_ROWS_MAX:
        backward["triton rows"] = layer_norm_backward_rows
    else:
        backward["triton loop"] = layer_norm_backward_loop
        if not h.interpreted:
            backward["triton split"] = layer_norm_backward_split
    case = f"{rows}x{cols}"
    first = h.compare(
        forward, reference, x, weight, bias, title="forward", case=case, baseline="torch",
        work=Work(bytes=2 * x.nbytes), terms=cols,
    )  # fmt: skip
    _, mean, rstd = layer_norm_forward(x, weight, bias)
    operands = dy, x, weight, mean, rstd
    second = h.compare(
        backward, reference_backward, *operands, title="backward", case=case, baseline="torch",
        work=Work(bytes=3 * x.nbytes), terms=max(rows, cols),
        operand_eps=torch.finfo(h.half).eps / 2,  # for torch's dweight and dbias
    )  # fmt: skip
    if cols == WIDTHS[0] and not h.profile:
        _, want, _ = reference_backward(*operands)
        off = {name: fn(*operands)[1].double() - want for name, fn in backward.items()}
        errors = {name: float(f"{(error.norm() / want.norm()).item():.2g}") for name, error in off.items()}
        h.fact(f"rms error of dweight over its rms, {case}", errors)
    return first, second


def study(h: Harness) -> None:
    checks(h)
    code(h)
    elements = h.fit(h.pick(interpreted=1 << 15, quick=1 << 26, full=1 << 28), bytes_each=100)
    widths = h.pick(interpreted=(1024, 20000), quick=(1024, 16384, 65536), full=WIDTHS)
    tables = [sweep(h, elements // cols, cols) for cols in widths]
    _, backward = zip(*tables, strict=True)
    if not all(backward):
        return
    waits = [table for table in backward if "triton split" in table]
    gain = geomean(waits, "triton loop", "triton split")
    shares = " and ".join(f"{table['triton split'].of_ceiling:.0%}" for table in waits)
    h.say(
        f"backward of long rows: programs that exchange sums are {gain:.2f}x as fast as reading everything twice "
        f"(5 passes for 3 would make 1.67x), at {shares} of a copy"
    )
