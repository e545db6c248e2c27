"""graph_boundaries, measured: two boundaries more, other lines of Python, and what torch_xla's own guard finds."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from harness import Harness

import torch
import torch.nn.functional as F
import torch_xla

from examples.common import xla
from examples.common.quiet import stderr_closed
from examples.xla import graph_boundaries as lesson
from examples.xla.graph_boundaries import PAIRS, ROWS, STEPS, WIDTH, advance, measure, size


def study(h: Harness) -> None:
    more_pairs(h)
    if not h.profile:
        census(h)
        guards(h)


# --- boundaries that the lesson leaves out


def more_pairs(h: Harness) -> None:
    width = WIDTH + 14
    here = h.randn(width, scale=0.1)
    there = here.to(xla.device())
    pairs = {
        ".item() after the sync: at the end": (lambda x: (x, size(x).item), lambda x: (x, size(x))),
        "bias on the CPU: moved before": (lambda x: (x + here, size(x)), lambda x: (x + there, size(x))),
    }
    rows = {what: measure(h, what, pair, width)[0] for what, pair in pairs.items()}
    h.table(f"{STEPS} steps with the boundary / without", {} if h.profile else rows)


# --- which lines look at a value


def lines(y: torch.Tensor, index: torch.Tensor) -> dict[str, Callable]:
    return {
        "y.shape, len(y), y.dtype": lambda: (y.shape, len(y), y.dtype),
        "y.isnan().any()": lambda: y.isnan().any(),
        "y[index]": lambda: y[index],
        "F.one_hot(index, 5)": lambda: F.one_hot(index, 5),
        "F.one_hot(index)": lambda: F.one_hot(index),
        "print(y)": lambda: str(y),
        "if y.isnan().any()": lambda: bool(y.isnan().any()),
        "max(y[0, :3])": lambda: max(y[0, :3]),
        "y[: index[0]]": lambda: y[: index[0]],
        "torch.tensor([y[0, 0], y[0, 1]])": lambda: torch.tensor([y[0, 0], y[0, 1]]),
        "y[y > 0] = 0": lambda: y.clone().__setitem__(y > 0, 0.0),
        "torch.unique(index)": lambda: torch.unique(index),
        "torch.fft.rfft(y)": lambda: torch.fft.rfft(y),
    }


def census(h: Harness) -> None:
    """Line by line: what a step that has just been recorded does when it meets them."""
    x, index = h.randn(ROWS, WIDTH - 2).to(xla.device()), h.randint(4, ROWS).to(xla.device())
    groups: dict[str, list[str]] = {}
    for name in lines(x, index):
        xla.settle()  # what earlier lines left pending
        with xla.watch() as ran:
            y, at = x * 2 + 1, index + 1
            lines(y, at)[name]()
        host = [each.removeprefix("aten::") for each in ran.fallbacks if each != "aten::_local_scalar_dense"]
        what = f"{ran.executions} run, {ran.from_device} read" if ran.executions or ran.from_device else "only recorded"
        groups.setdefault(what + (f", on the host: {', '.join(host)}" if host else ""), []).append(name)
        del y, at
    rows = {what: {"lines": "; ".join(names)} for what, names in groups.items()}
    h.table("lines of Python on a tensor that is pending", rows)


# --- torch_xla.compile(full_graph=True)


def guards(h: Harness) -> None:
    """What it says about each step of the lesson."""
    x, w, found = h.randn(ROWS, WIDTH).to(xla.device()), torch.eye(WIDTH).to(xla.device()), {}
    for what, pair in PAIRS.items():
        for name, ending in zip(what.split(": "), pair, strict=True):
            step = torch_xla.compile(lambda x, w, ending=ending: ending(advance(x, w)), full_graph=True)
            try:
                with stderr_closed():
                    step(x, w)
                found[name] = "passes"
            except RuntimeError as error:
                ours = [
                    each.line for each in traceback.extract_tb(error.__traceback__) if each.filename == lesson.__file__
                ]
                found[name] = f"raises at `{ours[-1]}`" if ours else "raises"
    h.fact("torch_xla.compile(full_graph=True)", found)
