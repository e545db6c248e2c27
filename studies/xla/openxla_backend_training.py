"""openxla_backend, measured: a training step phase by phase, the step's times, and snapshots that are lost."""

from __future__ import annotations

import copy

from harness import Harness, Timing, Work

import torch
from torch import nn

from examples.common import xla
from examples.common.transformer import Config, Transformer
from examples.xla.openxla_backend import EAGER, LIKE_EAGER, OPENXLA, case_of, on_xla, steps_of
from examples.xla.openxla_backend_training import LAZY, STEPS, Trainer

MODEL, CUT = "openxla: model", "openxla: model, cut before backward"


def study(h: Harness) -> None:
    torch.compiler.reset()
    xla.warm_up()
    if not h.profile:
        by_phase(h)
        snapshots(h)
    training(h)


def by_phase(h: Harness) -> None:
    """Where in a step programs are compiled and run; the batch is not of the lesson's size, whose programs exist."""
    phases = {}
    for i, name in enumerate((MODEL, CUT, "openxla: model, loss")):
        phases[name] = steps_of(name, h.randn(14, 17 + 2 * i), h.randint(11, 14))[0]
        steps = {"step 1": phases[name][0], "step 2": phases[name][1]}
        h.fact(
            f"by phase, {name}",
            {
                f"{step}, {what}": {phase: getattr(ran, field) for phase, ran in count.items()}
                for step, count in steps.items()
                for what, field in (("compiled", "compiles"), ("run", "executions"))
            },
        )


def snapshots(h: Harness) -> None:
    """Weights put back with copy_(), and then a step: is the snapshot still there? In lazy mode a sync decides it."""

    def as_is(snapshot: torch.Tensor) -> torch.Tensor:
        return snapshot

    cases = {
        "lazy": (None, False, as_is),
        "lazy, a sync after copy_()": (None, True, as_is),
        "openxla": ("model, loss", False, as_is),
        "openxla, copy_() of a clone": ("model, loss", False, torch.clone),
        "openxla, copy_() from the CPU": ("model, loss", False, torch.Tensor.cpu),
    }
    told = {}
    for name, (how, sync, given) in cases.items():
        torch.compiler.reset()
        trainer = Trainer(nn.Linear(29, 23).to(xla.device()), how)
        x, y = h.randn(7, 29).to(xla.device()), h.randint(23, 7).to(xla.device())
        weight = trainer.model.weight
        snapshot, want = weight.detach().clone(), weight.detach().cpu()
        for _ in range(2):
            with torch.no_grad():
                weight.copy_(given(snapshot))
            if sync:
                xla.settle()
            trainer(x, y)
            xla.settle()
            try:
                told[name] = "as it was" if torch.equal(snapshot.cpu(), want) else "changed"
            except RuntimeError as error:
                told[name] = f"gone: {type(error).__name__}"
                break
        del snapshot, trainer, weight
    torch.compiler.reset()
    h.fact("a snapshot on the device, after copy_() put it back and a step", told)


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
    variants = {**here, **{name: on_xla(trainer, tokens, targets) for name, trainer in there.items()}}
    torch.compiler.reset()
    h.compare(
        variants, lambda x, y: reference.uncompiled_loss(x, y).detach(), tokens, targets, baseline=EAGER, work=Work(),
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
