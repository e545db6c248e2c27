"""recompilation, measured: where recompiling ends, what makes that loud, and random numbers that Python draws."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from harness import Harness

import numpy as np
import torch

from compile_inspect import count_entries, find_breaks
from examples.common.shown import require
from examples.compiler.recompilation import CALLS, scales

OWN = random.Random(0)
DRAWS = {
    "random.random()": lambda x: x * random.random(),
    "random.uniform(0, 1)": lambda x: x * random.uniform(0, 1),
    "np.random.rand()": lambda x: x * np.random.rand(),
    "a random.Random of one's own": lambda x: x * OWN.random(),
    "torch.rand(())": lambda x: x * torch.rand((), device=x.device),
}


def random_values(h: Harness, x: torch.Tensor) -> None:
    """A number drawn in the compiled function: cache entries, breaks, and how many different numbers the calls get."""
    rows = {}
    for name, fn in DRAWS.items():
        found = count_entries(fn, [lambda f: f(x)] * CALLS)
        rows[name] = {
            "entries": found.compiled, "eager": found.eager_calls, "breaks": len(find_breaks(fn, x).breaks),
            "numbers": len({output.double().sum().item() for output in found.outputs}),
        }  # fmt: skip
    h.table(f"numbers drawn by {CALLS} calls", rows)
    stale = [name for name, row in rows.items() if row["numbers"] < CALLS]
    h.say(f"the first number again in every call: {', '.join(stale) or 'none'}")
    require(rows["torch.rand(())"] == {"entries": 1, "eager": 0, "breaks": 0, "numbers": CALLS}, f"torch.rand: {rows}")


def study(h: Harness) -> None:
    if h.profile:
        return
    x, made = h.randn(16, 64), []
    random_values(h, x)
    limit = torch._dynamo.config.recompile_limit
    values = [k / 10 for k in range(2, limit + 6)]

    def call(f: Callable, k: float) -> torch.Tensor:
        made.append(k)
        return f(x, k)

    calls = [lambda f, k=k: call(f, k) for k in values]
    found = count_entries(scales, [*calls, calls[0]], dynamic=False)
    h.fact(
        "recompile_limit, floats under dynamic=False",
        {
            "limit": limit, "values": len(values), "entries": found.compiled, "eager calls": found.eager_calls,
            "an earlier value, once past the limit": "eager" if found.eager[-1] else "compiled",
            "logged": "; ".join(found.warnings) or "nothing",
        },
    )  # fmt: skip

    loud = {}
    for name, config, options in (
        ("fail_on_recompile_limit_hit, limit 2", {"fail_on_recompile_limit_hit": True, "recompile_limit": 2}, {}),
        ("fullgraph=True, limit 2", {"recompile_limit": 2}, {"fullgraph": True}),
        ("error_on_recompile", {"error_on_recompile": True}, {}),
    ):
        made.clear()
        try:
            with torch._dynamo.config.patch(config):
                count_entries(scales, calls, dynamic=False, **options)
            loud[name] = "quiet"
        except (torch._dynamo.exc.RecompileError, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            first = re.sub(r"\S*/", "", str(error).splitlines()[0])  # files by name, without their folders
            loud[name] = f"call {len(made)}: {type(error).__name__}: {first}"
    h.fact("made loud by", loud)
