"""Stances: what compiled functions do at a shape they have not seen; compile, run eagerly, or refuse to.

Technique  torch.compiler.set_stance changes, for the whole process and without touching the model, what a call of a
           compiled function does when no graph of it fits: default compiles, force_eager ignores all graphs,
           eager_on_recompile runs that call in eager, fail_on_recompile raises, eager_then_compile and
           aot_eager_then_compile put the first compilation off by one call, so that it knows two shapes. A server warms
           up under default and then changes to one of the two that never compile.
Question   What does a compiled model do with a request of a shape that it was not warmed up for, and how long?
Needs      torch
Shapes     x [rows, width] -> the same shape; requests are padded to the next bucket. The model is Linear, GELU, Linear.
Dtypes     float32 on a CPU, bfloat16 on a GPU.
Errors     checked_stance() raises ValueError for a name that is none, at once: torch raises RuntimeError, and only when
           a compiled function is called. serve() raises ValueError for no buckets or a batch larger than them all.
           torch's fail_on_recompile: RuntimeError with the guard that failed. force_backend needs "default".
Wins when  a request must not wait for a compiler. fail_on_recompile finds what the warm-up forgot, in a test, before
           users do; eager_on_recompile keeps serving it.
Source     chapter section "Dynamic Shapes"; the documentation of torch.compiler.set_stance.
Run        python examples/compiler/stances.py
"""

from __future__ import annotations

import copy
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

from harness import Harness, run
from harness.compiler import empty_cache, watch

import torch
from torch import nn

STANCES = (
    "default", "force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile",
    "aot_eager_then_compile",
)  # fmt: skip
BUCKETS = (8, 32)


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


def outcomes(stance: str, sizes: tuple[int, ...], warm_up: tuple[int, ...] = ()) -> list[str]:
    """What a call of each size does to a function after its warm-up: compile (with what), run a graph, eager, error."""
    backend = Counting()
    fn, ran_in_eager = new_function()
    compiled, told = torch.compile(fn, backend=backend), []
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
            told.append("error")
            continue
        did = "compiles" if seen.graphs else "eager" if len(ran_in_eager) > eager else "graph"
        own = backend.graphs + backend.runs > graphs + runs
        told.append(did if own or did == "eager" else f"{did} (aot_eager)")
    return told


def tables(h: Harness) -> None:
    """Every stance, at a first call, a shape seen before and a new one; and two new shapes from the start."""
    calls = {"first": 4, "same shape": 4, "new shape": 5, "another": 6}
    for what, warm_up in {"not compiled yet": (), "warmed up": (4,)}.items():
        table = {stance: outcomes(stance, tuple(calls.values()), warm_up) for stance in STANCES}
        h.fact(f"calls of a function {what}", {name: dict(zip(calls, row, strict=True)) for name, row in table.items()})
    delayed = {stance: outcomes(stance, (4, 5, 6)) for stance in ("default", *STANCES[-2:])}
    h.fact("calls with 4, 5 and 6 rows", {stance: ", ".join(row) for stance, row in delayed.items()})
    compiled = {stance: row.count("compiles") for stance, row in delayed.items()}
    if max(compiled[name] for name in STANCES[-2:]) < compiled["default"]:
        h.say(
            f"graphs by the backend itself for these: {', '.join(f'{name} {n}' for name, n in compiled.items())}: "
            "who waits for a second shape knows which size differs"
        )


def forced_backend(h: Harness) -> None:
    """force_backend, with "default" only: the same program with another compiler, to find out whose fault it is."""
    own, forced = Counting(), Counting()
    compiled = torch.compile(new_function()[0], backend=own)
    x = torch.arange(4.0)
    with checked_stance("default", force_backend=forced):
        compiled(x)
        within = {"own": own.graphs, "forced": forced.graphs}
    compiled(x)
    try:
        with torch.compiler.set_stance("force_eager", force_backend=forced):
            compiled(x)
        refused = "accepted"
    except RuntimeError as error:
        refused = str(error).splitlines()[0]
    h.fact(
        "graphs under force_backend",
        {"within": within, "after": {"own": own.graphs, "forced": forced.graphs}, "with force_eager": refused},
    )


def wrong_name(h: Harness) -> None:
    """torch takes any name, and raises when a compiled function is called: perhaps much later, and elsewhere."""
    compiled = torch.compile(new_function()[0], backend="eager")
    told = {}
    with torch.compiler.set_stance("fail_on_recompiles"):
        told["set_stance"] = "accepts 'fail_on_recompiles'"
        try:
            compiled(torch.ones(4))
            told["first call"] = "no error"
        except RuntimeError as error:
            told["first call"] = f"RuntimeError: {str(error).splitlines()[0]}"
    try:
        checked_stance("fail_on_recompiles")
    except ValueError as error:
        told["checked_stance"] = f"ValueError: {error}"
    h.fact("a stance misspelt", told)


def reach(h: Harness) -> None:
    """A stance is one for the process: set within one thread, it holds in all of them, for as long as that is."""
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with checked_stance("force_eager"):
            inside.set()
            done.wait(30)

    backend, (fn, ran_in_eager) = Counting(), new_function()
    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(30)
    try:
        torch.compile(fn, backend=backend)(torch.ones(4))
    finally:
        done.set()
        thread.join()
    h.fact("a call while another thread is within force_eager", "runs in eager" if ran_in_eager else "compiles")


def seconds_of(h: Harness, fn: Callable, *args) -> float:
    def finish() -> None:
        if h.device.type == "cuda":
            torch.cuda.synchronize()

    finish()
    started = time.perf_counter()
    fn(*args)
    finish()
    return time.perf_counter() - started


def reason(error: RuntimeError) -> str:
    """The guards that failed, one for each graph there is, from the message of fail_on_recompile."""
    failed = [line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("-")]
    return f"{type(error).__name__}: {'; '.join(failed) or str(error).splitlines()[0]}"


@torch.no_grad()
def serving(h: Harness) -> None:
    """Warm up over the buckets, then never compile again; and what requests that nobody foresaw meet."""
    width, dtype = 128, torch.bfloat16 if h.device.type == "cuda" else torch.float32
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(h.device, dtype)
    exact = copy.deepcopy(model).double()
    # Sums of some hundred terms in float32, of a hidden layer that was rounded to the dtype.
    budget = {"terms": 4 * width, "operand_eps": torch.finfo(dtype).eps / 2, "poison": False}

    def reference(x):
        return exact(x.double())

    def forward(x):
        return model(x)

    compiled = torch.compile(forward, dynamic=False)
    with h.progress("warming up"), watch() as warm:
        for rows in BUCKETS:
            compiled(torch.zeros(rows, width, dtype=dtype, device=h.device))
    h.fact("graphs compiled by the warm-up", warm.graphs)

    requests = [h.randn(rows, width, dtype=dtype) for rows in (1, 5, 8, 9, 20, 32)]
    beyond = h.randn(max(BUCKETS) + 1, width, dtype=dtype)
    surprises = {
        "not padded": (beyond, nullcontext()),
        "a transposed view": (h.randn(width, BUCKETS[0], dtype=dtype).t(), nullcontext()),
        "no_grad forgotten": (requests[2], torch.enable_grad()),
    }
    met, graphs, latency = {}, {}, {}
    for stance in ("fail_on_recompile", "eager_on_recompile"):
        with checked_stance(stance), watch() as seen:
            for x in requests:
                h.check(lambda x: serve(compiled, x), reference, x, what=f"{stance}, {len(x)} rows", **budget)
            for what, (x, context) in surprises.items():
                with context:
                    try:
                        compiled(x)
                    except RuntimeError as error:
                        met[f"{stance}, {what}"] = reason(error)
                        continue
                    h.check(compiled, reference, x, what=f"{stance}, {what}", **budget)
                    met[f"{stance}, {what}"] = "served"
            x = requests[0]
            h.check(lambda x: serve(compiled, x), reference, x, what=f"{stance}, the request after", **budget)
            if h.timing and stance == "eager_on_recompile":
                latency["eager"] = statistics.median(seconds_of(h, compiled, beyond) for _ in range(9))
        graphs[stance] = seen.graphs
    with watch() as seen:
        latency["the call that compiles"] = seconds_of(h, compiled, beyond)
    graphs["default"] = seen.graphs
    h.fact("requests that the warm-up did not foresee", met)
    h.fact("graphs compiled while serving", graphs)
    if h.timing:
        latency["compiled"] = statistics.median(seconds_of(h, compiled, beyond) for _ in range(9))
        h.fact(f"ms for {len(beyond)} rows", {what: round(1000 * seconds, 3) for what, seconds in latency.items()})
        saved = latency["eager"] - latency["compiled"]
        calls = latency["the call that compiles"] / saved if saved > 0 else None
        h.say(
            f"under default one request waits {latency['the call that compiles']:.2f} s, "
            f"{latency['the call that compiles'] / latency['eager']:.0f} times as long as in eager; "
            + (f"the graph pays after {calls:.0f} such calls" if calls else "here the graph is not faster than eager")
        )


def demo(h: Harness) -> None:
    if h.profile:
        h.say("stances are about calls that compile; there is nothing in them for a profiler")
        return
    tables(h)
    forced_backend(h)
    wrong_name(h)
    reach(h)
    with empty_cache():  # so that a request that compiles finds nothing of an earlier run
        serving(h)


if __name__ == "__main__":
    run(demo)
