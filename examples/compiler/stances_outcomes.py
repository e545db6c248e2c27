"""What a call of a compiled function did under a stance: compile (with what), run a graph, run eagerly, or raise."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from compile_inspect import watch

STANCES = (
    "default", "force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile",
    "aot_eager_then_compile",
)  # fmt: skip


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
    """A function that torch has not seen, and the list where it records the calls that run it in eager."""
    ran_in_eager = []

    def scale(x):
        if not torch.compiler.is_compiling():
            ran_in_eager.append(len(x))
        return x * 2 + 1

    # The delaying stances identify code that was called once by its line number, even after torch.compiler.reset().
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
            with torch.compiler.set_stance(stance), watch() as seen:
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
