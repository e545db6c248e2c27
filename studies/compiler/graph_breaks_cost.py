"""graph_breaks: the kernels that Inductor writes for each cause, and the time of the fixes, of print and of .item()."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stdout

from harness import Harness

import torch

from compile_inspect import generated_code, logs
from examples.compiler.graph_breaks import (
    ONE_GRAPH,
    PAIRS,
    Layer,
    compare,
    operands,
    prints,
    reads_an_item,
    selects,
    stays_a_tensor,
)
from studies.compiler.graph_breaks import branches_in_the_graph, own


def kernels(layer: Layer, *inputs) -> int:
    """How many kernels Inductor writes for it."""
    torch.compiler.reset()
    with redirect_stdout(io.StringIO()), warnings.catch_warnings(), logs():
        warnings.simplefilter("ignore")
        code = generated_code(layer.fn, *inputs, *layer.extra(inputs[-1]))
    return sum(text.count("= async_compile.") for text in code)


def show_cost(h: Harness, *inputs) -> None:
    """Kernels that Inductor writes, and the time of the fixes, of print in eager, and of .item() captured."""
    layers = {"one graph": Layer(stays_a_tensor)} | {cause: before for cause, (before, _) in PAIRS.items()}
    written = {name: kernels(layer, *inputs) for name, layer in layers.items()}
    case = "x".join(map(str, inputs[0].shape))
    h.fact(f"kernels that Inductor writes, {case}", written)

    def prints_unseen(*args):
        with redirect_stdout(io.StringIO()):
            return prints(*args)

    layers = {"print": Layer(prints)}
    if h.machine.mode == "gpu":  # compiling torch.cond takes a CPU as long as all the rest
        layers |= {"if as torch.where": Layer(selects), "if as torch.cond": Layer(branches_in_the_graph)}
    timed = {"torch eager, print": prints_unseen}
    timed |= {f"torch.compile, {name}": own(layer).compiled() for name, layer in layers.items()}
    timed["torch.compile, .item() captured"] = own(Layer(reads_an_item)).compiled(fullgraph=True)
    table = compare(h, inputs, timed, "fixes and print")
    if table.timed:
        ratio = {name: table.over(name, ONE_GRAPH) for name in timed}
        h.say("time of a call over that of one graph: " + ", ".join(f"{n} {r:.2f}x" for n, r in ratio.items()))


def study(h: Harness) -> None:
    if not h.profile:
        show_cost(h, *operands(h, 32, 1024))
