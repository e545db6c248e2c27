"""graph_boundaries, measured: what the guards of torch_xla find, and what becomes of a tensor left on the CPU."""

from __future__ import annotations

import linecache
from collections.abc import Callable

from harness import Harness

import torch
import torch.nn.functional as F
import torch_xla

from examples.common import xla
from examples.xla import graph_boundaries as lesson
from examples.xla.graph_boundaries import PAIRS, ROWS, STEPS, WIDTH, advance


def study(h: Harness) -> None:
    if h.profile:
        return
    guards(h)
    left_behind(h)


def guards(h: Harness) -> None:
    """What torch_xla.compile says about each step: full_graph at the first call, one graph only over all of them."""
    x, w = h.randn(ROWS, WIDTH + 30), h.randn(WIDTH + 30, WIDTH + 30, scale=1.5 * WIDTH**-0.5)
    x, w, found = x.to(xla.device()), w.to(xla.device()), {}
    for what, pair in PAIRS.items():
        for name, lines in zip(what.split(": "), pair, strict=True):

            def step(x, w, lines=lines):
                return lines(advance(x, w))

            found[name] = {
                "full_graph": guarded(torch_xla.compile(step, full_graph=True), x, w, 1),
                "max_different_graphs=1": guarded(torch_xla.compile(step, max_different_graphs=1), x, w, STEPS),
            }
    h.table("torch_xla.compile", found)


def guarded(compiled: Callable, x: torch.Tensor, w: torch.Tensor, steps: int) -> str:
    """What `steps` calls come to: "passes", or where they raise."""
    for i in range(1, steps + 1):
        with xla.printed() as text:
            try:
                x, _ = compiled(x, w)
                continue
            except RuntimeError:
                pass
        here = [line for _, file, line in xla.frames(text[0]) if file == lesson.__file__]
        return f"raises at `{linecache.getline(lesson.__file__, here[0]).strip()}`" if here else f"raises in step {i}"
    return "passes"


def left_behind(h: Harness) -> None:
    """Arithmetic takes a tensor left on the CPU and copies it at every step; all else refuses, each in its words."""
    x, other = torch.ones(ROWS, ROWS).to(xla.device()), torch.ones(ROWS, ROWS)
    at = torch.zeros(ROWS, dtype=torch.int64)
    attempts = {
        "x + other": lambda: x + other,
        "x[index]": lambda: x[at],
        "x @ other": lambda: x @ other,
        "F.linear(x, other)": lambda: F.linear(x, other),
        "torch.where(x > 0, x, other)": lambda: torch.where(x > 0, x, other),
        "torch.cat([x, other])": lambda: torch.cat([x, other]),
        "F.embedding(index, x)": lambda: F.embedding(at, x),
        "other + x (in place)": lambda: other.clone().add_(x),
    }
    rows = {}
    for what, attempt in attempts.items():
        with xla.watch() as ran:
            try:
                attempt()
                xla.settle()
                error = None
            except RuntimeError as raised:
                error = f"RuntimeError: {str(raised).splitlines()[0]}"
                xla.forget_pending()
        outcome = error or f"accepted: {ran.to_device} to device, {ran.from_device} from device"
        rows[what] = {"what torch_xla does": outcome}
    h.table("x is on the XLA device, index and other are on the CPU", rows)
