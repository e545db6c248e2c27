"""What scan_layers scans: equal residual layers, on the CPU and on the XLA device, unrolled, with their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch_xla.experimental.scan_layers import scan_layers

from examples.common import xla

UNROLLED, SCANNED, STACKED = "torch_xla unrolled", "torch_xla scan_layers", "scan, stacked once"
PURE, EAGER = "torch_xla scan_layers, pure", "torch eager"
FORMS = (UNROLLED, SCANNED, STACKED)


class Layer(nn.Module):
    """A residual MLP layer: what is scanned here. `scale` is Python state, which no tensor shows."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


def unrolled(layers: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Model:
    """N layers on the XLA device in three forms, the same on the CPU, and what a step returns; `stack` is Stacked."""

    def __init__(self, depth: int, width: int, stack: Callable[[Sequence[nn.Module]], nn.Module]) -> None:
        torch.manual_seed(depth)
        self.depth = depth
        self.host = nn.ModuleList(Layer(width) for _ in range(depth))
        self.layers = copy.deepcopy(self.host).to(xla.device())
        self.stacked = stack(self.layers)
        xla.settle()

    def results(self, fn, parameters, x, backward: bool, stacked: bool = False) -> tuple[torch.Tensor, ...]:
        """The output; with `backward` the loss and, for each kind of weight, the gradients of all layers together.

        `stacked` means that they come stacked, or may stay as they come.
        """
        if not backward:
            with torch.no_grad():
                return (fn(x),)
        loss = fn(x).square().sum()
        # By default one of autograd's own threads runs an XLA device's backward pass, and may still hold its tensors at
        # the next sync. They are then results of that program too, which makes it another one, compiled anew.
        with torch.autograd.set_multithreading_enabled(False):
            grads = torch.autograd.grad(loss, parameters)
        kinds = len(grads) if stacked else len(grads) // self.depth
        return loss, *(grads if stacked else (torch.stack(grads[kind::kinds]) for kind in range(kinds)))

    def reference(self, x: torch.Tensor, backward: bool) -> tuple[torch.Tensor, ...]:
        exact = copy.deepcopy(self.host).double()
        return self.results(lambda x: unrolled(exact, x), list(exact.parameters()), x.double(), backward)

    def forms(self) -> dict[str, tuple[Callable, list[nn.Parameter]]]:
        own = list(self.layers.parameters())
        return {
            UNROLLED: (lambda x: unrolled(self.layers, x), own),
            SCANNED: (lambda x: scan_layers(self.layers, x), own),
            STACKED: (self.stacked, list(self.stacked.parameters())),
        }

    def steps(self, x: torch.Tensor, backward: bool) -> dict[str, Callable]:
        """A step of each form, with its gradients as they come: stacking them is not part of a step."""
        moved = x.to(xla.device())

        def timed(fn: Callable, parameters: list[nn.Parameter]) -> Callable:
            def call(_) -> torch.Tensor:
                held = self.results(fn, parameters, moved, backward, stacked=True)
                xla.settle()
                return held[0]  # the others were held until they had been computed

            return call

        host, own = list(self.host.parameters()), list(self.layers.parameters())
        eager = lambda x: self.results(lambda x: unrolled(self.host, x), host, x, backward, stacked=True)[0]  # noqa: E731
        forms = self.forms() | {PURE: (lambda x: scan_layers(self.layers, x, is_layer_pure=True), own)}
        return {EAGER: eager} | {name: timed(*way) for name, way in forms.items()}
