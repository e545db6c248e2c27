"""dynamic_shapes, measured: orders of sizes, guards, refused marks, a model that loses."""

from __future__ import annotations

from collections.abc import Callable

from harness import Harness

import torch
from torch import nn

from compile_inspect import guards, logs
from examples.compiler.dynamic_shapes import SIZES, GatedMLP, Served, sizes_compiled, time_mix


def count_orders(h: Harness, model: nn.Module, batches) -> None:
    """Graphs by the order of sizes. Dynamo decides that alone, so nothing is generated."""
    for order, sizes in {"2 to 64": batches[1:], "64 down to 1": batches[::-1]}.items():
        torch.compiler.reset()
        counts = {}
        for name in ("automatic", "dynamic=True", "mark_dynamic", "mark_unbacked"):
            counts[name] = len(sizes_compiled(Served(model, name, backend="eager"), sizes)[0])
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
        served = Served(model, name, backend="eager")
        sizes_compiled(served, batches)
        found[name] = rows_guards(served.code)
    h.fact("guards on the rows", found)
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
    served = {name: Served(model, name) for name in ("mark_dynamic", "mark_unbacked", "padded to 64")}
    for one in served.values():
        for x in batches:
            one.first(x)
    time_mix(h, model, served, batches, "mix of batches, a small model")
    torch.compiler.reset()


def study(h: Harness) -> None:
    if h.profile:
        return
    width = 16
    model, batches = GatedMLP(width, 32).to(h.device).requires_grad_(False), [h.randn(n, 3, width) for n in SIZES]
    count_orders(h, model, batches)
    explain_one(h, model, batches)
    refused_marks(h)
    small_model(h)
