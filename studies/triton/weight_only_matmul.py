"""weight_only_matmul, measured: what quantization loses, other sizes, programs to an SM, reading alone.

A GEMM is checked against the weights as they are packed; what packing lost has a table of its own, for normal weights
and for heavy-tailed ones. Real weights differ, and so does what the loss does to a model. The last tables are the floor
for one row: a kernel that reads the same words and only adds them up. Where the words are only a few tens of MB, it
does not reach the speed of a long copy either.
"""

from __future__ import annotations

import math
from functools import partial
from unittest.mock import patch

from harness import Harness, Work

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from examples.common.device import device_limits
from examples.triton import weight_only_matmul as lesson
from examples.triton.weight_only_matmul import compare, reference, weight_only_matmul_stream_k
from examples.triton.weight_only_matmul_packing import FORMATS, dequantized, quantize_weight


def study(h: Harness) -> None:
    what_is_lost(h)
    cases = [(M, 8192, 8192) for M in (4, 8, 32)] + [(M, 28672, 8192) for M in (1, 4, 8, 16, 32, 64)]
    for case in h.pick(interpreted=[], quick=[(8, 4096, 4096)], full=cases):
        compare(h, *case, title="other sizes")
    programs(h)
    for N, K in h.pick(interpreted=[(72, 264)], quick=[(4096, 4096)], full=[(8192, 8192), (28672, 8192)]):
        for format in FORMATS:
            reading(h, N, K, format)


def what_is_lost(h: Harness) -> None:
    """The signal-to-noise ratio of weights that were packed, in dB: normal ones, and some with heavy tails."""
    w = h.randn(256, 1024)
    kinds = {
        "normal": w,
        "cubed": w**3,
        "one column of 64 ten times as large": w * (1 + 9 * (torch.arange(1024, device=w.device) % 64 == 0)),
    }
    rows = {}
    for name, each in kinds.items():
        each = each.to(h.half)
        errors = {f: dequantized(quantize_weight(each, f)) - each.double() for f in FORMATS}
        rows[name] = {f: round(20 * math.log10(each.double().norm() / e.norm()), 1) for f, e in errors.items()}
    h.table("SNR of packed weights, dB", rows)


def programs(h: Harness) -> None:
    """One program to an SM waits for each step in turn; several overlap, but split tiles, which are then merged."""
    M, N, K = h.pick(interpreted=(1, 136, 520), quick=(1, 4096, 4096), full=(1, 8192, 8192))
    x, w = h.randn(M, K, dtype=h.half), h.randn(N, K, dtype=h.half)
    for format in FORMATS:
        packed = quantize_weight(w, format)
        variants = {f"{n} to an SM": partial(at_most, n, packed=packed) for n in (lesson.PER_SM, 1, 2, 3)}
        work = Work(
            bytes=sum(each.nbytes for each in (x, packed.words, packed.scales)), flops=2 * M * N * K, dtype=h.half
        )
        table = h.compare(
            variants, partial(reference, packed=packed), x, baseline="1 to an SM", work=work,
            title=f"programs, {format}", case=f"{M}x{N}x{K}", terms=K,
        )  # fmt: skip
        if table:
            h.say(f"{format}: {table.best.variant} is {table.over('1 to an SM'):.2f}x as fast as one")


def at_most(per_sm: int, x: torch.Tensor, packed) -> torch.Tensor:
    with patch.object(lesson, "PER_SM", per_sm):
        return weight_only_matmul_stream_k(x, packed)


@triton.jit
def read_kernel(words_ptr, out_ptr, words, TILE: tl.constexpr):
    """Each program adds up the int32 of its tiles, with wrap-around, into its element of out_ptr."""
    acc = tl.zeros((TILE,), tl.int32)
    for start in tl.range(tl.program_id(0) * TILE, words, tl.num_programs(0) * TILE, num_stages=4):
        at = start + tl.arange(0, TILE)
        acc += tl.load(words_ptr + at, mask=at < words, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, 0))


def reading(h: Harness, N: int, K: int, format: str) -> None:
    """The words of packed weights read by 1 to 8 programs to an SM, with as few other instructions as can be."""
    words = quantize_weight(h.randn(N, K, dtype=h.half), format).words.view(torch.int32)
    tile, sms = 4096, device_limits(h.device).sms

    def read(words, per_sm: int):
        sums = torch.empty(per_sm * sms, dtype=torch.int32, device=words.device)
        read_kernel[(per_sm * sms,)](words, sums, words.numel(), tile)
        return sums

    def sums(words, per_sm: int):
        tiles = pad(words.view(-1).long(), (0, -words.numel() % (per_sm * sms * tile)))
        return tiles.view(-1, per_sm * sms, tile).sum((0, 2)).to(torch.int32).double()

    variants = {f"{n} to an SM": n for n in (1, 2, 4, 8)}
    references = {name: partial(sums, per_sm=n) for name, n in variants.items()}
    h.compare(
        {name: partial(read, per_sm=n) for name, n in variants.items()}, references["1 to an SM"], words,
        baseline="1 to an SM", references=references, title="reading alone", case=f"{format} {N}x{K}",
        dtype=torch.int32, work=Work(bytes=words.nbytes, flops=0, dtype=torch.int32),
    )  # fmt: skip
