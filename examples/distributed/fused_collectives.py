"""Collectives fused with a GEMM: the tiles that need no other rank come first, while the rest is on its way.

Tensor parallelism gathers activations before one GEMM and reduce-scatters the result of the next. As separate calls,
one waits for all of the other. Here the unit is a tile. all_gather_matmul: copy engines push each rank's rows into the
peers' memory and write a flag after each chunk; meanwhile a kernel computes the rank's own rows, and in the next kernel
each program waits for its rows' chunk. matmul_reduce_scatter does the reverse: it sends the peers' tiles first.

Copy engines take no SMs from the GEMM, and need none: all_gather_matmul waits only for copies, so every wait ends.

Question   How much of a collective is hidden behind its GEMM, against NCCL then cuBLAS and torch's own fused operators?
Needs      triton, sm_90, 2 ranks, peers
Wins when  the GEMM on a rank's own rows takes about as long as the others' rows take to arrive, and the GPU has work
           queued: the gather takes the host longer than cuBLAS + NCCL, and cannot be in a CUDA graph
Variants   fused_collectives_scatter.py (GEMM, then reduce-scatter), fused_collectives_operands.py (memory, checks, K
           loop, stores), fused_collectives_torch.py (what they are put beside)
Source     goes beyond the chapter
"""

from __future__ import annotations

from functools import partial

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.operands import short_of_k
from examples.common.symmetric import pointer, wait_for
from examples.common.tiles import tile_coords
from examples.common.tma import tma_descriptor
from examples.common.untraced import untraced
from examples.distributed.fused_collectives_operands import (
    BLOCK_K,
    BLOCK_M,
    CHUNKS,
    GatherWorkspace,
    budget,
    check_fused,
    gather_workspace,
    has_async_proxy,
    launch_options,
    on_meta,
    order_for_tma,
    product,
    push_rows,
    reference,
    scatter_workspace,
    store_part,
    sum_of_products,
)
from examples.distributed.fused_collectives_scatter import matmul_reduce_scatter
from examples.distributed.fused_collectives_torch import collective_alone, gemm_alone, separate, torch_fused


@triton.jit(do_not_specialize=["rows", "chunk_rows", "call"])
def all_gather_matmul_kernel(
    x_desc, w_desc, y_ptr, signals, rows, chunk_rows, call, N, K,
    OWN: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, CHUNKS: tl.constexpr, ASYNC_PROXY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(N, BLOCK_N)  # of each rank's rows
    row, col = tile_coords(tl.program_id(0) % tiles, rows, N, BLOCK_M, BLOCK_N, GROUP_M)
    source, first = tl.full((), RANK, tl.int32), 0
    if not OWN:
        source = (RANK + WORLD - 1 - tl.program_id(0) // tiles) % WORLD  # in the order in which the rows arrive
        first = (call % 2 * WORLD + source) * rows
        chunk = (tl.minimum(row + BLOCK_M, rows) - 1) // chunk_rows  # of the tile's last row; chunks come in order
        wait_for(pointer(signals, tl.int32) + source * CHUNKS + chunk, call)
        order_for_tma(ASYNC_PROXY)
    acc = product(x_desc, w_desc, first + row, col, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    store_part(y_ptr + source.to(tl.int64) * rows * N, acc, row, col, rows, N, PARTS)


@untraced
def all_gather_matmul(x: torch.Tensor, w: torch.Tensor, work: GatherWorkspace) -> torch.Tensor:
    """The rows of every rank times w: x [rows, K] of each rank, w [K, N] -> y [ranks * rows, N], dtype of x.

    x and w are bfloat16 or float16, both the same, with contiguous rows of multiples of 8 elements; x with gaps between
    rows is copied first. `work` is gather_workspace(x). Calls with one workspace come one after the other, equally
    often in every rank.

    Raises TypeError for dtypes; ValueError for rank, sizes, a layout that TMA cannot load, or another workspace;
    RuntimeError for a device without Triton, an input that requires grad, or within a CUDA graph's capture.
    """
    check_fused("all_gather_matmul", x, w, work.data, tuple(x.shape))
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "all_gather_matmul: not supported in a CUDA graph, which would replay the number of the call that the host "
            "writes into its signals; call it outside, or all_gather_into_tensor and torch.matmul in the graph"
        )
    (rows, K), N, rank, world = x.shape, w.shape[1], work.data.rank, work.data.world
    y = torch.empty(world * rows, N, dtype=x.dtype, device=x.device)
    options = launch_options(x.device)
    tiles = triton.cdiv(rows, BLOCK_M) * triton.cdiv(N, options["BLOCK_N"])
    work.call += 1
    x = x.contiguous()  # before the streams fork: copying an x with gaps is a kernel, and needs SMs
    if work.side is not None:  # copies first: however streams are queued, no copy is behind a kernel that waits for it
        work.side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(work.side):
        chunk_rows = push_rows(x, work)
    for own in (True, False):  # one kernel would need the shared memory of two pipelines
        matrix = x if own else work.data.own.view(-1, K)
        all_gather_matmul_kernel[(tiles if own else (world - 1) * tiles,)](
            tma_descriptor(matrix, [BLOCK_M, BLOCK_K]), tma_descriptor(w, [BLOCK_K, options["BLOCK_N"]]), y,
            work.signals.addresses[rank], rows, chunk_rows, work.call, N, K, OWN=own, RANK=rank, WORLD=world,
            CHUNKS=CHUNKS, ASYNC_PROXY=has_async_proxy(x.device), **options,
        )  # fmt: skip
    if work.side is not None:
        torch.cuda.current_stream().wait_stream(work.side)  # what comes next may write to x
    return y


def problem(h: Harness, scatter: bool, M: int, N: int, K: int) -> tuple:
    """(ours, a float64 reference, a wrong one, what selects a rank's inputs, then the inputs of every rank)."""
    rows = slice(h.rank * (M // h.ranks), (h.rank + 1) * (M // h.ranks))
    if scatter:
        x, w = h.randn(h.ranks, M, K, dtype=h.half), h.randn(h.ranks, K, N, dtype=h.half)
        ours = partial(matmul_reduce_scatter, work=scatter_workspace(x[h.rank], w[h.rank]))
        want, wrong = partial(sum_of_products, rows=rows), lambda x, w: sum_of_products(x[1:], w[1:], rows)
        return ours, want, wrong, lambda x, w: (x[h.rank], w[h.rank]), x, w
    x, w = h.randn(M, K, dtype=h.half), h.randn(h.ranks, K, N, dtype=h.half)[h.rank]
    ours = partial(all_gather_matmul, work=gather_workspace(x[rows]))
    return ours, reference, *short_of_k(reference).values(), lambda x, w: (x[rows], w), x, w


def compare(h: Harness, scatter: bool, M: int, N: int, K: int) -> tuple:
    """The table of one size, and that of its collective alone: M rows in all; K and N are those of one rank's GEMM."""
    ours, want, wrong, own, x, w = problem(h, scatter, M, N, K)
    library, collective = ("cuBLAS + NCCL", "torch NCCL") if x.is_cuda else ("torch + gloo", "torch gloo")
    variants = {library: separate(scatter), "torch fused": torch_fused(scatter), "triton": ours}
    variants = {row: lambda *inputs, fn=fn: fn(*own(*inputs)) for row, fn in variants.items() if fn}
    gemm, alone = gemm_alone(scatter, h.rank), f"{library.split()[0]} GEMM alone"
    variants[alone] = gemm
    case, options = f"{M}x{N}x{K}", budget(h.half, scatter, K * h.ranks)
    moved = 2 * (h.ranks - 1) * M // h.ranks * (N if scatter else K)
    table = h.compare(
        variants, want, x, w, baseline=library, title=f"GEMM {'before' if scatter else 'after'} the collective",
        case=case, work=Work(bytes=moved, flops=2 * M * N * K, dtype=h.half), wrong={"short": wrong},
        references={alone: lambda x, w: gemm(x.double(), w.double())}, **options,
    )  # fmt: skip
    part = gemm(x, w) if scatter else own(x, w)[0]
    only = h.compare(
        {collective: collective_alone(scatter, part)}, want if scatter else lambda x, w: x.double(), x, w, case=case,
        baseline=collective, work=Work(), title="reduce-scatter alone" if scatter else "all-gather alone", **options,
    )  # fmt: skip
    return table, only


def hidden(table, only, row: str) -> float:
    """The time that a row saves over the baseline, as a share of the collective's."""
    return (table[table.baseline].ms - table[row].ms) / only[only.baseline].ms


def answer(pairs: list) -> str:
    last = pairs[-2:]  # the largest gather and reduce-scatter
    library, told = last[0][0].baseline, []
    for row in ("triton", "torch fused"):
        if row in last[0][0]:
            saved = " and ".join(f"{hidden(*pair, row):.0%}" for pair in last)
            told += [f"{row} hides {saved} ({' and '.join(f'{t.over(library, row):.2f}x' for t, _ in last)} {library})"]
    won = sum(table.over(library) > 1.02 for table, _ in pairs)
    return (
        f"Of the time of a gather and of a reduce-scatter, M = {last[0][0].case.split('x')[0]}, {', '.join(told)}. "
        f"Ours is faster than {library} in {won} of {len(pairs)} tables."
    )


def demo(h: Harness) -> None:
    # Tails in each dimension and a chunk that ends within a tile; fewer rows than a tile has.
    for scatter in (False, True):
        for M, N, K in ((h.ranks * 136, 264, 72), (h.ranks * 4, 8, 40)):
            ours, want, wrong, own, x, w = problem(h, scatter, M, N, K)
            for call in (1, 2, 3):  # the halves take turns
                fn = partial(lambda x, w, ours, own: ours(*own(x, w)), ours=ours, own=own)
                what = f"{ours.func.__name__} {M}x{N}x{K}, call {call}"
                h.check(fn, want, x, w, what=what, wrong={"short": wrong}, **budget(h.half, scatter, K * h.ranks))

    gather, scatter = on_meta(2, 1024, 1024)
    find = {90: ("wgmma", "ld.acquire.sys"), 100: ("tcgen05.mma", "ld.acquire.sys"), 120: ("ld.acquire.sys",)}
    h.codegen(all_gather_matmul, h.meta(1024, 1024), h.meta(1024, 1024), gather, find=find)
    find = {sm: (*names, "release.sys") for sm, names in find.items()}
    h.codegen(matmul_reduce_scatter, h.meta(2048, 1024), h.meta(1024, 1024), scatter, find=find)

    sizes = h.pick(interpreted=[(h.ranks * 128, 256, 64)], quick=[(2048, 4096, 8192)],
                   full=[(2048, 4096, 8192), (8192, 4096, 8192)])  # fmt: skip
    pairs = []
    for M, N, K in sizes:  # the GEMM before the reduce-scatter has N and K swapped
        pairs += [compare(h, False, M, N, K), compare(h, True, M, K, N)]
    h.answer(lambda: answer(pairs))


if __name__ == "__main__":
    run(demo)
