"""graph_breaks, measured: what torch's own tools say, a break in a loop, names of the API."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from harness import Harness

import torch

from compile_inspect import find_breaks, logs
from examples.compiler import graph_breaks as lesson
from examples.compiler.graph_breaks import PAIRS, Layer, operands


def prints_in_a_loop(x, scale, temperature):
    for _ in range(1):
        print("temperature", temperature)
        x = x / temperature
    return torch.tanh(x) * scale


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


def names_of_the_api(h: Harness, x: torch.Tensor) -> None:
    """The chapter's names against the supported ones."""

    def as_a_context(disable: Callable) -> str:
        try:
            with disable():
                return "works"
        except (RuntimeError, TypeError, AttributeError) as error:
            return f"{type(error).__name__}: {str(error)[:90]}"

    compiled = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")
    left_alone = torch.compiler.disable(lambda x: x * 2)
    found = find_breaks(lambda x: left_alone(x + 1) + 1, x)
    h.fact(
        "claim is-compiling-api",
        {
            "torch.compiler.is_compiling()": f"compiled {bool(compiled(torch.zeros(())))}",
            "torch._dynamo.is_compiling(), private": hasattr(torch._dynamo, "is_compiling"),
            "with torch._dynamo.disable()": as_a_context(torch._dynamo.disable),
            "with torch.compiler.disable()": as_a_context(torch.compiler.disable),
            "@torch.compiler.disable": f"{found.graphs} graphs, {len(found.breaks)} break",
        },
    )
    torch.compiler.reset()


def study(h: Harness) -> None:
    if h.profile:
        return
    inputs = operands(h, 32, 1024)
    show_tools(h, *inputs)
    found = Layer(prints_in_a_loop).breaks(*inputs)
    h.fact("print in a loop", {"graphs": found.graphs, "left to eager": found.breaks[-1].lost})
    names_of_the_api(h, inputs[2])
