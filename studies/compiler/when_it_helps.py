"""when_it_helps, further: one operation by itself, and after how many calls compiling has paid for itself."""

from __future__ import annotations

from harness import Harness, Timing, Work

import torch

from examples.compiler.when_it_helps import EAGER


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5


def one_operation(h: Harness) -> None:
    """Nothing to fuse and next to nothing to do: what is left of torch.compile is its own cost per call."""
    variants = {EAGER: scaled, "torch.compile": h.compiled(scaled)}
    if h.device.type == "cuda":
        variants["torch.compile max-autotune"] = h.compiled(scaled, mode="max-autotune")
    table = h.compare(
        variants, lambda x: x.double() * 1.5, h.randn(64, 64), baseline=EAGER, work=Work(),
        title="one multiplication", timing=Timing(end_to_end=True), terms=0,
    )  # fmt: skip
    if table.timed:
        eager, compiled = table[EAGER], table["torch.compile"]
        what = "loses" if compiled.speedup < 1 else "wins here"
        h.say(
            f"one operation: torch.compile {what}, {table.by_host(EAGER, compiled.variant)}: guards and calling what "
            f"it compiled take {(compiled.ms - eager.ms) * 1000:+.1f} us beside eager's dispatch; nothing is fused"
        )


def study(h: Harness) -> None:
    paid = {}
    for table in h.lesson or ():
        if table.timed and table.title == "when_it_helps":
            eager, best = table[EAGER], max(table.rows[1:], key=lambda row: row.speedup)
            if best.ms < eager.ms:
                paid[table.case] = f"{best.variant}: {best.first_call_s * 1000 / (eager.ms - best.ms):,.0f} calls"
            else:
                paid[table.case] = "never"
    h.fact("the first call has paid for itself after", paid)
    one_operation(h)
