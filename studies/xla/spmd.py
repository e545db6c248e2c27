"""spmd, measured: the layouts of a training step: what a device holds, and what it sends, next to theory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import Harness
from harness.process import report

import torch
import torch.nn.functional as F
import torch_xla
from torch import nn
from torch_xla import runtime

from examples.common import xla
from examples.xla.spmd import DEVICES, Spec, make_mesh, on_devices, shard, shards
from examples.xla.spmd_collectives import Programs, collectives, communication

STEPS = 3  # the first has no momentum yet, and is a program of its own; the third compiles nothing
LAYERS = 2
LR, MOMENTUM = 1.0, 0.9
WEIGHTS = 2 * LAYERS


class Mlp(nn.Module):
    """Residual blocks: x + down(silu(up(x))). Not relu: at its kink, one rounding would decide a whole gradient."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.silu(up(x)))
        return x


@dataclass(frozen=True)
class Layout:
    """How a training step is cut: the batch's rows, and the weights of both layers, each [out, in]."""

    rows: str | None
    up: Spec
    down: Spec
    theory: Callable[[int, int, int], list[tuple[str, int, int]]]
    mesh: tuple[int, ...] = (DEVICES,)
    axes: tuple[str, ...] = ("x",)


def sharded_weights(rows: int, width: int, hidden: int) -> list[tuple[str, int, int]]:
    """FSDP: each weight is gathered forward and, but for the first, whose input needs no gradient, again backward."""
    gathers = [("all-gather", DEVICES, width * hidden)] * (2 * WEIGHTS - 1)
    return gathers + [("reduce-scatter", DEVICES, width * hidden // DEVICES)] * WEIGHTS + [("all-reduce", DEVICES, 1)]


LAYOUTS = {
    # Every gradient, and the loss.
    "data parallel": Layout(
        "x", (None, None), (None, None),
        lambda rows, width, hidden: [("all-reduce", DEVICES, width * hidden)] * WEIGHTS + [("all-reduce", DEVICES, 1)],
    ),
    # An activation for each block forward, and backward for all but the first, whose input needs no gradient.
    "tensor parallel": Layout(
        None, ("x", None), (None, "x"),
        lambda rows, width, hidden: [("all-reduce", DEVICES, rows * width)] * (2 * LAYERS - 1),
    ),
    "data and tensor parallel": Layout(
        "data", ("model", None), (None, "model"),
        lambda rows, width, hidden: [("all-reduce", 2, rows // 2 * width)] * (2 * LAYERS - 1)
        + [("all-reduce", 2, width * hidden // 2)] * WEIGHTS + [("all-reduce", 2, 1)],
        mesh=(2, DEVICES // 2), axes=("data", "model"),
    ),
    "sharded weights": Layout("x", ("x", None), ("x", None), sharded_weights),
}  # fmt: skip


def train(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, after: Callable = lambda: None
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """STEPS steps, the loss of each: `after` is called at the end of each."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.detach())
    return optimizer, losses


# --- in the process with the devices


def run_layout(case: Layout, model: Mlp, x: torch.Tensor, y: torch.Tensor, programs: Programs) -> tuple[list, dict]:
    mesh, device = make_mesh(case.mesh, case.axes), xla.device()
    x, y = (shard(t.to(device), mesh, (case.rows, None)) for t in (x, y))
    model.to(device)
    for layers, spec in ((model.up, case.up), (model.down, case.down)):
        for layer in layers:
            shard(layer.weight, mesh, spec)
            if case.up == case.down:  # only weights are cut: unmarked outputs are cut as XLA likes
                layer.register_forward_hook(lambda *args: shard(args[-1], mesh, (case.rows, None)))
    xla.settle()
    programs.new()
    texts = []

    def after() -> None:
        torch_xla.sync()
        texts.append(programs.new())

    optimizer, losses = train(model, x, y, after)
    parameters = list(model.parameters())
    momentum = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    reported = {
        "collectives": list(collectives([text for each in texts for text in each][-1])),
        "compiles": [len(each) for each in texts],
        "held": sum(math.prod(shards(t)[0]) * t.element_size() for t in (*parameters, *momentum)),
    }
    return [torch.stack(losses).cpu(), *(p.detach().cpu() for p in parameters)], reported


def child_layouts(folder: str) -> None:
    runtime.use_spmd()
    given = torch.load(Path(folder, "given.pt"), weights_only=True)
    programs, out, reported = Programs(Path(folder, "hlo")), {}, {}
    for name, case in LAYOUTS.items():
        model = Mlp(*given["model"]["up.0.weight"].t().shape)
        model.load_state_dict(given["model"])
        out[name], reported[name] = run_layout(case, model, given["x"], given["y"], programs)
    torch.save(out, Path(folder, "out.pt"))
    report(**reported)


# --- in the process that asks


def study(h: Harness) -> None:
    if h.profile:
        return
    rows, width, hidden = h.pick((72, 56, 104), (1024, 384, 1056))
    x, y, model = h.randn(rows, width), h.randn(rows, width), Mlp(width, hidden)
    start = [p.detach() for p in model.parameters()]
    with h.progress(f"a mesh of {DEVICES} devices"):
        reported, out = on_devices(child_layouts, {"x": x, "y": y, "model": model.state_dict()})

    def learned(losses, after):
        # Not the weights: three steps change them so little that taking no step at all might pass.
        return (losses, *(p - before for p, before in zip(after, start, strict=True)))

    def float64(x, y):
        exact = Mlp(width, hidden).double()
        exact.load_state_dict(model.state_dict())
        losses = train(exact, x.double(), y.double())[1]
        return learned(torch.stack(losses), [p.detach() for p in exact.parameters()])

    facts, held = {}, {}
    whole = 2 * 4 * sum(p.numel() for p in model.parameters())
    for name, case in LAYOUTS.items():
        got = learned(out[name][0], out[name][1:])
        h.check(lambda *_, got=got: got, float64, x, y, what=f"{name}: losses and what {STEPS} steps change",
                terms=rows + hidden, poison=False)  # fmt: skip
        facts[name] = communication(reported[name]["collectives"], case.theory(rows, width, hidden))
        held[name] = {
            "bytes": reported[name]["held"], "share": f"{reported[name]['held'] / whole:.0%}",
            "compiles by step": str(reported[name]["compiles"]),
        }  # fmt: skip
    h.table("weights and momentum that a device holds", held)
    h.table(f"communication of a training step, bytes; the weights are {whole // 2}", facts)
