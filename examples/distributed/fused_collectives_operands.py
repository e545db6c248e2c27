"""What the two fused collectives share: memory, checks, the tile's K loop and its store."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from examples.common.device import architecture, device_limits
from examples.common.operands import check_gemm
from examples.common.rows import ASSEMBLY
from examples.common.symmetric import Symmetric, symmetric
from examples.common.tiles import split_columns

DTYPES = (torch.bfloat16, torch.float16)
BLOCK_M, BLOCK_K, GROUP_M, WARPS = 128, 64, 8, 8
PARTS = 4  # of a tile's columns, stored one after the other: each needs that much less shared memory
CHUNKS = 4  # of a rank's rows, each copied and signalled separately


@dataclass
class GatherWorkspace:
    """Memory of all_gather_matmul for x [rows, K] of each rank; two halves that take turns. `call` is counted on the
    host, which also tells the copy engines what to write."""

    data: Symmetric  # [2, ranks, rows, K]: what each rank pushed here
    signals: Symmetric  # int32 [ranks, CHUNKS]: the last call whose chunk is here
    side: torch.cuda.Stream | None
    call: int = 0


@dataclass
class ScatterWorkspace:
    """Memory of matmul_reduce_scatter for results [rows, N] of each rank. Tickets count the tiles of all calls."""

    data: Symmetric  # [2, ranks, rows, N]: what each rank pushed here
    signals: Symmetric  # int32 [ranks, tiles]: the last call whose tile is here
    tickets: torch.Tensor  # int64 [1]


def gather_workspace(x: torch.Tensor, group=None) -> GatherWorkspace:
    """For all_gather_matmul of x [rows, K], on the ranks of `group`. A collective; raises what symmetric() does."""
    (rows, K), world = x.shape, ranks_of(group)
    return GatherWorkspace(
        symmetric("gather_workspace", (2, world, rows, K), x.dtype, x.device, group),
        symmetric("gather_workspace", (world, CHUNKS), torch.int32, x.device, group),
        torch.cuda.Stream(x.device) if x.is_cuda else None,
    )


def scatter_workspace(x: torch.Tensor, w: torch.Tensor, group=None) -> ScatterWorkspace:
    """For matmul_reduce_scatter of x [M, K] @ w [K, N], on the ranks of `group`. A collective.

    Raises ValueError for rows that the ranks cannot share evenly, and what symmetric() does.
    """
    (M, _), (_, N), world = x.shape, w.shape, ranks_of(group)
    if M % world:
        raise ValueError(f"scatter_workspace: M is {M}, and {world} ranks share its rows: pad M to a multiple of them")
    block_n, _ = fitting_tile(x.device)
    tiles = triton.cdiv(M // world, BLOCK_M) * triton.cdiv(N, block_n)
    return ScatterWorkspace(
        symmetric("scatter_workspace", (2, world, M // world, N), x.dtype, x.device, group),
        symmetric("scatter_workspace", (world, tiles), torch.int32, x.device, group),
        torch.zeros(1, dtype=torch.int64, device=x.device),
    )


def on_meta(world: int, rows: int, cols: int) -> tuple[GatherWorkspace, ScatterWorkspace]:
    """Workspaces of `world` ranks without memory, for kernels that are compiled and never launched."""

    def like(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Symmetric:
        own = torch.empty(shape, dtype=dtype, device="meta")
        return Symmetric(own, (own,) * world, (2**40,) * world, 0)

    data, signals = like(2, world, rows, cols), like(world, CHUNKS, dtype=torch.int32)
    tickets = torch.empty(1, dtype=torch.int64, device="meta")
    return GatherWorkspace(data, signals, None), ScatterWorkspace(data, signals, tickets)


def ranks_of(group) -> int:
    return torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1


def check_fused(name: str, x: torch.Tensor, w: torch.Tensor, data: Symmetric, wanted: tuple[int, int]) -> None:
    """Raises what check_gemm(tma=True) does; ValueError for operands of another shape, dtype or device than those that
    the workspace was made for."""
    check_gemm(name, x, w, DTYPES, tma=True)
    if tuple(data.own.shape[2:]) != wanted or data.own.dtype != x.dtype or data.own.device != x.device:
        raise ValueError(
            f"{name}: x {tuple(x.shape)} and w {tuple(w.shape)} are {x.dtype} on {x.device}; the workspace holds "
            f"{tuple(data.own.shape[2:])} {data.own.dtype} on {data.own.device} of each rank; make another in each "
            f"rank, by {'gather_workspace(x)' if name == 'all_gather_matmul' else 'scatter_workspace(x, w)'}"
        )


def push_rows(x: torch.Tensor, work: GatherWorkspace) -> int:
    """Copy x to every peer, chunk by chunk, each followed by its signal; on the side stream, by copy engines.

    Each rank begins with the next rank, so that no two push to the same peer at once. Returns the rows of a chunk.
    Raises ValueError for an x that is not contiguous: its copies would be kernels, left without an SM if programs of
    every rank wait for them.
    """
    if not x.is_contiguous():
        raise ValueError(
            f"push_rows: strides {x.stride()}; call x.contiguous() before work.side waits for the current stream"
        )
    rank, world, half = work.data.rank, work.data.world, work.call % 2
    chunk_rows = triton.cdiv(len(x), CHUNKS)
    for step in range(1, world):
        peer = (rank + step) % world
        for chunk, part in enumerate(x.split(chunk_rows)):
            start = chunk * chunk_rows
            work.data.peers[peer][half, rank, start : start + len(part)].copy_(part, non_blocking=True)
            flag = rank * CHUNKS + chunk
            if x.is_cuda:
                write = torch._C._distributed_c10d._SymmetricMemory.stream_write_value32
                write(work.signals.peers[peer].view(-1).view(torch.uint32), flag, work.call)
            else:
                work.signals.peers[peer].view(-1)[flag] = work.call
    return chunk_rows


def fitting_tile(device: torch.device) -> tuple[int, int]:
    """The largest BLOCK_N and stages that fit in shared memory beside a part of a tile in float32.

    Raises RuntimeError for a device whose shared memory is too small for any.
    """
    limit = device_limits(device).shared_bytes
    for block_n, stages in itertools.product((256, 128), (4, 3, 2)):
        if 2 * stages * (BLOCK_M + block_n) * BLOCK_K + 4 * BLOCK_M * block_n // PARTS + 1024 <= limit:
            return block_n, stages
    raise RuntimeError(
        f"fused_collectives: no tile fits the {limit} bytes of shared memory of {device}; use torch.matmul and NCCL"
    )


def launch_options(device: torch.device) -> dict:
    block_n, stages = fitting_tile(device)
    return {
        "BLOCK_M": BLOCK_M, "BLOCK_N": block_n, "BLOCK_K": BLOCK_K, "GROUP_M": GROUP_M, "STAGES": stages,
        "PARTS": PARTS, "num_warps": WARPS,
    }  # fmt: skip


def has_async_proxy(device: torch.device) -> bool:
    return architecture(device) >= 90


@triton.jit
def product(
    x_desc, w_desc, row, col, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The accumulator of a tile: BLOCK_M rows of x from `row` on, BLOCK_N columns of w from `col` on."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        acc = tl.dot(x_desc.load([row, k]), w_desc.load([k, col]), acc)
    return acc


@triton.jit
def tile_offsets(row, col, rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets of a tile in [rows, N], contiguous, and which are inside: a tile ends where its rank's rows do."""
    r, c = row + tl.arange(0, BLOCK_M)[:, None], col + tl.arange(0, BLOCK_N)[None, :]
    return r.to(tl.int64) * N + c, (r < rows) & (c < N)


@triton.jit
def store_part(ptr, acc, row, col, rows, N, PARTS: tl.constexpr):
    """Store a tile in PARTS parts of its columns, by ordinary stores: after a TMA store, Triton waits only until its
    source has been read (wait_group.read), not until the written data is visible."""
    if PARTS > 1:
        left, right = split_columns(acc)
        store_part(ptr, left, row, col, rows, N, PARTS // 2)
        store_part(ptr, right, row, col + left.shape[1], rows, N, PARTS // 2)
    else:
        offsets, inside = tile_offsets(row, col, rows, N, acc.shape[0], acc.shape[1])
        tl.store(ptr + offsets, acc.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def order_for_tma(ASYNC_PROXY: tl.constexpr):
    """After this, TMA, which uses another path to memory, loads what this thread has seen by ordinary loads."""
    if ASSEMBLY and ASYNC_PROXY:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r,r", [tl.full((), 0, tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.double() @ w.double()


def sum_of_products(x: torch.Tensor, w: torch.Tensor, rows: slice) -> torch.Tensor:
    """The rows `rows` of the sum over the ranks of x [ranks, M, K] @ w [ranks, K, N]."""
    return (x[:, rows].double() @ w.double()).sum(0)


def budget(dtype: torch.dtype, scatter: bool, terms: int) -> dict:
    """What harness.check allows: the peers' parts of a sum are rounded before they are added."""
    return {"terms": terms, "operand_eps": torch.finfo(dtype).eps / 4 if scatter else 0.0}
