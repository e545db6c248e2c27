"""torch.compile as a baseline: the modes that a user would try, and a kernel beside the best library of a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

# mode="max-autotune-no-cudagraphs", without its tables on the console: it searches more tilings, of a GEMM also Triton
# templates with the epilogue in their store, and takes seconds more to compile.
SEARCH = {"max_autotune": True, "coordinate_descent_tuning": True, "autotune_num_choices_displayed": 0}
MODES = {"torch.compile": {}, "torch.compile max-autotune": {"options": SEARCH}}


def compiled_modes(h, fn: Callable) -> dict[str, Callable]:
    """Rows of a table: fn as each of MODES compiles it."""
    return {name: h.compiled(fn, **mode) for name, mode in MODES.items()}


def over_library(tables: Iterable, variant: str = "triton") -> float:
    """How many times as fast `variant` is as each table's fastest row of a library, the geometric mean over tables."""
    return statistics.geometric_mean(
        min(table.over(row.variant, variant) for row in table.rows if not row.ours) for table in tables
    )
