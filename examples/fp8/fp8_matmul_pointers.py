"""fp8_matmul by pointers, one program per tile: for what TMA cannot load, and for GPUs without it.

Any M, N and K, and rows of a and columns of b from any address on. Loads are pipelined within a tile; between tiles,
and while a tile is scaled and stored, nothing is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.common.tiles import tile_coords

# BLOCK_M, BLOCK_N, BLOCK_K, warps. The first that fits is taken, with as many steps of K in shared memory as it holds.
# BLOCK_K is 128 bytes of a row, the widest swizzle of shared memory.
POINTER_TILES = [(128, 256, 128, 8), (128, 128, 128, 8), (64, 128, 128, 4)]
BUFFERS = (4, 3, 2)
GROUP_M = 16


@triton.jit
def fp8_matmul_pointers_kernel(
    a_ptr, b_ptr, c_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, M, N, K,
    stride_am, stride_bn, stride_cm, stride_sa, stride_sb,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    row, col = tile_coords(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows, cols, inner = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Rows and columns past the edge wrap around; the masked store discards them.
    a_ptrs = a_ptr + (rows % M)[:, None].to(tl.int64) * stride_am + inner[None, :]
    b_ptrs = b_ptr + inner[:, None] + (cols % N)[None, :].to(tl.int64) * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
            b = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc)  # FP8 goes in as it is
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    # With a stride of 0 one scale serves all.
    scale_a = tl.load(scale_a_ptr + rows.to(tl.int64) * stride_sa, mask=rows < M, other=0.0)
    scale_b = tl.load(scale_b_ptr + cols.to(tl.int64) * stride_sb, mask=cols < N, other=0.0)
    acc = acc * (scale_a[:, None] * scale_b[None, :])
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


def scale_strides(scale_a: torch.Tensor, scale_b: torch.Tensor) -> tuple[int, int]:
    """How far apart the scales of two rows of a and of two columns of b are; 0 where one serves all."""
    return scale_a.stride(0) if scale_a.numel() > 1 else 0, scale_b.stride(1) if scale_b.numel() > 1 else 0


def fitting_tile(device: torch.device, tiles: list, out_itemsize: int) -> tuple[int, ...]:
    """The first of `tiles` that shared memory holds, and stages for as many steps of K as it holds: (*tile, stages).

    A tile of four numbers stores its result without shared memory of its own; a fifth says in how many parts.
    """
    limit = device_limits(device).shared_bytes
    # FP8 GPUs with little shared memory multiply by mma.sync, from registers: one stage more than there are buffers.
    # wgmma and tcgen05.mma read the buffers themselves.
    in_registers = 1 if limit < 128 * 1024 else 0
    for m, n, k, warps, *parts in tiles:
        stored = out_itemsize * m * n // parts[0] if parts else 0
        for buffers in BUFFERS:
            if buffers * (m + n) * k + stored + 2048 <= limit:  # and scales on their way to registers, barriers
                return m, n, k, warps, *parts, buffers + in_registers
    raise RuntimeError(f"fp8_matmul: no tile fits the {limit} bytes of shared memory of {device}")


def launch_pointers(a, b, c, scale_a, scale_b, bias) -> None:
    """c = (a * scale_a) @ (b * scale_b) + bias, all of them checked by fp8_matmul."""
    (M, K), N = a.shape, b.shape[1]
    block_m, block_n, block_k, num_warps, stages = fitting_tile(a.device, POINTER_TILES, c.element_size())
    fp8_matmul_pointers_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
        a, b, c, scale_a, scale_b, bias, M, N, K,
        a.stride(0), b.stride(1), c.stride(0), *scale_strides(scale_a, scale_b),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=K % block_k == 0, GROUP_M=GROUP_M,
        num_warps=num_warps, num_stages=stages,
    )  # fmt: skip
