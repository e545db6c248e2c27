"""Try a backend of torch.compile: does it compile, is it as exact as float32, do gradients flow, do results survive?

attempt({"backend": "inductor"}, "cpu") compiles a small network with these arguments, calls it twice, and compares the
result and the gradient with float64.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor

from compile_inspect import logs, watch
from examples.common.shown import require

FLOAT32 = 2.0**-18  # relative error, rms: here float32 stays below it, bfloat16 and TF32 do not


@contextmanager
def quiet() -> Iterator[list[tuple[str, str]]]:
    """Collect torch's log records, silence Python warnings, and restore Dynamo's settings afterwards.

    OpenVINO turns one of them, inline_inbuilt_nn_modules, off for the whole process when it is loaded.
    """
    with warnings.catch_warnings(), logs() as lines:
        warnings.simplefilter("ignore")
        with torch._dynamo.config.patch(recompile_limit=64):
            kept = hasattr(torch._dynamo.config, "inline_inbuilt_nn_modules")
            with torch._dynamo.config.patch({"inline_inbuilt_nn_modules": True} if kept else {"recompile_limit": 64}):
                yield lines


def network(width: int, hidden: int, device: str) -> nn.Sequential:
    layers = (nn.Linear(width, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, width))
    return nn.Sequential(*layers).to(device)


def off_by(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error, rms over all elements."""
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


@dataclass
class Outcome:
    """What one backend did with a small network: `error` is None when it ran.

    `result` and `gradient` are relative rms errors against float64; `gradient` is None when there is none.
    """

    error: str | None = None
    result: float = 0.0
    gradient: float | None = None
    refused: bool = False  # it raises if gradients are wanted
    next_call: str | None = None  # what the next call does to this call's result
    by_inductor: int = 0  # graphs that Inductor's cache was asked for: it compiled them, whatever the backend's name
    message: str | None = None  # the first line that torch logged about CUDA graphs

    @property
    def losses(self) -> list[str]:
        found = []
        if self.result > FLOAT32:
            found.append(f"result off by {self.result:.0e}, more than float32")
        if self.refused:
            found.append("refuses gradients")
        elif self.gradient is None:
            found.append("loses the gradient in silence")
        elif self.gradient > FLOAT32:
            found.append(f"gradient off by {self.gradient:.0e}")
        if self.next_call:
            found.append(self.next_call)
        return found


def attempt(arguments: dict, device: str) -> Outcome:
    """Compile a small network with these arguments of torch.compile, and see what becomes of it."""
    torch.compiler.reset()
    model = network(32, 64, device)
    x, other = (torch.randn(4, 32).to(device) for _ in range(2))
    exact = copy.deepcopy(model).double()
    want = exact(x.double())
    want_gradient = torch.autograd.grad(want.sin().sum(), exact[0].weight)[0]
    outcome = Outcome()
    with quiet() as lines, watch() as seen:
        try:
            compiled = torch.compile(model, **arguments)
            try:
                out = compiled(x)
            except Exception as error:
                if "gradient would be lost" not in str(error):
                    raise
                outcome.refused = True
                with torch.no_grad():
                    out = compiled(x)
            mine = out.detach().clone()
            outcome.result = off_by(mine, want)
            if out.requires_grad:
                got = torch.autograd.grad(out.sin().sum(), model[0].weight)[0]
                outcome.gradient = off_by(got, want_gradient)
            with torch.set_grad_enabled(not outcome.refused):
                compiled(other)
            outcome.next_call = _after_the_next_call(out, mine)
        except Exception as error:
            inner = getattr(error, "inner_exception", error)
            outcome.error = f"{type(inner).__name__}: {(str(inner).strip().splitlines() or ['no message'])[0]}"
            if "CxxCompiler" in outcome.error:
                outcome.error += "; install g++, or name another in the environment variable CXX"
    torch.compiler.reset()
    outcome.by_inductor = sum(n for key, n in seen.counters.get("inductor", {}).items() if key.startswith("fxgraph"))
    outcome.message = next((text.splitlines()[0] for _, text in lines if "cudagraph" in text), None)
    return outcome


def _after_the_next_call(out: torch.Tensor, mine: torch.Tensor) -> str | None:
    try:
        return None if torch.equal(out.detach(), mine) else "the next call overwrites the result in silence"
    except RuntimeError:  # a CUDA graph's memory, which torch guards
        return "the next call takes the result back, and reading it raises"


def describe(name: str, outcome: Outcome) -> str:
    if outcome.error:
        return f"fails: {outcome.error}".rstrip(".")
    text = "runs" + (f", but {', '.join(outcome.losses)}" if outcome.losses else "")
    if outcome.by_inductor and name != "inductor":
        text += "; compiled by Inductor, on which it fell back"
    return text + (f"; says: {outcome.message}" if outcome.message else "")


def handed_over(device: str) -> dict[str, dict[str, str]]:
    """The graph and the example inputs that a backend gets for a Linear and a GELU, by how it is called."""
    rows: dict[str, dict[str, str]] = {}

    def noting(way: str, result: Callable = lambda run: run) -> Callable:
        def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
            called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
            names = [str(each) if isinstance(each, torch._ops.OpOverload) else each.__name__ for each in called]
            fake = any(isinstance(each, FakeTensor) for each in inputs)
            rows[way] = {"graph": ", ".join(names), "example inputs": "fake" if fake else "real"}
            return result(graph.forward)

        return backend

    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).to(device).requires_grad_(False)
    for compiled in (
        torch.compile(model, backend=noting("torch.compile")),
        torch._dynamo.optimize(noting("torch._dynamo.optimize"))(model),
        torch.compile(model, backend=aot_autograd(fw_compiler=noting("after AOTAutograd", make_boxed_func))),
    ):
        torch.compiler.reset()
        compiled(torch.ones(2, 8, device=device))
    torch.compiler.reset()
    aten = [way for way, row in rows.items() if "aten." in row["graph"]]
    require(aten == ["after AOTAutograd"], f"ATen operations: {rows}")
    return rows
