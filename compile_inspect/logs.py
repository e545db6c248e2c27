"""torch's own log, collected: TORCH_LOGS for a block of code."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name.rsplit(".__", 1)[-1], record.getMessage()))


@contextmanager
def logs(**artifacts) -> Iterator[list[tuple[str, str]]]:
    """Switch torch's log artifacts on and collect them as (artifact, text): logs(recompiles=True) as lines.

    Only these, whatever TORCH_LOGS says, and torch's warnings with them; afterwards all is logged as before. Raises
    TypeError or ValueError, by torch, for a name that is no artifact.
    """
    from torch._logging import _internal, set_logs

    state = _internal.log_state
    names, levels = set(state.artifact_names), dict(state.log_qname_to_level)
    # torch's loggers do not propagate to the root logger, so their handlers are exchanged.
    collector, replaced = _Collector(), []
    try:
        with _without_torch_logs():
            set_logs(**artifacts)
        registry = _internal.log_registry
        for name in registry.get_log_qnames() | registry.get_artifact_log_qnames() | {"torch"}:
            logger = logging.getLogger(name)
            if logger.handlers:
                replaced.append((logger, list(logger.handlers)))
                logger.handlers[:] = [collector]
        yield collector.records
    finally:
        for logger, handlers in replaced:
            logger.handlers[:] = handlers
        state.clear()
        state.artifact_names.update(names)
        state.log_qname_to_level.update(levels)
        with _without_torch_logs():
            _internal._init_logs()


@contextmanager
def _without_torch_logs() -> Iterator[None]:
    """set_logs does nothing while TORCH_LOGS is set, and _init_logs reads it instead of the state."""
    with patch.dict(os.environ):
        os.environ.pop("TORCH_LOGS", None)
        yield
