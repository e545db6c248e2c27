"""ddp: what the size of DDP's buckets does to the graphs, the all-reduces, their overlap and the time."""

from __future__ import annotations

from harness import Harness, Table, Timing, Work, near

import torch

from compile_inspect import logs
from examples.common.collectives import traced
from examples.common.data_parallel import reference
from examples.distributed.ddp import BUCKETS, Step, case_of, sizes


def answer(table: Table) -> str:
    """Which size is the fastest, or that it hardly matters if all times are close."""
    fastest, slowest = min(table.rows, key=lambda row: row.ms), max(table.rows, key=lambda row: row.ms)
    ratio = f"{table.over(slowest.variant, fastest.variant):.2f}x"
    size = {row.variant: row.variant.partition(", ")[2] for row in table.rows}
    buckets = f"buckets of {', '.join(size.values())}"
    if near(fastest, slowest):
        return f"Of {buckets} none is faster by more than noise: the fastest has {ratio} the slowest one's speed."
    return f"Of {buckets}, {size[fastest.variant]} is the fastest: {ratio} the speed of {size[slowest.variant]}."


def study(h: Harness) -> None:
    new, tokens = sizes(h)
    want = reference(new(), tokens, h.ranks, h.rank)
    buckets = (25, 100, 400, 1600) if h.machine.mode == "gpu" else (1, 4)
    steps = {f"torch DDPOptimizer, {size} MiB": Step(new(), h.ranks, h.rank, BUCKETS, size) for size in buckets}
    first = next(iter(steps))
    with logs():
        table = h.compare(
            steps, lambda _: want, tokens, baseline=first, work=Work(), title="size of the buckets",
            case=case_of(h, tokens), timing=Timing(end_to_end=True), max_error_ratio=2.0,
            dtype=torch.float32,
        )  # fmt: skip
        if h.profile:
            return
        traces = {name: traced(step, tokens) for name, step in steps.items()}
    gradients = 4 * sum(p.numel() for p in steps[first].model.parameters())
    rows = {}
    for name, trace in traces.items():
        calls, reduced = trace.sent["all_reduce"]
        if reduced != gradients:
            raise AssertionError(f"{name}: {reduced} bytes were reduced, of {gradients} bytes of gradients")
        rows[name] = {"graphs": steps[name].compiler.graphs, "all-reduces": calls}
        if trace.communicating:
            rows[name]["overlapped"] = f"{trace.overlap:.0%}"
    h.table("by size of the buckets", rows)
    h.answer(lambda: answer(table))
