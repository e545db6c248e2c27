"""torch.compile as a baseline: the modes that a user would try, and how fast a kernel is beside a table's best library."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

# max-autotune searches more tilings (of a GEMM also Triton's templates, with the epilogue in its store), and takes
# seconds more to compile.
MODES = {"torch.compile": None, "torch.compile max-autotune": "max-autotune-no-cudagraphs"}


def compiled_modes(h, fn: Callable) -> dict[str, Callable]:
    """Rows of a table: fn as each of MODES compiles it."""
    return {name: h.compiled(fn, mode=mode) for name, mode in MODES.items()}


def over_library(tables: Iterable, variant: str = "triton") -> float:
    """How many times as fast `variant` is as each table's fastest row of a library, the geometric mean over tables."""
    return statistics.geometric_mean(
        min(table.over(row.variant, variant) for row in table.rows if not row.ours) for table in tables
    )
