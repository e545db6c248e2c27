"""Scan over layers: XLA compiles a loop with one layer in it, so that compile time does not grow with depth.

A Python loop over N equal layers is recorded N times, and XLA compiles N copies. scan makes it one While loop over
stacked weights: the layer is compiled once, and once more for backward.

torch_xla's scan_layers stacks the weights in every step: its graph still grows with each weight. Unless told
is_layer_pure=True it traces the layer anew at each call. Stacked, below, stacks once and keeps the trace. It also
refuses what scan_layers silently accepts and computes wrongly, such as a layer that works in place, or a setting that
differs between layers.

Question   How does the time to compile N equal layers grow with N, unrolled and scanned, and what does a step cost?
Needs      torch_xla>=2.9
Wins when  layers are many and compiling dominates: short runs, many shapes, development. By default scan_layers traces
           in every step, which takes several times as long as unrolled; a stacked training step is not slower.
Variants   scan_layers_checks.py (which layers can be scanned), scan_layers_model.py (what is scanned, unrolled)
Study      studies/xla/scan_layers.py (layers that are not equal or not pure, traces that are kept)
Source     goes beyond the chapter; scan and scan_layers of torch_xla.experimental
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

from harness import Harness, Timing, Work, run

import torch
from torch import nn
from torch_xla.experimental.scan import scan

from examples.common import xla
from examples.xla.scan_layers_checks import require_equal
from examples.xla.scan_layers_model import EAGER, FORMS, SCANNED, STACKED, UNROLLED, Model

ROWS = 12
NAMED = {False: "forward", True: "forward and backward"}


class Stacked(nn.Module):
    """N equal layers as one module: weights stacked along a new first dimension, once, and a scan over them.

    It takes x as one layer does, on the XLA device. Its parameters, for an optimizer, are the stacked ones, [N, ...];
    write_back() copies them back into layers. Raises what require_equal does, of x too, and ValueError off the device.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        require_equal(layers)
        self.template = [copy.deepcopy(layers[0])]  # in a list: its tensors are not this module's
        states = [dict((*layer.named_parameters(), *layer.named_buffers())) for layer in layers]
        trained = {name for name, tensor in layers[0].named_parameters() if tensor.requires_grad}
        self.names = list(states[0])
        self.stacked = nn.ParameterList(
            nn.Parameter(torch.stack([state[name].detach() for state in states]), requires_grad=name in trained)
            for name in self.names
        )
        self.bodies: dict[tuple, Callable] = {}
        self.carried: set[tuple] = set()
        self.training = layers[0].training

    def train(self, mode: bool = True) -> Stacked:
        super().train(mode)
        self.template[0].train(mode)
        self.bodies.clear()
        self.carried.clear()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "xla" or self.stacked[0].device != x.device:
            raise ValueError(
                f"Stacked: x is on {x.device}, the weights on {self.stacked[0].device}; move both to the XLA device"
            )
        if (looks := (x.shape, x.dtype)) not in self.carried:
            require_equal([copy.deepcopy(self.template[0]).to(x.device)], x)
            self.carried.add(looks)
        # torch_xla looks a kept trace up by function, shapes and dtypes, but not by which gradients it gives.
        key = torch.is_grad_enabled(), x.requires_grad, *(tensor.requires_grad for tensor in self.stacked)
        body = self.bodies.setdefault(key, partial(self._layer))
        return scan(body, x, dict(zip(self.names, self.stacked, strict=True)), is_fn_pure=True)[0]

    def _layer(self, x: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        return torch.func.functional_call(self.template[0], state, (x,)), None

    @torch.no_grad()
    def write_back(self, layers: Sequence[nn.Module]) -> None:
        """Copy the stacked weights into `layers`, as for a checkpoint of the unrolled model."""
        if len(layers) != len(self.stacked[0]):
            raise ValueError(f"Stacked.write_back: {len(layers)} layers; need {len(self.stacked[0])}: pass all")
        for i, layer in enumerate(layers):
            state = layer.state_dict()  # without buffers that are not persistent, with each name of a tied weight
            held = zip(self.names, self.stacked, strict=True)
            layer.load_state_dict(state | {name: each[i] for name, each in held if name in state})


def sweep(h: Harness, width: int, backward: bool, depths: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    """A first step at each depth in three forms: the size of its graph and its compile time, by quantity and form."""
    found = {what: {form: {} for form in FORMS} for what in ("operations", "loops", "compiles", "compile s")}
    for depth in depths:
        model, x, got = Model(depth, width, Stacked), h.randn(ROWS, width), ()
        for form in FORMS:
            with xla.watch() as ran:
                results = model.results(*model.forms()[form], x.to(xla.device()), backward, stacked=form == STACKED)
                recorded = xla.operations(xla.hlo(*results))
                xla.settle()
            got += results
            each = recorded.total(), recorded["while"], ran.compiles, round(ran.compile_s, 2)
            for what, number in zip(found, each, strict=True):
                found[what][form][str(depth)] = number
        h.check(
            lambda _, got=got: got, lambda x, model=model: model.reference(x, backward) * len(FORMS), x,
            what=f"{NAMED[backward]}, {depth} layers", terms=3 * width * depth, roundings=depth, poison=False,
        )  # fmt: skip
    for what, rows in found.items():
        (h.fact if what in ("loops", "compiles") else h.table)(f"{NAMED[backward]}: {what} by layers", rows)
    return found


def demo(h: Harness) -> None:
    width, depths = h.pick(quick=74, full=134), h.pick(quick=(2, 4, 8, 16, 32), full=(2, 4, 8, 16, 32, 64))
    trained, tables, depth = h.pick(quick=(2, 32), full=depths), {}, depths[-1]
    found = {b: {} if h.profile else sweep(h, width, b, trained if b else depths) for b in (False, True)}
    for backward in (False, True):
        model, x, what = Model(depth, width, Stacked), h.randn(ROWS, width), f"{NAMED[backward]} of {depth} layers"
        flops = (3 if backward else 1) * 2 * depth * ROWS * 6 * width * width
        tables[backward] = h.compare(
            model.steps(x, backward), lambda x, m=model, b=backward: m.reference(x, b)[0], x, baseline=EAGER,
            max_error_ratio=2.0, title=what, case=f"{depth} x {ROWS}x{width} float32",
            work=Work(flops=flops, dtype=torch.float32),
            timing=Timing(first_calls={} if backward else dict.fromkeys(FORMS)),  # compiled before
        )  # fmt: skip

    def answer() -> str:
        grown = {form: each[str(depth)] / each["2"] for form, each in found[True]["operations"].items()}
        seconds = " and ".join(f"{found[True]['compile s'][form][str(depth)]} s" for form in (UNROLLED, STACKED))
        step, scanned = (1 / tables[True].over(UNROLLED, form) for form in (STACKED, SCANNED))
        return (
            f"From 2 to {depth} layers a training step's graph grows {grown[UNROLLED]:.1f}x unrolled, "
            f"{grown[SCANNED]:.1f}x by scan_layers, {grown[STACKED]:.1f}x stacked once. Unrolled and stacked, {depth} "
            f"compile in {seconds}. A step takes {step:.2f}x unrolled's time stacked, {scanned:.2f}x by scan_layers."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
