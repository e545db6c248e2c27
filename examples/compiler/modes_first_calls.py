"""modes: the first calls of a compiled function, and how many of them come before it is as fast as it gets."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO

import torch

from compile_inspect import fresh_cache, kernels_run, logs

CALLS = 14  # the first of which compiles
STABLE = 1.10  # of the median of the last calls


def first_calls(fn: Callable, tokens: torch.Tensor) -> list[float]:
    """Milliseconds of each of the first calls, waiting for the GPU after each."""
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        fn(tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1000)
    return times


def calls_until_stable(times: list[float]) -> int:
    """How many calls come before the first settled one: one within STABLE of the median of the later half of the calls.

    At least half of the calls from it on must be within STABLE too, and one of the next two: not all of them, since a
    single slow call may be due to the machine and not the compiler. len(times) if no call is settled.
    """
    settled = statistics.median(times[len(times) // 2 :])
    slow = [time > STABLE * settled for time in times]
    for done in range(len(times)):
        rest = slow[done:]
        if not rest[0] and sum(rest) <= len(rest) // 2 and not all(rest[1:3] or [False]):
            return done
    return len(times)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the tables of max-autotune, and the choices that it cannot run, from the console."""
    shown = torch._inductor.config.patch(autotune_num_choices_displayed=0)
    with shown, warnings.catch_warnings(), logs(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        yield


def start(fn: Callable, tokens: torch.Tensor, then: Callable | None = None) -> dict:
    """The first calls of fn from an empty cache, then one of `then`, and what a call of fn launches on a GPU."""
    with fresh_cache(), quiet():
        times = first_calls(fn, tokens)
        if then is not None:
            then(tokens)
    facts = {"first call s": float(f"{times[0] / 1000:.3g}"), "calls until stable": calls_until_stable(times)}
    if tokens.is_cuda:
        names, facts["CUDA graphs"] = kernels_run(fn, tokens)
        facts["kernels"] = len(names)
    return facts
