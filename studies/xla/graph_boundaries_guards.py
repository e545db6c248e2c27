"""graph_boundaries, measured: what the guards of torch_xla find, and what becomes of a tensor left on the CPU."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path

from harness import Harness

import torch
import torch.nn.functional as F
import torch_xla

from examples.common import xla
from examples.xla.graph_boundaries import ROWS, STEPS, WIDTH, Step, pairs, read_early

LESSON = Path(read_early.__code__.co_filename)


def study(h: Harness) -> None:
    if h.profile:
        return
    guards(h)
    left_behind(h)
    xla.settle()


# --- the guards


def guards(h: Harness) -> None:
    """What torch_xla.compile says about each step: full_graph at the first call, one graph only over all of them."""
    x, w = h.randn(ROWS, WIDTH + 30), h.randn(WIDTH + 30, WIDTH + 30, scale=1.5 * WIDTH**-0.5)
    bias, x, w = h.randn(WIDTH + 30, scale=0.1), x.to(xla.device()), w.to(xla.device())
    found, said = {}, {}
    for what, steps in pairs(bias).items():
        for name, step in zip(what.split(": "), steps, strict=True):
            full = guarded(torch_xla.compile(step, full_graph=True), x, w, 1)
            few = guarded(torch_xla.compile(step, max_different_graphs=1), x, w, STEPS)
            found[name] = {"full_graph": full[0], "max_different_graphs=1": few[0]}
            said |= {"full_graph": full[1] or said.get("full_graph"), "other": few[1] or said.get("other")}
    h.table("torch_xla.compile", found)
    for text in filter(None, said.values()):
        h.say(f"torch_xla says: {text}")


def guarded(compiled: Callable, x: torch.Tensor, w: torch.Tensor, steps: int) -> tuple[str, str | None]:
    """What `steps` calls come to: "passes", or where they raise; and what torch_xla says then."""
    for i in range(1, steps + 1):
        with xla.printed() as text:
            try:
                x, _ = compiled(x, w)
                continue
            except RuntimeError as error:
                message = str(error)
        here = [line for _, file, line in xla.frames(text[0]) if Path(file).name == LESSON.name]
        at = f"at `{linecache.getline(str(LESSON), here[0]).strip()}`" if here else f"in step {i}"
        return f"raises {at}", " ".join(message.split())
    return "passes", None


def child_looks() -> None:
    """What PT_XLA_DEBUG_LEVEL=2 is to find: one look at a value."""
    x = torch.ones(3, 5).to(xla.device())
    Step(read_early)(x, torch.ones(5, 5).to(xla.device()))


# --- a tensor left on the CPU


def left_behind(h: Harness) -> None:
    """Arithmetic takes it, and copies it at every step; what else there is refuses, each operation in its words."""
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
    found = {}
    for what, attempt in attempts.items():
        with xla.watch() as ran:
            try:
                attempt()
                xla.settle()
                error = None
            except RuntimeError as raised:
                error = next(iter(str(raised).splitlines()))
        if error:
            found[what] = f"RuntimeError: {error}"
            xla.forget_pending()
        else:
            found[what] = f"accepted: {ran.to_device} to device, {ran.from_device} from device"
    rows = {what: {"what torch_xla does": outcome} for what, outcome in found.items()}
    h.table("x is on the XLA device, index and other are on the CPU", rows)
