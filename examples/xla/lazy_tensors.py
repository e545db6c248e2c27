"""Lazy tensors: operations are recorded, and one sync compiles and runs all of them as a single program.

An operation on an XLA tensor adds a node to a graph and returns: shapes and dtypes are known at once, values are not.
torch_xla.sync() hands XLA everything that is pending and still referenced. The program is looked up by the graph:
operations in their order, shapes, dtypes, constants, and which results are still held. A program that is found runs at
once; a new one is compiled first. Reading a value runs what that value needs, and keeps nothing else.

Two ways to lose. Recording costs the host some microseconds an operation, which small operations do not earn back. And
without a sync each step records all the steps before it: every read is a new program that begins at the first step.

Question   When does PyTorch/XLA compile, when does it run, and what does recording cost?
Needs      torch_xla>=2.9
Wins when  a step is long against what recording it costs on the host, and each step records the same graph.
Study      studies/xla/lazy_tensors.py (the graph as text, what counts as the same graph, numbers that compile),
           studies/xla/lazy_tensors_copies.py
Source     chapter section "XLA and torch_xla"; torch_xla's own counters and texts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

from harness import Harness, Table, Work, run

import torch
import torch.nn.functional as F
import torch_xla
from torch_xla.experimental.eager import eager_mode_context

from examples.common import xla

ROWS, INNER, WIDTH = 53, 379, 443  # sizes of no other technique: a program compiled there would be found here
LAYERS, OPS = 24, 4  # of chain(): matmul, tanh, scale, add
STEPS = 8
EAGER, LAZY, ONE_BY_ONE = "torch eager", "torch_xla lazy", "torch_xla eager mode"


def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w + b).mean(-1)


def layer64(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return layer(x.double(), w.double(), b.double())


# --- when it compiles, and when it runs


def stages(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, dict[str, xla.Ran]]:
    """A layer on these CPU tensors, and what XLA did in each stage of its way."""
    ran = {}
    with xla.watch() as ran["three tensors to the device"]:
        x, w, b = (t.to(xla.device()) for t in (x, w, b))
    with xla.watch() as ran["recording"]:
        y = layer(x, w, b)
        del y  # nobody holds it: it will never be computed
    with xla.watch() as ran["recording and sync"]:
        y = layer(x, w, b)
        torch_xla.sync()
    with xla.watch() as ran["reading the result"]:
        result = y.cpu()
    with xla.watch() as ran["the same again"]:
        y = layer(x, w, b)
        torch_xla.sync()
    with xla.watch() as ran["recording and reading, no sync"]:
        layer(x, w, b).cpu()
    return result, ran


def shown(ran: xla.Ran) -> dict[str, float]:
    """Tensors sent and fetched with their bytes, programs compiled and run; `s` are seconds of compiling."""
    return {
        "sent": ran.to_device, "compiled": ran.compiles, "s": round(ran.compile_s, 2), "run": ran.executions,
        "found again": ran.reused, "syncs": ran.syncs, "fetched": ran.from_device,
        "bytes": ran.to_bytes + ran.from_bytes,
    }  # fmt: skip


# --- a sync too few


def train_like(x: torch.Tensor, w: torch.Tensor, steps: int, synced: bool) -> tuple[torch.Tensor, list[dict]]:
    """A loop that reads its loss at every step. Reading computes the loss, and keeps nothing else."""
    graphs = []
    for _ in range(steps):
        x = torch.tanh(x @ w)
        loss = x.square().mean()
        found = xla.operations(xla.hlo(loss))
        if synced:
            torch_xla.sync()
        loss.item()
        graphs.append({"operations": sum(found.values()), "products": found["dot"]})
    return x, graphs


def train64(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = x.double(), w.double()
    for _ in range(STEPS):
        x = torch.tanh(x @ w)
    return x


def forgotten_sync(x: torch.Tensor, w: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, dict]]:
    """The loop with its sync and without: its results, and what it compiled and ran."""
    results, rows = {}, {}
    for what, synced in {"with sync": True, "forgotten": False}.items():
        there = x.to(xla.device()), w.to(xla.device())
        with xla.watch() as ran:
            results[what], graphs = train_like(*there, STEPS, synced)
        rows[what] = {
            "compiles": ran.compiles, "compile s": round(ran.compile_s, 2), "executions": ran.executions,
            "matrix products run": sum(step["products"] for step in graphs),
            "operations of each": ", ".join(str(step["operations"]) for step in graphs),
        }  # fmt: skip
    return results, rows


# --- the host's share


def chain(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for w in weights:
        x = x + torch.tanh(x @ w) * 0.5
    return x


def chain64(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return chain(x.double(), [w.double() for w in weights])


def split(record: Callable) -> tuple[float, float, float]:
    """Seconds of a step: in recording, in sync (looking the program up, starting it), and waiting for it."""
    times = []
    for _ in range(20):
        xla.settle()
        marks = [time.perf_counter()]
        held = record()
        marks.append(time.perf_counter())
        torch_xla.sync()
        marks.append(time.perf_counter())
        xla.wait()
        marks.append(time.perf_counter())
        times.append([b - a for a, b in itertools.pairwise(marks)])
        del held
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


def host_cost(h: Harness, size: str, rows: int, width: int) -> tuple[Table, dict[str, float]]:
    """The same operations on little data or much: their times, and the host's share of them in microseconds."""
    x, weights = h.randn(rows, width), [h.randn(width, width, scale=width**-0.5) for _ in range(LAYERS)]
    on_device, there = x.to(xla.device()), [w.to(xla.device()) for w in weights]

    def one_by_one(_):
        with eager_mode_context(True):
            y = chain(on_device, there)
            xla.wait()
        return y

    lazily = xla.waited(lambda _: chain(on_device, there))
    table = h.compare(
        {EAGER: lambda x: chain(x, weights), LAZY: lazily, ONE_BY_ONE: one_by_one}, lambda x: chain64(x, weights), x,
        baseline=EAGER, max_error_ratio=2.0, work=Work(flops=2 * LAYERS * rows * width * width, dtype=torch.float32),
        title=f"{LAYERS * OPS} operations", case=f"{size}, {rows}x{width}",
    )  # fmt: skip
    seconds = split(lambda: chain(on_device, there)) if table.timed else ()
    return table, dict(zip(("recording", "sync", "waiting"), (round(1e6 * s, 1) for s in seconds), strict=False))


def demo(h: Harness) -> None:
    tables, host = {}, {}
    if not h.profile:
        inputs = h.randn(ROWS, INNER), h.randn(INNER, WIDTH, scale=INNER**-0.5), h.randn(WIDTH)
        result, ran = stages(*inputs)
        h.check(lambda *_: result, layer64, *inputs, terms=INNER + WIDTH, poison=False, what="mean of gelu, lazy")
        h.table("what XLA did", {stage: shown(each) for stage, each in ran.items()})
        compiled = ran["recording and sync"]
        x, w = h.randn(ROWS, INNER + 18), h.randn(INNER + 18, INNER + 18, scale=(INNER + 18) ** -0.5)
        results, steps = forgotten_sync(x, w)
        for what, y in results.items():
            h.check(lambda *_, y=y: y, train64, x, w, terms=STEPS * len(w), poison=False, what=f"{STEPS} steps, {what}")
        h.table(f"{STEPS} steps that read their loss", steps)
    for size, shape in {"tiny": (7, 61), "large": h.pick((256, 397), (1024, 1021))}.items():
        tables[size], host[size] = host_cost(h, size, *shape)
    if tables["tiny"].timed:
        h.table(f"us of a call of {LAYERS * OPS} operations", host)
    xla.settle()

    def answer() -> str:
        products = [row["matrix products run"] for row in steps.values()]
        speed = " and ".join(f"{table.over(EAGER, LAZY):.2f}x ({size})" for size, table in tables.items())
        return (
            f"The first sync of a graph compiles it ({compiled.compile_s:.2f} s), later ones run it. Recording takes "
            f"{host['tiny']['recording'] / LAYERS / OPS:.1f} us an operation: {speed} eager's speed. Without a sync "
            f"{products[1]} matrix products for {products[0]}."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
