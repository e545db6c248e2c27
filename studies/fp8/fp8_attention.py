"""Study of fp8_attention: where its error comes from, what quantizing for each call costs, and the code of both masks.

1. The code for each head dim and mask.
2. The error on normal data, on outlier channels, on heads of unequal size and on values around 1, with a scale a head
   and with one scale; and the part that exact arithmetic on the FP8 inputs would leave. The arithmetic adds weights of
   three bits and, on Hopper, an accumulator that keeps about 14 bits and rounds towards zero: beside a large sum, small
   products lose part of what they add. Values with a mean of 0 keep the sum small; those around 1 do not.
3. prepare() in eager torch next to the attention, and next to a copy of its bytes.
"""

from __future__ import annotations

from harness import Harness

import torch

from examples.common.attention import attention_reference
from examples.fp8.fp8_attention import E4M3, TILES, fp8_attention, off_by, prepare, reference


def show_code(h: Harness) -> None:
    find = {90: ("mma f8", "wgmma"), 100: ("mma f8", "tcgen05.mma"), 120: ("mma f8", "mma.sync")}
    for D in TILES:
        x, s = h.meta(4, 32, 4096, D, dtype=E4M3), h.meta(4, 32, dtype=torch.float32)
        for causal in (False, True):
            h.codegen(fp8_attention, x, x, x.transpose(2, 3).contiguous(), s, s, s, causal, find=find)


def show_accuracy(h: Harness) -> None:
    """What FP8 costs, apart: quantizing the inputs, and the arithmetic after it."""
    B, H, S, D = h.pick(interpreted=(1, 3, 70, 64), quick=(1, 4, 2048, 128), full=(1, 4, 4096, 128))
    rows, shares = {}, []
    for kind in ("normal data", "outlier channels", "heads of unequal size", "values around 1"):
        q, k, v = (h.randn(B, H, S, D, dtype=h.half) for _ in range(3))
        if kind == "outlier channels":  # one of 32, ten times as large
            k[..., ::32] *= 10
            v[..., ::32] *= 10
        elif kind == "heads of unequal size":  # each 1/30 of the one before
            v *= (30.0 ** -torch.arange(H, device=v.device)).to(v.dtype)[:, None, None]
        elif kind == "values around 1":
            v += 1
        want, row = attention_reference(q, k, v), rows.setdefault(kind, {})
        for label, per_head in (("one scale", False), ("a scale a head", True)):
            data = prepare(q, k, v, per_head)
            exact, ours = off_by(reference(*data), want), off_by(fp8_attention(*data, out_dtype=h.half), want)
            row[label] = [round(exact, 4), round(ours, 4)]
        shares.append(f"{exact / ours:.0%} on {kind}")
    h.table("error over the answer; of FP8 inputs in exact arithmetic / in FP8", rows)
    h.say(f"exact arithmetic on the FP8 inputs would leave of the error, with a scale a head: {', '.join(shares)}")


def show_preparation(h: Harness, case: str, attention_ms: float) -> None:
    from harness.hardware import ceilings, gpu_ms

    inputs = [h.randn(*(int(size) for size in case.split("x")), dtype=h.half) for _ in range(3)]
    ms = gpu_ms(lambda: prepare(*inputs))
    moved = sum(x.numel() * (2 * x.element_size() + 1) for x in inputs)  # read for amax, read again, write
    least = moved / ceilings().copy_tbps() / 1e9
    h.say(
        f"{case}: quantizing Q, K and V costs {ms:.2f} ms a call in eager torch, {ms / attention_ms:.1f} times the "
        f"attention; at the speed of a copy its bytes would take {least:.2f} ms, {least / attention_ms:.0%} of it"
    )


def study(h: Harness) -> None:
    show_code(h)
    if not h.profile:
        show_accuracy(h)
    for table in h.lesson:
        if table and "causal" not in table.case:
            show_preparation(h, table.case, table["triton"].ms)
