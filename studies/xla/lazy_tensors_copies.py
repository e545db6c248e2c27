"""lazy_tensors, measured: what is copied between the host and the device, and what one operation costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from harness import Harness

import torch
import torch_xla

from examples.common import xla
from examples.xla.lazy_tensors import EAGER, LAYERS, LAZY, ONE_BY_ONE, OPS, ROWS, WIDTH, shown

PIECES, PIECE = 100, 10_000


def study(h: Harness) -> None:
    if h.profile:
        return
    transfers(h)
    shares(h)
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
    if not h.timing:
        return
    many, one = [h.randn(PIECE) for _ in range(PIECES)], h.randn(PIECES * PIECE)
    numbers = [torch.tensor(float(i)).to(xla.device()) for i in range(PIECES)]
    many_there, one_there = [t.to(xla.device()) for t in many], one.to(xla.device())
    ms = {
        f"{one.nbytes / 1e6:g} MB there": (
            lambda: [t.to(xla.device()) for t in many], lambda: one.to(xla.device()),
        ),
        f"{one.nbytes / 1e6:g} MB back": (lambda: [t.cpu() for t in many_there], one_there.cpu),
        f"{PIECES} numbers read": (lambda: [t.item() for t in numbers], lambda: torch.stack(numbers).cpu()),
    }  # fmt: skip
    took = {}
    for what, (apart, together) in ms.items():
        a, b = (1000 * median_seconds(xla.waited(fn)) for fn in (apart, together))
        took[what] = {f"ms in {PIECES} copies": round(a, 2), "ms in one": round(b, 2)}
        h.say(f"{what}: {PIECES} copies take {a / b:.1f} times as long as one")
    h.table("ms of copies", took)


def median_seconds(fn: Callable, times: int = 9) -> float:
    def once() -> float:
        started = time.perf_counter()
        fn()
        return time.perf_counter() - started

    fn()
    return statistics.median(once() for _ in range(times))


def shares(h: Harness) -> None:
    """What the lesson's times are for one operation."""
    for table in h.lesson:
        if table.timed:
            us = {row.variant: 1000 * row.ms / LAYERS / OPS for row in table.rows}
            h.say(
                f"{table.case}: an operation costs {us[EAGER]:.1f} us in eager, {us[LAZY]:.1f} us in lazy mode, and "
                f"{us[ONE_BY_ONE]:.1f} us as a program of its own, in torch_xla's eager mode"
            )
