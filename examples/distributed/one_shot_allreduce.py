"""One-shot all-reduce: each rank reads what every peer has, over NVLink, and adds it up by itself.

A ring moves the fewest bytes, in 2 (ranks - 1) steps that wait for each other. A small message is all latency: here
every rank copies it into symmetric memory, signals its peers, waits for their signals, and reads all of them, in one
kernel. There is no barrier over the grid: program p reads only what the programs p of the peers wrote, so it signals
these and waits for these. Two halves of the buffer take turns, so that nothing is overwritten while a peer reads it.
`mailbox` needs no barrier at all: each 4 bytes travel with the number of the call in one 8-byte word.

Sums are float32 in the order of the ranks: every rank gets the same bits. Calls are counted on the GPU, so that a CUDA
graph can hold one; docs/memory_ordering.md ("Ranks that wait for each other") says why this is safe.

Question   How much faster than NCCL is a one-shot all-reduce of a small message, and up to which size?
Needs      triton, 2 ranks, peers
Wins when  messages are small: it reads (ranks - 1) times the message, a ring twice the message in all
Variants   one_shot_allreduce_mailbox.py (data and flag in one word; the workspace, and the choice by size)
Source     goes beyond the chapter
"""

from __future__ import annotations

from functools import partial

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.symmetric import pointer, signal_peers, wait_for
from examples.distributed.one_shot_allreduce_mailbox import (
    VARIANTS,
    Workspace,
    all_reduce_in_place,
    check_operands,
    launch_mailbox,
    mailbox_is_faster,
    workspace,
)

WARPS = 16
BLOCK, LARGEST_BLOCK = WARPS * 32 * 8, WARPS * 32 * 32  # elements a program moves at a time: 16 bytes a thread, or four


@triton.jit
def one_shot_allreduce_kernel(
    x_ptr, y_ptr, data, signals, calls_ptr, n,  # data and signals: the addresses of every rank's
    RANK: tl.constexpr, WORLD: tl.constexpr, WORLD_POW2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = program * BLOCK + tl.arange(0, BLOCK)
    # Before the number of the call: the store needs both, and so they come from memory at once.
    x = tl.load(x_ptr + first, mask=first < n)
    call = tl.load(calls_ptr + program) + 1
    half = (call % 2) * n
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    own = pointer(data[RANK], dtype) + half
    for start in range(program * BLOCK, n, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(own + at, x, mask=at < n)
        at += programs * BLOCK
        x = tl.load(x_ptr + at, mask=at < n)

    signal_peers(signals, program * WORLD + RANK, call, RANK, WORLD, WORLD_POW2)
    mine = pointer(signals[RANK], tl.int32) + program * WORLD
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            wait_for(mine + rank, call)

    for start in range(program * BLOCK, n, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(WORLD):
            total += tl.load(pointer(data[rank], dtype) + half + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, total.to(dtype), mask=at < n)
    tl.store(calls_ptr + program, call)


def launch_pull(x: torch.Tensor, y: torch.Tensor, work: Workspace) -> None:
    world, share = work.data.world, triton.cdiv(x.numel(), work.calls.shape[1])
    block = min(LARGEST_BLOCK, max(BLOCK, triton.next_power_of_2(share)))
    one_shot_allreduce_kernel[(work.programs(x.numel(), block),)](
        x, y, work.data.addresses, work.signals.addresses, work.calls, x.numel(), RANK=work.data.rank, WORLD=world,
        WORLD_POW2=triton.next_power_of_2(world), BLOCK=block, num_warps=WARPS,
    )  # fmt: skip


def one_shot_allreduce(
    x: torch.Tensor, work: Workspace, out: torch.Tensor | None = None, variant: str | None = None
) -> torch.Tensor:
    """The sum of x over the ranks of `work`, which workspace(x) made: of x's shape and dtype, the same bits in each.

    x is bfloat16 or float16, contiguous, of a multiple of 8 elements. `out` may be x. `variant` is "pull" or
    "mailbox", by size unless given, the same in every rank. Calls with one workspace come one after the other, equally
    often in every rank; a rank that leaves one out lets the others wait for ever.

    Raises TypeError for another dtype; ValueError for another shape than the workspace's, a layout that is not
    contiguous, another `out` or an unknown variant; RuntimeError for a device without Triton or an input that requires
    grad.
    """
    y = check_operands("one_shot_allreduce", x, work, out, variant)
    if variant == "mailbox" or (variant is None and mailbox_is_faster(x, work)):
        launch_mailbox(x, y, work)
    else:
        launch_pull(x, y, work)
    return y


def reference(xs: torch.Tensor) -> torch.Tensor:
    return xs.double().sum(0)


def compare(h: Harness, nbytes: int):
    """The table of one size; the inputs are every rank's messages, [ranks, n]."""
    xs = h.randn(h.ranks, nbytes // 2, dtype=h.half)
    work = workspace(xs[h.rank])
    library, in_place = "torch NCCL" if xs.is_cuda else "torch gloo", all_reduce_in_place()
    variants = {library: lambda xs: in_place(xs[h.rank])}
    for variant in (None, *VARIANTS):
        variants[variant or "dispatcher"] = lambda xs, v=variant: one_shot_allreduce(xs[h.rank], work, variant=v)
    size = f"{nbytes // 1024} KiB" if nbytes < 2**20 else f"{nbytes // 2**20} MiB"
    wrong = {"without the last rank": lambda xs: reference(xs[:-1])}
    return h.compare(
        variants, reference, xs, baseline=library, work=Work(bytes=2 * nbytes), case=size, wrong=wrong,
        library={"stores": h.ranks},
    )  # fmt: skip


def answer(tables: list) -> str:
    library = tables[0].baseline
    over = {table.case: table.over(library, "dispatcher") for table in tables}
    slower = [case for case, ratio in over.items() if ratio < 1]
    where = f"from {slower[0]} on it is slower" if slower else f"at every size up to {tables[-1].case} it is faster"
    boxes = [table.case for table in tables if table.over("pull", "mailbox") > 1]
    ratios, boxes = ", ".join(f"{case} {ratio:.2f}x" for case, ratio in over.items()), boxes or ["nowhere"]
    return f"{ratios} {library.split()[1]}; {where}. The largest message for which mailboxes beat pulling: {boxes[-1]}."


def demo(h: Harness) -> None:
    # One program and two; a tail in the last block; calls one after the other, as halves and boxes take turns.
    for n in (8, BLOCK + 8, 4 * BLOCK + 1024):
        xs = h.randn(h.ranks, n, dtype=h.half)
        work = workspace(xs[h.rank])
        for call, variant in enumerate(2 * VARIANTS):
            fn = partial(lambda xs, work, v: one_shot_allreduce(xs[h.rank], work, variant=v), work=work, v=variant)
            h.check(fn, reference, xs, what=f"one_shot_allreduce {variant}, {n} elements, call {call}")

    found = ("ld.acquire.sys", "release.sys")
    h.codegen(one_shot_allreduce, xs[h.rank], work, variant="pull", find=dict.fromkeys((80, 90, 100, 120), found))
    h.codegen(one_shot_allreduce, xs[h.rank], work, variant="mailbox", find={80: (), 90: ("ld.relaxed.sys",)})

    sizes = h.pick(interpreted=(1,), quick=(16, 64), full=(1, 4, 16, 64, 256, 1024))
    tables = [compare(h, size * 1024) for size in sizes]
    h.answer(lambda: answer(tables))


if __name__ == "__main__":
    run(demo)
