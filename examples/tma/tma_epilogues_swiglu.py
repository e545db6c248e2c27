"""SwiGLU in the store of a TMA matmul: silu(x @ w_gate.t()) * (x @ w_up.t()), one matrix written instead of three.

Half of a tile's columns come from each weight, so that gate and value of an element meet in one program. On an H200
only the warp-specialized kernel gains from this; the persistent one, with two accumulators, is slower than two kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.activations import silu
from examples.common.tiles import split_columns, tile_coords
from examples.common.untraced import untraced
from examples.tma.tma_epilogues_hopper import launch_warp_specialized
from examples.tma.tma_epilogues_shared import check_layer, launch_persistent


@triton.jit
def _gate_and_store(y_desc, gate, up, row, col, FAST: tl.constexpr):
    """The epilogue of a tile, as many columns at a time as y_desc stores: fewer registers and less shared memory."""
    columns: tl.constexpr = gate.shape[1]
    if columns > y_desc.block_shape[1]:
        left, right = split_columns(gate)
        up_left, up_right = split_columns(up)
        _gate_and_store(y_desc, left, up_left, row, col, FAST)
        _gate_and_store(y_desc, right, up_right, row, col + columns // 2, FAST)
    else:
        y_desc.store([row, col], (silu(gate, FAST) * up).to(y_desc.dtype))


@triton.jit
def swiglu_persistent_kernel(
    x_desc, gate_desc, up_desc, y_desc, M, N, K, FAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of the result: as many of each weight."""
    tl.assume(K > 0)  # else the flattened loop comes with a second epilogue, for tiles without a step
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            x = x_desc.load([row, k])
            gate = tl.dot(x, gate_desc.load([col, k]).T, gate)
            up = tl.dot(x, up_desc.load([col, k]).T, up)
        _gate_and_store(y_desc, gate, up, row, col, FAST)


@untraced
def swiglu(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, variant: str | None = None) -> torch.Tensor:
    """silu(x @ w_gate.t()) * (x @ w_up.t()) -> y [M, N]; weights [N, K]. Limits, variants and errors as in linear."""
    variant = check_layer("swiglu", x, None, variant, 2, w_gate=w_gate, w_up=w_up)
    y = torch.empty(x.shape[0], w_gate.shape[0], dtype=x.dtype, device=x.device)
    if variant == "warp specialized" and y.numel():
        launch_warp_specialized(x, w_gate, w_up, y, None, None, "swiglu", "none")
    elif y.numel():
        launch_persistent(swiglu_persistent_kernel, x, (w_gate, w_up), y)
    return y
