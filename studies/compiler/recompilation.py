"""recompilation, measured: more causes and fixes; who specializes a float; the limit, and what makes it loud."""

from __future__ import annotations

import re
from collections.abc import Callable

from harness import Harness

import torch

from compile_inspect import count_entries
from examples.compiler.recompilation import CALLS, CountsCalls, check_outputs, scales, steps

ADAMW = "learning rate, AdamW foreach"
HALVES = {"terms": 0, "roundings": 8, "acc": torch.bfloat16}


def adamw(x: torch.Tensor, **options) -> tuple[Callable, list[Callable]]:
    """Four steps. Compiled, it has its step count in a float32 tensor: 1 - 0.999**step, by default, would cost four
    digits there."""
    step, calls = steps(x, torch.optim.AdamW, betas=(0.8, 0.9), **options)
    return step, calls[:4]


def ways(x: torch.Tensor) -> dict[str, tuple[list[torch.Tensor], dict[str, tuple]]]:
    """More causes, and other fixes for those of the lesson: the outputs in float64, and the ways to call: a function,
    its calls and, where they are not the default, options of torch.compile or settings of Dynamo."""
    exact, counts = x.double(), list(range(1, CALLS + 1))
    ints = [k + 1 for k in counts]
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    modes = [torch.enable_grad, torch.no_grad, torch.inference_mode]

    def tensor(k: float) -> torch.Tensor:
        return torch.tensor(k, device=x.device)

    def given(values: list) -> list[Callable]:
        return [lambda f, v=v: f(x, v) for v in values]

    def under(contexts: list) -> list[Callable]:
        return [lambda f, context=context: context()(f)(x, 2.0) for context in contexts]

    step, calls = adamw(exact, lr=0.1, foreach=False)
    dynamic, unspecialized = {"dynamic": True}, {"allow_unspec_int_on_nn_module": True}
    return {
        "int argument": ([scales(exact, k) for k in ints], {
            "as found": (scales, given(ints)),
            "dynamic=True": (scales, given(ints), dynamic),
            "tensor": (scales, given([tensor(k) for k in ints])),
        }),
        "int attribute of a module": ([scales(exact, k) for k in counts], {
            "allow_unspec_int_on_nn_module": (CountsCalls(0), [lambda f: f(x)] * CALLS, {}, unspecialized),
        }),
        ADAMW: ([call(step) for call in calls], {  # foreach is what a GPU gets unasked
            "as found": adamw(x, lr=0.1, foreach=True),
            "tensor lr, capturable": adamw(x, lr=tensor(0.1), foreach=True, capturable=True),
            "foreach=False": adamw(x, lr=0.1, foreach=False),
        }),
        "dtype": ([scales(x.to(d).double(), 2.0) for d in dtypes], {
            "as found": (scales, [lambda f, d=d: f(x.to(d), 2.0) for d in dtypes]),
            "cast before the call": (scales, [lambda f, d=d: f(x.to(d).float(), 2.0) for d in dtypes]),
        }),
        "grad mode": ([scales(exact, 2.0) for _ in modes], {
            "as found": (scales, under(modes)),
            "one mode around all": (scales, under([torch.no_grad] * len(modes))),
        }),
    }  # fmt: skip


def show_ways(h: Harness, x: torch.Tensor) -> None:
    rows = {}
    for name, (want, each) in ways(x).items():
        for how, (fn, calls, *changed) in each.items():
            options, config = [*changed, {}, {}][:2]
            with torch._dynamo.config.patch(config):
                found = count_entries(fn, calls, **options)
            check_outputs(h, f"{name}, {how}", found, want, **(HALVES if name == "dtype" else {}))
            reason = found.reasons[0] if found.reasons else "none"
            rows[f"{name}: {how}"] = {
                "entries": found.compiled, "eager": found.eager_calls, "guard that fails first": reason,
            }  # fmt: skip
    h.table("cache entries, and calls left to eager", rows)


def who_specializes(h: Harness, x: torch.Tensor) -> None:
    """The same float learning rate, for Dynamo alone and with the operators' own rules behind it."""
    entries = {
        backend: count_entries(*steps(x, lr=0.1), backend=backend).compiled for backend in ("eager", "aot_eager")
    }
    h.fact("cache entries for a float learning rate, by backend", entries)
    if entries["eager"] < entries["aot_eager"]:
        h.say("Dynamo makes the float dynamic; the operator that takes it (add_ with alpha=) specializes on it again")


def the_limit(h: Harness, x: torch.Tensor) -> None:
    """Where recompiling ends, and what makes that loud."""
    limit, made = torch._dynamo.config.recompile_limit, []
    values = [k / 10 for k in range(2, limit + 6)]

    def call(f: Callable, k: float) -> torch.Tensor:
        made.append(k)
        return f(x, k)

    calls = [lambda f, k=k: call(f, k) for k in values]
    found = count_entries(scales, [*calls, calls[0]], dynamic=False)
    h.fact(
        "recompile_limit, floats under dynamic=False",
        {
            "limit": limit, "values": len(values), "entries": found.compiled, "eager calls": found.eager_calls,
            "an earlier value after it": "eager" if found.eager[-1] else "compiled",
            "logged": "; ".join(found.warnings) or "nothing",
        },
    )  # fmt: skip

    loud = {}
    for name, config, options in (
        ("fail_on_recompile_limit_hit, limit 2", {"fail_on_recompile_limit_hit": True, "recompile_limit": 2}, {}),
        ("fullgraph=True, limit 2", {"recompile_limit": 2}, {"fullgraph": True}),
        ("error_on_recompile", {"error_on_recompile": True}, {}),
    ):
        made.clear()
        try:
            with torch._dynamo.config.patch(config):
                count_entries(scales, calls, dynamic=False, **options)
            loud[name] = "quiet"
        except (torch._dynamo.exc.RecompileError, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            first = re.sub(r"\S*/", "", str(error).splitlines()[0])  # a file by its name
            loud[name] = f"call {len(made)}: {type(error).__name__}: {first}"
    h.fact("made loud by", loud)


def study(h: Harness) -> None:
    if h.profile:
        return
    x = h.randn(16, 64)
    show_ways(h, x)
    who_specializes(h, x)
    the_limit(h, x)
