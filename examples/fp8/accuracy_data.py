"""Data that break a scale: channels, tokens and groups far from the rest, heavy tails, and what has grown since."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

EXTREME = 2.0**16  # how far outliers stick out where they are to break something


LEGEND = (
    "outlier channels: one in 512 is 2**16 times the rest; outlier tokens: one in 64; small groups: every second group "
    "of 128 channels is 2**-18 of the rest; 4x growth: the batch before was a quarter as large; delayed: the scale of "
    "the batch before; 2**n: scales are powers of two; 1x128 by 128x128: the blocks of x and of w that share a scale."
)


def datasets(randn: Callable, m: int, k: int, n: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Names, activations, weights, and the activations of the batch before, of which a delayed scale is made."""

    def plain() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        half = torch.bfloat16
        return randn(m, k, dtype=half), randn(n, k, dtype=half, scale=k**-0.5), randn(m, k, dtype=half)

    yield "plain", *plain()
    yield "outlier channels", *with_channels(*plain(), spaced(k, 512), EXTREME)
    x, w, before = plain()
    x[spaced(m, 64)] *= EXTREME
    before[spaced(m, 64)] *= EXTREME
    yield "outlier tokens", x, w, before
    x, w, before = plain()
    for each in (x, before):  # Student's t of two degrees of freedom: its variance is infinite
        each /= ((randn(m, k).square() + randn(m, k).square()) / 2).sqrt().to(each.dtype)
    yield "heavy tails", x, w, before
    yield "small groups", *with_channels(*plain(), torch.arange(k) // 128 % 2 == 1, 2.0**-18)
    x, w, before = plain()
    yield "4x growth", x, w, before / 4


def spaced(size: int, every: int) -> slice:
    return slice(every // 3, size, every)


def with_channels(x: torch.Tensor, w: torch.Tensor, before: torch.Tensor, which, factor: float):
    """The same product with `which` channels of the activations `factor` times as large, and their weights smaller."""
    for each in (x, before):
        each[:, which] *= factor
    w[:, which] /= factor
    return x, w, before
