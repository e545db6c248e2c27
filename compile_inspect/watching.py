"""What torch.compile compiles while it is watched: graphs, breaks, recompilations, kernels."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Frame:
    """One compilation of one Python frame. `reason` says which guard failed when it was not the first, and `failure`
    why nothing came of it: of a loop with a graph break in it, nothing is compiled.
    """

    name: str
    graph_ops: int
    guards: int
    seconds: float
    reason: str | None
    failure: str | None


@dataclass
class Compiled:
    """What torch.compile did within watch()."""

    graphs: int = 0  # handed to a backend
    breaks: list[str] = field(default_factory=list)  # the first line of each distinct reason
    frames: list[Frame] = field(default_factory=list)
    counters: dict[str, dict[str, int]] = field(default_factory=dict)  # torch's own, as they grew
    kernels: int = 0  # that Inductor generated: C++ loops or Triton kernels, equal ones counted each time
    seconds: float = 0.0  # of wall clock within

    @property
    def recompiles(self) -> list[str]:
        return [frame.reason for frame in self.frames if frame.reason]


@contextmanager
def watch() -> Iterator[Compiled]:
    """Count what torch.compile does within: watch() as seen, and after it seen.graphs, seen.recompiles and so on."""
    from torch._dynamo import utils

    seen, before = Compiled(), copy.deepcopy(dict(utils.counters))
    known = {id(metric) for metric in utils.get_compilation_metrics()}
    held = utils.get_compilation_metrics()  # alive, so that no new one gets an old one's id
    limit = utils._compilation_metrics.maxlen
    kernels = _kernels_generated()
    utils.set_compilation_metrics_limit(4096)
    started = time.perf_counter()
    try:
        yield seen
    finally:
        seen.seconds = time.perf_counter() - started
        for metric in utils.get_compilation_metrics():
            if id(metric) not in known:
                seen.frames.append(Frame(
                    metric.co_name, metric.graph_op_count or 0, metric.guard_count or 0,
                    metric.entire_frame_compile_time_s or 0.0, metric.recompile_reason, metric.fail_reason,
                ))  # fmt: skip
        seen.kernels = _kernels_generated() - kernels
        utils.set_compilation_metrics_limit(limit)
        del held
        for group, counts in utils.counters.items():
            grown = {name: n - before.get(group, {}).get(name, 0) for name, n in counts.items()}
            if grown := {name: n for name, n in grown.items() if n > 0}:
                seen.counters[group] = grown
        seen.graphs = seen.counters.get("stats", {}).get("unique_graphs", 0)
        seen.breaks = [text.strip().splitlines()[0] for text in seen.counters.get("graph_break", {})]


def _kernels_generated() -> int:
    metrics = sys.modules.get("torch._inductor.metrics")  # not loaded: nothing generated yet
    return metrics.generated_kernel_count if metrics else 0


def require_uncompiled(name: str, fn: Callable) -> None:
    """Raise TypeError unless fn can be called, and ValueError if torch.compile made it; `name` is who asks."""
    if not callable(fn):
        raise TypeError(f"{name}: got {type(fn).__name__}, which cannot be called; pass a function or a module")
    if hasattr(fn, "_torchdynamo_orig_callable") or hasattr(fn, "_orig_mod"):
        raise ValueError(f"{name}: fn is compiled already; pass the function or module that it was made of")
