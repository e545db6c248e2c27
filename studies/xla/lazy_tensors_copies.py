"""lazy_tensors, measured: what is copied between the host and the device, and programs of one operation."""

from __future__ import annotations

from harness import Harness, Work

import torch
import torch_xla
from torch_xla.experimental.eager import eager_mode_context

from examples.common import xla
from examples.xla.lazy_tensors import LAYERS, LAZY, OPS, ROWS, WIDTH, chain, exact, shown

PIECES, PIECE = 100, 10_000
ONE_BY_ONE = "torch_xla eager mode"


def study(h: Harness) -> None:
    if not h.profile:
        transfers(h)
        one_copy(h)
    one_by_one(h)
    xla.settle()


def transfers(h: Harness) -> None:
    x = h.randn(ROWS, WIDTH + 4)
    ran = {}
    with xla.watch() as ran["a tensor to the device"]:
        on_device = x.to(xla.device())
    number = float(x[0, 0])
    for what in ("a Python number", "the same number again"):
        with xla.watch() as ran[what]:
            y = on_device * number
            torch_xla.sync()
    with xla.watch() as ran["a result that is ready, read"]:
        y.cpu()
    with xla.watch() as ran["a result that is pending, read"]:
        (on_device * number).cpu()
    h.table("copies", {what: shown(each) for what, each in ran.items()})


def one_copy(h: Harness) -> None:
    """Many small results that are read, and one of the same bytes."""
    many = [h.randn(PIECE) for _ in range(PIECES)]
    together = torch.cat(many)
    many_there, one_there = [t.to(xla.device()) for t in many], together.to(xla.device())
    h.compare(
        {f"{PIECES} copies": lambda _: torch.cat([t.cpu() for t in many_there]), "one copy": lambda _: one_there.cpu()},
        torch.Tensor.double, together, baseline="one copy", work=Work(), title="results read",
        case=f"{together.nbytes / 1e6:g} MB",
    )  # fmt: skip


def one_by_one(h: Harness) -> None:
    """torch_xla's eager mode: each operation a program of its own."""
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
