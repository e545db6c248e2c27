"""What a call takes, as its caller sees it, and what its first call takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median, quantiles

from torch.profiler import ProfilerActivity, profile

from compile_inspect.subject import Subject

ROUNDS, BUDGET = 15, 1.0  # calls whose median is told, and the seconds that they may take together


@dataclass(frozen=True)
class Timed:
    """Medians: `ms` until the result is there, `host_ms` until the call returns."""

    ms: float
    host_ms: float


def time_calls(call: Callable[[], object], subject: Subject) -> Timed:
    """Three calls to settle, then the median of up to 15."""
    return _timed(_rounds([(call, nullcontext)], subject)[0])


def time_both(
    one: Callable[[], object], other: Callable[[], object], subject: Subject,
    around: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[Timed, Timed, tuple[float, float, float]]:  # fmt: skip
    """Both, call by call in turns, `one` in the context `around()`: what the host does meanwhile meets both.

    The last is how many times as fast as `one` the other is: the first quartile, the median, the third.
    """
    first, second = _rounds([(one, around), (other, nullcontext)], subject)
    low, middle, high = quantiles([a / b for (a, _), (b, _) in zip(first, second, strict=True)], n=4)
    return _timed(first), _timed(second), (low, middle, high)


def _timed(found: list[tuple[float, float]]) -> Timed:
    return Timed(*map(median, zip(*found, strict=True)))


def _rounds(calls: list[tuple[Callable, Callable]], subject: Subject) -> list[list[tuple[float, float]]]:
    """For each call (ms, host ms) of every round; each settles first, and is made in its context."""
    for call, around in calls:
        with around():
            for _ in range(3):
                call()
    found: list[list[tuple[float, float]]] = [[] for _ in calls]
    spent = 0.0
    while len(found[0]) < 3 or (len(found[0]) < ROUNDS and spent < BUDGET * 1e3 * len(calls)):
        for (call, around), each in zip(calls, found, strict=True):
            with around():
                each.append(once(call, subject)[:2])
            spent += each[-1][0]
    return found


def profiled(call: Callable[[], object], subject: Subject) -> profile:
    """torch's profile of a call, on the CPU and, where the model is there, on the GPU."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * subject.on_gpu
    with profile(activities=kinds, acc_events=True) as seen:
        call()
        subject.synchronize()
    return seen


def once(call: Callable[[], object], subject: Subject) -> tuple[float, float, object]:
    """(milliseconds of a call, those until it returns, its result)."""
    subject.synchronize()
    started = time.perf_counter()
    out = call()  # held, so that freeing it is not timed
    returned = time.perf_counter()
    subject.synchronize()
    ended = time.perf_counter()
    return (ended - started) * 1e3, (returned - started) * 1e3, out
