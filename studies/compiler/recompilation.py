"""recompilation, measured: where recompiling ends, and what makes that loud."""

from __future__ import annotations

import re
from collections.abc import Callable

from harness import Harness

import torch

from compile_inspect import count_entries
from examples.compiler.recompilation import scales


def study(h: Harness) -> None:
    if h.profile:
        return
    x, made = h.randn(16, 64), []
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
            "an earlier value after it": "eager" if found.eager[-1] else "compiled",
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
            first = re.sub(r"\S*/", "", str(error).splitlines()[0])  # a file by its name
            loud[name] = f"call {len(made)}: {type(error).__name__}: {first}"
    h.fact("made loud by", loud)
