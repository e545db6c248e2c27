"""openxla_backend, measured: the host's time of a call, tensors on the CPU, and a training step."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable

from harness import Harness, Timing, Work

import torch
import torch_xla

from examples.common import xla
from examples.common.transformer import Config, Transformer
from examples.xla.openxla_backend import EAGER, LIKE_EAGER, OPENXLA, case_of, given, on_xla, through_openxla
from examples.xla.openxla_backend_training import LAZY, STEPS, Trainer


def study(h: Harness) -> None:
    torch.compiler.reset()
    xla.warm_up()
    if not h.profile:
        if h.lesson and h.lesson[0].timed:
            host(h)
        cpu_tensors(h)
    training(h)


def host_ms(fn: Callable, *args, calls: int = 21) -> float:
    """Median time in ms until fn has returned; what it left running is waited for outside the timed part."""
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
    """How long the host is busy with a call, out of its total time."""
    model, tokens = given(h)
    rows = {row.variant: row for row in h.lesson[0].rows}
    there, moved = copy.deepcopy(model).to(xla.device()), tokens.to(xla.device())

    # Lazy mode has only recorded when the model returns; the sync, which looks the recording up, is part of its cost.
    def started(x: torch.Tensor) -> torch.Tensor:
        out = there(x)
        torch_xla.sync()
        return out

    h.say(
        f"the host, until the call returns: openxla {host_ms(through_openxla(there), moved):.2f} ms; lazy mode "
        f"{host_ms(there, moved):.2f} ms to record, {host_ms(started, moved):.2f} ms until a sync has started it. "
        f"The whole call: {rows[OPENXLA].ms:.2f} and {rows[LAZY].ms:.2f} ms"
    )


def cpu_tensors(h: Harness) -> None:
    """What torch does with tensors that were not moved to the device, all of which through_openxla refuses."""
    w, x = h.randn(43, 43), h.randn(5, 43)
    there, moved, told = w.to(xla.device()), x.to(xla.device()), {}

    def layer(x, w):
        return torch.relu(x @ w)

    for name, args in {"none": (moved, there), "all": (x, w), "x": (x, there)}.items():
        torch.compiler.reset()
        compiled = torch.compile(layer, backend="openxla", fullgraph=True, dynamic=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                compiled(*args)
            except RuntimeError as error:  # TorchRuntimeError
                told[name] = {"raises": type(error).__name__}
                continue
        with xla.watch() as ran:
            compiled(*args)
        warned = any("move all tensors to xla device" in str(warning.message) for warning in caught)
        told[name] = {"warns": str(warned), "programs per call": ran.executions}
    torch.compiler.reset()
    h.table("tensors on the CPU, given to openxla", told)


def training(h: Harness) -> None:
    """The transformer's step by each of them, and where its weights are after some."""
    config = h.pick(
        quick=Config(width=248, layers=1, heads=4, kv_heads=2, hidden=680, vocab=2008, max_tokens=64),
        full=Config(width=328, layers=2, heads=4, kv_heads=2, hidden=872, vocab=2056, max_tokens=128),
    )
    tokens = h.randint(config.vocab, *h.pick(quick=(4, 64), full=(4, 96)))
    targets = h.randint(config.vocab, len(tokens))
    model = Transformer.random(config, h.device, torch.float32, h.seed).train().requires_grad_(True)
    exact = copy.deepcopy(model).double()
    exact.cos, exact.sin = exact.angles(config.max_tokens, h.device)
    reference = Trainer(exact, None)
    here = {EAGER: Trainer(copy.deepcopy(model), None)}
    ways = {LAZY: None, f"{OPENXLA}, model and loss": "model, loss", f"{OPENXLA}, whole step": "whole step"}
    there = {name: Trainer(copy.deepcopy(model).to(xla.device()), how) for name, how in ways.items()}
    torch.compiler.reset()
    h.compare(
        here | {name: on_xla(trainer, tokens, targets) for name, trainer in there.items()},
        lambda x, y: reference.uncompiled_loss(x, y).detach(), tokens, targets, baseline=EAGER, work=Work(),
        title="training step", case=case_of(tokens), max_error_ratio=LIKE_EAGER, timing=Timing(cold=True),
        dtype=torch.float32,
    )  # fmt: skip
    if h.profile:
        return
    want = reference.moved(tokens, targets)
    for name, trainer in (here | there).items():

        def moved(*inputs, t=trainer):
            return t.moved(*(x.to(next(t.model.parameters()).device) for x in inputs))

        h.check(moved, lambda *_: want, tokens, targets, what=f"{STEPS} steps, {name}", terms=100_000,
                dtype=torch.float32, poison=False)  # fmt: skip
