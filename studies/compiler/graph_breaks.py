"""graph_breaks, measured: further fixes, what torch's own tools say, what does not break, and the names of the API."""

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

from compile_inspect import find_breaks, logs, own_code
from examples.compiler import graph_breaks as lesson
from examples.compiler.graph_breaks import (
    PAIRS,
    Layer,
    budget,
    catches,
    operands,
    prints,
    reads_an_item,
    reference,
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


def reads_items_in_a_generator(x, scale, temperature):
    y = F.silu(x) * scale
    divisor = max(each.item() for each in temperature.expand(2))
    return torch.tanh(y / divisor) * scale + x


# Fixes beside those of the lesson: how it is written, and the settings of Dynamo under which it is compiled.
FIXES = {
    "print": {"reorderable_logging_functions": (Layer(prints), {"reorderable_logging_functions": {print}})},
    ".item()": {"capture_scalar_outputs": (Layer(reads_an_item), {"capture_scalar_outputs": True})},
    "if on a tensor": {"torch.cond": (Layer(branches_in_the_graph), {})},
}


def own(layer: Layer) -> Layer:
    """The same with code of its own: graphs belong to the code, also those compiled under other settings."""
    return layer._replace(fn=own_code(layer.fn))


def show_fixes(h: Harness, *inputs) -> None:
    for cause, fixes in FIXES.items():
        for name, (layer, config) in fixes.items():
            with torch._dynamo.config.patch(config):
                found = layer.breaks(*inputs)
                h.check(
                    own(layer).compiled(backend="aot_eager", fullgraph=True), reference, *inputs,
                    what=f"{cause}: {name}, in one graph", poison=False, **budget(inputs[0].dtype),
                )  # fmt: skip
            h.fact(f"{cause}: {name}", {"graphs": found.graphs, "breaks": len(found.breaks)})


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
            "reason": before.breaks(*inputs).breaks[-1].reason,
            "fullgraph=True": fullgraph_says(before, *inputs),
            "torch._dynamo.explain": explained(before, *inputs),
        }
        for cause, (before, _) in PAIRS.items()
    }
    h.table("what torch's own tools say", rows)
    loud = [cause for cause, row in rows.items() if ", line " in row["fullgraph=True"]]
    h.say(f"fullgraph=True is an error that names the line for {len(loud)} of {len(rows)}: {', '.join(loud) or 'none'}")


def what_is_traced(h: Harness, *inputs) -> None:
    """What is often said to break and does not, and what breaks although nothing says so."""
    for name, fn in {
        "try/except around a raise": catches_nothing_that_breaks,
        "a generator made inside": generates_inside,
        ".item() in a generator made inside": reads_items_in_a_generator,
    }.items():
        found = find_breaks(fn, *inputs)
        lost = found.breaks[-1].lost if found.breaks else "nothing"
        h.fact(name, {"graphs": found.graphs, "breaks": len(found.breaks), "lost": lost})


def captured_try(h: Harness, x: torch.Tensor, scale: torch.Tensor) -> None:
    """fullgraph=True, which captures .item(), takes the layer with try/except; then comes the value it was for."""
    torch.compiler.reset()
    fn = torch.compile(catches, backend="aot_eager", fullgraph=True)
    zero = x.new_zeros(())
    fn(x, scale, x.new_tensor(2.0))
    want = catches(x, scale, zero)
    try:
        off = (fn(x, scale, zero).double() - want.double()).abs().max().item()
        outcome = f"off by {off:.3g} from eager" if off > 0.1 else "as eager"
    except ZeroDivisionError:
        outcome = "raises the ZeroDivisionError that its own except catches in eager"
    h.fact("try/except captured by fullgraph=True, at temperature 0", outcome)


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


def study(h: Harness) -> None:
    inputs = operands(h, 32, 1024)
    if not h.profile:
        show_fixes(h, *inputs)
        show_tools(h, *inputs)
        what_is_traced(h, *inputs)
        captured_try(h, *inputs[:2])
        names_of_the_api(h, inputs[2])
