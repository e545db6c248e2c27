"""backends, looked at: what torch lists, what an unknown name is answered, the graph a backend sees, first calls."""

from __future__ import annotations

import copy

from harness import Harness

import torch
from torch import nn

from examples.compiler.backends import BACKENDS, available, backend
from examples.compiler.backends_attempt import attempt, network


def study(h: Harness) -> None:
    if h.profile:
        return
    listed = torch.compiler.list_backends()
    h.fact("torch.compiler.list_backends()", listed)
    outcomes = {name: attempt({"backend": name}, h.device.type) for name in listed}
    h.fact("listed, but does not run by that name", [name for name, outcome in outcomes.items() if outcome.error])
    seconds = {n: round(attempt(backend(n), "cpu").seconds, 2) for n in BACKENDS if n in available()}
    h.fact("seconds to the first result on the CPU", seconds)
    ask_for_an_unknown_one(h)
    what_it_sees(h)
    when_it_pays(h)


def when_it_pays(h: Harness) -> None:
    """After how many calls a backend has saved what its first call took."""
    for table in h.lesson:
        for row in table.rows[1:] if table.timed else ():
            faster = row.p80 < table.rows[0].p20  # by more than either varies
            calls = row.first_call_s * 1000 / (table.rows[0].ms - row.ms) if faster else None
            saved = f"saved again after {calls:,.0f} calls" if calls else "never saved again: it is not clearly faster"
            h.say(f"{table.title}, {row.variant}: first call {row.first_call_s:.2f} s, {saved}")


def ask_for_an_unknown_one(h: Harness) -> None:
    for name in ("inducter", "ipex"):
        answers = {}
        for who, ask in (("torch", lambda n: torch.compile(nn.ReLU(), backend=n)), ("backend()", backend)):
            try:
                ask(name)
            except Exception as error:
                answers[who] = f"{type(error).__name__}: {error}"
        h.fact(f"asked for {name!r}", answers)


def what_it_sees(h: Harness) -> None:
    """The operations of the graph, in torch's functions: ATen's names come only after AOTAutograd."""
    nodes = []

    def looking(graph, inputs):
        nodes.extend(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    model = network(32, 64, h.device.type)
    exact = copy.deepcopy(model).double()
    h.check(
        h.compiled(model, backend=looking), lambda x: exact(x.double()), h.randn(4, 32),
        what="a backend of two lines", terms=64, roundings=8,
    )  # fmt: skip
    h.fact("a backend of two lines saw", nodes)
