"""What kernels over rows share: 16-bit values widened where they are used, column sums, and checks of operands."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits, interpreted, require_triton_device
from examples.common.operands import check_rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ASSEMBLY = tl.constexpr(not interpreted())  # the interpreter has none
STAGES = 3  # two rows in flight to shared memory while one is in use
SPLIT_STAGES = 3  # where Triton loads at the end of an iteration: from one to two rows are in flight


@triton.jit
def widen(x):
    """x in float32, converted where it is used: LLVM would hoist that out of the loop, at twice the registers.

    Volatile assembly stays where it is. It takes pairs of 16-bit values, which share a 32-bit register.
    """
    if x.dtype == tl.float32 or not ASSEMBLY:
        return x.to(tl.float32)
    elif x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=False, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=f,=f,r", [x], dtype=tl.float32, is_pure=False, pack=2,
        )  # fmt: skip


def row_block(n_cols: int) -> int:
    """The power of two that holds a row; 16 at least, because `widen` takes pairs."""
    return max(16, triton.next_power_of_2(n_cols))


def pipeline_stages(x: torch.Tensor, elements: int, per_sm: int, most: int = STAGES) -> int:
    """`most`, or as many as leave shared memory for `per_sm` programs, when a stage takes `elements` of x's dtype."""
    room = (device_limits(x.device).shared_bytes - 8192) // per_sm  # 8 KiB for sums across warps
    return max(1, min(most, 1 + room // (elements * x.element_size())))


def registers(num_warps: int, per_sm: int) -> int:
    """Registers a thread may have (maxnreg) where per_sm programs of num_warps warps share an SM's 65536."""
    return 65536 // (32 * num_warps * per_sm)


@triton.jit
def column_sums_kernel(
    a_parts_ptr, b_parts_ptr, a_ptr, b_ptr, n_parts, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    a = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, n_parts, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        inside = (rows < n_parts)[:, None] & (cols < n_cols)[None, :]
        at = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
        a += tl.load(a_parts_ptr + at, mask=inside, other=0.0)
        b += tl.load(b_parts_ptr + at, mask=inside, other=0.0)
    tl.store(a_ptr + cols, tl.sum(a, axis=0).to(a_ptr.dtype.element_ty), mask=cols < n_cols)
    tl.store(b_ptr + cols, tl.sum(b, axis=0).to(b_ptr.dtype.element_ty), mask=cols < n_cols)


def column_sums(parts: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums over the parts of float32 `parts` [2, n_parts, n_cols], each [n_cols] in the dtype of `like`."""
    _, n_parts, n_cols = parts.shape
    a, b = torch.empty_like(like), torch.empty_like(like)
    block_n = 32 if n_cols <= 4096 else 128  # few columns, so that there is a program for most SMs; at least 128 bytes
    column_sums_kernel[(triton.cdiv(n_cols, block_n),)](
        parts[0], parts[1], a, b, n_parts, n_cols, BLOCK_M=2048 // block_n, BLOCK_N=block_n, num_warps=8
    )
    return a, b


def check_length(name: str, n_cols: int, limit: int, instead: str) -> None:
    """Raises ValueError for a row that is longer than a kernel takes; `instead` names one that takes it."""
    if n_cols > limit:
        raise ValueError(f"{name}: {n_cols} columns, but a row may have {limit} here; call {instead}")


def check_norm(name: str, dtypes: tuple, matrices: dict, columns: dict, rows: dict | None = None) -> tuple[int, int]:
    """n_rows and n_cols of matrices["x"]; the other matrices are like x, `columns` and `rows` have a value for each.

    Raises what check_rows does; TypeError for a vector of `columns` that is None, or of another dtype than x's or
    float32, the same for all, and for one of `rows` that is not float32; ValueError for sizes, dtypes of matrices and
    strides that do not fit x.
    """
    rows = rows or {}
    if missing := [label for label, vector in columns.items() if vector is None]:
        ones = "torch.ones_like(x[0]) as weight, torch.zeros_like(weight) as bias"
        raise TypeError(f"{name}: {missing[0]} is None; pass {ones}")
    require_triton_device(name, *matrices.values(), *columns.values(), *rows.values())
    x, weight = matrices["x"], next(iter(columns.values()))
    n_rows, n_cols = check_rows(name, x, dtypes)
    for label, matrix in matrices.items():
        if matrix.shape != x.shape or matrix.dtype != x.dtype:
            raise ValueError(
                f"{name}: {label} is {tuple(matrix.shape)} {matrix.dtype}, but x is {tuple(x.shape)} {x.dtype}; "
                f"pass a {label} of x's shape and dtype"
            )
        if matrix.stride(1) != 1 and n_cols > 1:
            raise ValueError(f"{name}: {label} has strides {matrix.stride()}; call {label}.contiguous() first")
    for label, vector in columns.items():
        if vector.dtype not in (x.dtype, torch.float32) or vector.dtype != weight.dtype:
            raise TypeError(
                f"{name}: {label} is {vector.dtype}; weight and bias must both be {x.dtype} as x, or both torch.float32"
            )
    for label, vector in rows.items():
        if vector.dtype != torch.float32:
            raise TypeError(f"{name}: {label} is {vector.dtype}; pass the float32 one that the forward returned")
    for label, vector in (columns | rows).items():
        size = n_rows if label in rows else n_cols
        if vector.shape != (size,) or (vector.stride(0) != 1 and size > 1):
            raise ValueError(
                f"{name}: {label} has shape {tuple(vector.shape)} and strides {vector.stride()}, but x of "
                f"{tuple(x.shape)} needs [{size}], contiguous"
            )
    return n_rows, n_cols


def check_eps(name: str, eps: float) -> None:
    """Raises TypeError for an eps that is no number, ValueError for one that is negative or not finite in float32."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{name}: eps is a {type(eps).__name__}; pass a Python number such as 1e-5")
    if not 0 <= eps < 1e30:  # NaN is not
        raise ValueError(f"{name}: eps is {eps}; pass a number from 0 up that float32 can hold, such as 1e-5")


def check_layer_norm(name: str, x, weight, bias, eps: float) -> tuple[int, int]:
    """n_rows and n_cols of x, and what check_norm and check_eps say of a LayerNorm's operands."""
    check_eps(name, eps)
    return check_norm(name, DTYPES, {"x": x}, {"weight": weight, "bias": bias})


def check_layer_norm_backward(name: str, dy, x, weight, mean, rstd) -> tuple[int, int]:
    """n_rows and n_cols of x, and what check_norm says of the operands of a LayerNorm's backward."""
    return check_norm(name, DTYPES, {"x": x, "dy": dy}, {"weight": weight}, {"mean": mean, "rstd": rstd})
