"""The copies that Triton's compiler makes of tma_copy's tiles, and the plan of each: tile, warps, buffers, programs.

pointers, tile and tile device have one program per tile; persistent, pipelined and pipelined device loop over tiles. In
tile and persistent the compiler sees that the tile that was loaded is the tile to store, so it never enters registers.
A pipelined loop moves each tile through registers into one more buffer, from which it is stored. "device" says that
each program makes its descriptors itself (tl.make_tensor_descriptor), in scratch memory that an allocator provides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.common.tma import launch_with_scratch, tma_descriptor


class Plan(NamedTuple):
    """Rows of a tile and bytes of each; warps; buffers of a program that loops, and how many such programs an SM gets.

    programs 0: one for each tile.
    """

    rows: int
    row_bytes: int
    warps: int
    stages: int
    programs: int


# The same tile for all: 16 KiB in rows of 512 bytes, long stretches of memory, and of 16-bit values the most that a box
# may have in a row (256), which the ring asks for at once. One warp where each tile's program makes its descriptors:
# one makes them, and more would only wait.
PLANS = {
    "pointers": Plan(32, 512, 4, 1, 0),
    "tile": Plan(32, 512, 4, 1, 0),
    "tile device": Plan(32, 512, 1, 1, 0),
    "persistent": Plan(32, 512, 4, 1, 3),
    "pipelined": Plan(32, 512, 4, 4, 3),
    "pipelined device": Plan(32, 512, 4, 4, 3),
    "ring": Plan(32, 512, 1, 6, 2),
}


@triton.jit
def _corner(tile, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    tiles_n = tl.cdiv(N, BLOCK_N)
    return tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N


@triton.jit
def copy_pointers_kernel(x_ptr, y_ptr, M, N, stride_x, stride_y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col = _corner(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    rows, cols = row + tl.arange(0, BLOCK_M)[:, None], col + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < M) & (cols < N)
    rows = rows.to(tl.int64)
    tl.store(y_ptr + rows * stride_y + cols, tl.load(x_ptr + rows * stride_x + cols, mask=inside), mask=inside)


@triton.jit
def copy_tile_kernel(
    x, y, M, N, stride_x, stride_y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEVICE: tl.constexpr
):  # fmt: skip
    """x and y are descriptors, or pointers where the device makes them."""
    x_desc, y_desc = x, y
    if DEVICE:
        x_desc = tl.make_tensor_descriptor(x, [M, N], [stride_x, 1], [BLOCK_M, BLOCK_N])
        y_desc = tl.make_tensor_descriptor(y, [M, N], [stride_y, 1], [BLOCK_M, BLOCK_N])
    row, col = _corner(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    y_desc.store([row, col], x_desc.load([row, col]))


@triton.jit
def copy_persistent_kernel(
    x, y, M, N, stride_x, stride_y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEVICE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """x and y are descriptors, or pointers where the device makes them."""
    x_desc, y_desc = x, y
    if DEVICE:
        x_desc = tl.make_tensor_descriptor(x, [M, N], [stride_x, 1], [BLOCK_M, BLOCK_N])
        y_desc = tl.make_tensor_descriptor(y, [M, N], [stride_y, 1], [BLOCK_M, BLOCK_N])
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row, col = _corner(tile, N, BLOCK_M, BLOCK_N)
        y_desc.store([row, col], x_desc.load([row, col]))


def make_plan(
    variant: str,
    rows: int | None = None,
    row_bytes: int | None = None,
    stages: int | None = None,
    programs: int | None = None,
) -> Plan:
    """The plan of a variant with what is given instead; ValueError for what cannot be."""
    default = PLANS[variant]
    given = {"rows": rows, "row_bytes": row_bytes, "stages": stages, "programs": programs}
    plan = default._replace(**{name: value for name, value in given.items() if value is not None})
    for name, least, most in (("rows", 8, 256), ("row_bytes", 32, 8192), ("stages", 1, 64), ("programs", 1, 32)):
        value = given[name]
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise ValueError(f"tma_copy: {name} is {value!r}; pass an int from {least} to {most}")
        if value is not None and name in ("rows", "row_bytes") and value & (value - 1):
            raise ValueError(f"tma_copy: {name} is {value}; pass a power of two")
    if default.stages == 1 and plan.stages != 1:
        raise ValueError(
            f"tma_copy: stages is {stages}, but {variant!r} has no loads ahead; use 'pipelined' or 'ring'"
        )  # fmt: skip
    if not default.programs and plan.programs:
        raise ValueError(f"tma_copy: programs is {programs}, but {variant!r} has one for each tile")
    return plan


def check_out(x: torch.Tensor, out: torch.Tensor, variant: str) -> None:
    """ValueError for an output that x cannot be copied into by this variant."""
    if out.dtype != x.dtype or out.shape != x.shape:
        raise ValueError(
            f"tma_copy: out is {out.dtype} {tuple(out.shape)}; x is {x.dtype} {tuple(x.shape)}, and out must be too"
        )
    if (out.shape[1] > 1 and out.stride(1) != 1) or (out.shape[0] > 1 and out.stride(0) < out.shape[1]):
        raise ValueError(f"tma_copy: out has strides {out.stride()}; its columns must be adjacent, its rows apart")
    if out.numel() and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        raise ValueError("tma_copy: out lies in the storage of x, and tiles are copied in no order; pass other memory")
    if variant == "pointers":
        return
    if out is not None and (length := out.shape[1] * out.element_size()) % 16:
        raise ValueError(
            f"tma_copy: rows of out are {length} bytes long, and a TMA store goes on to the next multiple of 16: "
            "it would write beside out; leave out, pass one in whole 16 bytes, or variant='pointers'"
        )


def shared_bytes(plan: Plan) -> int:
    """Of a program: buffers and barriers."""
    return plan.stages * plan.rows * plan.row_bytes + 16 * plan.stages


def per_sm(plan: Plan, limit: int) -> int:
    """Programs for each SM: those beyond what it holds would wait for others to end, with their share of the tiles."""
    return max(1, min(plan.programs, (limit + 1024) // (shared_bytes(plan) + 1024)))


def grid_of(x: torch.Tensor, plan: Plan) -> int:
    """How many programs copy x."""
    tiles = triton.cdiv(x.shape[0], plan.rows) * triton.cdiv(x.shape[1], plan.row_bytes // x.element_size())
    sms, limit = device_limits(x.device)
    return min(tiles, sms * per_sm(plan, limit)) if plan.programs else tiles


def launch_triton(x: torch.Tensor, y: torch.Tensor, variant: str, plan: Plan) -> None:
    """The copy by any variant but "ring", without a check. By TMA it writes y's rows up to a multiple of 16 bytes."""
    (M, N), grid, warps = x.shape, grid_of(x, plan), plan.warps
    block = plan.rows, plan.row_bytes // x.element_size()
    if variant == "pointers":
        copy_pointers_kernel[(grid,)](x, y, M, N, x.stride(0), y.stride(0), *block, num_warps=warps)
        return
    described = tuple(tma_descriptor(each, list(block)) for each in (x, y))
    strides = [each.strides[0] for each in described]  # a multiple of 16 bytes also where there is but one row
    on_device = variant.endswith("device")
    arguments = (*((x, y) if on_device else described), M, N, *strides, *block)

    def launch() -> None:
        if plan.programs:
            copy_persistent_kernel[(grid,)](*arguments, DEVICE=on_device, STAGES=plan.stages, num_warps=warps)
        else:
            copy_tile_kernel[(grid,)](*arguments, DEVICE=on_device, num_warps=warps)

    launch_with_scratch(x.device, launch) if on_device else launch()
