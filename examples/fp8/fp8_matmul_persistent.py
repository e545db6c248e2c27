"""fp8_matmul by TMA, one program per SM: the loads of the next tile run while this one is scaled and stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.common.tiles import split_columns, tile_coords
from examples.common.tma import tma_descriptor

BUFFERS = (4, 3, 2)  # steps of K in shared memory: as many as it holds
GROUP_M = 16
# BLOCK_M, BLOCK_N, BLOCK_K, warps, and in how many parts a tile is stored: a part needs shared memory of its own, as
# the loads of the next tile already own the rest.
TMA_TILES = [(128, 256, 128, 8, 4), (128, 128, 128, 8, 2)]


@triton.jit
def _store(c_desc, acc, row, col, scale_a, scale_b, bias, ROWS: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr):
    """Scale a tile and store it in PARTS parts of its columns; without ROWS, scale_a is the product of both scales."""
    if PARTS > 1:
        width: tl.constexpr = acc.shape[1] // 2
        left, right = split_columns(acc)
        scale_left, scale_right = scale_b, scale_b
        if ROWS:
            scale_left, scale_right = scale_b.reshape(2, width).permute(1, 0).split()
        bias_left, bias_right = bias, bias
        if BIAS:
            bias_left, bias_right = bias.reshape(2, width).permute(1, 0).split()
        _store(c_desc, left, row, col, scale_a, scale_left, bias_left, ROWS, BIAS, PARTS // 2)
        _store(c_desc, right, row, col + width, scale_a, scale_right, bias_right, ROWS, BIAS, PARTS // 2)
    else:
        acc = acc * (scale_a[:, None] * scale_b[None, :]) if ROWS else acc * scale_a
        if BIAS:
            acc += bias[None, :].to(tl.float32)
        c_desc.store([row, col], acc.to(c_desc.dtype))


@triton.jit
def fp8_matmul_persistent_kernel(
    a_desc, bt_desc, c_desc, scale_a_ptr, scale_b_ptr, bias_ptr, M, N, K, stride_sa, stride_sb, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    BIAS: tl.constexpr = bias_ptr is not None
    scale = 1.0 if ROWS else tl.load(scale_a_ptr) * tl.load(scale_b_ptr)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    # flatten: the loops over tiles and K are one pipeline, so loads of the next tile run while this one is stored.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            acc = tl.dot(a_desc.load([row, k]), bt_desc.load([col, k]).T, acc)  # FP8 goes in as it is
        rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        scale_a, scale_b, bias = scale, scale, scale
        if ROWS:
            scale_a = tl.load(scale_a_ptr + rows.to(tl.int64) * stride_sa, mask=rows < M, other=0.0)
            scale_b = tl.load(scale_b_ptr + cols.to(tl.int64) * stride_sb, mask=cols < N, other=0.0)
        if BIAS:
            bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
        _store(c_desc, acc, row, col, scale_a, scale_b, bias, ROWS, BIAS, PARTS)


def scale_strides(scale_a: torch.Tensor, scale_b: torch.Tensor) -> tuple[int, int]:
    """How far apart the scales of two rows of a and of two columns of b are; 0 where one serves all."""
    return scale_a.stride(0) if scale_a.numel() > 1 else 0, scale_b.stride(1) if scale_b.numel() > 1 else 0


def fitting_tile(device: torch.device, tiles: list, out_itemsize: int) -> tuple[int, ...]:
    """The first of `tiles` that shared memory holds, and stages for as many steps of K as it holds: (*tile, stages).

    A tile of four numbers stores its result without shared memory of its own; a fifth says in how many parts.
    """
    limit = device_limits(device).shared_bytes
    # FP8 GPUs with little shared memory multiply by mma.sync, from registers: one stage more than there are buffers,
    # and at most 64 accumulators a thread, since with 128 the code of Triton 3.9 spills. wgmma and tcgen05.mma read the
    # buffers themselves.
    in_registers = 1 if limit < 128 * 1024 else 0
    for m, n, k, warps, *parts in tiles:
        if in_registers and m * n > 64 * 32 * warps:
            continue
        stored = out_itemsize * m * n // parts[0] if parts else 0
        for buffers in BUFFERS:
            if buffers * (m + n) * k + stored + 2048 <= limit:  # and scales on their way to registers, barriers
                return m, n, k, warps, *parts, buffers + in_registers
    raise RuntimeError(f"fp8_matmul: no tile fits the {limit} bytes of shared memory of {device}")


def launch_persistent(a, b, c, scale_a, scale_b, bias) -> None:
    """c = (a * scale_a) @ (b * scale_b) + bias, all of them checked by fp8_matmul."""
    (M, K), N = a.shape, b.shape[1]
    block_m, block_n, block_k, num_warps, parts, stages = fitting_tile(a.device, TMA_TILES, c.element_size())
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    fp8_matmul_persistent_kernel[(min(tiles, device_limits(a.device).sms),)](
        tma_descriptor(a, [block_m, block_k]), tma_descriptor(b.t(), [block_n, block_k]),
        tma_descriptor(c, [block_m, block_n // parts]), scale_a, scale_b, bias, M, N, K,
        *scale_strides(scale_a, scale_b), ROWS=max(scale_a.numel(), scale_b.numel()) > 1,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PARTS=parts, GROUP_M=GROUP_M,
        num_warps=num_warps, num_stages=stages,
    )  # fmt: skip
