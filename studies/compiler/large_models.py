"""large_models: how an eager call's time divides, and what the chapter claims of such models, beside this run."""

from __future__ import annotations

from harness import Harness

from examples.common.transformer import FORTY_BILLION, ONE_BILLION, pieces
from examples.compiler.large_models import BLOCKS, EAGER, WHOLE

# What the chapter says of each: speed-up by compiling, and seconds of compiling.
CHAPTER = {"1 B": ((1.03, 1.18), (5, 10)), "40 B": ((0.99, 0.99), (120, 300))}
CONFIGS = {"1 B": ONE_BILLION, "40 B": FORTY_BILLION}


def study(h: Harness) -> None:
    claims: dict[str, dict] = {}
    for table in h.lesson or ():
        name, size = table.case.removesuffix(" tokens").split(", ")
        if not table.timed or name not in CHAPTER:
            continue
        eager, tokens = table[EAGER], int(size.partition("x")[2])
        least = sum(p.bytes * p.count for p in pieces(CONFIGS[name], 1, tokens, 2))
        launching = f", {min(1.0, eager.enqueue_us / eager.ms / 1000):.0%} of it launching" if eager.enqueue_us else ""
        h.say(
            f"{table.case}: eager {eager.ms:.2f} ms{launching}; its least bytes are {least / eager.ms / 1e9:.2f} TB/s"
        )
        (low, high), (fast, slow) = CHAPTER[name]
        compiled = [row for row in table.rows if row.variant in (WHOLE, BLOCKS)]
        claims[table.case] = {
            "speed-up claimed": [low, high],
            "measured": [round(row.speedup, 2) for row in compiled],
            "seconds to compile claimed": [fast, slow],
            "measured s": [round(row.first_call_s, 1) for row in compiled],
        }
    h.table("the chapter's claims; measured: whole model (where compiled), one block", claims)
