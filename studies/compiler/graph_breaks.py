"""graph_breaks, measured: further fixes, what torch's own tools say, what does not break, names of the API, kernels."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from harness import Harness

import torch
import torch.nn.functional as F

from compile_inspect import find_breaks, generated_code, logs
from examples.compiler import graph_breaks as lesson
from examples.compiler.graph_breaks import (
    PAIRS,
    Layer,
    budget,
    operands,
    prints,
    reads_an_item,
    reference,
    stays_a_tensor,
)

# --- the layer once more


def branches_in_the_graph(x, scale, temperature):
    y = F.silu(x) * scale
    # Both branches return a tensor of their own: an output that is an input is refused.
    y = torch.cond(temperature > 0, lambda y, t: y / t, lambda y, t: y.clone(), (y, temperature))
    return torch.tanh(y) * scale + x


def catches_nothing_that_breaks(x, scale, temperature):
    try:
        if x.ndim != 3:
            raise ValueError("not a batch")
        y = x
    except ValueError:
        y = F.silu(x) * scale
    return torch.tanh(y / temperature) * scale + x


def generates_inside(x, scale, temperature):
    y = F.silu(x) * scale
    for divisor in (each for each in (temperature,)):
        y = y / divisor
    return torch.tanh(y) * scale + x


def prints_in_a_loop(x, scale, temperature):
    y = F.silu(x) * scale
    for _ in range(1):
        print("temperature", temperature)
        y = y / temperature
    return torch.tanh(y) * scale + x


def reads_items_in_a_generator(x, scale, temperature):
    y = F.silu(x) * scale
    divisor = max(each.item() for each in temperature.expand(2))
    return torch.tanh(y / divisor) * scale + x


# Fixes beside those of the lesson: how it is written, and the settings of Dynamo under which it is compiled.
FIXES = {
    "print: reorderable_logging_functions": (Layer(prints), {"reorderable_logging_functions": {print}}),
    ".item(): capture_scalar_outputs": (Layer(reads_an_item), {"capture_scalar_outputs": True}),
    "if on a tensor: torch.cond": (Layer(branches_in_the_graph), {}),
}


def silenced(fn: Callable) -> Callable:
    def call(*inputs):
        with redirect_stdout(io.StringIO()):
            return fn(*inputs)

    return call


def show_fixes(h: Harness, *inputs) -> None:
    for name, (layer, config) in FIXES.items():
        with torch._dynamo.config.patch(config):
            found, fixed = layer.breaks(*inputs), layer.compiled(backend="aot_eager", fullgraph=True)
            what = f"{name}, in one graph"
            h.check(silenced(fixed), reference, *inputs, what=what, poison=False, **budget(inputs[0].dtype))
        h.fact(name, {"graphs": found.graphs, "breaks": len(found.breaks)})


def fullgraph_says(layer: Layer, *inputs) -> str:
    """What fullgraph=True does with it: the error with the line that it names, or nothing."""
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            layer.compiled(backend="eager", fullgraph=True)(*inputs)
        except torch._dynamo.exc.Unsupported as error:
            named = re.findall(r'File "(.+)", line (\d+)', str(error))
            mine = [int(line) for file, line in named if Path(file).name == Path(lesson.__file__).name]
            where = f", line {mine[-1]}" if mine else ""
            return f"{type(error).__name__}: {str(error).splitlines()[0]}{where}"
    return "compiles"


def explained(layer: Layer, *inputs) -> str:
    torch.compiler.reset()
    with redirect_stdout(io.StringIO()), warnings.catch_warnings(), logs():
        warnings.simplefilter("ignore")
        told = torch._dynamo.explain(layer.fn)(*inputs, *layer.extra(inputs[-1]))
    torch.compiler.reset()
    return f"{told.graph_break_count} breaks, {len(told.break_reasons)} reasons"


def show_tools(h: Harness, *inputs) -> None:
    """What fullgraph=True and explain say of each cause."""
    rows = {
        cause: {
            "reason": broken.breaks(*inputs).breaks[-1].reason,
            "fullgraph=True": fullgraph_says(broken, *inputs),
            "torch._dynamo.explain": explained(broken, *inputs),
        }
        for cause, (broken, _) in PAIRS.items()
    }
    h.table("what torch's own tools say", rows)


def what_is_traced(h: Harness, *inputs) -> None:
    """What is often said to break and does not, and what breaks although nothing says so."""
    for name, fn in {
        "try/except around a raise": catches_nothing_that_breaks,
        "a generator made inside": generates_inside,
        ".item() in a generator made inside": reads_items_in_a_generator,
        "print in a loop": prints_in_a_loop,
    }.items():
        found = Layer(fn).breaks(*inputs)
        lost = found.breaks[-1].lost if found.breaks else "nothing"
        h.fact(name, {"graphs": found.graphs, "breaks": len(found.breaks), "lost": lost})


def names_of_the_api(h: Harness, x: torch.Tensor) -> None:
    """The chapter's names against the supported ones."""

    def asks(x, who):
        return x + 1 if who() else x

    def is_compiling(who: Callable) -> str:
        torch.compiler.reset()
        zero = torch.zeros((), device=x.device)
        return f"eager {bool(asks(zero, who))}, compiled {bool(torch.compile(asks, backend='eager')(zero, who))}"

    def as_a_context(disable: Callable) -> str:
        try:
            with disable():
                return "works"
        except (RuntimeError, TypeError, AttributeError) as error:
            return f"{type(error).__name__}: {str(error)[:90]}"

    private = getattr(torch._dynamo, "is_compiling", None)
    left_alone = torch.compiler.disable(lambda x: x * 2)
    found = find_breaks(lambda x: left_alone(x + 1) + 1, x)
    h.fact(
        "claim is-compiling-api",
        {
            "torch.compiler.is_compiling()": is_compiling(torch.compiler.is_compiling),
            "torch._dynamo.is_compiling(), private": is_compiling(private) if private else "does not exist",
            "with torch._dynamo.disable()": as_a_context(torch._dynamo.disable),
            "with torch.compiler.disable()": as_a_context(torch.compiler.disable),
            "@torch.compiler.disable": f"{found.graphs} graphs, {len(found.breaks)} break",
        },
    )
    torch.compiler.reset()


def show_kernels(h: Harness, *inputs) -> None:
    """How many kernels Inductor writes for each cause."""
    layers = {"one graph": Layer(stays_a_tensor)} | {cause: broken for cause, (broken, _) in PAIRS.items()}
    written = {}
    for name, layer in layers.items():
        torch.compiler.reset()
        with redirect_stdout(io.StringIO()), warnings.catch_warnings(), logs():
            warnings.simplefilter("ignore")
            code = generated_code(layer.fn, *inputs, *layer.extra(inputs[-1]))
        written[name] = sum(text.count("= async_compile.") for text in code)
    h.fact(f"kernels that Inductor writes, {'x'.join(map(str, inputs[0].shape))}", written)


def study(h: Harness) -> None:
    inputs = operands(h, 32, 1024)
    if not h.profile:
        show_fixes(h, *inputs)
        show_tools(h, *inputs)
        what_is_traced(h, *inputs)
        names_of_the_api(h, inputs[2])
        show_kernels(h, *inputs)
