"""Graph breaks: find the line of your own code that splits the graph, and write it so that it does not.

Where Dynamo meets Python that it cannot trace, it ends the graph, lets Python run that line and starts another graph
after it. Kernels on both sides are no longer fused, guards and launches are paid again, and where a tensor's value is
read the host waits for the GPU. That is the mild case: inside a try block or a loop over a generator Dynamo cannot
resume, and leaves the rest of the function, or all of it, to eager.

One layer is written with five common causes, and again without; calls of code that Dynamo does not know are the subject
of custom_ops. find_breaks names the line and what it leaves to eager (torch._dynamo.explain lists none that cannot be
resumed from); fullgraph=True holds the mended version to one graph.

Question   Which line of the model breaks the graph, what does that cost, and how is it written without?
Needs      torch
Wins when  (mending pays when) many short kernels surround the break. Between long kernels only the lost fusion is left.
Study      studies/compiler/graph_breaks.py (further fixes, fullgraph, explain, what does not break, kernels written)
Source     chapter section "Graph Breaks and Debugging".
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import NamedTuple

from harness import Harness, Timing, Work, run

import torch
import torch.nn.functional as F

from compile_inspect import SPLIT, Breaks, find_breaks, logs, own_code, warm_up

# --- one layer, broken and mended: tanh(silu(x) * scale / temperature) * scale + x


def prints(x, scale, temperature):
    y = F.silu(x) * scale
    print("temperature", temperature)
    return torch.tanh(y / temperature) * scale + x


def prints_when_eager(x, scale, temperature):
    y = F.silu(x) * scale
    if not torch.compiler.is_compiling():
        print("temperature", temperature)
    return torch.tanh(y / temperature) * scale + x


def reads_an_item(x, scale, temperature):
    y = F.silu(x) * scale
    y = y / temperature.item()
    return torch.tanh(y) * scale + x


def stays_a_tensor(x, scale, temperature):
    return torch.tanh(F.silu(x) * scale / temperature) * scale + x


def branches(x, scale, temperature):
    y = F.silu(x) * scale
    if temperature > 0:
        y = y / temperature
    return torch.tanh(y) * scale + x


def selects(x, scale, temperature):
    y = F.silu(x) * scale
    y = torch.where(temperature > 0, y / temperature, y)
    return torch.tanh(y) * scale + x


def catches(x, scale, temperature):
    y = F.silu(x) * scale
    try:
        gain = 1 / temperature.item()
    except ZeroDivisionError:
        gain = 1.0
    return torch.tanh(y * gain) * scale + x


def guards_the_zero(x, scale, temperature):
    y = F.silu(x) * scale
    gain = torch.where(temperature == 0, 1.0, 1 / temperature)
    return torch.tanh(y * gain) * scale + x


def iterates(x, scale, temperature, divisors):
    y = F.silu(x) * scale
    for divisor in divisors:
        y = y / divisor
    return torch.tanh(y) * scale + x


def reference(x, scale, temperature):
    return stays_a_tensor(x.double(), scale.double(), temperature.double())


class Layer(NamedTuple):
    """A way to write the layer: a function, and what its caller hands in besides."""

    fn: Callable
    extra: Callable = lambda temperature: ()

    def breaks(self, x, scale, temperature) -> Breaks:
        with redirect_stdout(io.StringIO()):
            return find_breaks(self.fn, x, scale, temperature, *self.extra(temperature))

    def compiled(self, **options) -> Callable:
        """f(x, scale, temperature), compiled at its first call; what it prints is not shown."""
        fn = torch.compile(own_code(self.fn), dynamic=False, **options)

        def call(x, scale, temperature):
            with redirect_stdout(io.StringIO()):
                return fn(x, scale, temperature, *self.extra(temperature))

        return call


PAIRS = {  # broken, mended
    "print": (Layer(prints), Layer(prints_when_eager)),
    ".item()": (Layer(reads_an_item), Layer(stays_a_tensor)),
    "if on a tensor": (Layer(branches), Layer(selects)),
    "try/except": (Layer(catches), Layer(guards_the_zero)),
    "generator": (Layer(iterates, lambda t: ((each for each in (t,)),)), Layer(iterates, lambda t: ([t],))),
}
EAGER, ONE_GRAPH = "torch eager", "torch.compile, one graph"


def budget(dtype: torch.dtype) -> dict:
    return {"terms": 0, "roundings": 8, "acc": dtype}


def operands(h: Harness, rows: int, width: int) -> tuple[torch.Tensor, ...]:
    """x [rows, width], scale [width] and temperature []; both positive, so that nothing cancels in the sum."""
    dtype = torch.bfloat16 if h.machine.mode == "gpu" else torch.float32
    scale = (h.randn(width).abs() + 0.5).to(dtype)
    return h.randn(rows, width, dtype=dtype), scale, torch.tensor(1.7, dtype=dtype, device=h.device)


def compare(h: Harness, inputs: tuple):
    """One call as its caller waits for it: eager, in one graph, and with each cause of a break."""
    warm_up(inputs[0].device)
    torch.compiler.reset()
    variants = {EAGER: stays_a_tensor, ONE_GRAPH: Layer(stays_a_tensor).compiled()}
    variants |= {f"torch.compile, {cause}": before.compiled() for cause, (before, _) in PAIRS.items()}
    with warnings.catch_warnings(), logs():
        warnings.simplefilter("ignore")
        return h.compare(
            variants, reference, *inputs, baseline=EAGER, work=Work(bytes=2 * inputs[0].nbytes),
            title="one layer", timing=Timing(end_to_end=True, cold=h.full), **budget(inputs[0].dtype),
        )  # fmt: skip


def answer(rows: dict[str, dict], tables: list) -> str:
    more = [cause for cause, row in rows.items() if row["left to eager"] != SPLIT]
    costs = []
    for table in tables:  # without print: to format a tensor takes time, compiled or not
        times = {cause: table.over(f"torch.compile, {cause}", ONE_GRAPH) for cause in PAIRS if cause != "print"}
        dearest = max(times, key=times.get)
        costs.append(f"{min(times.values()):.1f} to {times[dearest]:.1f} at {table.case} (most: {dearest})")
    lost = f"After {', '.join(more)} the rest runs in eager" if more else "Fusion is all that is lost"
    return f"A call with a break takes one graph's time x {', x '.join(costs)}. {lost}. find_breaks names each line."


def demo(h: Harness) -> None:
    sizes = h.pick(quick=((32, 1024),), full=((32, 1024), (8192, 8192) if h.machine.mode == "gpu" else (1024, 4096)))
    inputs, rows = operands(h, *sizes[0]), {}
    for cause, (before, after) in {} if h.profile else PAIRS.items():
        found, mended = before.breaks(*inputs), after.breaks(*inputs)
        (first,) = found.breaks
        fixed = after.compiled(backend="aot_eager", fullgraph=True)
        h.check(fixed, reference, *inputs, what=f"{cause}, mended", poison=False, **budget(inputs[0].dtype))
        rows[cause] = {
            "graphs": found.graphs,
            "operations": f"{found.operations} of {mended.operations}",
            "left to eager": first.lost,
            "line": str(first),
        }
    h.table("what breaks the graph; mended, each is one graph with all operations", rows)
    tables = [compare(h, operands(h, *size)) for size in sizes]
    h.answer(lambda: answer(rows, tables))


if __name__ == "__main__":
    run(demo)
