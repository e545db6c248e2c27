"""logging_and_hints: what the log shows of a graph break when the running program asks for it, and how it must ask."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

import torch

from compile_inspect import logs
from examples.common.shown import require


def breaks_logged(fn: Callable, *inputs) -> dict[str, int]:
    """How many records of fn's graph break there are, by how the running program asks for them."""
    found = {}
    for way, variables, switches in (
        ('os.environ["TORCH_LOGS"] = "graph_breaks"', {"TORCH_LOGS": "graph_breaks"}, {}),
        ("torch._logging.set_logs(graph_breaks=True)", {}, {"graph_breaks": True}),
    ):
        torch.compiler.reset()
        with patch.dict(os.environ, variables), logs(**switches) as records:
            torch.compile(fn, backend="eager")(*inputs)
        found[way] = sum(artifact == "graph_breaks" for artifact, _ in records)
    torch.compiler.reset()
    late, asked = found.values()
    require((late, asked > 0) == (0, True), f"breaks logged: {found}")
    return found
