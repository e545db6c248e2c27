"""Lazy tensors: operations are recorded, and one sync compiles and runs all of them as a single program.

An operation on an XLA tensor adds a node to a graph and returns: shapes and dtypes are known at once, values are not.
torch_xla.sync() hands XLA everything that is pending and still referenced. The program is looked up by the graph:
operations in their order, shapes, dtypes, constants, and which results are still held; a new one is compiled first.

Lazy mode loses in two ways. Recording costs the host microseconds per operation, which small operations do not earn
back. And a read (.item()) runs what its value needs but keeps none of it: without a sync between steps, each step's
read runs all steps before it again, as a program that is compiled anew.

Question   When does PyTorch/XLA compile, when does it run, and what does recording cost?
Needs      torch_xla>=2.9
Wins when  a step takes long compared with recording it on the host, and each step records the same graph. On a
           CPU tiny operations are slower than eager's; whether large ones are differs from CPU to CPU.
Study      studies/xla/lazy_tensors.py (what is the same graph, numbers that compile)
Source     goes beyond the chapter, whose section "PyTorch XLA Backend" has openxla only; torch_xla's own counters
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from harness import Harness, Work, run

import torch
import torch.nn.functional as F
import torch_xla

from examples.common import xla

ROWS, INNER, WIDTH = 53, 379, 443  # sizes that no other technique uses: its programs would be found here
LAYERS, OPS = 24, 4  # of chain(): matmul, tanh, scale, add
STEPS = 8
EAGER, LAZY = "torch eager", "torch_xla lazy"


def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w + b).mean(-1)


def chain(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for w in weights:
        x = x + torch.tanh(x @ w) * 0.5
    return x


def exact(fn: Callable) -> Callable:
    return lambda *tensors: fn(*(t.double() for t in tensors))


def stages(h: Harness) -> dict[str, xla.Ran]:
    """What XLA does in each stage of a layer, from its tensors on the CPU to its result there."""
    inputs, ran = (h.randn(ROWS, INNER), h.randn(INNER, WIDTH, scale=INNER**-0.5), h.randn(WIDTH)), {}
    with xla.watch() as ran["three tensors to the device"]:
        there = [t.to(xla.device()) for t in inputs]
    with xla.watch() as ran["recording"]:
        y = layer(*there)
        del y  # nobody holds it: it will never be computed
    with xla.watch() as ran["recording and sync"]:
        y = layer(*there)
        torch_xla.sync()
    with xla.watch() as ran["reading the result"]:
        result = y.cpu()
    with xla.watch() as ran["the same again"]:
        y = layer(*there)
        torch_xla.sync()
    h.check(lambda *_: result, exact(layer), *inputs, terms=INNER + WIDTH, poison=False, what="mean of gelu, lazy")
    h.table("what XLA did", {stage: shown(each) for stage, each in ran.items()})
    return ran


def shown(ran: xla.Ran) -> dict[str, float]:
    """Tensors sent and fetched, programs compiled and run; `s` are seconds of compiling."""
    return {
        "sent": ran.to_device, "compiled": ran.compiles, "s": round(ran.compile_s, 2), "run": ran.executions,
        "found again": ran.reused, "syncs": ran.syncs, "fetched": ran.from_device,
    }  # fmt: skip


def train_like(x: torch.Tensor, w: torch.Tensor, steps: int, synced: bool) -> tuple[torch.Tensor, list[int]]:
    """A loop that reads its loss at every step: the last x, and the matrix products of each step's sync, or read."""
    products = []
    for _ in range(steps):
        x = torch.tanh(x @ w)
        loss = x.square().mean()
        if x.is_xla:
            products.append(xla.operations(xla.hlo(loss))["dot"])
        if synced:
            torch_xla.sync()
        loss.item()
    return x, products


def forgotten_sync(h: Harness) -> dict[str, dict]:
    """The loop with its sync and without: what it compiled and ran."""
    x, w, rows = h.randn(ROWS, INNER), h.randn(INNER, INNER, scale=INNER**-0.5), {}
    for what, synced in {"with sync": True, "forgotten": False}.items():
        there = x.to(xla.device()), w.to(xla.device())
        with xla.watch() as ran:
            y, products = train_like(*there, STEPS, synced)
        h.check(lambda *_, y=y: y, lambda x, w: train_like(x.double(), w.double(), STEPS, True)[0], x, w,
                terms=STEPS * len(w), poison=False, what=f"{STEPS} steps, {what}")  # fmt: skip
        rows[what] = {"compiles": ran.compiles, "executions": ran.executions, "matrix products run": sum(products)}
    h.table(f"{STEPS} steps that read their loss", rows)
    return rows


def recording_us(there: list[torch.Tensor]) -> float:
    """Median time until an operation of the chain is recorded, in microseconds."""
    times = []
    for _ in range(20):
        xla.settle()
        started = time.perf_counter()
        held = chain(*there)
        times.append(time.perf_counter() - started)
        del held
    return round(1e6 * statistics.median(times) / LAYERS / OPS, 1)


def demo(h: Harness) -> None:
    ran, steps = ({}, {}) if h.profile else (stages(h), forgotten_sync(h))
    tables, us = {}, {}
    for size, (rows, width) in {"tiny": (7, 61), "large": h.pick((256, 397), (1024, 1021))}.items():
        given = h.randn(rows, width), *(h.randn(width, width, scale=width**-0.5) for _ in range(LAYERS))
        there = [t.to(xla.device()) for t in given]
        tables[size] = h.compare(
            {EAGER: chain, LAZY: xla.waited(lambda *_, there=there: chain(*there))}, exact(chain), *given,
            baseline=EAGER, work=Work(flops=2 * LAYERS * rows * width * width, dtype=torch.float32),
            max_error_ratio=2.0, title=f"{LAYERS * OPS} operations", case=f"{size}, {rows}x{width}",
        )  # fmt: skip
        us[size] = recording_us(there) if tables[size].timed else None
    h.fact("us to record an operation", us)
    xla.settle()

    def answer() -> str:
        products = [row["matrix products run"] for row in steps.values()]
        speed = " and ".join(f"{table.over(EAGER, LAZY):.2f}x ({size})" for size, table in tables.items())
        return (
            f"The first sync of a graph compiles it ({ran['recording and sync'].compile_s:.2f} s), later ones run it. "
            f"Recording takes {us['tiny']} us an operation: {speed} eager's speed. Without a sync between steps "
            f"{products[1]} matrix products are run for {products[0]}."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
