"""What a lesson without kernels requires: that a switch did, or a log said, what the lesson claims."""

from __future__ import annotations


class NotShown(AssertionError):
    """A run does not show what it is there to show."""


def require(shown: bool, otherwise: str) -> None:
    """Raise NotShown(otherwise) unless `shown`."""
    if not shown:
        raise NotShown(otherwise)
