"""A training step, compiled by openxla in five ways, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from examples.common import xla

LR, STEPS = 0.05, 5
LAZY = "torch_xla lazy"


def compiled(fn: Callable, fullgraph: bool = True) -> Callable:
    return torch.compile(fn, backend="openxla", fullgraph=fullgraph, dynamic=False)


class Trainer:
    """(x, y) -> the loss before an SGD step, which it does. `lazy` and eager are the same code on two devices.

    `how` says what goes through openxla: "model"; "model, cut": the same, and at backward nothing is pending, for there
    is a sync before it, and the first gradient, 1.0, is there already; "model, loss"; "model, loss, update", the first
    gradient there already; "whole step". None is eager, or lazy mode.
    """

    def __init__(self, model: nn.Module, how: str | None) -> None:
        self.model, self.how = model, how
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        self.start = [p.detach().cpu().clone() for p in model.parameters()]  # why there: snapshots() below
        self.forward, self.loss_of, self.update = model, self.uncompiled_loss, self.optimizer.step
        given = how in ("model, cut", "model, loss, update")
        self.seed = torch.ones((), device=next(model.parameters()).device) if given else None
        if how in ("model", "model, cut"):
            self.forward = compiled(model)
        elif how in ("model, loss", "model, loss, update"):
            self.loss_of = compiled(self.uncompiled_loss)
            if "update" in how:
                self.update = compiled(self.optimizer.step, fullgraph=False)
        elif how == "whole step":
            self.whole = compiled(self.whole_step)

    def uncompiled_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), y)

    def whole_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def loss_of(weights: dict) -> torch.Tensor:
            return F.cross_entropy(torch.func.functional_call(self.model, weights, (x,)), y)

        weights = dict(self.model.named_parameters())
        gradients, loss = torch.func.grad_and_value(loss_of)({name: p.detach() for name, p in weights.items()})
        with torch.no_grad():
            for name, weight in weights.items():
                weight.sub_(gradients[name], alpha=LR)
        return loss

    def step(self, x: torch.Tensor, y: torch.Tensor) -> Iterator[str]:
        """One step, phase by phase: each is done when its name comes. self.loss is the result."""
        if self.how == "whole step":
            self.loss = self.whole(x, y)
            yield "whole step"
            return
        self.optimizer.zero_grad()
        if self.how in ("model", "model, cut"):
            logits = self.forward(x)
            yield "forward"
            loss = F.cross_entropy(logits, y)
            if self.how == "model, cut":
                xla.settle()
            yield "loss"
        else:
            loss = self.loss_of(x, y)
            yield "forward and loss"
        loss.backward(self.seed)
        self.loss = loss.detach()
        del loss
        yield "backward"
        self.update()
        yield "update"

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in self.step(x, y):
            pass
        return self.loss

    @torch.no_grad()
    def reset(self) -> None:
        for weight, start in zip(self.model.parameters(), self.start, strict=True):
            weight.copy_(start)

    def moved(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """How far each weight is from where it began after STEPS steps."""
        self.reset()
        for _ in range(STEPS):
            self(x, y)
            if x.device.type == "xla":
                xla.settle()
        with torch.no_grad():
            return tuple((p.cpu() - s).flatten() for p, s in zip(self.model.parameters(), self.start, strict=True))


WAYS = {
    LAZY: None,
    "openxla: model": "model",
    "openxla: model, cut before backward": "model, cut",
    "openxla: model, loss": "model, loss",
    "openxla: model, loss, update": "model, loss, update",
    "openxla: whole step": "whole step",
}


def count_phases(trainer: Trainer, x: torch.Tensor, y: torch.Tensor) -> dict[str, xla.Ran]:
    """What XLA did in each phase of one step, and in the sync behind it."""
    steps, counts, name = trainer.step(x, y), {}, ""
    while name is not None:
        with xla.watch(settled=False) as ran:
            if (name := next(steps, None)) is None:
                xla.settle()
        counts[name or "sync"] = ran
    return counts
