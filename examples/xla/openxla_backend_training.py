"""A training step, compiled by openxla in four ways."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from examples.common import xla

LR, STEPS = 0.05, 5
LAZY = "torch_xla lazy"


def compiled(fn: Callable, fullgraph: bool = True) -> Callable:
    return torch.compile(fn, backend="openxla", fullgraph=fullgraph, dynamic=False)


class Trainer:
    """(x, y) -> the loss before the SGD step that it does. Lazy mode and eager are the same code on two devices.

    `how` says what goes through openxla: "model"; "model, loss"; "model, loss, update", whose first gradient, 1.0, is
    on the device already; "whole step". None is eager, or lazy mode.
    """

    def __init__(self, model: nn.Module, how: str | None) -> None:
        self.model, self.how = model, how
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        # On the CPU: openxla may reuse a device copy's memory once copy_() has restored the weights from it.
        self.start = [p.detach().cpu().clone() for p in model.parameters()]
        self.loss_of, self.update, self.seed = self.uncompiled_loss, self.optimizer.step, None
        if how == "model":
            forward = compiled(model)
            self.loss_of = lambda x, y: F.cross_entropy(forward(x), y)
        elif how in ("model, loss", "model, loss, update"):
            self.loss_of = compiled(self.uncompiled_loss)
            if "update" in how:
                self.update = compiled(self.optimizer.step, fullgraph=False)
                self.seed = torch.ones((), device=next(model.parameters()).device)
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

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.how == "whole step":
            return self.whole(x, y)
        self.optimizer.zero_grad()
        loss = self.loss_of(x, y)
        loss.backward(self.seed)
        self.update()
        return loss.detach()

    @torch.no_grad()
    def reset(self) -> None:
        for weight, start in zip(self.model.parameters(), self.start, strict=True):
            weight.copy_(start)

    def moved(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """How far each weight has moved from its start after STEPS steps."""
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
    "openxla: model, loss": "model, loss",
    "openxla: model, loss, update": "model, loss, update",
    "openxla: whole step": "whole step",
}
