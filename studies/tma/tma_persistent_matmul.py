"""Study of the persistent TMA matmul: every schedule over sizes and layers, and who makes the descriptors.

1. All five schedules and the rule of plan(), beside cuBLAS: squares and the layers of a transformer.
2. Few tiles, where tiles of 128x256 would leave most SMs idle, in the only wave or in the second.
3. Schedule split with descriptors made by the host for each call; by the host once (prepare_matmul); by each program
   before its loop; or by each program for every tile, as where each tile is of another matrix. The GPU's time of many
   short tiles shows what the last two cost it, and a caller in a loop, at a size of one tile for each program, what the
   first costs the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from harness import Harness, Table, Timing, geomean

import torch
import triton

from examples.common.operands import check_tma_gemm
from examples.common.tma import launch_with_scratch, tma_strides
from examples.tma.tma_persistent_matmul import compare, matmul_tma_persistent, prepare_matmul
from examples.tma.tma_persistent_matmul_schedules import (
    DTYPES,
    PARTS,
    PER_SM,
    SCHEDULES,
    matmul_flattened_kernel,
    plan,
    runnable,
)

SIZES = [(n, n, n) for n in (2048, 4096, 8192, 16384)] + [(4096, 14336, 4096), (4096, 4096, 14336)]
FEW_TILES = [(1024, 1024, 1024), (2560, 1664, 4096)]  # on 132 SMs: a quarter of a wave of 128x256 tiles, and 1.06
SMALL = [(257, 264, 264)]  # more tiles than the interpreter has SMs, tails everywhere, more steps than parts
# 2048 tiles, 15 or 16 for each of 132 SMs, of 8 steps along K: short enough that making three descriptors for each
# shows. At K = 8192 a tile takes 16 times as long, and hides it.
MANY_TILES = (8192, 8192, 512)
PLACES = {"program, once": "program", "program, each tile": "tile"}


def compare_schedules(h: Harness, size: tuple[int, int, int], names: tuple[str, ...], title: str) -> Table:
    ours = {name: functools.partial(matmul_tma_persistent, schedule=name) for name in names}
    table = compare(h, *size, {"triton": matmul_tma_persistent} | ours, title=title)
    if table:
        p = plan(*size, h.device)
        tiles, places = triton.cdiv(size[0], p.block_m) * triton.cdiv(size[1], p.block_n), PER_SM[p.schedule]
        h.say(
            f"{table.case}: default is {p.schedule}, {p.stages} stages; {tiles} tiles of {p.block_m}x{p.block_n} "
            f"are {tiles / (places * h.machine.sms):.2f} waves"
        )
    return table


def matmul_device_descriptors(a: torch.Tensor, b: torch.Tensor, where: str) -> torch.Tensor:
    """matmul_tma_persistent(a, b, schedule="split"), with descriptors that the kernel makes: `where` of PLACES."""
    M, N, K, columns = check_tma_gemm("matmul_device_descriptors", a, b, DTYPES)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    p = plan(M, N, K, a.device, "split")
    operands = a, b.t() if columns else b, c
    strides = [tma_strides(x)[0] for x in operands]  # a multiple of 16 bytes also where there is but one row
    launch_with_scratch(
        a.device,
        lambda: matmul_flattened_kernel[(p.programs,)](
            *operands, M, N, K, *strides, DESCRIPTORS=where, B_COLUMNS=columns, BLOCK_M=p.block_m, BLOCK_N=p.block_n,
            BLOCK_K=p.block_k, GROUP_M=p.group_m, STAGES=p.stages, PARTS=PARTS[p.schedule], num_warps=p.warps,
        ),
    )  # fmt: skip
    return c


def prepared() -> Callable:
    """A function of a and b that prepares at its first call, for the buffers of a model, which stay."""
    call = None

    def matmul_prepared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal call
        call = call or prepare_matmul(a, b, a.new_full((a.shape[0], b.shape[1]), math.nan), "split")
        return call()

    return matmul_prepared


def compare_places(h: Harness, size: tuple[int, int, int], end_to_end: bool) -> None:
    """What the GPU takes for many tiles, or what a caller in a loop waits for where each program has one."""
    once, each = PLACES
    ours = {"host, each call": functools.partial(matmul_tma_persistent, schedule="split")}
    for name in (once,) if end_to_end else PLACES:
        ours[name] = functools.partial(matmul_device_descriptors, where=PLACES[name])
    ours["host, prepared"] = prepared()
    title = "descriptors, in a loop" if end_to_end else "descriptors"
    table = compare(h, *size, ours, title=title, timing=Timing(end_to_end=end_to_end))
    if table and end_to_end:
        rows = {r.variant: {"host": round(r.enqueue_us, 1), "call": round(1000 * r.ms, 1)} for r in table.rows}
        h.table(f"microseconds of the host, and of a call in a loop, {table.case}", rows)
    elif table:
        p = plan(*size, h.device, "split")
        tiles = triton.cdiv(size[0], p.block_m) * triton.cdiv(size[1], p.block_n) / p.programs  # of a program
        us = {row.variant: 1000 * row.ms for row in table.rows}
        first, more = us[once] - us["host, prepared"], us[each] - us[once]
        h.say(
            f"{table.case}, {tiles:.1f} tiles a program: descriptors made by each program once cost "
            f"{first:+.1f} us a call over the host's, made for every tile {more:+.1f} us over once, "
            f"{more / (tiles - 1):+.2f} us for each further tile ({table.over(once, each):.2f}x the speed)"
        )


def study(h: Harness) -> None:
    x, find = h.meta(8192, 8192), {90: ("cp.async.bulk.tensor", "mbarrier", "wgmma")}
    for name in SCHEDULES:
        h.codegen(matmul_tma_persistent, x, x.t(), schedule=name, find=find)
    for where in PLACES.values():
        h.codegen(matmul_device_descriptors, x, x, where, find=find)

    sizes = h.pick(interpreted=SMALL, quick=SIZES[:2], full=SIZES)
    tables = [compare_schedules(h, size, runnable(h.device), "schedules") for size in sizes]
    if all(tables):
        means = {row.variant: round(geomean(tables, "cuBLAS", row.variant), 4) for row in tables[0].rows[1:]}
        h.fact("geometric mean over cuBLAS, schedules", means)
    for size in h.pick(interpreted=[], quick=FEW_TILES[:1], full=FEW_TILES):
        compare_schedules(h, size, ("split",), "few tiles")
    compare_places(h, h.pick(interpreted=SMALL[0], quick=MANY_TILES, full=MANY_TILES), end_to_end=False)
    compare_places(h, h.pick(interpreted=SMALL[0], quick=SIZES[0], full=SIZES[0]), end_to_end=True)
