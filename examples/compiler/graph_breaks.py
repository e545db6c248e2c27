"""Graph breaks: find the line of your own code that splits the graph, and write it so that it does not.

Where Dynamo meets Python that it cannot trace, it ends the graph, lets Python run that line and starts another graph
after it. Operations on either side of it are no longer fused, each graph has its own guards and launches, and if the
line reads a tensor's value the host waits for the GPU. A break inside a try block, or at a loop over a generator that
the caller passed, is worse: Dynamo cannot resume after it, and leaves the rest of the function to eager; after a break
inside a loop it leaves the whole function.

One layer is written with five common causes, and again without them; calls that Dynamo cannot trace are the subject of
custom_ops. find_breaks reads torch's log (TORCH_LOGS=graph_breaks, for any program) and names the line, and what is
left to eager; torch._dynamo.explain does not count the breaks that Dynamo cannot resume from. fullgraph=True, the usual
detector, raises at a break but finds nothing at .item(): there it captures the scalar in the graph, as the setting
torch._dynamo.config.capture_scalar_outputs does, and the break is back as soon as fullgraph is left out.

Question   Which line of the model breaks the graph, what does that cost, and how is it written without?
Needs      torch
Wins when  (mending pays) always, here: between short kernels a break costs launches, guards and the wait for the value;
           between long ones it costs fusion, more of it the more of the function is left to eager. At 32x1024 one graph
           gains little over eager, because guards and one launch replace only a few launches, and a broken one is
           slower than eager.
Study      studies/compiler/graph_breaks.py (fullgraph, explain, a break in a loop, names of the API)
Source     chapter sections "Graph Breaks and Debugging", "1. Minimize Graph Breaks" and "Graph Breaks".
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
from examples.common.shown import require

# --- one layer, broken and mended: tanh(silu(x) * scale / temperature) * scale + x


def prints(x, scale, temperature):
    y = F.silu(x) * scale
    print("temperature", temperature)
    return torch.tanh(y / temperature) * scale + x


def prints_when_eager(x, scale, temperature):
    y = F.silu(x) * scale
    # Compiled, it prints nothing; to keep the output, add print to torch._dynamo.config.reorderable_logging_functions.
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
    # The divisor is selected, not the quotient: y / 0, though not selected, would make gradients NaN.
    y = y / torch.where(temperature > 0, temperature, 1.0)
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
    gain = 1 / torch.where(temperature == 0, 1.0, temperature)
    return torch.tanh(y * gain) * scale + x


def iterates(x, scale, temperature, divisors):
    y = F.silu(x) * scale
    for divisor in divisors:
        y = y / divisor
    return torch.tanh(y) * scale + x


def reference(x, scale, temperature):
    return stays_a_tensor(x.double(), scale.double(), temperature.double())


class Layer(NamedTuple):
    """A way to write the layer: a function, and extra arguments, made anew for each call as a generator must be."""

    fn: Callable
    extra: Callable = lambda temperature: ()

    def breaks(self, x, scale, temperature) -> Breaks:
        with redirect_stdout(io.StringIO()):
            return find_breaks(self.fn, x, scale, temperature, *self.extra(temperature))

    def compiled(self, **options) -> Callable:
        """f(x, scale, temperature), compiled at its first call."""
        fn = torch.compile(own_code(self.fn), dynamic=False, **options)

        def call(x, scale, temperature):
            return fn(x, scale, temperature, *self.extra(temperature))

        return call


PAIRS = {  # broken, mended
    "print": (Layer(prints), Layer(prints_when_eager)),
    ".item()": (Layer(reads_an_item), Layer(stays_a_tensor)),
    "if on a tensor": (Layer(branches), Layer(selects)),
    ".item() inside try": (Layer(catches), Layer(guards_the_zero)),
    "generator argument": (Layer(iterates, lambda t: ((each for each in (t,)),)), Layer(iterates, lambda t: ([t],))),
}
# Without print: most of its time would be formatting the tensor, which costs the same without a break.
TIMED = {f"torch.compile, {cause}": broken for cause, (broken, _) in PAIRS.items() if cause != "print"}
EAGER, ONE_GRAPH = "torch eager", "torch.compile, one graph"


def budget(dtype: torch.dtype) -> dict:
    # Seven operations round at most: silu, * scale, 1 / temperature, * gain, tanh, * scale and + x.
    return {"terms": 0, "roundings": 7, "acc": dtype}


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
    variants |= {name: broken.compiled() for name, broken in TIMED.items()}
    with warnings.catch_warnings(), logs():
        warnings.simplefilter("ignore")
        return h.compare(
            variants, reference, *inputs, baseline=EAGER, work=Work(bytes=2 * inputs[0].nbytes),
            title="one layer", timing=Timing(end_to_end=True, cold=h.full), **budget(inputs[0].dtype),
        )  # fmt: skip


def answer(rows: dict[str, dict], tables: list) -> str:
    item = "torch.compile, .item()"
    costs = [f"at {table.case.split()[0]} .item() {table.over(item, ONE_GRAPH):.2f}x" for table in tables]
    worst = max(TIMED, key=lambda name: tables[-1].over(name, ONE_GRAPH))
    cause, eager = worst.partition(", ")[2], {each: row["left to eager"] for each, row in rows.items()}
    if worst != item:
        costs[-1] += f", {cause} {tables[-1].over(worst, ONE_GRAPH):.2f}x"
        costs[-1] += " (it leaves the rest to eager)" if eager[cause] != SPLIT else ""
    return f"Speed with the break mended, over broken: {'; '.join(costs)}."


def demo(h: Harness) -> None:
    sizes = h.pick(quick=((32, 1024),), full=((32, 1024), (8192, 8192) if h.machine.mode == "gpu" else (1024, 4096)))
    inputs, rows = operands(h, *sizes[0]), {}
    for cause, (broken, mended) in {} if h.profile else PAIRS.items():
        found, whole = broken.breaks(*inputs), mended.breaks(*inputs)
        (first,) = found.breaks
        # fullgraph=True would not detect it: .item() compiles under it.
        require(not whole.breaks, f"{cause}, mended, breaks: {', '.join(map(str, whole.breaks))}")
        fn = mended.compiled(backend="aot_eager", fullgraph=True)  # aot_eager: the graph, without Inductor's code
        h.check(fn, reference, *inputs, what=f"{cause}, mended", poison=False, **budget(inputs[0].dtype))
        rows[cause] = {
            "graphs": found.graphs,
            "operations captured": found.operations,
            "mended": whole.operations,
            "left to eager": first.lost,
            "line": str(first),
        }
    h.table("what breaks the graph (the mended layer is one graph; it may need an operation more)", rows)
    tables = [compare(h, operands(h, *size)) for size in sizes]
    h.answer(lambda: answer(rows, tables))


if __name__ == "__main__":
    run(demo)
