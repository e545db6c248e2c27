"""RMSNorm of rows longer than a program holds: shared by programs, or read again by one.

Where programs may wait for each other they share a row, as LayerNorm's do (layer_norm_long.py). Elsewhere, in the
interpreter and for rows whose parts do not fit an eighth of the SMs, one loop goes through two rows block by block: it
adds up the squares of the program's next row, read from memory, and writes the result of the previous one, which is
read again, from L2 if it is still there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits, interpreted, require_triton_device
from examples.common.rows import row_block
from examples.triton.layer_norm_long import launch_split, split_limit

BLOCK_BYTES = 16384  # of a row at a step: 2 loads of 128 bits a thread at 16 warps
STAGES = 4  # three blocks of each operand in flight to shared memory while one is in use
L2_BYTES = 24 << 20  # for rows that wait to be written; beyond it, an SM has one program and not two


@triton.jit
def rms_norm_long_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, stride_xm, stride_rm, stride_ym, n_rows, n_cols, eps,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    stride_xm, stride_rm = tl.cast(stride_xm, tl.int64), tl.cast(stride_rm, tl.int64)
    stride_ym = tl.cast(stride_ym, tl.int64)
    eps = tl.cast(eps, tl.float32)  # torch.compile passes a float in 64 bits
    lane = tl.arange(0, BLOCK_N)
    whole = n_cols // BLOCK_N * BLOCK_N
    cols = whole + lane  # the last block, loaded before the loop and used after it
    in_row = cols < n_cols
    rest_weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
    rstd_due = 0.0
    for row in range(tl.program_id(0), n_rows + tl.num_programs(0), tl.num_programs(0)):
        due = row - tl.num_programs(0)
        is_row, is_due = row < n_rows, due >= 0
        x_row, y_due = x_ptr + row * stride_xm, y_ptr + due * stride_ym
        rest = tl.load(x_row + cols, mask=in_row & is_row, other=0.0)
        if residual_ptr is None:
            from_due = x_ptr + due * stride_xm
        else:
            residual_row, sum_row, from_due = (
                residual_ptr + row * stride_rm,
                sum_ptr + row * stride_ym,
                sum_ptr + due * stride_ym,
            )
            rest_residual = tl.load(residual_row + cols, mask=in_row & is_row, other=0.0)
        rest_due = tl.load(from_due + cols, mask=in_row & is_due, other=0.0)
        squares = tl.zeros((BLOCK_N,), tl.float32)
        for start in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
            x = tl.load(x_row + start + lane, mask=is_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if residual_ptr is not None:
                x += tl.load(residual_row + start + lane, mask=is_row, other=0.0, eviction_policy="evict_first").to(
                    tl.float32
                )
                summed = x.to(sum_ptr.dtype.element_ty)
                tl.store(sum_row + start + lane, summed, mask=is_row, eviction_policy="evict_last")
                x = summed.to(tl.float32)
            squares += x * x
            x = tl.load(from_due + start + lane, mask=is_due, other=0.0, eviction_policy="evict_first").to(tl.float32)
            y = x * rstd_due * tl.load(weight_ptr + start + lane, eviction_policy="evict_last").to(tl.float32)
            tl.store(y_due + start + lane, y.to(y_ptr.dtype.element_ty), mask=is_due, eviction_policy="evict_first")
        y = rest_due.to(tl.float32) * rstd_due * rest_weight.to(tl.float32)
        tl.store(y_due + cols, y.to(y_ptr.dtype.element_ty), mask=in_row & is_due)
        x = rest.to(tl.float32)
        if residual_ptr is not None:
            summed = (x + rest_residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
            tl.store(sum_row + cols, summed, mask=in_row & is_row)
            x = summed.to(tl.float32)
        squares += x * x
        rstd_due = tl.rsqrt(tl.sum(squares, axis=0) / n_cols + eps)
        tl.store(rstd_ptr + row, rstd_due, mask=is_row)
        tl.debug_barrier()  # from here on, other threads of this program read the sums that it stored


def launch_long(x, residual, weight, y, summed, rstd, eps: float) -> None:
    """The rows of x to y, summed and rstd, by the kernel that is fastest for the row length."""
    if not interpreted() and x.shape[1] <= split_limit(x, weight, residual):
        launch_split(x, residual, weight, None, y, summed, None, rstd, eps)
    else:
        launch_loop(x, residual, weight, y, summed, rstd, eps)


def launch_loop(x, residual, weight, y, summed, rstd, eps: float) -> None:
    """The rows of x to y, summed and rstd, by programs that read the next row and write the previous one."""
    n_rows, n_cols = x.shape
    sms, shared = device_limits(x.device)
    per_sm = 2 if 2 * sms * n_cols * x.element_size() < L2_BYTES else 1
    block_n = min(BLOCK_BYTES // per_sm // x.element_size(), row_block(n_cols))
    # A stage holds a block each of the row, its residual, the row before and the weight, which may be float32.
    stage = block_n * ((2 if residual is None else 3) * x.element_size() + weight.element_size())
    rms_norm_long_kernel[(min(n_rows, per_sm * sms),)](
        x, residual, weight, y, summed, rstd, x.stride(0), 0 if residual is None else residual.stride(0), y.stride(0),
        n_rows, n_cols, eps, BLOCK_N=block_n, STAGES=max(1, min(STAGES, 1 + (shared - 8192) // per_sm // stage)),
        num_warps=max(1, block_n * x.element_size() // 1024), maxnreg=128,  # 512 threads an SM, in one or two programs
    )  # fmt: skip


def check_input(name: str, x: torch.Tensor, residual: torch.Tensor | None) -> None:
    """What require_triton_device says of both; ValueError for no columns, or a residual that is not like x."""
    require_triton_device(name, x, *(() if residual is None else (residual,)))
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name}: shape {tuple(x.shape)} has no columns; a row needs at least one element")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        found = f"{tuple(residual.shape)} {residual.dtype}, but x is {tuple(x.shape)} {x.dtype}"
        raise ValueError(f"{name}: residual is {found}; pass one like x")
