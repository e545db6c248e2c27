"""training_step, measured: the joint graph and its cuts, gradients, losses after some steps, AdamW and its share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from harness import Harness, Table, Timing, Work
from harness.check import CheckError, VacuousCheck

import torch

from compile_inspect import kernels_run, logs, splits
from examples.common.memory import peak_bytes
from examples.compiler.training_step import (
    EAGER,
    WHOLE,
    LanguageModel,
    Trainer,
    case_of,
    make_trainers,
    saved_by_autograd,
    sizes,
)

FUSED, COMPILED = "torch AdamW fused", "torch.compile AdamW"
STEPS = 4
NEAR = 4  # times eager's own error, after some steps
ADAMW_BYTES = 28  # per float32 parameter: it, its gradient and two moments are read, all but the gradient written


def study(h: Harness) -> None:
    if h.profile:
        return
    new, batches = sizes(h)
    tokens, last = batches[0], batches[-1]
    model = new()
    show_graphs(h, model, tokens)
    show_gradients(h, model, tokens)
    torch.compiler.reset()
    double, other, model = new().float64(), new(), new()
    trainers, exact = make_trainers(new), Trainer(double, double, "foreach")
    with logs():  # Dynamo warns that it leaves out torch's profiler marks
        show_training(h, trainers, exact, last)
    alone = {
        FUSED: trainers[EAGER],
        "torch AdamW foreach": Trainer(other, other, "foreach"),
        COMPILED: trainers[WHOLE],
    }
    show_share(h, show_optimizer(h, alone, gradients(model, model)(last), exact))


def gradients(model: LanguageModel, losses: Callable) -> Callable:
    """tokens -> the gradient of the mean loss with respect to each parameter."""
    parameters = list(model.parameters())
    return lambda tokens: torch.autograd.grad(losses(tokens).mean(), parameters)


def show_graphs(h: Harness, model: LanguageModel, tokens: torch.Tensor) -> None:
    """The joint graph, and what waits in memory between its two parts."""
    torch.compiler.reset()
    found = splits(model, tokens, cases={name: (name, 1.0) for name in ("default", "min-cut")})
    torch.compiler.reset()
    number, size = saved_by_autograd(model, tokens)
    h.fact("saved for backward by eager autograd", {"saved": number, "saved_bytes": size})
    h.table("joint graph, cut by", {name: asdict(cut) for name, cut in found.items()})


def show_gradients(h: Harness, model: LanguageModel, tokens: torch.Tensor) -> None:
    """Forward and backward: every gradient against float64, time, and on a GPU the memory really used."""
    compiled = h.compiled(model, fullgraph=True)
    variants = {"torch eager": gradients(model, model), "torch.compile": gradients(model, compiled)}
    exact = model.float64()
    h.compare(
        variants, gradients(exact, exact), tokens, baseline="torch eager", work=Work(), title="forward and backward",
        case=case_of(tokens), timing=Timing(end_to_end=True), max_error_ratio=2.0, dtype=torch.float32,
    )  # fmt: skip
    if tokens.is_cuda:
        peaks = {name: peak_bytes(fn, tokens) for name, fn in variants.items()}
        h.fact("peak bytes of forward and backward", peaks)


def after(steps: int, trainer: Trainer, tokens: torch.Tensor) -> torch.Tensor:
    """The losses that the first weights have after that many updates."""
    trainer.reset()
    for _ in range(steps):
        trainer(tokens)
    return trainer(tokens)


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def show_training(h: Harness, trainers: dict[str, Trainer], exact: Trainer, tokens: torch.Tensor) -> None:
    """How far training has come after some steps, against float64."""
    first, want = after(0, exact, tokens), after(STEPS, exact, tokens)
    losses = {name: after(STEPS, trainer, tokens) for name, trainer in trainers.items()}
    # Errors grow from step to step, so the error allowed to a compiled step follows from eager's own.
    allowed = NEAR * max(rms(losses[EAGER] - want), 2**-22 * rms(want))
    if not allowed < rms(want - first):
        raise VacuousCheck(f"losses after {STEPS} steps: {allowed:.3g} (rms) allowed, and no step at all is nearer")
    for name, got in losses.items():
        if not (off := rms(got - want)) <= allowed:
            raise CheckError(f"losses after {STEPS} steps: {name} is off by {off:.3g} (rms), {allowed:.3g} allowed")
    means = {"float64, no step": first, "float64": want} | losses
    h.fact(f"mean loss after {STEPS} steps", {name: float(f"{loss.mean():.6g}") for name, loss in means.items()})


def show_share(h: Harness, alone: Table) -> None:
    """How much of eager's whole step AdamW is, and so how much compiling it can save."""
    for step in h.lesson or ():
        if step.timed and alone.timed:
            share = alone[FUSED].ms / step[EAGER].ms
            h.say(
                f"{step.case}: AdamW, fused, is {share:.1%} of eager's step ({alone[FUSED].ms:.2f} ms of "
                f"{step[EAGER].ms:.2f}); compiled, {alone.over(FUSED, COMPILED):.2f}x as fast, it would save at most "
                f"{max(0.0, share * (1 - alone[COMPILED].ms / alone[FUSED].ms)):.1%}"
            )


def show_optimizer(h: Harness, trainers: dict[str, Trainer], grads: tuple[torch.Tensor, ...], exact: Trainer) -> Table:
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
        table = h.compare(
            variants, update(exact), *grads, baseline=FUSED, work=Work(bytes=ADAMW_BYTES * number),
            title="AdamW", case=f"{number} parameters float32",
            timing=Timing(first_calls=dict.fromkeys(variants)),  # in the whole steps, before
        )  # fmt: skip
    if grads[0].is_cuda:
        h.fact("kernels of AdamW", {name: len(kernels_run(fn)[0]) for name, fn in variants.items()})
    return table
