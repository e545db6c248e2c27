"""One model, six ways to run it: eager, Inductor, openxla, lazy XLA, torch_xla.compile, JAX; and when each one pays.

The same weights go through every compiler, each cold. Three differ only in how torch_xla learns what to compile: lazy
mode by recording each call, torch_xla.compile by recording each call between two syncs, openxla by Dynamo, once. JAX
uses the same compiler with its own front end. A compiler costs time at the first call and saves it at later ones.

Question   Which compiler for this model, given how often it will be called with these sizes?
Needs      torch_xla>=2.9
Wins when  later calls earn the first one back. Which compiler's do, and after how many, differs from CPU to CPU: run it
           on yours. For one call, none.
Variants   compare_jax.py (the model in JAX)
Study      studies/xla/compare.py (what the two front ends hand to XLA)
Source     chapter section "Ecosystem Context", which compares torch.compile with XLA and JAX without a number
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from harness import Harness, Timing, Work, run

import torch
import torch_xla

from compile_inspect import fresh_cache, logs, warm_up
from examples.common import xla
from examples.common.transformer import Config, Transformer, pieces
from examples.xla.compare_jax import have_jax, jax_way, warm_up_jax

EAGER, INDUCTOR, OPENXLA = "torch eager", "torch.compile inductor", "torch.compile openxla"
LAZY, COMPILE, JAX = "torch_xla lazy", "torch_xla.compile", "JAX"
LIKE_EAGER = 2.0  # times eager's own error from float64
CALLS = (1, 100, 10_000, 1_000_000)


def another_program(model: Transformer) -> Transformer:
    """The same model with one more row, which nothing reads, in its tables of angles.

    torch_xla.compile records the same graph as lazy mode, and would find it already compiled: this one differs.
    """
    longer = copy.deepcopy(model)
    longer.cos, longer.sin = (torch.cat((table, table[-1:])) for table in (model.cos, model.sin))
    return longer.to(xla.device())


def forwards(model: Transformer, tokens: torch.Tensor) -> dict[str, Callable]:
    """The forward pass, each way with its own copy of the weights and of the tokens where it needs them."""
    there, moved = copy.deepcopy(model).to(xla.device()), tokens.to(xla.device())
    openxla = torch.compile(there, backend="openxla", fullgraph=True, dynamic=False)
    bounded = torch_xla.compile(another_program(model), full_graph=True)
    ways = {
        EAGER: model,
        INDUCTOR: torch.compile(model, fullgraph=True, dynamic=False),
        OPENXLA: xla.waited(lambda _: openxla(moved)),
        LAZY: xla.waited(lambda _: there(moved)),
        COMPILE: xla.waited(lambda _: bounded(moved)),
    }
    return ways | ({JAX: jax_way(model, tokens)} if have_jax() else {})


def start(ways: dict[str, Callable], tokens: torch.Tensor) -> tuple[dict[str, float], dict[str, int]]:
    """Each way compiled cold: seconds of its first call, and the programs that torch_xla compiled for it."""
    seconds, programs = {}, {}
    for name, way in ways.items():
        with fresh_cache(), xla.watch() as ran:
            way(tokens)
        seconds[name] = ran.seconds
        if name in (OPENXLA, LAZY, COMPILE):
            programs[name] = ran.compiles
    return seconds, programs


def sizes(h: Harness) -> tuple[Config, tuple[tuple[int, int], ...]]:
    quick = Config(width=264, layers=1, heads=4, kv_heads=2, hidden=712, vocab=2056, max_tokens=128)
    full = Config(width=520, layers=2, heads=4, kv_heads=2, hidden=1400, vocab=8200, max_tokens=256)
    return h.pick(quick=(quick, ((1, 32), (4, 64))), full=(full, ((1, 16), (4, 64), (8, 128))))


def totals(table, calls: int) -> dict[str, float]:
    """Seconds that each way takes for so many calls: the first, plus the later ones at their time each."""
    return {row.variant: row.first_call_s + (calls - 1) * row.ms / 1000 for row in table.rows}


def least(seconds: dict[str, float]) -> str:
    """The short name of the way that takes the least; of those within 5 % of it the first in the table."""
    return next(name.split()[-1] for name, s in seconds.items() if s <= 1.05 * min(seconds.values()))


def measure(h: Harness, model: Transformer, tokens: torch.Tensor):
    """One table, each way compiled cold before it."""
    case = f"{'x'.join(map(str, tokens.shape))} tokens"
    torch.compiler.reset()
    each = pieces(model.config, *tokens.shape, 4)
    with torch.no_grad(), h.progress(f"first calls, {case}"):
        ways = forwards(model, tokens)
        seconds, programs = ({}, {}) if h.profile else start(ways, tokens)
        h.fact(f"programs of XLA that torch_xla compiled, {case}", programs)
        return h.compare(
            ways, model.float64, tokens, baseline=EAGER, title="forward", case=case, max_error_ratio=LIKE_EAGER,
            work=Work(flops=sum(p.count * p.flops for p in each), dtype=torch.float32), dtype=torch.float32,
            timing=Timing(first_calls=seconds or None),
        )  # fmt: skip


def demo(h: Harness) -> None:
    config, shapes = sizes(h)
    with logs():  # the extra cost of a process's first compilation belongs to no model
        warm_up(h.device)
        xla.warm_up()
        warm_up_jax()
    model = Transformer.random(config, h.device, torch.float32, h.seed)
    tables = [measure(h, model, h.randint(config.vocab, *shape)) for shape in shapes]
    for table in filter(None, tables):
        rows = {name: {f"{n:,}": round(totals(table, n)[name], 1) for n in CALLS} for name in totals(table, 1)}
        h.table(f"total seconds by the number of calls, {table.case}", rows)

    def answer() -> str:
        cases: dict[str, list[str]] = {}  # cases with the same answer are grouped
        for table in tables:
            calls: dict[str, list[str]] = {}
            for n in CALLS:
                calls.setdefault(least(totals(table, n)), []).append(f"{n:,}")
            text = ", ".join(f"{name} for {', '.join(ns)} calls" for name, ns in calls.items())
            cases.setdefault(text, []).append(table.case.removesuffix(" tokens"))
        parts = (f"{', '.join(tokens)} tokens: {text}" for text, tokens in cases.items())
        return f"Fastest in all, compiling included. {'; '.join(parts)}."

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
