"""GEMM and reduce-scatter in one kernel: each tile of x @ w goes to the rank that owns its rows, which adds them up.

Tiles of other ranks' rows come first: their programs store into the owner's memory over NVLink, signal, and wait for
nobody. A program of one of the rank's own tiles waits for that tile from each peer, which too sends before it waits. It
adds up its accumulator and the peers' tiles in float32, in rank order. Tickets, not program_id, assign tiles: once a
program waits, all its rank's tiles for peers have started (docs/memory_ordering.md, "Ranks that wait for each other").
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.symmetric import pointer, signal, wait_for
from examples.common.tiles import split_columns, tile_coords
from examples.common.tma import tma_descriptor
from examples.common.untraced import untraced
from examples.distributed.fused_collectives_operands import (
    BLOCK_K,
    BLOCK_M,
    ScatterWorkspace,
    check_fused,
    launch_options,
    product,
    store_part,
    tile_offsets,
)


@triton.jit
def _add_and_store(
    y_ptr, own_ptr, acc, row, col, rows, N, RANK: tl.constexpr, WORLD: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Store a tile's sum over the ranks, where acc is this rank's part, in PARTS parts of its columns."""
    if PARTS > 1:
        left, right = split_columns(acc)
        _add_and_store(y_ptr, own_ptr, left, row, col, rows, N, RANK, WORLD, PARTS // 2)
        _add_and_store(y_ptr, own_ptr, right, row, col + left.shape[1], rows, N, RANK, WORLD, PARTS // 2)
    else:
        offsets, inside = tile_offsets(row, col, rows, N, acc.shape[0], acc.shape[1])
        total = tl.zeros(acc.shape, tl.float32)
        for rank in tl.static_range(WORLD):
            if rank == RANK:
                total += acc
            else:
                pushed = own_ptr + rank * (rows.to(tl.int64) * N) + offsets
                total += tl.load(pushed, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + offsets, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def matmul_reduce_scatter_kernel(
    x_desc, w_desc, y_ptr, data, signals, tickets_ptr, rows, N, K,  # data and signals: the addresses of every rank's
    RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(N, BLOCK_N)  # of each rank's rows
    ticket = tl.atomic_add(tickets_ptr, 1, sem="relaxed")
    call = ticket // tl.num_programs(0) + 1
    turn = (ticket % tl.num_programs(0)).to(tl.int32)
    owner = (RANK + 1 + turn // tiles) % WORLD  # its own rows come last
    tile = turn % tiles
    row, col = tile_coords(tile, rows, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = product(x_desc, w_desc, owner * rows + row, col, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)

    shard = rows.to(tl.int64) * N
    half = (call % 2) * WORLD * shard
    if owner == RANK:
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                wait_for(pointer(signals[RANK], tl.int32) + rank * tiles + tile, call)
        own = pointer(data[RANK], y_ptr.dtype.element_ty) + half
        _add_and_store(y_ptr, own, acc, row, col, rows, N, RANK, WORLD, PARTS)
    else:
        data_start, signals_start = data[0], signals[0]
        for rank in tl.static_range(1, WORLD):
            data_start = tl.where(owner == rank, data[rank], data_start)
            signals_start = tl.where(owner == rank, signals[rank], signals_start)
        box = pointer(data_start, y_ptr.dtype.element_ty) + half + RANK * shard
        store_part(box, acc, row, col, rows, N, PARTS)
        signal(pointer(signals_start, tl.int32) + RANK * tiles + tile, call)


@untraced
def matmul_reduce_scatter(x: torch.Tensor, w: torch.Tensor, work: ScatterWorkspace) -> torch.Tensor:
    """This rank's rows of the sum over the ranks of x [M, K] @ w [K, N]: y [M / ranks, N], contiguous, dtype of x.

    x and w are bfloat16 or float16, both the same, with contiguous rows of multiples of 8 elements; `work` is
    scatter_workspace(x, w). The peers' parts are rounded to that dtype once; sums are float32, in the order of the
    ranks. Calls with one workspace come one after the other, equally often in every rank.

    Raises TypeError for dtypes; ValueError for rank, sizes, a layout that TMA cannot load, or another workspace;
    RuntimeError for a device without Triton or an input that requires grad.
    """
    world = work.data.world
    rows = x.shape[0] // world  # below, a quotient that is no integer is no workspace's number of rows
    check_fused("matmul_reduce_scatter", x, w, work.data, (x.shape[0] / world, *w.shape[1:]))
    y = torch.empty(rows, w.shape[1], dtype=x.dtype, device=x.device)
    options = launch_options(x.device)
    block_n = options["BLOCK_N"]
    tiles = triton.cdiv(rows, BLOCK_M) * triton.cdiv(y.shape[1], block_n)
    matmul_reduce_scatter_kernel[(world * tiles,)](
        tma_descriptor(x, [BLOCK_M, BLOCK_K]), tma_descriptor(w, [BLOCK_K, block_n]), y,
        work.data.addresses, work.signals.addresses, work.tickets, rows, y.shape[1], x.shape[1],
        RANK=work.data.rank, WORLD=world, **options,
    )  # fmt: skip
    return y
