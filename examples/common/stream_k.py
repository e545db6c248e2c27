"""Stream-K: every program gets an equal share of a GEMM's steps along K, however many tiles there are.

The steps of all tiles stand in one row, tile after tile; program p of P takes those from p * units / P on. So a share
may begin or end within a tile, and a tile may belong to several programs. Each adds up its part in float32 and parks it
in a slot of its own; merge_kernel adds the parts in the order of K, so every run gives the same bits. A program parks
at most two parts: slot 2 p holds one that begins within a tile, slot 2 p + 1 one from the start of a tile on.

A tile is BLOCK_N outputs of BLOCK_M rows of x: acc = w x^T of y [M, N] = x [M, K] w [N, K]^T. Tiles of the same outputs
are neighbours, so that w is read from memory once.

Where the halves of tiles overlap by `spare` rows (overlapping_rows.py), what is computed twice is stored once.

merge_kernel starts before the kernel that parks has ended (from sm_90 on: programmatic dependent launch). It finds out
what to add while the last parts are computed, and waits for the end of their kernel, which must call start_dependents.

Kernels take the number of steps per tile unspecialized: were it a constant 1, all tiles would be whole, and Triton 3.6,
seeing that no part is ever parked, fails an assertion on the code that would park it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from examples.common.device import architecture, device_limits, interpreted, require_triton_device
from examples.common.tiles import split_columns

LEAST_STEPS = 4  # of a program: a shorter share costs more to merge than it saves
EVEN_SHARE = 0.9  # of the programs: with as many, tiles are split evenly, and no program has two parts to park
MERGE_N = 16  # outputs of a tile that a program of merge_kernel adds up
PDL = True
STORE_M = tl.constexpr(32)  # columns of acc stored at a time: a whole tile would take the shared memory of two steps


def check_linear(name: str, x: torch.Tensor, w: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int, int]:
    """M, N and K of x [M, K] times w [N, K] transposed, both of one dtype of `dtypes`, their rows contiguous.

    Raises what require_triton_device does; TypeError for another dtype or two dtypes; ValueError for rank, inner sizes
    or an inner stride other than 1.
    """
    require_triton_device(name, x, w)
    if x.dtype not in dtypes or w.dtype != x.dtype:
        raise TypeError(f"{name}: dtypes {x.dtype} and {w.dtype}; both must be the same one of {dtypes}")
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{name}: shapes {tuple(x.shape)} and {tuple(w.shape)}; need x [M, K] and w [N, K]")
    for label, each in (("x", x), ("w", w)):
        if each.shape[1] > 1 and each.stride(1) != 1:
            raise ValueError(f"{name}: {label} has strides {each.stride()}; K must be contiguous: {label}.contiguous()")
    return x.shape[0], w.shape[0], x.shape[1]


@triton.jit
def load_block(
    source, row, k, n_rows, K, stride, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """ROWS rows of BLOCK_K columns by a descriptor, or by a pointer; 0 beyond K. store_outputs discards other rows."""
    if TMA:
        return source.load([row, k])
    else:
        rows, cols = (row + tl.arange(0, ROWS)) % n_rows, k + tl.arange(0, BLOCK_K)
        pointers = source + rows[:, None].to(tl.int64) * stride + cols[None, :]
        return tl.load(pointers, mask=cols[None, :] < K, other=0.0)


@triton.jit
def first_unit(program, units, programs):
    """The first of all steps that is this program's; int64, as products of counts are."""
    return program.to(tl.int64) * units // programs


@triton.jit
def owner(unit, units, programs):
    """The program whose share has this step: the inverse of first_unit."""
    return ((unit + 1) * programs - 1) // units


@triton.jit
def store_outputs(y_ptr, acc, row, col, at, M, N, spare, BLOCK_M: tl.constexpr):
    """acc [outputs, rows of x] into y [M, N], contiguous: its first output is `row`, its tile's first row of x `col`.

    `at` is the first column of acc in its tile. The second half of a tile begins `spare` rows early: a row that both
    halves have is stored from the second, as the first may lack it.
    """
    HALF: tl.constexpr = BLOCK_M // 2
    n, column = row + tl.arange(0, acc.shape[0])[:, None], tl.arange(0, acc.shape[1])[None, :] + at
    m = col + column - tl.where(column >= HALF, spare, 0)
    inside = (n < N) & (m < M) & ((column < HALF - spare) | (column >= HALF))
    tl.store(y_ptr + m.to(tl.int64) * N + n, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def slot_offsets(slot, row, col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Where ROWS x COLS sums of a parked tile lie, from its output `row` and its row of x `col` on."""
    n, m = row + tl.arange(0, ROWS)[:, None], col + tl.arange(0, COLS)[None, :]
    return slot.to(tl.int64) * (BLOCK_N * BLOCK_M) + n * BLOCK_M + m


@triton.jit
def store_share(
    y_ptr, parked_ptr, acc, whole, slot, row, col, at, M, N, BLOCK_M: tl.constexpr, spare=0
):  # fmt: skip
    """Store a tile that is whole; park what is a part of one. `at` and `spare` as for store_outputs."""
    if acc.shape[1] > STORE_M:
        left, right = split_columns(acc)
        store_share(y_ptr, parked_ptr, left, whole, slot, row, col, at, M, N, BLOCK_M, spare)
        store_share(y_ptr, parked_ptr, right, whole, slot, row, col, at + left.shape[1], M, N, BLOCK_M, spare)
    elif whole:
        store_outputs(y_ptr, acc, row, col, at, M, N, spare, BLOCK_M)
    else:
        offsets = slot_offsets(slot, 0, at, BLOCK_M, acc.shape[0], acc.shape[0], acc.shape[1])
        tl.store(parked_ptr + offsets, acc)


@triton.jit
def start_dependents(EARLY: tl.constexpr):
    """Once every program of this kernel has called it, those of merge_kernel may start."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def merge_kernel(
    parked_ptr, y_ptr, M, N, steps, units, programs, spare,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    first, last = owner(tile * steps, units, programs), owner((tile + 1) * steps - 1, units, programs)
    if first < last:  # else one program had all of the tile, and has stored it
        row = tl.program_id(1) * ROWS
        acc = tl.zeros((ROWS, BLOCK_M), tl.float32)
        if EARLY:
            tl.extra.cuda.gdc_wait()  # until all that is parked is visible
        for i in range(0, (last - first + 1).to(tl.int32)):
            slot = 2 * (first + i) + (i == 0)  # only the first of them has the start of the tile
            acc += tl.load(parked_ptr + slot_offsets(slot, row, 0, BLOCK_M, BLOCK_N, ROWS, BLOCK_M))
        tiles_m = tl.cdiv(M, BLOCK_M)
        row, col = (tile // tiles_m * BLOCK_N).to(tl.int32) + row, tile % tiles_m * (BLOCK_M - spare)
        store_outputs(y_ptr, acc, row, col, 0, M, N, spare, BLOCK_M)


def stages_that_fit(
    device: torch.device, block_m: int, block_n: int, step_bytes: int, most: int, per_sm: int = 1
) -> int:
    """How many steps a program holds in shared memory, up to `most`, beside the columns that are stored at a time."""
    stored = 4 * block_n * min(block_m, STORE_M.value)
    return min(most, (device_limits(device).shared_bytes // per_sm - stored - 1024) // step_bytes)  # 1024: barriers


def fit_tile(tiles: list, M: int, most: int, device: torch.device, per_sm: int = 1) -> tuple[int, ...]:
    """Of (BLOCK_M, BLOCK_N, BLOCK_K, warps) the first that has M rows, or the last, with its stages, two to `most`."""
    with_stages = [
        (m, n, k, warps, stages_that_fit(device, m, n, 2 * (m + n) * k, most, per_sm)) for m, n, k, warps in tiles
    ]
    fitting = [tile for tile in with_stages if tile[-1] > 1]
    return next((tile for tile in fitting if tile[0] >= M), fitting[-1])


def share_out(tiles: int, steps: int, slots: int) -> int:
    """How many programs share `tiles` of `steps` each, where `slots` run at once: all slots or, where these are nearly
    as many, a multiple of the tiles."""
    most = max(1, min(slots, tiles * steps // LEAST_STEPS))
    even = most // tiles * tiles
    return even if even >= EVEN_SHARE * most else most


def launch_stream_k(
    launch: Callable, y: torch.Tensor, K: int, blocks: tuple, programs: int | None = None, per_sm: int = 1,
    spare: int = 0,
) -> None:  # fmt: skip
    """launch(programs, parked, steps, units, early) and, where a tile is shared, the kernel that merges its parts.

    `blocks` are BLOCK_M, BLOCK_N and what a step takes of K, in the unit of K: elements, or words of packed weights. An
    SM runs per_sm programs at once; `spare` is as for store_outputs.
    """
    (M, N), (block_m, block_n, block_k) = y.shape, blocks
    tiles, steps = triton.cdiv(M, block_m) * triton.cdiv(N, block_n), triton.cdiv(K, block_k)
    # At least a step each: the owners of a tile's first and last step would enclose one that has nothing to add.
    programs = min(programs or share_out(tiles, steps, per_sm * device_limits(y.device).sms), tiles * steps)
    shared = steps > 1 and tiles % programs != 0
    parked = torch.empty(2 * programs * block_m * block_n if shared else 1, dtype=torch.float32, device=y.device)
    early = shared and PDL and architecture(y.device) >= 90 and not interpreted()
    launch(programs, parked, steps, tiles * steps, early)
    if shared:
        rows = min(MERGE_N, block_n)
        merge_kernel[(tiles, block_n // rows)](
            parked, y, M, N, steps, tiles * steps, programs, spare, BLOCK_M=block_m, BLOCK_N=block_n, ROWS=rows,
            EARLY=early, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
