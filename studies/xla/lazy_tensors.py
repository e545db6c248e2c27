"""lazy_tensors, measured: what counts as the same graph, and which numbers are part of it."""

from __future__ import annotations

from harness import Harness

import torch
import torch.nn.functional as F
import torch_xla

from examples.common import xla
from examples.xla.lazy_tensors import INNER, ROWS, WIDTH, layer


def study(h: Harness) -> None:
    if not h.profile:
        same_graph(h)
        baked_in(h)


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


def one(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.tensor([value], device=x.device)


def baked_in(h: Harness) -> None:
    """A Python number that changes at every step: part of the graph, or an input of it?

    0 and 1 are put into the graph, because much can be simplified with them. A list of one number is data.
    """
    special, whole = (0.0, 1.0, 1.37, 1.91), (2, 3, 4, 5)
    cases = {
        "x * s": (lambda x, s: x * s, (0.37, 0.71, 1.37, 1.91)),
        "x * s, 0 and 1 among them": (lambda x, s: x * s, special),
        "x * torch.tensor([s], device=xla), the same": (lambda x, s: x * one(x, s), special),
        "x ** n": (lambda x, n: x**n, whole),
        "x ** torch.tensor([n], device=xla)": (lambda x, n: x ** one(x, float(n)), whole),
        "x[:, n]": (lambda x, n: x[:, n].square(), whole),
        "x.index_select(1, [n] there)": (lambda x, n: x.index_select(1, one(x, n)), whole),
    }
    found = {}
    for i, (what, (fn, values)) in enumerate(cases.items()):
        x, results = h.randn(ROWS, 67 + i), []  # a width for each, so that no case finds another's programs
        there = x.to(xla.device())
        with xla.watch() as ran:
            for value in values:
                results.append(fn(there, value))
                torch_xla.sync()
        h.check(
            lambda _, results=results: tuple(results),
            lambda x, fn=fn, values=values: tuple(fn(x.double(), value) for value in values),
            x, terms=8, roundings=16, poison=False, what=f"{what} for {values}", constant_ok=0.0 in values,
        )  # fmt: skip
        found[what] = {"compiles": ran.compiles, "found again": ran.reused}
    h.table(f"programs for {len(whole)} values", found)
