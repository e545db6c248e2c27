"""What the processes of one run, the ranks of torch.distributed, do alike: without it one waits for ever for another.

Where there is one process, all of this does nothing. Collectives are called by every rank, equally often.
"""

from __future__ import annotations

import functools

import torch


def count() -> int:
    """How many ranks this run has; 1 without a process group."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def gathered(value) -> list:
    """`value` of every rank, by rank."""
    values = [value] * count()
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def align() -> None:
    """On a GPU: what is launched after this begins on all ranks at about the same time."""
    if count() > 1:
        torch.distributed.all_reduce(_one_element())


@functools.cache
def _one_element() -> torch.Tensor:
    return torch.zeros(1, device="cuda")


def slowest(samples: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """Times of calls, by name and round: of every one the longest of all ranks, as the others wait for it."""
    ranks = gathered(samples)
    return {
        name: [list(map(max, zip(*times, strict=True))) for times in zip(*(each[name] for each in ranks), strict=True)]
        for name in samples
    }
