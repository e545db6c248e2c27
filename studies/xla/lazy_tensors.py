"""lazy_tensors, measured: the graph as text, what counts as the same graph, numbers that compile, eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from harness import Harness, Work

import torch
import torch.nn.functional as F
import torch_xla
from torch_xla.experimental.eager import eager_mode_context

from examples.common import xla
from examples.xla.lazy_tensors import INNER, LAYERS, LAZY, OPS, ROWS, WIDTH, chain, exact, layer

ONE_BY_ONE = "torch_xla eager mode"


def study(h: Harness) -> None:
    if not h.profile:
        forms_of(h)
        same_graph(h)
        baked_in(h)
    one_by_one(h)


# --- the graph as text


def forms_of(h: Harness) -> None:
    """The same graph as recorded, and as it is handed to XLA and to other compilers."""
    inputs = h.randn(ROWS, INNER), h.randn(INNER, WIDTH, scale=INNER**-0.5), h.randn(WIDTH)
    y = layer(*(t.to(xla.device()) for t in inputs))
    forms = {"IR": xla.ir(y), "HLO": xla.hlo(y), "StableHLO": xla.stablehlo(y)}
    del y
    operations = {name: xla.operations(text) for name, text in forms.items()}
    h.fact("operations", {form: dict(found.most_common()) for form, found in operations.items()})


# --- what is the same graph


def same_graph(h: Harness) -> None:
    """A program is found again by what was recorded, not by the code that recorded it nor by the values in it."""
    inputs = h.randn(ROWS, INNER), h.randn(INNER, WIDTH + 2, scale=INNER**-0.5), h.randn(WIDTH + 2)
    x, w, b = (t.to(xla.device()) for t in inputs)
    other = h.randn(ROWS, INNER).to(xla.device())

    def rewritten(x, w, b):
        hidden = torch.add(torch.matmul(x, w), b)
        return torch.mean(torch.nn.GELU()(hidden), dim=1)

    def held(x, w, b):
        hidden = x @ w + b
        return F.gelu(hidden).mean(-1), hidden

    def dropped(x, w, b):
        (x * 3).exp()
        return layer(x, w, b)

    cases = {
        "the first time": (layer, (x, w, b)),
        "the same again": (layer, (x, w, b)),
        "other values": (layer, (other, w, b)),
        "other code, the same operations": (rewritten, (x, w, b)),
        "a result more that nobody holds": (dropped, (x, w, b)),
        "an intermediate result held": (held, (x, w, b)),
        "b + x @ w for x @ w + b": (lambda x, w, b: F.gelu(b + x @ w).mean(-1), (x, w, b)),
        "one row less": (layer, (x[1:].clone(), w, b)),
    }
    found = {}
    for what, (fn, given) in cases.items():
        with xla.watch() as ran:
            result = fn(*given)
            xla.settle()
        found[what] = "compiled" if ran.compiles else "found again" if ran.reused else "not run"
        del result
    h.fact("recorded", found)


# --- numbers in the graph


def programs(fn: Callable, x: torch.Tensor, values: Iterable) -> tuple[xla.Ran, list[torch.Tensor]]:
    """fn(x, value) for each value, each in a step of its own: what XLA did for all, and the results."""
    results = []
    with xla.watch() as ran:
        for value in values:
            results.append(fn(x, value))
            torch_xla.sync()
    return ran, results


def one(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.tensor([value], device=x.device)


def baked_in(h: Harness) -> None:
    """A Python number that changes at every step: part of the graph, or an input of it?

    0 and 1 are put into the graph, because much can be simplified with them: those of a tensor without dimensions too,
    wherever it was made. A list of one number is data.
    """
    floats, special, whole = (0.37, 0.71, 1.37, 1.91), (0.0, 1.0, 1.37, 1.91), (2, 3, 4, 5)
    cases = {
        "x * s": (lambda x, s: x * s, floats),
        "x * s, 0 and 1 among them": (lambda x, s: x * s, special),
        "x * torch.tensor(s, device=xla), the same": (lambda x, s: x * torch.tensor(s, device=x.device), special),
        "x * torch.tensor([s], device=xla), the same": (lambda x, s: x * one(x, s), special),
        "x ** n": (lambda x, n: x**n, whole),
        "x ** torch.tensor([n], device=xla)": (lambda x, n: x ** one(x, float(n)), whole),
        "x[:, n]": (lambda x, n: x[:, n].square(), whole),
        "x[:, torch.tensor(n, device=xla)]": (lambda x, n: x[:, torch.tensor(n, device=x.device)].exp(), whole),
        "x.index_select(1, [n] there)": (lambda x, n: x.index_select(1, one(x, n)), whole),
        "x[:, :n].sum(1)": (lambda x, n: x[:, :n].sum(1), whole),
        "torch.where(column < [n] there, x, 0).sum(1)": (
            lambda x, n: torch.where(torch.arange(x.shape[1], device=x.device) < one(x, n), x, 0.0).sum(1), whole,
        ),
    }  # fmt: skip
    found = {}
    for i, (what, (fn, values)) in enumerate(cases.items()):
        x = h.randn(ROWS, 67 + i)  # a width each, so that no case finds the programs of another
        ran, results = programs(fn, x.to(xla.device()), values)
        h.check(
            lambda _, results=results: tuple(results),
            lambda x, fn=fn, values=values: tuple(fn(x.double(), value) for value in values),
            x, terms=8, roundings=16, poison=False, what=f"{what} for {values}", constant_ok=0.0 in values,
        )  # fmt: skip
        found[what] = {"compiles": ran.compiles, "found again": ran.reused}
        if ran.from_device:
            found[what]["read by the host"] = ran.from_device
    h.table(f"programs for {len(whole)} values", found)


# --- without laziness


def one_by_one(h: Harness) -> None:
    """torch_xla's eager mode: each operation of the lesson's chain a program of its own."""
    rows, width = 7, 61
    given = h.randn(rows, width), *(h.randn(width, width, scale=width**-0.5) for _ in range(LAYERS))
    there = [t.to(xla.device()) for t in given]

    def eagerly(*_) -> torch.Tensor:
        with eager_mode_context(True):
            y = chain(*there)
            xla.wait()
        return y

    h.compare(
        {LAZY: xla.waited(lambda *_: chain(*there)), ONE_BY_ONE: eagerly}, exact(chain), *given, baseline=LAZY,
        terms=LAYERS * width, work=Work(), title=f"{LAYERS * OPS} operations", case=f"{rows}x{width}",
    )  # fmt: skip
