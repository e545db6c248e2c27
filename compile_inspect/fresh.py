"""torch.compile from nothing: no cache entries, empty cache folders, and its first-use costs already paid."""

from __future__ import annotations

import functools
import itertools
import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

_COPIES = itertools.count()


def own_code(fn: Callable) -> Callable:
    """A copy of fn that Dynamo has never met: cache entries and marks belong to a code object or its name."""
    code = fn.__code__.replace(co_name=f"{fn.__name__.strip('<>')}_{next(_COPIES)}")
    return types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


@functools.cache
def warm_up(device: torch.device | str) -> None:
    """Pay, once per process, what only its first compilation costs: imports, workers, precompiled headers."""
    torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    torch.compiler.reset()


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Within it torch.compile starts from nothing: no cache entries, no recompile counts, and an empty cache folder.

    What was compiled within is forgotten at the end. A C++ compiler's headers, precompiled once per machine, stay.
    """
    torch.compiler.reset()
    try:
        with fresh_cache():
            yield
    finally:
        torch.compiler.reset()


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Within it Inductor and Triton write to an empty folder; what is compiled within keeps working afterwards.

    The folder goes at the end, also when what is compiled fails (torch's own fresh_cache leaves it behind then).
    """
    from torch._inductor.utils import clear_caches

    with TemporaryDirectory(prefix="fresh-cache-", ignore_cleanup_errors=True) as folder:
        folders = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        try:
            with patch.dict(os.environ, folders):
                clear_caches()
                yield
        finally:
            clear_caches()
