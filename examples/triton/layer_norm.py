"""LayerNorm, forward and backward: sums along rows and columns, each input read once, each output written once.

Forward, a row's mean and variance must be known before any of it is written. The kernel below holds a row in registers,
or several short ones, so x is read once and y written once: 2 * n_rows * n_cols elements, as a copy of x moves. Longer
rows stay in the L1 cache of an SM (layer_norm_resident.py); where it holds only one such row, a group of programs
shares a row (layer_norm_long.py).

Backward needs two means along each row and two sums along each column: with x_hat = (x - mean) * rstd, g = dy * weight

    dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)),  dweight = sum(dy * x_hat),  dbias = sum(dy)

x and dy are read and dx is written: 3 * n_rows * n_cols. Sums along columns would take a second pass; instead, programs
take many rows each and keep these sums in registers (layer_norm_backward.py). A row too long for one program is shared
by a group of them, which exchange the sums of each row (layer_norm_backward_split.py).

Question   How close to a copy is LayerNorm, forward and in training, whose gradients are summed along both axes?
Needs      triton
Wins when  x is larger than L2: in training, and forward alone at 65536 columns. Up to 16384 columns torch.compile is as
           fast in the forward or, at 16384 on an H100, faster.
Variants   layer_norm_resident.py, layer_norm_long.py, layer_norm_backward.py, layer_norm_backward_split.py
Study      studies/triton/layer_norm.py
Source     goes beyond the chapter; backward as derived in Triton tutorial 05 (layer norm), without its locks.
"""

from __future__ import annotations

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl

from examples.common.compiled import compiled_modes, over_library
from examples.common.device import interpreted, require_triton_device
from examples.common.rows import check_layer_norm, check_length, row_block, widen
from examples.common.training import forward_backward, in_float64
from examples.triton.layer_norm_backward import LayerNorm, layer_norm_backward  # noqa: F401 (for calls without autograd)
from examples.triton.layer_norm_long import layer_norm_split, split_limit
from examples.triton.layer_norm_resident import layer_norm_resident

ROWS_MAX = 1024  # longer rows are faster from L1 than held in registers
L1_BEST_KIB = 64  # rows of twice that leave room for one program on an SM, and there programs share a row


@triton.jit
def layer_norm_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, stride_xm, stride_ym, n_rows, n_cols, eps,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    # int64 because row * stride passes 2**31 elements on tensors that still fit in memory.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_N)
    in_row = (cols < n_cols)[None, :]
    inside = (rows < n_rows)[:, None] & in_row
    x = widen(tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=inside, other=0.0))
    # Measured from the row's first element: a mean of 10000 with a spread of 1 would cost float32 four digits.
    origin = tl.load(x_ptr + rows * stride_xm, mask=rows < n_rows, other=0.0).to(tl.float32)
    x -= origin[:, None]
    if not FULL:
        x = tl.where(in_row, x, 0.0)
    mean = tl.sum(x, axis=1) / n_cols
    # Not E[x^2] - E[x]^2, of which nothing would be left where the mean is large.
    x -= mean[:, None]
    if not FULL:
        x = tl.where(in_row, x, 0.0)
    eps = tl.cast(eps, tl.float32)  # torch.compile passes a float in 64 bits
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
    weight = widen(tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0))
    bias = widen(tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0))
    y = x * rstd[:, None] * weight[None, :] + bias[None, :]
    tl.store(y_ptr + rows[:, None] * stride_ym + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + rows, origin + mean, mask=rows < n_rows)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


def layer_norm_rows(x, weight, bias, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) for rows of up to ROWS_MAX columns, each held in one program's registers."""
    n_rows, n_cols = check_layer_norm("layer_norm_rows", x, weight, bias, eps)
    check_length("layer_norm_rows", n_cols, ROWS_MAX, "layer_norm_forward")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(n_rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if n_rows:  # a grid of zero programs is a launch error
        block_n = row_block(n_cols)
        rows = max(1, min(64, 2048 // block_n))
        layer_norm_rows_kernel[(triton.cdiv(n_rows, rows),)](
            x, weight, bias, y, mean, rstd, x.stride(0), y.stride(0), n_rows, n_cols, eps,
            ROWS=rows, BLOCK_N=block_n, FULL=n_cols == block_n, num_warps=4,
        )  # fmt: skip
    return y, mean, rstd


def layer_norm_forward(x, weight, bias, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) of x [n_rows, n_cols], by the kernel that is fastest for the row length; mean, rstd float32.

    Takes and raises what layer_norm does, save that x is a matrix with any row stride, and nothing requires grad. For
    float32 x, y is computed from the mean as two float32 numbers; the mean returned is their sum, rounded once.
    """
    _, n_cols = check_layer_norm("layer_norm_forward", x, weight, bias, eps)
    if n_cols <= ROWS_MAX:
        return layer_norm_rows(x, weight, bias, eps)
    fits = n_cols * x.element_size() <= L1_BEST_KIB * 1024
    resident = fits or interpreted() or n_cols > split_limit(x, weight)
    return (layer_norm_resident if resident else layer_norm_split)(x, weight, bias, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """LayerNorm over the last dimension of x [..., n_cols], once differentiable in x, weight and bias [n_cols].

    x: float32, float16 or bfloat16, last dimension contiguous; y has its dtype. weight and bias: both of x's dtype, or
    both float32. The arithmetic is float32. Raises TypeError for another dtype, a missing weight or bias, or an eps
    that is no number; ValueError for no columns, sizes that do not fit, an inner stride other than 1, or an eps that is
    negative or not finite; RuntimeError for a device without Triton, or a second derivative. The programs of rows over
    L1_BEST_KIB, in backward of those over 8192 columns, wait for each other. The wait ends beside kernels that keep
    their SMs, as NCCL's do, and in a context with a part of the SMs, as long as an eighth is left; with less call
    layer_norm_resident and layer_norm_backward_loop. Values of a row that differ by over 2e18 overflow when squared.
    Backward knows the mean rounded to float32: there x_hat is off by up to 6e-8 * |mean| / std.
    """
    with torch.no_grad():  # this one has a backward
        require_triton_device("layer_norm", x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"layer_norm: shape {tuple(x.shape)} has no columns; a row needs at least one element")
    return LayerNorm.apply(x, weight, bias, eps, layer_norm_forward)


def torch_layer_norm(x, weight, bias, eps: float = 1e-5) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


reference, reference_step = in_float64(torch_layer_norm), in_float64(forward_backward(torch_layer_norm))


def short_of_rows(x, weight, bias, dy) -> tuple[torch.Tensor, ...]:
    """y and dx as they are; dweight and dbias without the last 4 rows: what a check of sums over rows must notice."""
    return *reference_step(x, weight, bias, dy)[:2], *reference_step(x[:-4], weight, bias, dy[:-4])[2:]


def inputs(h: Harness, *shape: int) -> tuple[torch.Tensor, ...]:
    """Rows with statistics of their own, some with a variance near eps: a neighbour's mean or no eps is then wrong."""
    weight, bias = (h.randn(shape[-1], dtype=h.half) for _ in range(2))
    return h.rows(*shape, dtype=h.half), weight, bias, h.randn(*shape, dtype=h.half)


def compare_both(h: Harness, rows: int, cols: int):
    x, *others = inputs(h, rows, cols)
    variants = {"torch": torch_layer_norm} | compiled_modes(h, torch_layer_norm) | {"triton": layer_norm}
    # torch adds up dweight and dbias in parts that it rounds to 16 bits, and on a CPU rounds mean and rstd so too.
    rounded = torch.finfo(h.half).eps * (2 if h.interpreted else 0.5)
    forward = h.compare(
        variants, reference, x, *others[:2], title="forward", case=f"{rows}x{cols}", baseline="torch",
        work=Work(bytes=2 * x.nbytes), terms=cols,
    )  # fmt: skip
    training = h.compare(
        {name: forward_backward(fn) for name, fn in variants.items()}, reference_step, x, *others,
        title="forward + backward", case=f"{rows}x{cols}", baseline="torch", work=Work(bytes=5 * x.nbytes),
        terms=max(rows, cols), library={"operand_eps": rounded}, wrong={"without 4 rows of dweight": short_of_rows},
    )  # fmt: skip
    return forward, training


def demo(h: Harness) -> None:
    for shape in [(3, 781), (4, 5, 1025), (9, 8208), (7, 20000)]:  # odd; the last two are shared in backward
        h.check(forward_backward(layer_norm), reference_step, *inputs(h, *shape), terms=shape[-1], what=f"{shape}")
    rows, columns = h.meta(4096, 1024), h.meta(1024)
    h.codegen(layer_norm_rows, rows, columns, columns, find={90: ("ld.global.v4", "st.global.v4")})

    elements = h.fit(h.pick(interpreted=1 << 17, quick=1 << 26, full=1 << 28), bytes_each=100)
    tables = [compare_both(h, elements // cols, cols) for cols in (1024, 16384, 65536)]

    def answer() -> str:
        both = list(zip(*tables, strict=True))
        forward, training = (", ".join(f"{table['triton'].of_ceiling:.0%}" for table in each) for each in both)
        gains = [over_library(each) for each in both]
        return (
            f"At 1024, 16384 and 65536 columns: {forward} of a copy's speed forward; {training} forward + backward. "
            f"Over torch's fastest call: {gains[0]:.2f}x forward, {gains[1]:.2f}x forward + backward (geometric means)."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
