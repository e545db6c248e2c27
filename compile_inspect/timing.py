"""What a call takes, as its caller sees it, and what its first call takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import torch

from compile_inspect.subject import Subject

ROUNDS, BUDGET = 15, 1.0  # calls whose median is told, and the seconds that they may take together


@dataclass(frozen=True)
class Timed:
    """Medians: `ms` until the result is there, `host_ms` until the call returns. `first_s` is the first call, in s."""

    ms: float
    host_ms: float
    first_s: float = 0.0

    @property
    def waits_for_host(self) -> bool:
        """Whether launching takes about as long as the whole call: the GPU is done when the host is."""
        return self.host_ms > 0.8 * self.ms


def time_calls(call: Callable[[], object], subject: Subject) -> Timed:
    """The first call, two more to settle, then the median of up to 15."""
    took = []
    for _ in range(3):
        took.append(_once(call, subject)[0])
    found = []
    while len(found) < 3 or (len(found) < ROUNDS and sum(ms for ms, _ in found) < BUDGET * 1e3):
        found.append(_once(call, subject))
    return Timed(median(ms for ms, _ in found), median(host for _, host in found), took[0] / 1e3)


def _once(call: Callable[[], object], subject: Subject) -> tuple[float, float]:
    subject.synchronize()
    started = time.perf_counter()
    out = call()  # held, so that freeing it is not timed
    returned = time.perf_counter()
    subject.synchronize()
    ended = time.perf_counter()
    del out
    return (ended - started) * 1e3, (returned - started) * 1e3


def time_model(subject: Subject, settings: dict[str, object] | None = None, **options) -> Timed:
    """The model compiled from nothing with torch.compile's `options`, under these settings of Dynamo, and called.

    `compiled=False` among the options times it in eager.
    """
    compiled = options.pop("compiled", True)
    model, args, kwargs = subject.fresh()
    with torch._dynamo.config.patch(settings) if settings else nullcontext():
        return time_calls(subject.caller(torch.compile(model, **options) if compiled else model, args, kwargs), subject)
