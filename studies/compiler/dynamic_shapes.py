"""dynamic_shapes, measured: orders of sizes, guards, the recompile limit, refused marks, a model that loses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from harness import Harness

import torch
from torch import nn

from compile_inspect import guards, logs, watch
from examples.compiler.dynamic_shapes import POLICIES, SIZES, Counting, GatedMLP, Served, sizes_compiled, time_mix


class CountingRuns(Counting):
    """Counts the runs of its graphs too."""

    def __init__(self, backend: str = "eager") -> None:
        super().__init__(backend)
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs) -> Callable:
        compiled = super().__call__(graph, inputs)

        def call(*args):
            self.runs += 1
            return compiled(*args)

        return call


def count_orders(h: Harness, model: nn.Module, batches) -> None:
    """Graphs by the order of sizes. Dynamo decides that alone, so nothing is generated."""
    for order, sizes in {"2 to 64": batches[1:], "64 down to 1": batches[::-1]}.items():
        torch.compiler.reset()
        counts = {}
        for name in ("automatic", "dynamic=True", "mark_dynamic", "mark_unbacked"):
            counting = Counting()
            served = Served(model, name, POLICIES[name], backend=counting)
            counts[name] = len(sizes_compiled(served, sizes, counting))
        h.fact(f"graphs for batches of {order}", counts)
    torch.compiler.reset()


def rows_guards(fn: Callable) -> list[str]:
    """The guards on the number of rows, of each cache entry of fn, the newest first."""
    found = []
    for entry in guards(fn):
        symbolic = [line for line in entry if ".size()[0]" in line]
        constant = [line.split("size=[")[1].split(",")[0].split("]")[0] for line in entry if "check_tensor" in line]
        symbols = [line.split("  #")[0].removeprefix("LAMBDA_GUARD: ") for line in symbolic]
        found.append("; ".join(symbols) or f"rows == {constant[0]}")
    return found


def explain_one(h: Harness, model: nn.Module, batches) -> None:
    """Why a batch of 1 has a graph of its own, by the guards on the number of rows."""
    found = {}
    for name in ("automatic", "mark_dynamic", "mark_unbacked"):
        torch.compiler.reset()
        counting = Counting()
        served = Served(model, name, POLICIES[name], backend=counting)
        sizes_compiled(served, batches, counting)
        found[name] = rows_guards(served.code)
    h.fact("guards on the rows", found)
    if any("2 <=" in guard for guard in found["mark_dynamic"]):
        h.say(
            "0/1 specialization: 1 broadcasts and 0 is empty, so a symbol stands for what its guard says, "
            f"{found['mark_dynamic'][0]}, and 1 is compiled apart; mark_unbacked: {found['mark_unbacked'][0]}"
        )
    torch.compiler.reset()


def recompile_limit(h: Harness, batches) -> None:
    """What happens at the limit: eager for good, one warning, and two settings that raise instead."""

    def scale(x):
        return torch.sin(x) + 1

    torch.compiler.reset()
    counting = CountingRuns()
    compiled = torch.compile(scale, backend=counting, dynamic=False)
    runs = []
    with logs() as lines:
        for _ in range(2):
            for x in batches:
                compiled(x)
            runs.append(counting.runs - sum(runs))
    warnings = [text for _, text in lines if "recompile_limit" in text]
    h.fact(
        "static, at the default limit",
        {
            "limit": torch._dynamo.config.recompile_limit, "graphs": counting.graphs, "calls": len(batches),
            "in eager": len(batches) - runs[0], "in eager, second time": len(batches) - runs[1],
            "warnings": len(warnings),
        },
    )  # fmt: skip
    for line in "\n".join(warnings).splitlines()[:3]:
        h.say(f"  {line.split(' (/')[0].strip()}")
    raised = {}
    for name, options in {"fail_on_recompile_limit_hit": {}, "fullgraph=True": {"fullgraph": True}}.items():
        torch.compiler.reset()
        compiled = torch.compile(scale, backend="eager", dynamic=False, **options)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=not options), logs():
            for x in batches:
                try:
                    compiled(x)
                except torch._dynamo.exc.FailOnRecompileLimitHit as error:
                    raised[name] = {"at rows": len(x), "error": f"{type(error).__name__}: {error}".splitlines()[0]}
                    break
    h.fact("how to be told of the limit", raised)
    torch.compiler.reset()


def guard_search(h: Harness) -> None:
    """What many graphs cost a call: their guards are tried one after the other, the graph used last first."""

    def scale(x):
        return torch.sin(x) + 1

    compiled = torch.compile(scale, backend="eager", dynamic=False)
    batches = [torch.ones(rows, 1) for rows in SIZES]  # on the CPU: what is timed is the host's search
    with torch._dynamo.config.patch(recompile_limit=len(SIZES)):
        for x in batches:
            compiled(x)
    times = {}
    for what, calls in {"in turn": batches, "one size again and again": [batches[0]] * len(batches)}.items():
        passes = []
        for _ in range(20):
            started = time.perf_counter()
            for x in calls:
                compiled(x)
            passes.append((time.perf_counter() - started) / len(calls))
        times[what] = round(1e6 * statistics.median(passes), 1)
    h.fact(f"us a call on the host, {len(batches)} static graphs", times)
    torch.compiler.reset()


def refused_marks(h: Harness) -> None:
    """Code that needs to know the size: a mark makes that an error, a guard, or is dropped without a word."""

    def four_rows(x):
        return x.view(4, 2) + 1

    def other_above_4(x):
        return x * 2 if len(x) > 4 else x

    outcomes = {}
    for fn in (four_rows, other_above_4):
        for mark in ("mark_dynamic", "maybe_mark_dynamic", "mark_unbacked"):
            torch.compiler.reset()
            x = torch.ones(8)
            getattr(torch._dynamo.decorators, mark)(x, 0)
            try:
                with logs():  # torch logs thirty lines beside the error
                    torch.compile(fn, backend="eager", fullgraph=True)(x)
                outcomes[f"{mark}, {fn.__name__}"] = f"compiled for {rows_guards(fn)[0]}"
            except RuntimeError as error:
                lines = [line for line in str(error).splitlines() if "specialized it" in line or "guard on" in line]
                outcomes[f"{mark}, {fn.__name__}"] = f"{type(error).__name__}: {(lines or [str(error)])[0].strip(' -')}"
    h.fact("a mark on code that needs the size", outcomes)
    torch.compiler.reset()


def small_model(h: Harness) -> None:
    """A Linear, a GELU and a Linear of few rows: short kernels, where launching is all that a call takes."""
    gpu, width = h.device.type == "cuda", 256
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    model = model.to(h.device, torch.bfloat16 if gpu else torch.float32).requires_grad_(False)
    batches = [h.randn(rows, width, dtype=model[0].weight.dtype) for rows in SIZES]
    torch.compiler.reset()
    served = {name: Served(model, name, POLICIES[name]) for name in ("mark_dynamic", "mark_unbacked", "padded to 64")}
    for one in served.values():
        for x in batches:
            one.first(x)
    with watch() as seen:
        table = time_mix(h, model, served, batches, "mix of batches, a small model")
    h.fact("graphs compiled while it was timed", seen.graphs)
    if table.timed:
        us = {row.variant.removeprefix("torch.compile "): 1000 * row.ms / len(batches) for row in table.rows}
        h.say("us a call: " + ", ".join(f"{name} {us[name]:.1f}" for name in sorted(us, key=us.get)))
    torch.compiler.reset()


def study(h: Harness) -> None:
    if h.profile:
        return
    width = 16
    model, batches = GatedMLP(width, 32).to(h.device).requires_grad_(False), [h.randn(n, 3, width) for n in SIZES]
    count_orders(h, model, batches)
    explain_one(h, model, batches)
    recompile_limit(h, batches)
    refused_marks(h)
    if h.timing:
        guard_search(h)
    small_model(h)
