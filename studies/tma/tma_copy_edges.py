"""Study of tma_copy: where each variant's loads and stores end, at the edges of a matrix within a larger one.

A copy into the middle of a poisoned matrix, an output that tma_copy itself would refuse: what it writes inside, beside
it up to the next multiple of 16 bytes of each row, and anywhere else. A TMA store ends at that multiple; pointers, the
interpreter, and Triton's code for GPUs without TMA, stop at the element.
"""

from __future__ import annotations

from typing import NamedTuple

from harness import Harness
from harness.check import CheckError

import torch

from examples.common.tma import rows_for_tma
from examples.tma.tma_copy import launch_copy
from examples.tma.tma_copy_triton import PLANS, Plan, runnable


def padded(h: Harness, M: int, N: int, dtype: torch.dtype) -> torch.Tensor:
    """An M x N matrix whose rows are a multiple of 16 bytes apart, and its padding poison."""
    x = rows_for_tma(torch.empty(M, N, dtype=dtype, device=h.device))
    if x.numel():
        x.as_strided((M, x.stride(0)), x.stride()).fill_(float("nan"))
    return x.copy_(h.randn(M, N, dtype=dtype))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def up_to_16_bytes(x: torch.Tensor) -> int:
    """Elements between the rows of x and the next multiples of 16 bytes: what a TMA store may write outside."""
    return x.shape[0] * (-x.shape[1] % (16 // x.element_size()))


class Written(NamedTuple):
    """Elements that a copy wrote: of x, beside it up to the next multiple of 16 bytes of each row, anywhere else."""

    inside: int
    up_to_16_bytes: int
    elsewhere: int


def written(x: torch.Tensor, variant: str, margin: int = 16, plan: Plan | None = None) -> Written:
    """What a copy into the middle of a larger, poisoned matrix writes, an output that tma_copy itself would refuse.

    x is read from the middle of another, of which nothing else may arrive. CheckError for a wrong element inside, for
    one written elsewhere, and for any outside that pointers wrote.
    """
    M, N = x.shape
    end = N + up_to_16_bytes(x[:1])
    whole = M + 2 * margin, end + 2 * margin
    around, canvas = torch.full(whole, 7.0, dtype=x.dtype, device=x.device), x.new_full(whole, float("nan"))
    middle = slice(margin, margin + M), slice(margin, margin + N)
    around[middle] = x
    before = bits(canvas).clone()
    if x.numel():
        launch_copy(around[middle], canvas[middle], variant, plan or PLANS[variant])
    after, wanted = bits(canvas), bits(around)
    if not torch.equal(after[middle], wanted[middle]):
        raise CheckError(
            f"tma_copy {variant}: {int((after[middle] != wanted[middle]).sum())} elements are not those of x"
        )
    changed = after != before
    changed[middle] = False
    beside = int(changed[middle[0], margin + N : margin + end].sum())
    found = Written(x.numel(), beside, int(changed.sum()) - beside)
    if found.elsewhere or (variant == "pointers" and beside):
        raise CheckError(f"tma_copy {variant} wrote outside its output: {found}")
    return found


def show_edges(h: Harness, x: torch.Tensor) -> None:
    """Where each variant's stores end, within a larger matrix."""
    found = {variant: written(x, variant) for variant in runnable()}
    size = "x".join(map(str, x.shape))
    h.table(f"elements written by a copy of {size}", {variant: counts._asdict() for variant, counts in found.items()})
    wide = [variant for variant, counts in found.items() if counts.up_to_16_bytes]
    h.say(f"{up_to_16_bytes(x)} elements lie between a row's end and 16 bytes; written by: {', '.join(wide) or 'none'}")


def study(h: Harness) -> None:
    if not h.profile:
        show_edges(h, h.randn(101, 203, dtype=torch.float16))
