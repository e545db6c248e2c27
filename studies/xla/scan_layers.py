"""scan_layers, measured: layers that are not equal or not pure, and what a trace that is kept forgets."""

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


class InPlace(nn.Linear):
    def forward(self, x):
        return super().forward(x.add_(1))


def handed_over(width: int) -> dict[str, list[nn.Module]]:
    """Layers that a user might scan."""
    hooked = [Layer(width), Layer(width)]
    hooked[1].register_forward_hook(lambda module, args, out: out * 2)
    return {
        "equal layers": [Layer(width) for _ in range(3)],
        "another dtype": [Layer(width), Layer(width).to(torch.bfloat16)],
        "another setting": [Layer(width), Layer(width, scale=3.0)],
        "another activation": [nn.Sequential(nn.Linear(width, width), f()) for f in (nn.ReLU, nn.Tanh)],
        "a hook on the second": hooked,
        "a wider output": [nn.Linear(width, width + 1) for _ in range(2)],
        "batch norm, training": [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(2)],
        "input changed in place": [InPlace(width, width) for _ in range(2)],
        "dropout, training": [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5)) for _ in range(2)],
    }


def outcome(fn: Callable, layers: list[nn.Module], x: torch.Tensor) -> str:
    """What fn(layers, x) does on the XLA device, next to the same layers in float64: right, wrong, or an error."""
    moved = [copy.deepcopy(layer).to(xla.device()) for layer in layers]
    on_xla = x.to(xla.device())
    xla.settle()
    try:
        with torch.no_grad():
            got = fn(moved, on_xla).cpu().double()
    except Exception as error:  # also torch's own errors, which share no class
        xla.forget_pending()
        return f"{type(error).__name__}: {' '.join(str(error).split())[:170]}"
    with torch.no_grad():
        want = unrolled([copy.deepcopy(layer).double() for layer in layers], x.double())
    off = ((got - want).norm() / want.norm()).item()
    return "right" if off < 1e-5 else f"WRONG, no error: off by {off:.0%}" if off >= 0.01 else f"off by {off:.1e}"


def refusals(h: Harness, width: int) -> None:
    """Each kind of layers through scan_layers, and through Stacked."""
    torch.manual_seed(width)
    x, told = h.randn(4, width), {}
    for name, layers in handed_over(width).items():
        told[name] = {
            "scan_layers": outcome(scan_layers, layers, x),
            "Stacked": outcome(lambda layers, x: Stacked(layers)(x), layers, x),
        }
    h.table("outcome by the kind of layers", told)
    silent = [name for name, row in told.items() if row["scan_layers"].startswith("WRONG")]
    h.say(f"wrong without an error by scan_layers: {', '.join(silent) or 'none'}")


def kept_traces(h: Harness, width: int) -> None:
    """is_layer_pure=True keeps the trace: it notices neither a changed setting nor that gradients are now wanted."""
    x = h.randn(4, width).to(xla.device())
    layers = nn.ModuleList(Layer(width) for _ in range(2)).to(xla.device())
    stacked = Stacked(layers)

    def pure(x: torch.Tensor) -> torch.Tensor:
        return scan_layers(layers, x, is_layer_pure=True)

    told = {}
    for name, fn, module in (("scan_layers, pure", pure, layers), ("Stacked", stacked, stacked)):
        with torch.no_grad():
            before = fn(x).cpu()
        fn(x).sum().backward()
        grads = [p.grad is not None for p in module.parameters()]
        told[f"{name}: no_grad, then backward"] = f"{sum(grads)} of {len(grads)} gradients"
        if fn is pure:
            for layer in layers:
                layer.scale = 5.0
            told["scale 1, then 5"] = "the old result" if torch.equal(before, pure(x).detach().cpu()) else "another"
    h.fact("a trace that is kept", told)
