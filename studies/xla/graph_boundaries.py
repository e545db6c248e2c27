"""graph_boundaries, measured: a loop that ends when a value says so, and which lines of Python look at a value."""

from __future__ import annotations

from collections.abc import Callable

from harness import Harness, Timing, Work

import torch
import torch.nn.functional as F
import torch_xla

from examples.common import xla
from examples.xla.graph_boundaries import ROWS, WIDTH, advance, require_xla

TOLERANCE, MOST = 1e-3, 64  # of until()


def study(h: Harness) -> None:
    ended_by_a_value(h)
    if not h.profile:
        census(h)
    xla.settle()


# --- a loop that ends when a value says so


def until(
    x: torch.Tensor, w: torch.Tensor, every: int, tolerance: float = TOLERANCE, most: int = MOST
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """x <- tanh(x @ w) until it moves by less than `tolerance`, asked for every `every` steps; at most `most` steps.

    Returns x, the steps that it needed (a tensor on the device), and how often a value was read. The steps that come
    too many change nothing: x is held by torch.where.
    """
    require_xla("until", x, w)
    if every < 1 or most < 1:
        raise ValueError(f"until: every={every}, most={most}; both must be at least 1")
    steps = torch.zeros(1, dtype=torch.int64, device=x.device)
    done = torch.zeros(1, dtype=torch.bool, device=x.device)
    reads = 0
    for i in range(1, most + 1):
        new = advance(x, w)
        moved = (new - x).abs().max()
        x, steps = torch.where(done, x, new), steps + torch.where(done, 0, 1)
        done = done | (moved < tolerance)
        torch_xla.sync()
        if i % every == 0 and i < most:
            reads += 1
            if done.item():
                break
    return x, steps, reads


def until64(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = x.double(), w.double()
    for _ in range(MOST):
        old, x = x, advance(x, w)
        if (x - old).abs().max() < TOLERANCE:
            break
    return x


def ended_by_a_value(h: Harness) -> None:
    width = WIDTH + 20
    x, w = h.randn(ROWS, width), h.randn(width, width, scale=0.5 * width**-0.5)
    x_there, w_there = x.to(xla.device()), w.to(xla.device())
    found, ends = {}, (1, 4, 16)
    for every in ends if not h.profile else ():
        with xla.watch() as ran:
            _, steps, reads = until(x_there, w_there, every)
        found[f"asked every {every}"] = {
            "steps needed": int(steps), "steps run": ran.syncs, "values read": reads, "compiles": ran.compiles
        }  # fmt: skip
    if found:
        h.table("a loop until it converges", found)
    variants = {
        f"torch_xla asked every {every}": xla.waited(lambda *_, every=every: until(x_there, w_there, every)[0])
        for every in ends
    }
    h.compare(
        variants, until64, x, w, baseline=next(iter(variants)), title="until it converges", work=Work(),
        terms=MOST * width, roundings=16, timing=Timing(first_calls=dict.fromkeys(variants)),  # they share programs
    )  # fmt: skip


# --- which lines look at a value


def lines(y: torch.Tensor, index: torch.Tensor) -> dict[str, Callable]:
    return {
        "y.shape, len(y), y.dtype": lambda: (y.shape, len(y), y.dtype),
        "y.clone(), y.detach()": lambda: (y.clone(), y.detach()),
        "y.isnan().any()": lambda: y.isnan().any(),
        "for row in y[:3]": lambda: list(y[:3]),
        "sum(y[0, :3])": lambda: sum(y[0, :3]),
        "y[index]": lambda: y[index],
        "y.masked_fill(y > 0, 0)": lambda: y.masked_fill(y > 0, 0.0),
        "y.topk(3), y.sort(), y.argmax(-1)": lambda: (y.topk(3), y.sort(), y.argmax(-1)),
        "F.one_hot(index, 5)": lambda: F.one_hot(index, 5),
        "F.one_hot(index)": lambda: F.one_hot(index),
        "y[0, 0].item()": lambda: y[0, 0].item(),
        "float(y[0, 0])": lambda: float(y[0, 0]),
        "f'{y[0, 0]:.2f}'": lambda: f"{y[0, 0]:.2f}",
        "print(y)": lambda: str(y),
        "y.tolist()": lambda: y.tolist(),
        "if y.isnan().any()": lambda: bool(y.isnan().any()),
        "max(y[0, :3])": lambda: max(y[0, :3]),
        "3.0 in y": lambda: 3.0 in y,
        "torch.allclose(y, y + 1)": lambda: torch.allclose(y, y + 1),
        "torch.equal(y, y + 1)": lambda: torch.equal(y, y + 1),
        "y[: index[0]]": lambda: y[: index[0]],
        "torch.full((3,), y[0, 0])": lambda: torch.full((3,), y[0, 0], device=y.device),
        "torch.tensor([y[0, 0], y[0, 1]])": lambda: torch.tensor([y[0, 0], y[0, 1]]),
        "torch.stack([y[0, 0], y[0, 1]])": lambda: torch.stack([y[0, 0], y[0, 1]]),
        "y[y > 0]": lambda: y[y > 0],
        "y.nonzero()": lambda: y.nonzero(),
        "torch.where(y > 0)": lambda: torch.where(y > 0),
        "y[y > 0] = 0": lambda: y.clone().__setitem__(y > 0, 0.0),
        "torch.unique(index)": lambda: torch.unique(index),
        "y.median()": lambda: y.median(),
        "torch.bincount(index, minlength=5)": lambda: torch.bincount(index, minlength=5),
        "torch.searchsorted(y, y)": lambda: torch.searchsorted(y, y),
        "torch.fft.rfft(y)": lambda: torch.fft.rfft(y),
    }


def census(h: Harness) -> None:
    """Line by line: what a step that has just been recorded does when it meets them."""
    x, index = h.randn(ROWS, WIDTH - 2).to(xla.device()), h.randint(4, ROWS).to(xla.device())
    groups: dict[str, list[str]] = {}
    for name in lines(x, index):
        y, at = x * 2 + 1, index + 1
        xla.settle()  # what the lines before left
        del y, at
        with xla.watch() as ran:
            y, at = x * 2 + 1, index + 1
            lines(y, at)[name]()
        host = [each.removeprefix("aten::") for each in ran.fallbacks if each != "aten::_local_scalar_dense"]
        what = f"{ran.executions} run, {ran.from_device} read" if ran.executions or ran.from_device else "only recorded"
        groups.setdefault(what + (f", on the host: {', '.join(host)}" if host else ""), []).append(name)
        xla.settle()
    rows = {what: {"lines": "; ".join(names)} for what, names in groups.items()}
    h.table("lines of Python on a tensor that is pending", rows)
