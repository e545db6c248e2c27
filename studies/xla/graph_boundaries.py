"""graph_boundaries, measured: three boundaries more, a loop that a value ends, and other lines of Python."""

from __future__ import annotations

from collections.abc import Callable

from harness import Harness, Timing, Work

import torch
import torch.nn.functional as F
import torch_xla

from examples.common import xla
from examples.xla.graph_boundaries import ROWS, STEPS, WIDTH, advance, measure, size

TOLERANCE, MOST = 1e-3, 64  # of until()


def study(h: Harness) -> None:
    more_pairs(h)
    ended_by_a_value(h)
    if not h.profile:
        census(h)


# --- boundaries that the lesson leaves out


def over_the_host(x):
    peak = x.cpu().abs().max().to(x.device)
    return x / peak, size(x)


def adding(bias: torch.Tensor) -> Callable:
    def add(x):
        x = x + bias
        return x, size(x)

    return add


def more_pairs(h: Harness) -> None:
    width = WIDTH + 14
    bias = h.randn(width, scale=0.1)
    pairs = {
        ".item() after the sync: at the end": (lambda x: (x, size(x).item), lambda x: (x, size(x))),
        ".cpu(): on the device": (over_the_host, lambda x: (x / x.abs().max(), size(x))),
        "bias on the CPU: moved before": (adding(bias), adding(bias.to(xla.device()))),
    }
    rows = {what: measure(h, what, pair, width)[0] for what, pair in pairs.items()}
    h.table(f"{STEPS} steps with the boundary / without", {} if h.profile else rows)


# --- a loop that ends when a value says so


def until(
    x: torch.Tensor, w: torch.Tensor, every: int, tolerance: float = TOLERANCE, most: int = MOST
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """x <- tanh(x @ w) until it moves by less than `tolerance`, asked for every `every` steps; at most `most` steps.

    Returns x, the steps that it needed (a tensor on the device), and how often a value was read. The steps that come
    too many change nothing: x is held by torch.where.
    """
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
    there, found, variants = (x.to(xla.device()), w.to(xla.device())), {}, {}
    for every in (1, 4, 16):
        variants[f"torch_xla asked every {every}"] = xla.waited(lambda *_, every=every: until(*there, every)[0])
        if not h.profile:
            with xla.watch() as ran:
                _, steps, reads = until(*there, every)
            found[f"asked every {every}"] = {
                "steps needed": int(steps), "steps run": ran.syncs, "values read": reads, "compiles": ran.compiles
            }  # fmt: skip
    h.table("a loop until it converges", found)
    h.compare(
        variants, until64, x, w, baseline="torch_xla asked every 1", title="until it converges", work=Work(),
        terms=MOST * width, roundings=16, timing=Timing(first_calls=dict.fromkeys(variants)),  # they share programs
    )  # fmt: skip


# --- which lines look at a value


def lines(y: torch.Tensor, index: torch.Tensor) -> dict[str, Callable]:
    return {
        "y.shape, len(y), y.dtype": lambda: (y.shape, len(y), y.dtype),
        "y.isnan().any()": lambda: y.isnan().any(),
        "for row in y[:3]": lambda: list(y[:3]),
        "y[index]": lambda: y[index],
        "y.topk(3), y.sort(), y.argmax(-1)": lambda: (y.topk(3), y.sort(), y.argmax(-1)),
        "F.one_hot(index, 5)": lambda: F.one_hot(index, 5),
        "F.one_hot(index)": lambda: F.one_hot(index),
        "f'{y[0, 0]:.2f}'": lambda: f"{y[0, 0]:.2f}",
        "print(y)": lambda: str(y),
        "if y.isnan().any()": lambda: bool(y.isnan().any()),
        "max(y[0, :3])": lambda: max(y[0, :3]),
        "torch.allclose(y, y + 1)": lambda: torch.allclose(y, y + 1),
        "y[: index[0]]": lambda: y[: index[0]],
        "torch.full((3,), y[0, 0])": lambda: torch.full((3,), y[0, 0], device=y.device),
        "torch.tensor([y[0, 0], y[0, 1]])": lambda: torch.tensor([y[0, 0], y[0, 1]]),
        "torch.stack([y[0, 0], y[0, 1]])": lambda: torch.stack([y[0, 0], y[0, 1]]),
        "y.nonzero(), torch.where(y > 0)": lambda: (y.nonzero(), torch.where(y > 0)),
        "y[y > 0] = 0": lambda: y.clone().__setitem__(y > 0, 0.0),
        "torch.unique(index)": lambda: torch.unique(index),
        "torch.bincount(index, minlength=5)": lambda: torch.bincount(index, minlength=5),
        "torch.fft.rfft(y)": lambda: torch.fft.rfft(y),
    }


def census(h: Harness) -> None:
    """Line by line: what a step that has just been recorded does when it meets them."""
    x, index = h.randn(ROWS, WIDTH - 2).to(xla.device()), h.randint(4, ROWS).to(xla.device())
    groups: dict[str, list[str]] = {}
    for name in lines(x, index):
        xla.settle()  # what the lines before left
        with xla.watch() as ran:
            y, at = x * 2 + 1, index + 1
            lines(y, at)[name]()
        host = [each.removeprefix("aten::") for each in ran.fallbacks if each != "aten::_local_scalar_dense"]
        what = f"{ran.executions} run, {ran.from_device} read" if ran.executions or ran.from_device else "only recorded"
        groups.setdefault(what + (f", on the host: {', '.join(host)}" if host else ""), []).append(name)
        del y, at
    rows = {what: {"lines": "; ".join(names)} for what, names in groups.items()}
    h.table("lines of Python on a tensor that is pending", rows)
