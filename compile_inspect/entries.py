"""Cache entries of a compiled function: how many a series of calls makes, and which guard failed each time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from compile_inspect.logs import logs
from compile_inspect.watching import require_uncompiled, watch


@dataclass
class Entries:
    """What a series of calls made of a function: its cache entries, and how each call was served."""

    compiled: int  # cache entries
    eager: list[bool]  # of each call, whether it ran no compiled graph
    reasons: list[str]  # the guard that failed, for each entry after a function's first
    warnings: list[str]  # what torch logs unasked when it gives up
    outputs: list

    @property
    def eager_calls(self) -> int:
        return sum(self.eager)


def count_entries(
    fn: Callable | list[Callable], calls: list[Callable], backend: str = "aot_eager", **options
) -> Entries:
    """Compile fn, or each of a list, from nothing, hand it to each of `calls`, and count: [lambda f: f(x, 2)].

    `options` go to torch.compile. Raises TypeError for what cannot be called, ValueError for a function that is
    compiled already and for no calls, and what the calls raise (RecompileError, FailOnRecompileLimitHit).
    """
    for each in fn if isinstance(fn, list) else [fn]:
        require_uncompiled("count_entries", each)
    if not calls:
        raise ValueError("count_entries: no calls; pass functions that call what they are given")
    reached = False

    def counted(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        compiled = torch._dynamo.lookup_backend(backend)(graph, inputs)

        def run(*args):
            nonlocal reached
            reached = True
            return compiled(*args)

        return run

    torch.compiler.reset()
    eager, outputs = [], []
    try:
        with watch() as seen, logs() as records, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            many = [torch.compile(f, backend=counted, **options) for f in (fn if isinstance(fn, list) else [fn])]
            compiled = many if isinstance(fn, list) else many[0]
            for call in calls:
                reached = False
                outputs.append(call(compiled))
                eager.append(not reached)
    finally:
        torch.compiler.reset()
    warned = [text.splitlines()[0] for _, text in records if "recompile_limit" in text]
    return Entries(seen.graphs, eager, [_guard(reason) for reason in seen.recompiles], warned, outputs)


def _guard(reason: str) -> str:
    """The guard that failed, without the source line and the stack that torch adds to it."""
    return reason.splitlines()[0].split("  #")[0].strip()
