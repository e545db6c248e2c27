"""One-shot all-reduce: each rank reads what every peer has, over NVLink, and adds it up by itself.

A ring moves the fewest bytes, in 2 (ranks - 1) steps that wait for each other. A small message is all latency: here
every rank copies its message into symmetric memory, signals its peers, waits for their signals, and reads all messages,
in one kernel. There is no grid-wide barrier: program p reads only what program p of each peer wrote, so it signals and
waits for those alone. Two halves of the buffer take turns, so that nothing is overwritten while a peer reads it.
`mailbox` needs no barrier at all: each 4 bytes travel with the call number in one 8-byte word.

Sums are float32 in the order of the ranks: every rank gets the same bits. Calls are counted on the GPU, so that a CUDA
graph can hold one; docs/memory_ordering.md ("Ranks that wait for each other") says why this is safe.

Question   How much faster than NCCL is a one-shot all-reduce of a small message, and up to which size?
Needs      triton, 2 ranks, peers
Wins when  messages are small (it reads (ranks - 1) times the message, a ring at most twice; on 2 ranks as much) and the
           call is in a CUDA graph: outside one, NCCL (mostly) and torch's one-shot (always) take the host less time
Variants   one_shot_allreduce_mailbox.py (data and flag in one word; the workspace, and the choice by size),
           one_shot_allreduce_torch.py (what they are put beside)
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
    check_operands,
    launch_mailbox,
    mailbox_is_faster,
    workspace,
)
from examples.distributed.one_shot_allreduce_torch import library_calls

WARPS = 16
BLOCK = WARPS * 32 * 8  # elements a program moves at a time: 16 bytes a thread
LARGEST_BLOCK = 4 * BLOCK


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

    x is bfloat16 or float16, contiguous, starts at a multiple of 16 bytes, has a multiple of 8 elements, 2**28 at most,
    and lies outside the workspace. `out` may be x. `variant` is "pull" or "mailbox", by size unless given, the same in
    every rank. Calls with one workspace come one after the other, equally often in every rank; a rank that skips one
    makes the others wait forever.

    Raises TypeError for another dtype (in the interpreter bfloat16 too); ValueError for another shape or device than
    the workspace's, a layout that is not contiguous, another start or number of elements, an `out` that overlaps the
    workspace or a part of x, or an unknown variant; RuntimeError for a device without Triton or an input that requires
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


def replayed(x: torch.Tensor, work: Workspace, variant: str) -> torch.Tensor:
    """one_shot_allreduce(x) in a CUDA graph that is replayed twice, on zeros and then on x."""
    message, y = torch.zeros_like(x), torch.empty_like(x)
    one_shot_allreduce(message, work, y, variant)  # compiles, which must not happen in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may ask for NCCL's events
        one_shot_allreduce(message, work, y, variant)
    graph.replay()
    message.copy_(x)
    graph.replay()
    torch.cuda.synchronize()  # the graph is freed when this returns
    return y


def compare(h: Harness, nbytes: int):
    """The table of one size; the inputs are every rank's messages, [ranks, n]."""
    xs = h.randn(h.ranks, nbytes // 2, dtype=h.half)
    work = workspace(xs[h.rank])
    calls = library_calls(xs[h.rank])
    baseline, *others = calls
    ours = {v or "dispatcher": partial(one_shot_allreduce, work=work, variant=v) for v in (None, *VARIANTS)}
    functions = {baseline: calls[baseline]} | ours | {name: calls[name] for name in others}
    variants = {name: lambda xs, fn=fn: fn(xs[h.rank]) for name, fn in functions.items()}
    size = f"{nbytes // 1024} KiB" if nbytes < 2**20 else f"{nbytes // 2**20} MiB"
    wrong = {"without the last rank": lambda xs: reference(xs[:-1])}
    return h.compare(
        variants, reference, xs, baseline=baseline, work=Work(bytes=2 * nbytes), case=size, wrong=wrong,
        library={"stores": h.ranks},
    )  # fmt: skip


def answer(tables: list, ranks: int) -> str:
    """The sizes at which it is fastest, and what is at the others; also the host's time, which a CUDA graph saves."""
    over, ahead = {table.case: table.over(table.baseline, "dispatcher") for table in tables}, {}
    for table in tables:
        fastest = min((row for row in table.rows if not row.ours), key=lambda row: row.ms)
        if table.over(fastest.variant, "dispatcher") < 1:
            ahead.setdefault(fastest.variant, []).append(table.case)
    slower = "".join(f"; at {', '.join(cases)} {name} is" for name, cases in ahead.items())
    wins = f"Fastest at {len(over) - sum(map(len, ahead.values()))} of {len(over)} sizes{slower}"
    ratios, least = ", ".join(f"{case} {ratio:.2f}x" for case, ratio in list(over.items())[::2]), tables[0]
    dispatcher, library = least["dispatcher"], least[least.baseline]
    return (
        f"{wins}. GPU time on {ranks} ranks, as in a CUDA graph, over NCCL: {ratios}. "
        f"Launched one by one, {least.case} takes the host {dispatcher.enqueue_us:.0f} us, "
        f"{least.baseline.split()[1]}'s {library.enqueue_us:.0f} us."
    )


def demo(h: Harness) -> None:
    # One program and several; a tail in the last block; calls one after the other, as halves and boxes take turns.
    for n in (8, BLOCK + 8, 4 * BLOCK + 1024):
        xs = h.randn(h.ranks, n, dtype=h.half)
        work = workspace(xs[h.rank])
        for call, variant in enumerate(2 * VARIANTS):
            fn = partial(lambda xs, work, v: one_shot_allreduce(xs[h.rank], work, variant=v), work=work, v=variant)
            h.check(fn, reference, xs, what=f"one_shot_allreduce {variant}, {n} elements, call {call}")
        for variant in VARIANTS if xs.is_cuda else ():
            fn = partial(lambda xs, work, v: replayed(xs[h.rank], work, v), work=work, v=variant)
            h.check(fn, reference, xs, what=f"one_shot_allreduce {variant}, {n} elements, in a CUDA graph")

    found = ("ld.acquire.sys", "release.sys")
    h.codegen(one_shot_allreduce, xs[h.rank], work, variant="pull", find=dict.fromkeys((80, 90, 100, 120), found))
    h.codegen(one_shot_allreduce, xs[h.rank], work, variant="mailbox", find={80: (), 90: ("ld.relaxed.sys",)})

    sizes = h.pick(interpreted=(1,), quick=(16, 64), full=(1, 4, 16, 64, 256, 1024, 4096, 16384))
    tables = [compare(h, size * 1024) for size in sizes]
    h.answer(lambda: answer(tables, h.ranks))


if __name__ == "__main__":
    run(demo)
