"""openxla_backend, measured: the host's time of a call, and tensors on the CPU."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable

from harness import Harness

import torch
import torch_xla

from examples.common import xla
from examples.xla.openxla_backend import LAZY, OPENXLA, given, through_openxla


def study(h: Harness) -> None:
    if h.profile:
        return
    torch.compiler.reset()
    xla.warm_up()
    if h.lesson and h.lesson[0].timed:
        host(h)
    cpu_tensors(h)


def host_ms(fn: Callable, *args, calls: int = 21) -> float:
    """Median time in ms until fn has returned; what it left to run is waited for outside of the clock."""
    times = []
    for _ in range(calls):
        xla.settle()
        started = time.perf_counter()
        fn(*args)
        times.append(1000 * (time.perf_counter() - started))
    xla.settle()
    return statistics.median(times)


@torch.no_grad()
def host(h: Harness) -> None:
    """How long the host is busy with a call, of how long it takes in all."""
    model, tokens = given(h)
    rows = {row.variant: row for row in h.lesson[0].rows}
    there, moved = copy.deepcopy(model).to(xla.device()), tokens.to(xla.device())
    ms = {name: host_ms(fn, moved) for name, fn in {LAZY: there, OPENXLA: through_openxla(there)}.items()}

    # Lazy mode has only recorded when the model returns; the sync, which looks the recording up, is part of its cost.
    def started(x: torch.Tensor) -> torch.Tensor:
        out = there(x)
        torch_xla.sync()
        return out

    synced = host_ms(started, moved)
    h.say(
        f"the host, until the call returns: openxla {ms[OPENXLA]:.2f} ms; lazy mode {ms[LAZY]:.2f} ms to record, "
        f"{synced:.2f} ms until a sync has started it. "
        f"The whole call: {rows[OPENXLA].ms:.2f} and {rows[LAZY].ms:.2f} ms"
    )


# --- tensors on the CPU


def cpu_tensors(h: Harness) -> None:
    """What becomes of tensors that were not moved: torch's own doing, and what through_openxla says instead."""
    w, x = h.randn(43, 43), h.randn(5, 43)
    there, moved = w.to(xla.device()), x.to(xla.device())
    scalar = torch.tensor(1.5)

    def layer(x, w):
        return torch.relu(x.to(w.device) @ w) if x.ndim else torch.relu(w * x)

    cases = {
        "all on the XLA device": (layer, moved, there),
        "all on the CPU": (layer, x, w),
        "x on the CPU": (lambda x, w: torch.relu(x @ w), x, there),
        "x on the CPU, moved in the graph": (layer, x, there),
        "a scalar tensor on the CPU": (layer, scalar, there),
    }
    told = {}
    for name, (fn, *args) in cases.items():
        torch.compiler.reset()
        compiled = torch.compile(fn, backend="openxla", fullgraph=True, dynamic=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                compiled(*args)
            except RuntimeError as error:  # TorchRuntimeError
                told[name] = {"raises": type(error).__name__}
                continue
            first = told_to_move(caught)
            # New values in the same tensors' place: a transfer that is needed at every call shows.
            args = [a + 1 if a.device.type == "cpu" else a for a in args]
            with xla.watch() as ran:
                out = compiled(*args)
                xla.settle()
        told[name] = {
            "warnings": first, "at the second call": told_to_move(caught) - first,
            "programs per call": ran.executions, "transfers per call": ran.to_device,
            "result on": out.device.type,
        }  # fmt: skip
        h.check(compiled, lambda *given: layer(*(a.cpu().double() for a in given)), *args, what=f"openxla, {name}",
                terms=43, poison=False)  # fmt: skip
    torch.compiler.reset()
    h.table("tensors on the CPU, given to openxla", told)


def told_to_move(caught: list[warnings.WarningMessage]) -> int:
    return sum("move all tensors to xla device" in str(warning.message) for warning in caught)
