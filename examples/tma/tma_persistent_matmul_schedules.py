"""The other schedules of tma_persistent_matmul, where each tile is stored before the next, and the rule that chooses.

tile, pair    one program per tile, whose store takes the shared memory that its operands had. pair has tiles of half
              the size, so that two programs share an SM: one can multiply while the other starts or stores.
whole, split  one program per SM, flattened loops: loads continue while a tile is stored, but the tensor cores wait. The
              store needs its own shared memory. split stores half a tile at a time, to leave room for a fourth stage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from examples.common.device import architecture, device_limits
from examples.common.operands import check_choice, check_tma_gemm, check_tma_out
from examples.common.tiles import store_parts, tile_coords
from examples.common.tma import tma_descriptor

DTYPES = (torch.float16, torch.bfloat16)


@triton.jit
def matmul_tile_kernel(
    a_desc, b_desc, c_desc, M, N, K, B_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, col = tile_coords(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([col, k]).T if B_COLUMNS else b_desc.load([k, col]), acc)
    c_desc.store([row, col], acc.to(c_desc.dtype))


@triton.jit
def matmul_flattened_kernel(
    a, b, c, M, N, K, stride_a, stride_b, stride_c, DESCRIPTORS: tl.constexpr, B_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """a, b and c are descriptors made by the host, or pointers, from which each program makes descriptors, once before
    its loop (DESCRIPTORS is "program") or, to see what that costs, for every tile ("tile")."""
    rows_b, cols_b = (N, K) if B_COLUMNS else (K, N)
    BLOCK_B0: tl.constexpr = BLOCK_N if B_COLUMNS else BLOCK_K
    BLOCK_B1: tl.constexpr = BLOCK_K if B_COLUMNS else BLOCK_N
    if DESCRIPTORS == "program":
        a = tl.make_tensor_descriptor(a, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
        b = tl.make_tensor_descriptor(b, [rows_b, cols_b], [stride_b, 1], [BLOCK_B0, BLOCK_B1])
        c = tl.make_tensor_descriptor(c, [M, N], [stride_c, 1], [BLOCK_M, BLOCK_N // PARTS])
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        a_desc, b_desc, c_desc = a, b, c
        if DESCRIPTORS == "tile":
            # Of what begins at the tile: one of the whole matrix would be the same for all, and be hoisted.
            first_b = col.to(tl.int64) * stride_b if B_COLUMNS else col
            a_rows, c_rows = a + row.to(tl.int64) * stride_a, c + row.to(tl.int64) * stride_c + col
            left_b0, left_b1 = (N - col, K) if B_COLUMNS else (K, N - col)
            a_desc = tl.make_tensor_descriptor(a_rows, [M - row, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
            b_desc = tl.make_tensor_descriptor(b + first_b, [left_b0, left_b1], [stride_b, 1], [BLOCK_B0, BLOCK_B1])
            c_desc = tl.make_tensor_descriptor(c_rows, [M - row, N - col], [stride_c, 1], [BLOCK_M, BLOCK_N // PARTS])
            row, col = 0, 0
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            acc = tl.dot(a_desc.load([row, k]), b_desc.load([col, k]).T if B_COLUMNS else b_desc.load([k, col]), acc)
        store_parts(c_desc, acc, row, col, PARTS)


# BLOCK_M, BLOCK_N, BLOCK_K, warps, and the fewest stages with which it is taken. The first that fits shared memory is,
# with as many stages as do, up to MOST_STAGES (or the fewest, where those are more).
TILES = [(128, 256, 64, 8, 3), (128, 128, 64, 8, 2)]
MOST_STAGES = 4
PAIR = (128, 128, 64, 4, 2)
# What the rule takes where one wave covers c, the smallest first. A program alone on its SM has only its own stages to
# hide the latency of loads, so it gets more. An SM computes as much with a pair as with one of the first TILES: the
# pair starts sooner, the one loads less. On an H200, in a run that is not recorded, the pair was ahead with K of 512,
# level with 2048 and behind with 8192.
ONE_WAVE = [("tile", (128, 64, 64, 4, 6)), ("tile", (128, 128, 64, 4, 5)), ("pair", PAIR)]
PAIR_K = 1024
RESERVED = 1024  # bytes of an SM's shared memory that CUDA takes for each program on it
PARTS = {"tile": 1, "pair": 1, "whole": 1, "split": 2, "late": 4}  # of a tile's columns, stored one after another
SCHEDULES = tuple(PARTS)
PER_SM = {name: 2 if name == "pair" else 1 for name in SCHEDULES}  # programs that share an SM
GROUPS = {"tile": 8, "pair": 8, "whole": 16, "split": 8, "late": 8}  # GROUP_M: chosen on an H200; not recorded


class Plan(NamedTuple):
    schedule: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int
    programs: int


def shared_bytes(block_m: int, block_n: int, block_k: int, itemsize: int, stages: int, schedule: str) -> int:
    """Bytes a program holds: `stages` steps of a and b, the part of c that is stored at a time, a few barriers."""
    operands, stored = stages * (block_m + block_n) * block_k, block_m * block_n // PARTS[schedule]
    return itemsize * (max(operands, stored) if schedule in ("tile", "pair") else operands + stored) + 256


def plan(M: int, N: int, K: int, device: torch.device, schedule: str | None = None) -> Plan:
    """The rule, for 16-bit operands; with `schedule` its first tile that fits, with the most stages.

    The smallest tiles that cover c in one wave, so that the most SMs work: tile with 128x64 and six stages, or with
    128x128 and five; then pair, but 128x256 where that is one wave too and K is long. What needs more waves takes
    128x256, late on sm_90 if a tile has more steps than parts to store, else split: elsewhere the accumulators are not
    in registers (sm_100: tensor memory) or shared memory is short. All of this was found on an H200.
    """
    sms, limit = device_limits(device)

    def tiles_of(tile: tuple[int, ...]) -> int:
        return triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1])

    candidates = [("pair", PAIR)] if schedule == "pair" else []
    if schedule is None:
        candidates += [(name, tile) for name, tile in ONE_WAVE if tiles_of(tile) <= PER_SM[name] * sms]
        if K > PAIR_K and tiles_of(TILES[0]) <= sms:
            candidates = [(name, tile) for name, tile in candidates if name != "pair"]
    for tile in TILES if schedule != "pair" else ():
        late = tiles_of(tile) > sms and triton.cdiv(K, tile[2]) > PARTS["late"] and architecture(device) == 90
        candidates.append((schedule or ("late" if late else "split"), tile))
    for chosen, tile in candidates:
        *sizes, warps, fewest = tile
        for stages in range(max(MOST_STAGES, fewest), fewest - 1, -1):
            if PER_SM[chosen] * (shared_bytes(*sizes, 2, stages, chosen) + RESERVED) <= limit + RESERVED:
                programs = tiles_of(tile) if chosen in ("tile", "pair") else min(tiles_of(tile), sms)
                return Plan(chosen, *sizes, warps, stages, GROUPS[chosen], programs)
    raise RuntimeError(
        f"matmul_tma_persistent: no tile fits the {limit} bytes of shared memory of {device}; use torch.matmul"
    )


def launch_of(name: str, late_kernel, a, b, out, schedule: str | None) -> tuple[torch.Tensor, tuple | None]:
    """c, and what computes it: kernel, programs, arguments and options; None where there is nothing to add up."""
    M, N, K, columns = check_tma_gemm(name, a, b, DTYPES)
    check_choice(name, (None, *SCHEDULES), schedule=schedule)
    if out is not None:
        check_tma_out(name, out, (M, N), a=a, b=b)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device) if out is None else out
    if not (M and N and K):
        return c, None
    p = plan(M, N, K, a.device, schedule)
    least = PARTS["late"] * p.block_k
    if p.schedule == "late" and (least >= K or architecture(a.device) != 90):
        raise ValueError(f"{name}: schedule 'late' needs K above {least}, got {K}, and an sm_90; take 'split'")
    options = {
        "B_COLUMNS": columns, "BLOCK_M": p.block_m, "BLOCK_N": p.block_n, "BLOCK_K": p.block_k, "GROUP_M": p.group_m,
        "STAGES": p.stages, "num_warps": p.warps,
    }  # fmt: skip
    described = (
        tma_descriptor(a, [p.block_m, p.block_k]),
        tma_descriptor(b.t() if columns else b, [p.block_n, p.block_k] if columns else [p.block_k, p.block_n]),
        tma_descriptor(c, [p.block_m, p.block_n // PARTS[p.schedule]]),
    )
    if p.schedule in ("tile", "pair"):
        return c, (matmul_tile_kernel, p.programs, (*described, M, N, K), options)
    options["PARTS"] = PARTS[p.schedule]
    if p.schedule == "late":
        return c, (late_kernel, p.programs, (*described, M, N, K), options)
    strides = [each.strides[0] for each in described]
    return c, (matmul_flattened_kernel, p.programs, (*described, M, N, K, *strides), options | {"DESCRIPTORS": "host"})


def runnable(device: torch.device) -> tuple[str, ...]:
    """The schedules that a GPU has: late is Hopper's, and pair needs room for two programs on an SM."""

    def runs(schedule: str) -> bool:
        try:
            plan(1, 8, 8, device, schedule)
        except RuntimeError:
            return False
        return schedule != "late" or architecture(device) == 90

    return tuple(filter(runs, SCHEDULES))
