"""training_step, measured: losses after some steps against float64, AdamW by itself, and its learning rate."""

from __future__ import annotations

from collections.abc import Callable

from harness import Harness, Timing, Work
from harness.check import CheckError, VacuousCheck

import torch
from torch import nn

from compile_inspect import kernels_run, logs, watch
from examples.compiler.training_step import EAGER, LR, WHOLE, Trainer, make_trainers, sizes
from studies.compiler.training_step import gradients

STEPS = 4
NEAR = 4  # times eager's own error, after some steps
ADAMW_BYTES = 28  # of a float32 parameter: it, its gradient and two moments are read, all but the gradient written


def study(h: Harness) -> None:
    if h.profile:
        return
    new, (*_, tokens) = sizes(h)
    torch.compiler.reset()
    double, other, model = new().float64(), new(), new()
    trainers, exact = make_trainers(new), Trainer(double, double, "foreach")
    with logs():  # Dynamo warns that it leaves out torch's profiler marks
        show_training(h, trainers, exact, tokens)
    alone = {
        "torch AdamW fused": trainers[EAGER],
        "torch AdamW foreach": Trainer(other, other, "foreach"),
        "torch.compile AdamW": trainers[WHOLE],
    }
    show_optimizer(h, alone, gradients(model, model)(tokens), exact)
    lrs = {"float": LR, "tensor": torch.tensor(LR)}
    h.fact("graphs of AdamW.step in 4 steps of a scheduler", {k: graphs_with_a_scheduler(lr) for k, lr in lrs.items()})


def after(steps: int, trainer: Trainer, tokens: torch.Tensor) -> torch.Tensor:
    """The losses that the first weights have after that many updates."""
    trainer.reset()
    for _ in range(steps):
        trainer(tokens)
    return trainer(tokens)


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def show_training(h: Harness, trainers: dict[str, Trainer], exact: Trainer, tokens: torch.Tensor) -> None:
    """How far training has come after some steps: as far as in float64."""
    first, want = after(0, exact, tokens), after(STEPS, exact, tokens)
    losses = {name: after(STEPS, trainer, tokens) for name, trainer in trainers.items()}
    # Errors grow from step to step, so what a compiled step may be off follows from eager's own.
    allowed = NEAR * max(rms(losses[EAGER] - want), 2**-22 * rms(want))
    if not allowed < rms(want - first):
        raise VacuousCheck(f"losses after {STEPS} steps: {allowed:.3g} (rms) allowed, and no step at all is nearer")
    for name, got in losses.items():
        if not (off := rms(got - want)) <= allowed:
            raise CheckError(f"losses after {STEPS} steps: {name} is off by {off:.3g} (rms), {allowed:.3g} allowed")
    means = {"float64, no step": first, "float64": want} | losses
    h.fact(f"mean loss after {STEPS} steps", {name: float(f"{loss.mean():.6g}") for name, loss in means.items()})


def show_optimizer(h: Harness, trainers: dict[str, Trainer], grads: tuple[torch.Tensor, ...], exact: Trainer) -> None:
    """AdamW alone, on these gradients, by the optimizers of these trainers."""

    def update(trainer: Trainer) -> Callable:
        trainer.reset()
        for parameter, grad in zip(trainer.model.parameters(), grads, strict=True):
            parameter.grad = grad.to(parameter.dtype)

        def call(*_) -> tuple[torch.Tensor, ...]:
            trainer.update()
            return tuple(p.detach() for p in trainer.model.parameters())

        return call

    variants = {name: update(trainer) for name, trainer in trainers.items()}
    number = sum(grad.numel() for grad in grads)
    with logs():
        h.compare(
            variants, update(exact), *grads, baseline="torch AdamW fused", work=Work(bytes=ADAMW_BYTES * number),
            title="AdamW", case=f"{number} parameters float32",
            timing=Timing(first_calls=dict.fromkeys(variants)),  # in the whole steps, before
        )  # fmt: skip
    if grads[0].is_cuda:
        h.fact("kernels of AdamW", {name: len(kernels_run(fn)[0]) for name, fn in variants.items()})


def graphs_with_a_scheduler(lr: float | torch.Tensor) -> dict:
    """Graphs that Dynamo makes of AdamW.step while a scheduler lowers lr, and the guards that failed on the way."""
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.compiler.reset()
    step = torch.compile(optimizer.step, backend="eager")
    with logs(), watch() as seen:
        for _ in range(4):
            step()
            scheduler.step()
    torch.compiler.reset()
    return {"graphs": seen.graphs, "guards": [r.partition(": ")[2].split("  #")[0].strip() for r in seen.recompiles]}
