"""llama_block: two quantizers that Inductor does not make of torch's operations.

quantize_transposed   x.t() in FP8, by one scale that is given. FP8 tensor cores read both operands along the summed
                      dimension, and in the gradient of a weight that is the tokens. A tile is turned in shared memory,
                      so that both its reads and its writes are wide: 3 bytes an element;
swiglu_quantize       silu(gate) * up in FP8, with a scale per row: a program holds a row of both in registers, where
                      Inductor reads it twice, once for the largest magnitude: 5 bytes an element of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.activations import silu
from examples.common.fp8 import E4M3, fp8_max, require_scales
from examples.common.operands import check_rows
from examples.common.quantize import absmax, check_quantize, empty_quantized, scale_and_inverse, widen_bfloat16
from examples.common.rows import DTYPES, check_length

TILE = (128, 128)  # rows and columns of x
COLUMNS_MAX = 65535 * TILE[1]  # the second dimension of a grid has at most 65535 programs
ROW_MAX = 16384  # columns of a row of the result that one program holds
PER_THREAD = 32  # of these


@triton.jit
def quantize_transposed_kernel(
    x_ptr, scale_ptr, q_ptr, stride_xm, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    # int64 because row * stride passes 2**31 elements on tensors that still fit in memory.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = widen_bfloat16(tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=inside, other=0.0))
    q = (x * tl.div_rn(1.0, tl.load(scale_ptr))).to(q_ptr.dtype.element_ty)  # saturates
    inside = (cols < n_cols)[:, None] & (rows < n_rows)[None, :]
    tl.store(q_ptr + cols[:, None] * n_rows + rows[None, :], tl.trans(q), mask=inside)


def quantize_transposed(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = E4M3, check_scales: bool = True
) -> torch.Tensor:
    """x.t() / scale in FP8, [n_cols, n_rows], contiguous; what is larger than scale * max of the format saturates.

    x [n_rows, n_cols] is float32, float16 or bfloat16, with contiguous rows and any row stride; scale is one float32,
    [], [1] or [1, 1]. The arithmetic is float32.

    Raises TypeError for another dtype of x or the result; ValueError for another rank, an inner stride other than 1,
    more than 8,388,480 columns, and what require_scales refuses (check_scales=True reads the scale, which waits for the
    GPU); RuntimeError for a device without Triton or FP8, or an input that requires grad.
    """
    name = "quantize_transposed"
    check_quantize(name, x, dtype)
    require_scales(name, x, values=check_scales, scale=(scale, ((), (1,), (1, 1))))
    n_rows, n_cols = x.shape
    check_length(name, n_cols, COLUMNS_MAX, "it on parts of the columns")
    q = torch.empty(n_cols, n_rows, dtype=dtype, device=x.device)
    if q.numel():  # a grid of zero programs is a launch error
        block_m, block_n = TILE
        quantize_transposed_kernel[(triton.cdiv(n_rows, block_m), triton.cdiv(n_cols, block_n))](
            x, scale, q, x.stride(0), n_rows, n_cols, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8
        )
    return q


def transposed_reference(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.double().t() / scale.double()


@triton.jit
def swiglu_quantize_kernel(
    x_ptr, q_ptr, scale_ptr, stride_xm, n_cols, MOST: tl.constexpr, FULL: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)[None, :]
    inside = None if FULL else cols < n_cols
    gate = tl.load(x_ptr + row * stride_xm + cols, mask=inside, other=None if FULL else 0.0)
    up = tl.load(x_ptr + row * stride_xm + n_cols + cols, mask=inside, other=None if FULL else 0.0)
    y = silu(widen_bfloat16(gate)) * widen_bfloat16(up)
    scale, inverse = scale_and_inverse(absmax(y, 1), MOST, INFINITE=True)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)
    tl.store(q_ptr + row * n_cols + cols, (y * inverse[:, None]).to(q_ptr.dtype.element_ty), mask=inside)


def swiglu_quantize(packed: torch.Tensor, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales) of silu(gate) * up, q [n_rows, n_cols] and a float32 scale per row [n_rows, 1].

    packed [n_rows, 2 * n_cols] has gate in its first half of columns and up in the other: float32, float16 or bfloat16,
    contiguous rows, any row stride. scale = amax / max of the format, q = y * (max / amax), in float32. An infinity or
    NaN turns its row to NaN when it is read back.

    Raises TypeError for another dtype; ValueError for another rank, an odd number of columns or none, an inner stride
    other than 1, or more than 16384 columns of the result; RuntimeError for a device without Triton, or an input that
    requires grad.
    """
    name = "swiglu_quantize"
    n_rows, both = check_rows(name, packed, DTYPES)
    if both % 2:
        raise ValueError(f"{name}: {both} columns; the first half is the gate, so there must be two halves")
    n_cols = both // 2
    check_length(name, n_cols, ROW_MAX, "torch's silu(gate) * up, then quantize_row of examples/fp8/quantize.py")
    q, scale = empty_quantized(name, packed[:, :n_cols], "row", dtype)
    if n_rows:
        block_n = max(32, triton.next_power_of_2(n_cols))
        swiglu_quantize_kernel[(n_rows,)](
            packed, q, scale, packed.stride(0), n_cols, MOST=fp8_max(dtype), FULL=n_cols == block_n, BLOCK_N=block_n,
            num_warps=max(1, min(16, block_n // (32 * PER_THREAD))),
        )  # fmt: skip
    return q, scale


def swiglu_reference(packed: torch.Tensor) -> torch.Tensor:
    gate, up = packed.double().chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up
