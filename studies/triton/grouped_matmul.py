"""grouped_matmul, measured: beside Inductor's own kernel, with fewer bytes in flight, and from few tokens to many.

With few tokens, reading the weights takes all the time and padding costs nothing; with many, the MMAs do, and what a
group's last tile multiplies in vain counts.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from harness import Harness

import torch

from examples.common.compiled import SEARCH, over_library
from examples.common.device import architecture
from examples.triton import grouped_matmul as lesson
from examples.triton.grouped_matmul import compare, grouped_matmul
from examples.triton.grouped_matmul_operands import experts


def study(h: Harness) -> None:
    T, E, N, K = h.pick(interpreted=(170, 5, 72, 160), quick=(2048, 16, 1024, 2048), full=(8192, 64, 2048, 7168))
    operands = experts(h, T, E, N, K)
    inductor(h, operands)
    stages(h, operands)
    tokens(h, E, N, K)


def inductor(h: Harness, operands: tuple) -> None:
    """torch.compile's max-autotune, which searches tiles of a Triton kernel of its own."""

    def grouped(a, b, offs) -> torch.Tensor:
        return torch._grouped_mm(a, b, offs=offs)

    for how in h.pick(interpreted=("even",), quick=("skewed",), full=("even", "skewed")):
        more = {} if h.interpreted else {"torch.compile max-autotune": h.compiled(grouped, options=SEARCH)}
        if table := compare(h, operands, how, more, title="beside max-autotune"):
            h.say(f"{how}: {over_library([table]):.2f}x the fastest of torch's calls, max-autotune among them")


def stages(h: Harness, operands: tuple) -> None:
    """Fewer steps along K in shared memory: fewer bytes in flight, while a tile of weights comes from memory."""
    more = {f"{n} stages": with_stages(n) for n in range(2, lesson.STAGES)}
    for how in h.pick(interpreted=("hot",), quick=("skewed",), full=("even", "skewed", "hot")):
        if table := compare(h, operands, how, more, title="stages"):
            ratio = table.over("triton")
            best = table.best.variant.replace("triton", f"{lesson.STAGES} stages")
            h.say(f"{how}: {best} are fastest, {ratio:.2f}x as fast as the lesson's {lesson.STAGES}")


def with_stages(n: int) -> Callable:
    def call(*operands) -> torch.Tensor:
        with patch.object(lesson, "STAGES", n):
            return grouped_matmul(*operands)

    return call


def tokens(h: Harness, E: int, N: int, K: int) -> None:
    """From few tokens, where reading the weights takes all the time, to many, where the MMAs do; FP8 too."""
    for T in h.pick(interpreted=(33,), quick=(256,), full=(512, 2048, 32768)):
        for fp8 in (False, True) if architecture(h.device) >= 89 else (False,):
            compare(h, experts(h, T, E, N, K, fp8), "skewed", title="tokens")
