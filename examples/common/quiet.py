"""What C++ writes to standard error, kept from the console: a compiler's own account of what it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stderr_closed() -> Iterator[None]:
    """Redirect file descriptor 2, of the whole process, to os.devnull: what Python writes there is lost, too.

    For a call whose failure is expected, and whose exception says all that matters.
    """
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
