"""FP8 all-gather: each rank quantizes its part of a weight, and one byte an element travels instead of two.

FSDP gathers every weight before it is used, in bfloat16. In e4m3 half the bytes travel, plus a float32 scale per part
or per row: the largest magnitude over 448, so that nothing saturates. A row's scale is known once the row has been
read, and the row is cast from cache; a rank's scale takes a pass over its whole part, which the cast reads again.

The passes before and after can cost what the link saves: the largest magnitude, the cast, and for a bfloat16 GEMM the
cast back. In eager they cost more; torch.compile fuses each side's. An FP8 GEMM takes bytes and scales as they come.
e4m3 has 4 bits over a range of 2^15, fewer below: a small row loses bits under a larger row's scale.

Question   What does gathering weights in FP8 save in bytes and in time, what does it cost in error, by rank or by row?
Needs      torch, 2 ranks
Wins when  the gather is not hidden, above all on a slow link or for a GEMM in FP8; read back, only compiled and queued.
Source     goes beyond the chapter
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from harness import Harness, Work, run

import torch
import torch.distributed as dist

from examples.common.collectives import traced
from examples.common.data_parallel import Compiler
from examples.common.fp8 import E4M3, FLOOR, fp8_max
from examples.common.transformer import TINY, WIDE

EACH = ("rank", "row")  # the parts that share a scale
BF16, AFTER, BEFORE = "bfloat16", "quantized after", "quantized before"
# For what is read back: one rounding to e4m3, and the values below its smallest normal.
BUDGET = {"terms": 0, "roundings": 1, "acc": 2.0**-4 * 1.001, "operand_eps": 4e-6}


def quantize(w: torch.Tensor, each: str) -> tuple[torch.Tensor, torch.Tensor]:
    """w [rows, K] -> its e4m3 numbers, and float32 scales [rows, 1], or [1, 1] for one scale per rank."""
    amax = w.abs().amax(dim=1 if each == "row" else (0, 1), keepdim=True)
    scales = amax.float().clamp(min=FLOOR) / fp8_max(E4M3)
    return (w / scales).to(E4M3), scales


def gather(x: torch.Tensor) -> torch.Tensor:
    """The rows of every rank. Bytes travel: NCCL knows e4m3 on some GPUs, gloo nowhere."""
    y = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:], dtype=x.dtype)
    flat = (y.view(torch.uint8), x.view(torch.uint8)) if x.dtype is E4M3 else (y, x)
    dist.all_gather_into_tensor(*flat)
    return y


def all_gather_bf16(w: torch.Tensor) -> torch.Tensor:
    return gather(w.bfloat16())


def all_gather_fp8(w: torch.Tensor, each: str = "row") -> torch.Tensor:
    """w [rows, K] float32, contiguous, of each rank, of one shape -> the rows of all ranks in bfloat16, sent in e4m3.

    Each rank, or each row, has its own scale. Raises ValueError for another `each`, or unless w is a matrix.
    """
    if each not in EACH or w.ndim != 2:
        raise ValueError(f"all_gather_fp8: {tuple(w.shape)}, each={each!r}; pass a matrix, and 'rank' or 'row'")
    q, scales = (gather(part) for part in quantize(w, each))
    parts = q.view(len(scales), -1).float() * scales  # each row of these shares a scale
    return parts.bfloat16().view(q.shape)


def quantized_after(w: torch.Tensor) -> torch.Tensor:
    """For a GEMM in FP8 with a scale per row: bfloat16 travels, and every rank quantizes all rows."""
    return quantize(gather(w.bfloat16()), "row")[0]


def quantized_before(w: torch.Tensor) -> torch.Tensor:
    q, _ = (gather(part) for part in quantize(w, "row"))
    return q


READ_BACK = {BF16: all_gather_bf16} | {f"e4m3 by {each}": partial(all_gather_fp8, each=each) for each in EACH}
FOR_FP8 = {AFTER: quantized_after, BEFORE: quantized_before}


def by_range(h: Harness, w: torch.Tensor) -> dict[str, dict[str, str]]:
    """The rows' mean relative rms error, where a rank's largest and smallest row differ by each factor."""
    found: dict[str, dict[str, str]] = {name: {} for name in READ_BACK}
    for log2 in (0, 8, 16, 24):
        sizes = torch.linspace(0, -log2, len(w) // h.ranks, device=w.device).exp2().repeat(h.ranks)[:, None]
        want = w.double() * sizes
        for name, fn in READ_BACK.items():
            off = fn((w * sizes).chunk(h.ranks)[h.rank]).double() - want
            found[name][f"2^{log2}"] = f"{(off.norm(dim=1) / want.norm(dim=1)).mean().item():.2%}"
    return found


def sent_by(name: str, fn: Callable, own: torch.Tensor) -> dict[str, int]:
    """What a rank gives away in a call. Raises AssertionError if the bytes are not those of theory."""
    in_e4m3 = own.numel() + 4 * (1 if "rank" in name else len(own))
    theory = 2 * own.numel() if name.endswith((BF16, AFTER)) else in_e4m3
    calls, total = map(
        sum, zip(*(each for kind, each in traced(fn, own).sent.items() if "gather" in kind), strict=True)
    )
    if total != theory:
        raise AssertionError(f"{name}: {total} bytes were gathered, {theory} by theory")
    return {"calls": calls, "bytes": total, "by theory": theory}


def compare(h: Harness, ways: dict[str, Callable], w: torch.Tensor, title: str, reference: Callable, **budget) -> tuple:
    """The table of these ways, eager and compiled, and what each sends."""
    backend = Compiler(w.is_cuda)
    rows = {f"torch, {name}": fn for name, fn in ways.items()}
    rows |= {f"torch.compile, {name}": torch.compile(fn, dynamic=False, backend=backend) for name, fn in ways.items()}
    table = h.compare(
        {name: lambda w, fn=fn: fn(w.chunk(h.ranks)[h.rank]) for name, fn in rows.items()}, reference, w,
        baseline=next(iter(rows)), work=Work(), title=title, case="x".join(map(str, w.shape)),
        budgets={name: BUDGET for name in rows if "e4m3" in name}, **budget,
    )  # fmt: skip
    return table, {name: sent_by(name, fn, w.chunk(h.ranks)[h.rank]) for name, fn in rows.items() if not h.profile}


def demo(h: Harness) -> None:
    for rows, each in ((1, "rank"), (3, "rank"), (3, "row")):  # parts of an odd number of bytes
        odd = (h.randn if rows > 1 and each == "rank" else h.rows)(rows * h.ranks, 45)  # a small row would lose bits
        fn = partial(lambda w, each: all_gather_fp8(w.chunk(h.ranks)[h.rank], each), each=each)
        h.check(fn, torch.Tensor.double, odd, what=f"by {each}, {rows}x45 a rank", dtype=torch.bfloat16, **BUDGET)
    config = h.pick(TINY, WIDE)
    w = h.randn(2 * config.hidden // h.ranks * h.ranks, config.width, scale=config.width**-0.5)  # gate and up, of all
    back, sent = compare(h, READ_BACK, w, "gathered, bfloat16 again", torch.Tensor.double, dtype=torch.bfloat16)
    q, more = compare(h, FOR_FP8, w, "gathered, for FP8", lambda w: w.double() / quantize(w, "row")[1], dtype=E4M3)
    if h.profile:
        return
    off = by_range(h, w)
    h.table("what a rank gives away", sent | more)
    h.table("error where a rank's rows differ by", off)

    def answer() -> str:
        speeds = " and ".join(
            f"by {each} {back.over(f'torch.compile, {BF16}', f'torch.compile, e4m3 by {each}'):.2f}x" for each in EACH
        )
        kept = q.over(f"torch.compile, {AFTER}", f"torch.compile, {BEFORE}")
        return (
            f"Half the bytes; compiled, {speeds} bfloat16's speed if read back, {kept:.2f}x if used in FP8. Error "
            f"{off['e4m3 by row']['2^0']}, bfloat16 {off[BF16]['2^0']}; if rows differ by 2^24, by rank "
            f"{off['e4m3 by rank']['2^24']}, by row {off['e4m3 by row']['2^24']}."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
