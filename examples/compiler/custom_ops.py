"""Custom operators, allow_in_graph, nonstrict_trace, disable: four ways around code that Dynamo cannot trace.

The function here is two operations, reached through Python that Dynamo cannot trace. Untouched, or under disable, it
breaks the graph. Under allow_in_graph and nonstrict_trace it is traced later, in AOTAutograd: the graph is whole, but
the Python runs only once, at compile time. torch.library.custom_op makes it one opaque node that runs at every call; it
needs rules for shapes (register_fake) and gradients (register_autograd), which opcheck checks.

Question   Which way around code that cannot be traced is right when, and what does a call cost?
Needs      torch
Wins when  the work outside torch is long, or must happen at each call. Here it is short, and every way loses to eager.
Variants   custom_ops_isotonic.py (an operator that reads its data, with a gradient)
Study      studies/compiler/custom_ops.py (what a wrong fake kernel does, and what opcheck finds of it)
Source     chapter sections "4. Register Custom Operations" and "Debugging Tools".
"""

# No `from __future__ import annotations` here: torch reads an operator's schema from its annotations.

import array
import warnings
from collections.abc import Callable

from harness import Harness, Timing, Work, run

import torch

from compile_inspect import aten_graphs, logs, own_code
from examples.compiler.custom_ops_isotonic import isotonic, pooled

# A copy of this file under another name has operators of its own.
NAMESPACE = "companion_ops" if __name__ == "examples.compiler.custom_ops" else f"ops_{__name__.replace('.', '_')}"
EAGER, TRACED, OPAQUE = "torch eager", "torch nonstrict_trace", "torch custom_op"
# A factor, and a byte for each read of it. Both are arrays, whose code is C, and there Dynamo stops.
FACTOR, ASKED = array.array("d", [2.0]), array.array("b")


def wave(x: torch.Tensor) -> torch.Tensor:
    """The same two operations at every call, but reached through Python that Dynamo cannot trace."""
    ASKED.append(1)
    return x.sin() * FACTOR[0]


@torch.library.custom_op(f"{NAMESPACE}::wave", mutates_args=())
def wave_operator(x: torch.Tensor) -> torch.Tensor:
    return wave(x)


@wave_operator.register_fake
def _(x):
    return torch.empty_like(x)


wave_operator.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos() * FACTOR[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def ways() -> dict[str, tuple[Callable, Callable]]:
    """(wave, the plain isotonic fit) as each way wraps them, by its name; for custom_op the registered operators."""
    decorators = {
        "untouched": lambda fn: fn,
        "allow_in_graph": torch.compiler.allow_in_graph,
        "nonstrict_trace": torch._dynamo.nonstrict_trace,
        "disable": torch.compiler.disable,
    }
    functions = (wave, lambda x: pooled(x)[0])
    taken = {name: tuple(decorate(own_code(fn)) for fn in functions) for name, decorate in decorators.items()}
    return taken | {"custom_op": (wave_operator, isotonic)}


def around(fn: Callable) -> Callable:
    return own_code(lambda x: fn(x + 1) * 3)


def around_reference(x: torch.Tensor) -> torch.Tensor:
    return (x.double() + 1).sin() * FACTOR[0] * 3


def one_graph(fn: Callable, x: torch.Tensor) -> str:
    """Whether fn compiles without a break: "yes", "no" or the error's kind."""
    try:
        return "yes" if len(aten_graphs(fn, x, fullgraph=True)) == 1 else "no"
    except Exception as error:
        return type(getattr(error, "inner_exception", error)).__name__


def probe(x: torch.Tensor, wave_so: Callable, fit_so: Callable) -> dict:
    """What one way does with wave and with code that reads its data: `wave_so`, `fit_so` are a pair from ways()."""
    with logs():
        torch.compiler.reset()
        compiled = torch.compile(around(wave_so), backend="aot_eager")
        (grad,) = torch.autograd.grad(compiled(leaf := x.clone().requires_grad_()).sum(), leaf)
        before = compiled(x)  # compiles again, as no gradient is wanted now: so only the next call is counted
        asked = len(ASKED)
        compiled(x)
        runs = len(ASKED) - asked
        FACTOR[0] *= 1.5
        followed = torch.allclose(compiled(x), 1.5 * before)
        FACTOR[0] /= 1.5
    (want,) = torch.autograd.grad(around_reference(leaf := x.double().requires_grad_()).sum(), leaf)
    graphs = aten_graphs(around(wave_so), x)
    return {
        "graph": " | ".join(" ".join(name.split(".")[1] for name in graph) for graph in graphs),
        "gradient": "right" if torch.allclose(grad.double(), want, atol=1e-5) else "wrong",
        "runs at a call": runs,
        "sees a setting changed later": "yes" if followed else "no",
        "one graph": one_graph(around(wave_so), x),
        "one graph if it reads data": one_graph(lambda x: fit_so(x * 2) + 1, x),
    }


def decisions(answers: dict[str, dict]) -> dict[str, str]:
    """Which ways do what is needed, from the probes."""
    needs = {
        "the compiler sees its operations": lambda a: "sin" in a["graph"] and a["one graph"] == "yes",
        "it runs at every call, in one graph": lambda a: a["runs at a call"] == 1 and a["one graph"] == "yes",
        "it reads data, in one graph": lambda a: a["one graph if it reads data"] == "yes",
    }
    return {need: ", ".join(n for n, a in answers.items() if holds(a)) or "none" for need, holds in needs.items()}


def demo(h: Harness) -> None:
    h.check(wave_operator, lambda x: x.double().sin() * FACTOR[0], h.randn(16), what="the operator", roundings=8)
    answers = {}
    if not h.profile:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answers = {name: probe(h.randn(8), *taken) for name, taken in ways().items()}
        h.fact("the same function, five ways", answers)
        h.table("when to use which", {need: {"ways": names} for need, names in decisions(answers).items()})
    compiled = {f"torch {name}": h.compiled(around(wave_so)) for name, (wave_so, _) in ways().items()}
    table = h.compare(
        {EAGER: around(wave)} | compiled, around_reference, h.randn(16), baseline=EAGER, work=Work(),
        title="one call", timing=Timing(end_to_end=True), terms=0, roundings=16,
    )  # fmt: skip

    def answer() -> str:
        runs = decisions(answers)["it runs at every call, in one graph"]
        stale = " and ".join(name for name, a in answers.items() if a["sees a setting changed later"] == "no")
        return (
            f"Only {runs} keeps the graph whole and runs its Python each call: over eager "
            f"{table.by_host(EAGER, OPAQUE)}, {1000 * (table[OPAQUE].ms - table[TRACED].ms):.0f} us more than "
            f"{TRACED[6:]}. {stale} run it only while compiling: later settings are not seen."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
