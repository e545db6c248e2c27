"""The copies that Triton's compiler makes of tma_copy's tiles; the plan of each variant, and what may be copied.

pointers and tile have one program per tile; persistent and pipelined loop over tiles. In tile and persistent the
compiler sees that the tile that was loaded is the tile to store, so the tile never enters registers. A pipelined loop
moves each tile through registers into one more buffer, from which it is stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits, interpreted
from examples.common.gluon import gluon_architecture
from examples.common.operands import check_choice, check_tma_matrix
from examples.common.tiles import copy_pointers_kernel, tile_corner
from examples.common.tma import require_tma_layout, tma_descriptor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Plan(NamedTuple):
    """Rows of a tile and bytes of each, powers of two; warps; buffers of a program that loops, and how many such
    programs an SM gets. programs 0: one for each tile, with one buffer."""

    rows: int
    row_bytes: int
    warps: int
    stages: int
    programs: int

    @property
    def shared_bytes(self) -> int:
        """Of a program: buffers and barriers."""
        return self.stages * self.rows * self.row_bytes + 16 * self.stages


# The same tile for all: 16 KiB in rows of 512 bytes, long stretches of memory, and of 16-bit values the most that a box
# may have in a row (256), which the ring asks for at once.
PLANS = {
    "pointers": Plan(32, 512, 4, 1, 0),
    "tile": Plan(32, 512, 4, 1, 0),
    "persistent": Plan(32, 512, 4, 1, 3),
    "pipelined": Plan(32, 512, 4, 4, 3),
    "ring": Plan(32, 512, 1, 6, 2),
}
VARIANTS = tuple(PLANS)


@triton.jit
def copy_tile_kernel(x_desc, y_desc, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col = tile_corner(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    y_desc.store([row, col], x_desc.load([row, col]))


@triton.jit
def copy_persistent_kernel(
    x_desc, y_desc, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row, col = tile_corner(tile, N, BLOCK_M, BLOCK_N)
        y_desc.store([row, col], x_desc.load([row, col]))


def runnable() -> tuple[str, ...]:
    return tuple(variant for variant in VARIANTS if variant != "ring" or not interpreted())


def check_copy(x: torch.Tensor, out: torch.Tensor | None, variant: str, plan: Plan) -> None:
    """Raises what tma_copy says it raises."""
    check_choice("tma_copy", VARIANTS, variant=variant)
    check_tma_matrix("tma_copy", x, DTYPES, tma=variant != "pointers")
    if out is not None:
        _check_out(x, out, variant)
    if variant == "ring" and (sm := gluon_architecture(x.device) or 0) < 90:
        here = f"this is sm_{sm}" if sm else "Gluon kernels are not interpreted"
        raise RuntimeError(f"tma_copy: 'ring' needs sm_90, for its TMA ({here}): use variant='pipelined'")
    limit = device_limits(x.device).shared_bytes
    if variant != "pointers" and plan.shared_bytes > limit:
        raise ValueError(
            f"tma_copy: {plan.stages} tiles of {plan.rows} rows x {plan.row_bytes} bytes take {plan.shared_bytes} "
            f"bytes of shared memory, and a program may have {limit} here; plan fewer stages or smaller tiles"
        )


def _check_out(x: torch.Tensor, out: torch.Tensor, variant: str) -> None:
    check_tma_matrix("tma_copy", out, (x.dtype,), tma=False)
    if out.shape != x.shape or out.device != x.device or (out.shape[0] > 1 and out.stride(0) < out.shape[1]):
        raise ValueError(
            f"tma_copy: out is {tuple(out.shape)} with strides {out.stride()} on {out.device}; x is {tuple(x.shape)} "
            f"on {x.device}: out must be as large, its rows apart"
        )
    if out.numel() and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        raise ValueError("tma_copy: out lies in the storage of x, and tiles are copied in no order; pass other memory")
    if variant != "pointers":
        require_tma_layout("tma_copy", out=out)
        if (length := out.shape[1] * out.element_size()) % 16:
            raise ValueError(
                f"tma_copy: rows of out are {length} bytes long, and a TMA store goes on to the next multiple of 16: "
                "it would write beside out; leave out, pass one in whole 16 bytes, or variant='pointers'"
            )


def lag(stages: int) -> int:
    """Turns that a store of the ring gets to read its buffer; the other buffers have loads in flight."""
    return 1 if stages > 2 else 0


def loads_in_flight(variant: str, plan: Plan) -> int:
    """Tiles that a program has asked for and not yet received, at most."""
    return plan.stages - lag(plan.stages) if variant == "ring" else max(1, plan.stages - 1)


def per_sm(plan: Plan, limit: int) -> int:
    """Programs for each SM: those beyond what it holds would wait for others to end, with their share of the tiles."""
    return max(1, min(plan.programs, (limit + 1024) // (plan.shared_bytes + 1024)))


def kib_in_flight(variant: str, plan: Plan, limit: int) -> int:
    """KiB that the programs of an SM have asked for and not yet received, at most."""
    return per_sm(plan, limit) * loads_in_flight(variant, plan) * plan.rows * plan.row_bytes >> 10


def grid_of(x: torch.Tensor, plan: Plan) -> int:
    """How many programs copy x."""
    tiles = triton.cdiv(x.shape[0], plan.rows) * triton.cdiv(x.shape[1], plan.row_bytes // x.element_size())
    sms, limit = device_limits(x.device)
    return min(tiles, sms * per_sm(plan, limit)) if plan.programs else tiles


def launch_triton(x: torch.Tensor, y: torch.Tensor, variant: str, plan: Plan) -> None:
    """The copy by any variant but "ring", without a check. By TMA it writes y's rows up to a multiple of 16 bytes."""
    (M, N), grid, warps = x.shape, (grid_of(x, plan),), plan.warps
    block = plan.rows, plan.row_bytes // x.element_size()
    if variant == "pointers":
        copy_pointers_kernel[grid](x, y, M, N, x.stride(0), y.stride(0), *block, num_warps=warps)
        return
    x_desc, y_desc = (tma_descriptor(each, list(block)) for each in (x, y))
    if plan.programs:
        copy_persistent_kernel[grid](x_desc, y_desc, M, N, *block, STAGES=plan.stages, num_warps=warps)
    else:
        copy_tile_kernel[grid](x_desc, y_desc, N, *block, num_warps=warps)
