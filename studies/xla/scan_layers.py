"""scan_layers, measured: layers that are not equal, not pure, or no list, and what a trace that is kept forgets."""

from __future__ import annotations

import copy
from collections.abc import Callable

from harness import Harness

import torch
from torch import nn
from torch_xla.experimental.scan_layers import scan_layers

from examples.common import xla
from examples.xla.scan_layers import Stacked
from examples.xla.scan_layers_model import Layer, unrolled


def study(h: Harness) -> None:
    if h.profile:
        return
    refusals(h, width=14)
    kept_traces(h, width=18)


class Bounded(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.linear(x))


class InPlace(nn.Linear):
    def forward(self, x):
        return super().forward(x.add_(1))


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum().item() > 0 else -x)


class Capturing(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.outside = [torch.ones(width, device=xla.device())]

    def forward(self, x):
        return super().forward(x * self.outside[0].to(x.device, x.dtype))


def hooked(width: int) -> list[nn.Module]:
    layers = [Layer(width), Layer(width)]
    layers[1].register_forward_hook(lambda module, args, out: out * 2)
    return layers


def unequal(width: int) -> dict[str, Callable[[], list[nn.Module]]]:
    """What a user might hand over; each makes new layers on the CPU."""
    return {
        "equal layers": lambda: [Layer(width) for _ in range(3)],
        "another shape": lambda: [nn.Linear(width, width), nn.Linear(width, width + 1)],
        "other parameters": lambda: [Layer(width), nn.Linear(width, width)],
        "another dtype": lambda: [Layer(width), Layer(width).to(torch.bfloat16)],
        "another setting": lambda: [Layer(width), Layer(width, scale=3.0)],
        "another activation": lambda: [nn.Sequential(nn.Linear(width, width), f()) for f in (nn.ReLU, nn.Tanh)],
        "a hook on the second": lambda: hooked(width),
        "a wider output": lambda: [nn.Linear(width, width + 1) for _ in range(2)],
        "batch norm, training": lambda: [Bounded(width) for _ in range(2)],
        "input changed in place": lambda: [InPlace(width, width) for _ in range(2)],
        "a branch on a value": lambda: [Branching(width, width) for _ in range(2)],
        "a tensor from outside": lambda: [Capturing(width) for _ in range(2)],
        "dropout, training": lambda: [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5)) for _ in range(2)],
    }


def outcome(fn: Callable, layers: list[nn.Module], x: torch.Tensor) -> str:
    """What fn(layers, x) does on the XLA device, next to the same layers in float64: right, wrong, or an error."""
    moved = [copy.deepcopy(layer).to(xla.device()) for layer in layers]
    on_xla = x.to(xla.device())
    xla.settle()
    try:
        with torch.no_grad():
            got = fn(moved, on_xla).cpu().double()
    except Exception as error:  # also torch's own, which share no class
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:170]}"
        xla.forget_pending()
        return told
    with torch.no_grad():
        want = unrolled([copy.deepcopy(layer).double() for layer in layers], x.double())
    off = ((got - want).norm() / want.norm()).item()
    return "right" if off < 1e-5 else f"WRONG, no error: off by {off:.0%}" if off >= 0.01 else f"off by {off:.1e}"


def refusals(h: Harness, width: int) -> None:
    """Each kind of layers through scan_layers, and through Stacked."""
    torch.manual_seed(width)
    x = h.randn(4, width)
    told = {}
    for name, make in unequal(width).items():
        layers = make()
        told[name] = {
            "scan_layers": outcome(scan_layers, layers, x),
            "Stacked": outcome(lambda layers, x: Stacked(layers)(x), layers, x),
        }
    h.table("layers handed to", told)
    silent = [name for name, row in told.items() if row["scan_layers"].startswith("WRONG")]
    h.say(f"wrong without an error by scan_layers: {', '.join(silent) or 'none'}")


def kept_traces(h: Harness, width: int) -> None:
    """is_layer_pure=True keeps the trace: it does not see another setting, nor that gradients are wanted now."""
    x = h.randn(4, width).to(xla.device())
    told = {}
    layers = [Layer(width).to(xla.device()) for _ in range(2)]
    before = scan_layers(layers, x, is_layer_pure=True).detach().cpu()
    for layer in layers:
        layer.scale = 5.0
    after = scan_layers(layers, x, is_layer_pure=True).detach().cpu()
    want = unrolled(layers, x).detach().cpu()
    told["scale 1, then 5"] = "the old result" if torch.equal(before, after) else f"off by {(after - want).norm():.1g}"
    for name, fn in {
        "scan_layers, pure": lambda layers, x: scan_layers(layers, x, is_layer_pure=True),
        "Stacked": Stacked.__call__,
    }.items():
        layers = [Layer(width).to(xla.device()) for _ in range(2)]
        one = Stacked(layers) if name == "Stacked" else layers
        with torch.no_grad():
            fn(one, x).cpu()
        fn(one, x).sum().backward()
        grads = [p.grad is not None for module in (layers if one is layers else [one]) for p in module.parameters()]
        told[f"{name}: no_grad, then backward"] = f"{sum(grads)} of {len(grads)} gradients"
    h.fact("a trace that is kept", told)
