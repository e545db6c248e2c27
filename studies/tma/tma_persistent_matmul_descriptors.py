"""Study of the persistent TMA matmul: who makes its descriptors, and who pays for them.

One kernel (schedule split) with descriptors made in four places: by the host for each call; by the host once, for
tensors that stay (prepare_matmul); by each program before its loop; or, a mistake, by each program for every tile. The
GPU's time shows what the last two cost it, and a caller in a loop what the first costs the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from harness import Harness, Timing

import torch

from examples.common.operands import check_choice, check_tma_gemm
from examples.common.tma import launch_with_scratch, tma_strides
from examples.tma.tma_persistent_matmul import compare, matmul_tma_persistent, prepare_matmul
from examples.tma.tma_persistent_matmul_schedules import DTYPES, PARTS, matmul_flattened_kernel, plan

ON_DEVICE = ("program", "tile")  # made by each program once, or by each program for each tile
PLACES = {"program, once": "program", "program, each tile": "tile"}


def matmul_device_descriptors(a: torch.Tensor, b: torch.Tensor, where: str) -> torch.Tensor:
    """matmul_tma_persistent(a, b, schedule="split"), with descriptors that the kernel makes, in one of ON_DEVICE."""
    name = "matmul_device_descriptors"
    M, N, K, columns = check_tma_gemm(name, a, b, DTYPES)
    check_choice(name, ON_DEVICE, where=where)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if not (M and N and K):
        return c.zero_()
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


def prepared(schedule: str) -> Callable:
    """A function of a and b that prepares at its first call, for the buffers of a model, which stay."""
    call = None

    def matmul_prepared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal call
        call = call or prepare_matmul(a, b, a.new_full((a.shape[0], b.shape[1]), math.nan), schedule)
        return call()

    return matmul_prepared


def compare_places(h: Harness, n: int, end_to_end: bool) -> None:
    """What the GPU takes, or what a caller in a loop waits for."""
    ours = {"host, each call": functools.partial(matmul_tma_persistent, schedule="split")}
    ours |= {name: functools.partial(matmul_device_descriptors, where=where) for name, where in PLACES.items()}
    ours["host, prepared"] = prepared("split")
    title = "descriptors, whole calls" if end_to_end else "descriptors"
    table = compare(h, n, n, n, ours, title=title, timing=Timing(end_to_end=end_to_end))
    if not table:
        return
    if end_to_end:
        rows = {r.variant: {"host": round(r.enqueue_us, 1), "call": round(1000 * r.ms, 1)} for r in table.rows}
        h.table(f"microseconds of the host, and of a call in a loop, {table.case}", rows)
        return
    once, each = (1000 * (table[name].ms - table["host, each call"].ms) for name in PLACES)
    h.say(
        f"{table.case}, on the GPU, against descriptors of the host: made by each program {once:+.2f} us, "
        f"made for each tile {each:+.2f} us"
    )


def study(h: Harness) -> None:
    x = h.meta(8192, 8192)
    for where in ON_DEVICE:
        find = {90: ("cp.async.bulk.tensor", "mbarrier", "wgmma")}
        h.codegen(matmul_device_descriptors, x, x, where, find=find)
    for n in h.pick(interpreted=(264,), quick=(2048,), full=(2048, 4096)):
        compare_places(h, n, end_to_end=False)
    compare_places(h, h.pick(interpreted=264, quick=2048, full=2048), end_to_end=True)
