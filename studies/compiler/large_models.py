"""large_models: what the chapter claims of such models, beside this run."""

from __future__ import annotations

from harness import Harness

from examples.compiler.large_models import BLOCKS, EAGER, WHOLE

# What the chapter says of each: speed-up by compiling, and seconds of compiling.
CHAPTER = {"1 B": ([1.03, 1.18], [5, 10]), "40 B": ([0.99, 0.99], [120, 300])}


def study(h: Harness) -> None:
    claims: dict[str, dict] = {}
    for table in h.lesson or ():
        name = table.case.partition(", ")[0]
        if not table.timed or name not in CHAPTER:
            continue
        eager, (speeds, seconds) = table[EAGER], CHAPTER[name]
        compiled = [row for row in table.rows if row.variant in (WHOLE, BLOCKS)]
        claims[table.case] = {
            "eager launches, %": round(min(1.0, (eager.enqueue_us or 0.0) / eager.ms / 1000) * 100),
            "speed-up claimed": speeds, "measured": [round(row.speedup, 2) for row in compiled],
            "seconds to compile claimed": seconds, "measured s": [round(row.first_call_s, 1) for row in compiled],
        }  # fmt: skip
    h.table("the chapter's claims; measured: whole model (where compiled), one block", claims)
