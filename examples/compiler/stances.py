"""Stances: what compiled functions do at a shape they have not seen; compile, run eagerly, or refuse to.

torch.compiler.set_stance changes, for the whole process and without touching the model, what a call of a compiled
function does when no graph fits it: default compiles, force_eager ignores all graphs, eager_on_recompile runs that call
in eager, fail_on_recompile raises. eager_then_compile and aot_eager_then_compile delay the first compilation by one
call, so that it sees two shapes. A server warms up under default and then changes to eager_on_recompile or
fail_on_recompile: both run the existing graphs, and compile no more.

Question   What does a compiled model do with a shape that it was not warmed up for, and how long does a request wait?
Needs      torch
Wins when  a request must not wait for a compiler. fail_on_recompile finds what the warm-up forgot, in a test, before
           users do; eager_on_recompile keeps serving it.
Variants   stances_outcomes.py (how it is found out what a call did)
Study      studies/compiler/stances.py (two shapes before compiling, threads)
Source     chapter section "Compiler Stances"; the documentation of torch.compiler.set_stance.
"""

from __future__ import annotations

import copy
import re
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

from harness import Harness, run

import torch
from torch import nn

from compile_inspect import fresh_cache, watch
from examples.compiler.stances_outcomes import STANCES, outcomes_of

BUCKETS = (8, 32)
CALLS = {"first": 4, "same shape": 4, "new shape": 5, "another": 6}  # and their rows


def serve(model: Callable, x: torch.Tensor, buckets: tuple[int, ...] = BUCKETS) -> torch.Tensor:
    """model(x), padded with zeros to the smallest bucket that holds x. Raises ValueError if none does."""
    if not buckets or len(x) > max(buckets):
        raise ValueError(f"serve: {len(x)} rows, but the buckets are {buckets}; split the batch or add a larger one")
    rows = min(size for size in buckets if size >= len(x))
    return model(torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:]))))[: len(x)]


def outcome_of(call: Callable, x: torch.Tensor) -> str:
    """ "served", or the guards that failed, one for each existing graph, from the message of fail_on_recompile."""
    try:
        call(x)
        return "served"
    except RuntimeError as error:
        failed = [line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("-")]
        failed = [re.sub(r"^\d+/", "graph ", line) for line in failed]  # torch writes frame/graph
        return f"{type(error).__name__}: {'; '.join(failed) or str(error).splitlines()[0]}"


def ms_of(fn: Callable, x: torch.Tensor, calls: int = 1) -> float:
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        fn(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started))
    return round(statistics.median(times), 3)


@torch.no_grad()
def serving(h: Harness) -> tuple[dict, dict]:
    """Warm up over the buckets, then meet requests that nobody foresaw: what each stance did, and ms of a call."""
    width, dtype = 128, torch.bfloat16 if h.device.type == "cuda" else torch.float32
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(h.device, dtype)
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, dynamic=False)
    for rows in BUCKETS:
        compiled(torch.zeros(rows, width, dtype=dtype, device=h.device))
    foreseen = [h.randn(rows, width, dtype=dtype) for rows in (1, 8, 20, 32)]
    beyond = h.randn(max(BUCKETS) + 1, width, dtype=dtype)
    surprises = {
        "not padded": (beyond, nullcontext),
        "a transposed view": (h.randn(width, BUCKETS[0], dtype=dtype).t(), nullcontext),
        "no_grad forgotten": (foreseen[1], torch.enable_grad),
    }
    met, ms = {what: {} for what in (*surprises, "graphs compiled")}, {}
    for stance in ("fail_on_recompile", "eager_on_recompile"):
        with torch.compiler.set_stance(stance), watch() as seen:
            for what, (x, context) in surprises.items():
                with context():
                    met[what][stance] = outcome_of(compiled, x)
            for x in foreseen:  # still served after the surprises
                h.check(
                    lambda x: serve(compiled, x), lambda x: exact(x.double()), x, what=f"{stance}, {len(x)} rows",
                    terms=4 * width, operand_eps=torch.finfo(dtype).eps / 2, poison=False,  # a hidden layer in dtype
                )  # fmt: skip
            if stance == "eager_on_recompile" and h.timing:
                ms["eager"] = ms_of(compiled, beyond, calls=9)
        met["graphs compiled"][stance] = seen.graphs
    if h.timing:
        ms["the call that compiles"] = ms_of(compiled, beyond)
        ms["compiled"] = ms_of(compiled, beyond, calls=9)
    return met, {what: {"ms": each} for what, each in ms.items()}


def demo(h: Harness) -> None:
    if h.profile:
        h.say("stances are about calls that compile; there is nothing in them for a profiler")
        return
    for state, warm_up in {"not compiled yet": (), "warmed up": (CALLS["first"],)}.items():
        rows = {each: outcomes_of(each, tuple(CALLS.values()), warm_up) for each in STANCES}
        rows = {stance: dict(zip(CALLS, row, strict=True)) for stance, row in rows.items()}
        h.table(f"calls of a function {state}", rows)
    with fresh_cache():  # so that a request that compiles finds nothing from an earlier run
        met, ms = serving(h)
    h.table("requests that the warm-up did not foresee", met)
    h.table("ms of the request that is not padded", ms)

    def answer() -> str:
        did = {stance: row["new shape"] for stance, row in rows.items()}
        waits = served = ""
        if ms:
            waits = f": the request waits {ms['the call that compiles']['ms'] / 1000:.1f} s"
            served = f" ({ms['eager']['ms']:.2g} ms)"
        return (
            f"default {did['default']}{waits}. eager_on_recompile runs it in {did['eager_on_recompile']}{served}; "
            f"fail_on_recompile ends in an {did['fail_on_recompile']} that names the guard."
        )

    h.answer(answer, timed=False)


if __name__ == "__main__":
    run(demo)
