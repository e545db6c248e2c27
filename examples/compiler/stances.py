"""Stances: what compiled functions do at a shape they have not seen; compile, run eagerly, or refuse to.

torch.compiler.set_stance changes, for the whole process and without touching the model, what a call of a compiled
function does when no graph fits it: default compiles, force_eager ignores all graphs, eager_on_recompile runs that call
in eager, fail_on_recompile raises. eager_then_compile and aot_eager_then_compile put the first compilation off by one
call, so that it knows two shapes. A server warms up under default and then changes to one of the two that never
compile.

Question   What does a compiled model do with a request of a shape that it was not warmed up for, and how long?
Needs      torch
Wins when  a request must not wait for a compiler. fail_on_recompile finds what the warm-up forgot, in a test, before
           users do; eager_on_recompile keeps serving it.
Study      studies/compiler/stances.py (force_backend, misspelt names, threads)
Source     chapter section "Dynamic Shapes"; the documentation of torch.compiler.set_stance.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

from harness import Harness, run

import torch
from torch import nn

from compile_inspect import fresh_cache, watch

STANCES = (
    "default", "force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile",
    "aot_eager_then_compile",
)  # fmt: skip
BUCKETS = (8, 32)
CALLS = {"first": 4, "same shape": 4, "new shape": 5, "another": 6}  # and their rows


def checked_stance(name: str, **options):
    """torch.compiler.set_stance for a name that exists; a context manager, as that is."""
    if name not in STANCES:
        raise ValueError(f"checked_stance: {name!r} is not one of {', '.join(STANCES)}")
    return torch.compiler.set_stance(name, **options)


def serve(model: Callable, x: torch.Tensor, buckets: tuple[int, ...] = BUCKETS) -> torch.Tensor:
    """model(x), padded with zeros to the smallest bucket that holds x."""
    if not buckets or len(x) > max(buckets):
        raise ValueError(f"serve: {len(x)} rows, but the buckets are {buckets}; split the batch or add a larger one")
    rows = min(size for size in buckets if size >= len(x))
    return model(torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:]))))[: len(x)]


class Counting:
    """A backend that runs graphs as they are, and counts what it compiled and what it ran."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, _) -> Callable:
        self.graphs += 1

        def call(*args):
            self.runs += 1
            return graph(*args)

        return call


def new_function() -> tuple[Callable, list[int]]:
    """A function that torch has not met, and the list where it notes the calls that run it in eager.

    The two delaying stances remember by file and line, beyond torch.compiler.reset(), which code was called once
    already: so it gets a line of its own.
    """
    ran_in_eager = []

    def scale(x):
        if not torch.compiler.is_compiling():
            ran_in_eager.append(len(x))
        return x * 2 + 1

    scale.__code__ = scale.__code__.replace(co_firstlineno=time.monotonic_ns() % 2**30)
    return scale, ran_in_eager


def outcomes_of(stance: str, sizes: tuple[int, ...], warm_up: tuple[int, ...] = ()) -> list[str]:
    """What a call of each size does to a function after its warm-up: compile (with what), run a graph, eager, error."""
    backend = Counting()
    fn, ran_in_eager = new_function()
    compiled, outcomes = torch.compile(fn, backend=backend), []
    for rows in warm_up:
        compiled(torch.ones(rows))
    for rows in sizes:
        x, graphs, runs, eager = torch.arange(float(rows)), backend.graphs, backend.runs, len(ran_in_eager)
        try:
            with checked_stance(stance), watch() as seen:
                torch.testing.assert_close(compiled(x), x * 2 + 1)
        except RuntimeError as error:
            if "fail_on_recompile" not in str(error):
                raise
            outcomes.append("error")
            continue
        did = "compiles" if seen.graphs else "eager" if len(ran_in_eager) > eager else "graph"
        own = backend.graphs + backend.runs > graphs + runs
        outcomes.append(did if own or did == "eager" else f"{did} (aot_eager)")
    return outcomes


def reason(error: RuntimeError) -> str:
    """The guards that failed, one for each graph there is, from the message of fail_on_recompile."""
    failed = [line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("-")]
    return f"{type(error).__name__}: {'; '.join(failed) or str(error).splitlines()[0]}"


def ms_of(fn: Callable, x: torch.Tensor) -> float:
    def finish() -> None:
        if x.is_cuda:
            torch.cuda.synchronize()

    finish()
    started = time.perf_counter()
    fn(x)
    finish()
    return 1000 * (time.perf_counter() - started)


def outcome_of(call: Callable, x: torch.Tensor) -> str:
    try:
        call(x)
    except RuntimeError as error:
        return reason(error)
    return "served"


@torch.no_grad()
def serving(h: Harness) -> tuple[dict, dict]:
    """Warm up over the buckets, then meet requests that nobody foresaw: what each stance did, and ms of a call."""
    width, dtype = 128, torch.bfloat16 if h.device.type == "cuda" else torch.float32
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(h.device, dtype)
    exact = copy.deepcopy(model).double()
    # Sums of some hundred terms in float32, of a hidden layer that was rounded to the dtype.
    budget = {"terms": 4 * width, "operand_eps": torch.finfo(dtype).eps / 2, "poison": False}
    compiled = torch.compile(model, dynamic=False)
    for rows in BUCKETS:
        compiled(torch.zeros(rows, width, dtype=dtype, device=h.device))
    foreseen = [h.randn(rows, width, dtype=dtype) for rows in (1, 5, 8, 9, 20, 32)]
    beyond = h.randn(max(BUCKETS) + 1, width, dtype=dtype)
    surprises = {
        "not padded": (beyond, nullcontext),
        "a transposed view": (h.randn(width, BUCKETS[0], dtype=dtype).t(), nullcontext),
        "no_grad forgotten": (foreseen[2], torch.enable_grad),
    }
    met, ms = {what: {} for what in surprises}, {}
    for stance in ("fail_on_recompile", "eager_on_recompile"):
        with checked_stance(stance), watch() as seen:
            for what, (x, context) in surprises.items():
                with context():
                    met[what][stance] = outcome_of(compiled, x)
            for x in foreseen:  # also after those
                what = f"{stance}, {len(x)} rows"
                h.check(lambda x: serve(compiled, x), lambda x: exact(x.double()), x, what=what, **budget)
            if stance == "eager_on_recompile" and h.timing:
                ms["eager"] = statistics.median(ms_of(compiled, beyond) for _ in range(9))
        met["graphs compiled"] = met.get("graphs compiled", {}) | {stance: seen.graphs}
    if h.timing:
        ms["the call that compiles"] = ms_of(compiled, beyond)
        ms["compiled"] = statistics.median(ms_of(compiled, beyond) for _ in range(9))
    h.check(compiled, lambda x: exact(x.double()), beyond, what="default, not padded", **budget)
    return met, {what: {"ms": round(each, 3)} for what, each in ms.items()}


def demo(h: Harness) -> None:
    if h.profile:
        h.say("stances are about calls that compile; there is nothing in them for a profiler")
        return
    for state, warm_up in {"not compiled yet": (), "warmed up": (CALLS["first"],)}.items():
        rows = {each: outcomes_of(each, tuple(CALLS.values()), warm_up) for each in STANCES}
        rows = {stance: dict(zip(CALLS, row, strict=True)) for stance, row in rows.items()}
        h.table(f"calls of a function {state}", rows)
    with fresh_cache():  # so that a request that compiles finds nothing of an earlier run
        met, ms = serving(h)
    h.table("requests that the warm-up did not foresee", met)
    h.table("ms of the request that is not padded", ms)

    def answer() -> str:
        did = {stance: row["new shape"] for stance, row in rows.items()}
        waits = served = ""
        if ms:
            compiling, eager = ms["the call that compiles"]["ms"], ms["eager"]["ms"]
            waits = f": the request waits {compiling / 1000:.1f} s, {compiling / eager:.0f}x the time of eager"
            served = f" ({eager:.2g} ms)"
        return (
            f"default {did['default']}{waits}. eager_on_recompile runs it in {did['eager_on_recompile']}{served}; "
            f"fail_on_recompile ends in an {did['fail_on_recompile']} that names the guard."
        )

    h.answer(answer, timed=False)


if __name__ == "__main__":
    run(demo)
