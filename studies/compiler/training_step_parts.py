"""training_step, measured: losses after some steps against float64, AdamW by itself, and its learning rate."""

from __future__ import annotations

from collections.abc import Callable

from harness import Harness, Timing, Work
from harness.check import CheckError, VacuousCheck

import torch
from torch import nn

from compile_inspect import kernels_run, logs, watch
from examples.compiler.training_step import EAGER, LR, WHOLE, LanguageModel, Trainer, make_trainers, sizes
from studies.compiler.training_step import against, gradients

STEPS = 4
NEAR = 4  # times eager's own error, after some steps
ADAMW_BYTES = 28  # of a float32 parameter: it, its gradient and two moments are read, all but the gradient written


def study(h: Harness) -> None:
    if h.profile:
        return
    config, shapes = sizes(h)
    tokens = h.randint(config.vocab, *shapes[-1])

    def new() -> LanguageModel:
        return LanguageModel(config, h.device, h.machine.mode == "gpu")

    torch.compiler.reset()
    trainers, double, other, model = make_trainers(new), new().float64(), new(), new()
    exact = Trainer(double, double, "foreach")
    with logs():  # Dynamo warns that it leaves out torch's profiler marks
        show_training(h, trainers, exact, tokens)
    alone = {
        "torch AdamW fused": trainers[EAGER],
        "torch AdamW foreach": Trainer(other, other, "foreach"),
        "torch.compile AdamW": trainers[WHOLE],
    }
    show_optimizer(h, alone, gradients(model, model)(tokens), exact)
    show_scheduler(h)


def show_training(h: Harness, trainers: dict[str, Trainer], exact: Trainer, tokens: torch.Tensor) -> None:
    """How far training has come after some steps, and what the host's share of a step is."""
    for table in h.lesson:
        for row in table.rows if table.timed else []:
            launching = f", {min(1.0, row.enqueue_us / row.ms / 1000):.0%} of it launching" if row.enqueue_us else ""
            speed = "" if row.variant == EAGER else f"; {against(row.speedup)} eager"
            h.say(f"{table.case}, {row.variant}: {row.ms:.2f} ms{launching}{speed}")
    exact_first, want = exact.after(0, tokens), exact.after(STEPS, tokens)
    moved = (want - exact_first).square().mean().sqrt().item()
    losses = {"float64": {"first": exact_first.mean().item(), "last": want.mean().item(), "rms off": 0.0}}
    for name, trainer in trainers.items():
        first, got = trainer.after(0, tokens), trainer.after(STEPS, tokens)
        off = (got - want).square().mean().sqrt().item()
        losses[name] = {"first": first.mean().item(), "last": got.mean().item(), "rms off": off}
        # Errors grow from step to step, so what a compiled step may be off follows from eager's own.
        allowed = NEAR * max(losses[EAGER]["rms off"], 2**-22 * want.square().mean().sqrt().item())
        if not allowed < moved:
            raise VacuousCheck(
                f"losses after {STEPS} steps: {allowed:.3g} (rms) allowed, but no step at all is only {moved:.3g} off"
            )
        if not off <= allowed:
            raise CheckError(f"losses after {STEPS} steps: {name} is off by {off:.3g} (rms), {allowed:.3g} allowed")
    rounded = {name: {key: float(f"{value:.6g}") for key, value in each.items()} for name, each in losses.items()}
    h.fact(f"mean loss, and after {STEPS} steps", rounded)


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
    number, fused = sum(grad.numel() for grad in grads), next(iter(variants))
    with logs():
        table = h.compare(
            variants, update(exact), *grads, baseline=fused, work=Work(bytes=ADAMW_BYTES * number), title="AdamW",
            case=f"{number} parameters float32",
            timing=Timing(first_calls=dict.fromkeys(variants)),  # in the whole steps, before
        )  # fmt: skip
    if grads[0].is_cuda:
        h.fact("kernels of AdamW", {name: len(kernels_run(fn)[0]) for name, fn in variants.items()})
    for row in table.rows[1:] if h.timing else []:
        h.say(f"{row.variant}: {against(row.speedup)} {fused}")


def graphs_with_a_scheduler(device: torch.device, lr: float | torch.Tensor, steps: int = 4) -> tuple[int, list[str]]:
    """(graphs that Dynamo makes of AdamW.step while a scheduler lowers lr, the guards that failed on the way)."""
    parameters = [nn.Parameter(torch.ones(4, device=device)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=lr, capturable=device.type == "cuda")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.compiler.reset()
    step = torch.compile(optimizer.step, backend="eager")
    with logs(), watch() as seen:  # logs: Dynamo warns that it leaves out torch's profiler marks
        for _ in range(steps):
            step()
            scheduler.step()
    torch.compiler.reset()
    return seen.graphs, [reason.partition(": ")[2].split("  #")[0].strip() for reason in seen.recompiles]


def show_scheduler(h: Harness) -> None:
    lrs = {"float": LR, "tensor": torch.tensor(LR, device=h.device)}
    made = {kind: graphs_with_a_scheduler(h.device, lr) for kind, lr in lrs.items()}
    h.fact("graphs of AdamW.step in 4 steps of a scheduler", {kind: graphs for kind, (graphs, _) in made.items()})
    for kind, (graphs, reasons) in made.items():
        why = f"; a guard failed: {'; '.join(reasons)}" if reasons else ""
        h.say(f"lr as a {kind}: {graphs} graph{'s' if graphs > 1 else ''}{why}")
