"""Scan over layers: XLA compiles a loop with one layer in it, so that compile time does not grow with depth.

A Python loop over N equal layers is recorded N times, and XLA compiles N copies. scan makes it one While loop over
stacked weights: the layer is compiled once, and once more for backward.

torch_xla's scan_layers stacks the weights within every step: its graph still grows with each weight, and it traces the
layer anew at each call. Stacked, below, stacks once and keeps the trace. It also refuses what scan_layers takes without
a word and computes wrongly, such as a layer that works in place, or a setting that differs between layers.

Question   How does the time to compile N equal layers grow with N, unrolled and scanned, and what does a step cost?
Needs      torch_xla>=2.9
Wins when  layers are many and compiling is the larger part: short runs, many shapes, development. A step has its own
           price, mostly the host's for tracing and recording: each run says after how many steps unrolling pays.
Variants   scan_layers_checks.py (which layers can be scanned), scan_layers_model.py (what is scanned, unrolled)
Study      studies/xla/scan_layers.py (layers that are not equal or not pure, traces that are kept)
Source     chapter section "XLA": scan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from harness import Harness, Timing, Work, run

import torch
from torch import nn
from torch_xla.experimental.scan import scan

from examples.common import xla
from examples.xla.scan_layers_checks import require_equal
from examples.xla.scan_layers_model import EAGER, FORMS, SCANNED, STACKED, UNROLLED, Model

ROWS = 12


class Stacked(nn.Module):
    """N equal layers as one module: weights stacked along a new first dimension, once, and a scan over them.

    Its parameters are the stacked ones, which an optimizer gets; write_back() puts them into layers again.
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
        if x.device.type != "xla" or any(tensor.device != x.device for tensor in self.stacked):
            on = {str(tensor.device) for tensor in self.stacked}
            raise ValueError(
                f"Stacked: x is on {x.device}, the weights on {', '.join(on)}; move both to the XLA device"
            )
        if (looks := (x.shape, x.dtype)) not in self.carried:
            require_equal([copy.deepcopy(self.template[0]).to(x.device)], x)
            self.carried.add(looks)
        # A kept trace is found by its function, shapes and dtypes; which gradients it gives is not looked at.
        key = torch.is_grad_enabled(), x.requires_grad, *(tensor.requires_grad for tensor in self.stacked)
        body = self.bodies.setdefault(key, self._body())
        return scan(body, x, dict(zip(self.names, self.stacked, strict=True)), is_fn_pure=True)[0]

    def _body(self) -> Callable:
        template = self.template[0]

        def body(x: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
            return torch.func.functional_call(template, state, (x,)), None

        return body

    @torch.no_grad()
    def write_back(self, layers: Sequence[nn.Module]) -> None:
        """Copy the stacked weights into `layers`, as for a checkpoint of the unrolled model."""
        require_equal(layers)
        for i, layer in enumerate(layers):
            state = dict((*layer.named_parameters(), *layer.named_buffers()))
            looks = {name: tuple(tensor.shape) for name, tensor in state.items()}
            mine = {name: tuple(s.shape[1:]) for name, s in zip(self.names, self.stacked, strict=True)}
            if looks != mine or len(layers) != len(self.stacked[0]):
                raise ValueError(
                    f"Stacked.write_back: {len(layers)} layers with {looks}; need {len(self.stacked[0])} with {mine}"
                )
            for name, stacked in zip(self.names, self.stacked, strict=True):
                state[name].copy_(stacked[i])


# --- how large, how long to compile, and what a step takes


def cold(model: Model, x: torch.Tensor, backward: bool) -> tuple[dict[str, tuple], dict[str, dict[str, float]]]:
    """A first step of each form: its results, and the size of its graph and what compiling it took."""
    got, sizes = {}, {}
    for form in FORMS:
        with xla.watch() as ran:
            got[form] = model.results(*model.forms()[form], x, backward, stacked=form == STACKED)
            text = xla.hlo(*got[form])
            xla.settle()
        found = xla.operations(text)
        sizes[form] = {"operations": found.total(), "compile s": round(ran.compile_s, 2), "loops": found["while"],
                       "lines": len(text.splitlines()), "compiles": ran.compiles}  # fmt: skip
    return got, sizes


def named(backward: bool) -> str:
    return "forward and backward" if backward else "forward"


def sweep(h: Harness, width: int, backward: bool, depths: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    """Every depth in three forms, compiled; results against float64. By form and depth."""
    found = {form: {} for form in FORMS}
    for depth in depths:
        model, x = Model(depth, width, Stacked), h.randn(ROWS, width)
        with h.progress(f"{named(backward)}, {depth} layers"):
            got, sizes = cold(model, x.to(xla.device()), backward)
        h.check(
            lambda _, got=got: tuple(tensor for outs in got.values() for tensor in outs),
            lambda x, model=model: model.reference(x, backward) * len(FORMS), x,
            what=f"{named(backward)}, {depth} layers", terms=3 * width * depth, roundings=depth, poison=False,
        )  # fmt: skip
        for form in FORMS:
            found[form][str(depth)] = sizes[form]
    for what in ("operations", "lines", "loops", "compiles", "compile s"):
        rows = {form: {depth: each[what] for depth, each in found[form].items()} for form in FORMS}
        show = h.table if what in ("operations", "compile s") else h.fact
        show(f"{named(backward)}: {what} by layers", rows)
    return found


def against_unrolled(table, form: str, seconds: dict[str, float]) -> dict[str, float | str]:
    """What a scanned form saves in compiling and costs a step, and when unrolling pays."""
    rows = {row.variant: row for row in table.rows}
    saved, extra = seconds[UNROLLED] - seconds[form], rows[form].ms - rows[UNROLLED].ms
    when = "it saves nothing here" if saved <= 0 else "at no step"
    if saved > 0 and rows[form].p20 <= rows[UNROLLED].p80 and rows[UNROLLED].p20 <= rows[form].p80:
        when = "within the spread of a step's times"
    elif saved > 0 and extra > 0:
        when = f"after {1000 * saved / extra:.0f} steps"
    return {"s less to compile": round(saved, 2), "ms more a step": round(extra, 2), "unrolling pays": when}


def demo(h: Harness) -> None:
    width, depths = h.pick(quick=74, full=134), h.pick(quick=(2, 4, 8, 16, 32), full=(2, 4, 8, 16, 32, 64))
    trained, tables = h.pick(quick=(2, 32), full=depths), {}
    found = {b: {} if h.profile else sweep(h, width, b, trained if b else depths) for b in (False, True)}
    for backward in (False, True):
        depth, x = trained[-1], h.randn(ROWS, width)
        model, what = Model(depth, width, Stacked), f"{named(backward)} of {depth} layers"
        flops = (3 if backward else 1) * 2 * depth * ROWS * 6 * width * width
        tables[backward] = table = h.compare(
            model.steps(x, backward), lambda x, m=model, b=backward: m.reference(x, b)[0], x, baseline=EAGER,
            max_error_ratio=2.0, title=what, case=f"{depth} x {ROWS}x{width} float32",
            work=Work(flops=flops, dtype=torch.float32),
            timing=Timing(first_calls={} if backward else dict.fromkeys(FORMS)),  # compiled before
        )  # fmt: skip
        seconds = {form: each[str(depth)]["compile s"] for form, each in found[backward].items()}
        if table.timed and all(seconds.values()):  # 0: compiled earlier in this process, nothing to pay back
            h.table(f"{what}, scanned", {form: against_unrolled(table, form, seconds) for form in (SCANNED, STACKED)})

    def answer() -> str:
        least, most = (str(depth) for depth in (trained[0], trained[-1]))
        grown = [each[most]["operations"] / each[least]["operations"] for each in found[True].values()]
        seconds = " and ".join(f"{found[True][form][most]['compile s']} s" for form in (UNROLLED, STACKED))
        step = 1 / tables[True].over(UNROLLED, STACKED)
        return (
            f"A step of {most} layers has {grown[0]:.1f}x the operations of {least} unrolled, {grown[1]:.1f}x by "
            f"scan_layers, {grown[2]:.1f}x stacked once. Unrolled and stacked compile in {seconds}; a stacked step "
            f"takes {step:.2f}x the time."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
