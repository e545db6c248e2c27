"""recompilation, measured: more causes and fixes; the guards of a scalar; the limit, and what makes it loud."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from harness import Harness

import torch
from torch import nn

from compile_inspect import Entries, count_entries, guards
from examples.compiler.recompilation import CALLS, CountsCalls, check_outputs, passing, scales, sgd_steps

LAYER = "a layer each, int attribute"
ADAMW = "learning rate, AdamW foreach"
HALVES = {"terms": 0, "roundings": 8, "acc": torch.bfloat16}


class Layer(nn.Module):
    """Knows which of the model's layers it is; `kind` is int, or torch.tensor."""

    def __init__(self, index: int, kind: Callable) -> None:
        super().__init__()
        self.index = kind(index)

    def forward(self, x):
        return scales(x, self.index)


def adamw_steps(x: torch.Tensor, lr: float | torch.Tensor, **options) -> tuple[Callable, list[Callable]]:
    """AdamW's step and four calls of it, with a scheduler that changes lr after each; the outputs are the weights.

    Compiled, it has its step count in a float32 tensor: 1 - 0.999**step, by default, would cost four digits there.
    """
    weight = nn.Parameter(x.clone())
    weight.grad = torch.tanh(x)
    optimizer = torch.optim.AdamW([weight], lr=lr, betas=(0.8, 0.9), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def call(step: Callable) -> torch.Tensor:
        step()
        scheduler.step()
        return weight.detach().clone()

    return optimizer.step, [call] * 4


@dataclass(frozen=True)
class Way:
    """A function with calls of it, made anew by start(); options of torch.compile and settings of Dynamo."""

    start: Callable[[], tuple[Callable, list[Callable]]]
    options: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)

    def entries(self) -> Entries:
        with torch._dynamo.config.patch(**self.config) if self.config else nullcontext():
            return count_entries(*self.start(), **self.options)


def ways(x: torch.Tensor) -> dict[str, tuple[list[torch.Tensor], dict[str, Way]]]:
    """More causes, and other fixes for those of the lesson: the outputs in float64, and the ways to call."""
    exact, counts = x.double(), list(range(1, CALLS + 1))
    ints, floats = [k + 1 for k in counts], [k / 10 for k in counts]

    def counted() -> tuple[Callable, list[Callable]]:
        return CountsCalls(), [lambda f: f(x)] * CALLS

    def layers(kind: Callable) -> tuple[list[Callable], list[Callable]]:
        return [Layer(k, kind) for k in counts], [lambda each, i=i: each[i](x) for i in range(CALLS)]

    def under(context: Callable) -> Callable:
        def call(f: Callable) -> torch.Tensor:
            with context():
                return f(x, 2.0)

        return call

    step, calls = adamw_steps(exact, 0.1, foreach=False)
    exact_steps = [call(step) for call in calls]
    dynamic = {"dynamic": True}
    halves, modes = (
        [torch.float32, torch.float16, torch.bfloat16],
        [torch.enable_grad, torch.no_grad, torch.inference_mode],
    )
    return {
        "int argument": (
            [scales(exact, k) for k in ints],
            {
                "as found": Way(passing(scales, x, ints)),
                "dynamic=True": Way(passing(scales, x, ints), dynamic),
                "tensor": Way(passing(scales, x, [torch.tensor(k, device=x.device) for k in ints])),
            },
        ),
        "float argument": (
            [scales(exact, k) for k in floats], {"dynamic=True": Way(passing(scales, x, floats), dynamic)}
        ),
        "int attribute of a module": (
            [scales(exact, k) for k in counts],
            {"allow_unspec_int_on_nn_module": Way(counted, config={"allow_unspec_int_on_nn_module": True})},
        ),
        LAYER: (
            [scales(exact, k) for k in counts],
            {
                "as found": Way(lambda: layers(int)),
                "tensor": Way(lambda: layers(lambda k: torch.tensor(k, device=x.device))),
            },
        ),
        ADAMW: (  # foreach is what a GPU gets unasked
            exact_steps,
            {
                "as found": Way(lambda: adamw_steps(x, 0.1, foreach=True)),
                "tensor lr, capturable": Way(
                    lambda: adamw_steps(x, torch.tensor(0.1, device=x.device), foreach=True, capturable=True)
                ),
                "foreach=False": Way(lambda: adamw_steps(x, 0.1, foreach=False)),
            },
        ),
        "dtype": (
            [scales(x.to(d).double(), 2.0) for d in halves],
            {
                "as found": Way(lambda: (scales, [lambda f, d=d: f(x.to(d), 2.0) for d in halves])),
                "cast before the call": Way(lambda: (scales, [lambda f, d=d: f(x.to(d).float(), 2.0) for d in halves])),
            },
        ),
        "grad mode": (
            [scales(exact, 2.0) for _ in modes],
            {
                "as found": Way(lambda: (scales, [under(mode) for mode in modes])),
                "one mode around all": Way(lambda: (scales, [under(torch.no_grad) for _ in modes])),
            },
        ),
    }  # fmt: skip


def show_ways(h: Harness, x: torch.Tensor) -> None:
    rows = {}
    for name, (want, each) in ways(x).items():
        for how, way in each.items():
            found = way.entries()
            check_outputs(h, f"{name}, {how}", found, want, **(HALVES if name == "dtype" else {}))
            reason = found.reasons[0] if found.reasons else "none"
            rows[f"{name}: {how}"] = {
                "entries": found.compiled, "eager": found.eager_calls, "guard that fails first": reason,
            }  # fmt: skip
    h.table("cache entries, and calls left to eager", rows)


def guards_on_a_scalar(h: Harness, x: torch.Tensor) -> None:
    """What the first entry of an argument checks, and what the second: its value, then only its type."""
    shown = {}
    for kind, values in (("int", (2, 3)), ("float", (0.2, 0.3))):
        torch.compiler.reset()
        fn = torch.compile(scales, backend="eager")
        for value in values:
            fn(x, value)
        for nth, lines in zip(("second", "first"), guards(scales), strict=True):
            mine = [re.sub(r", \d{9,}", "", line.split("  #")[0]) for line in lines if "L['k']" in line]
            shown[f"{kind}, {nth} entry"] = "; ".join(line.strip() for line in mine)
    torch.compiler.reset()
    h.fact("guards on a scalar argument", shown)


def who_specializes(h: Harness, x: torch.Tensor) -> None:
    """The same float learning rate, for Dynamo alone and with the operators' own rules behind it."""
    entries = {
        backend: count_entries(*sgd_steps(x, 0.1), backend=backend).compiled for backend in ("eager", "aot_eager")
    }
    h.fact("cache entries for a float learning rate, by backend", entries)
    if entries["eager"] < entries["aot_eager"]:
        h.say("Dynamo makes the float dynamic; the operator that takes it (add_ with alpha=) specializes on it again")


def the_limit(h: Harness, x: torch.Tensor) -> None:
    """Where recompiling ends, and what makes that loud."""
    limit = torch._dynamo.config.recompile_limit
    values = [k / 10 for k in range(2, limit + 6)]
    found = count_entries(scales, [lambda f, k=k: f(x, k) for k in [*values, values[0]]], dynamic=False)
    h.fact(
        "recompile_limit, floats under dynamic=False",
        {
            "limit": limit,
            "values": len(values),
            "entries": found.compiled,
            "eager calls": found.eager_calls,
            "an earlier value after it": "eager" if found.eager[-1] else "compiled",
            "logged": "; ".join(found.warnings) or "nothing",
        },
    )

    loud = {}
    for name, config, options in (
        ("fail_on_recompile_limit_hit, limit 2", {"fail_on_recompile_limit_hit": True, "recompile_limit": 2}, {}),
        ("fullgraph=True, limit 2", {"recompile_limit": 2}, {"fullgraph": True}),
        ("error_on_recompile", {"error_on_recompile": True}, {}),
    ):
        made = 0

        def counted(f: Callable, k: float) -> torch.Tensor:
            nonlocal made
            made += 1
            return f(x, k)

        try:
            with torch._dynamo.config.patch(**config):
                count_entries(scales, [lambda f, k=k: counted(f, k) for k in values], dynamic=False, **options)
            loud[name] = "quiet"
        except (torch._dynamo.exc.RecompileError, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            first = re.sub(r"\S*/", "", str(error).splitlines()[0])  # a file by its name
            loud[name] = f"call {made}: {type(error).__name__}: {first}"
    h.fact("made loud by", loud)


def study(h: Harness) -> None:
    if h.profile:
        return
    x = h.randn(16, 64)
    show_ways(h, x)
    guards_on_a_scalar(h, x)
    who_specializes(h, x)
    the_limit(h, x)
