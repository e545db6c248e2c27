"""Fusion: add, ReLU and multiply in one kernel instead of three, and what that can be worth.

Eager runs three kernels. Each reads its inputs from memory and writes its result back: the addition moves 3 tensors,
ReLU 2, the multiplication 2, which makes 7 passes over memory. One kernel keeps the intermediates in registers and
moves 3. Where memory is the limit, time follows bytes: fusion is worth about 7 / 3 = 2.33x, and saves no arithmetic.

Tensors that fit in L2 gain for another reason: the intermediates never reach memory, but each kernel still takes a
few microseconds to start and to drain, and eager has three of them.

Question   What is fusing three elementwise kernels worth, and why not more?
Needs      triton
Wins when  over eager, most beyond L2; for small tensors only if the host is ahead of the GPU: the host takes longer to
           launch this kernel than eager's three. torch.compile finds the same fusion and is as fast.
Study      studies/triton/fused_add_relu_mul.py
Source     chapter section "Fused Add-ReLU-Mul Kernel", whose expected 3-4x the bytes rule out (H200: 2.37x, since
           eager reaches a little less bandwidth), and whose benchmark times the first call, which compiles
"""

from __future__ import annotations

from harness import Harness, Work, near, run

import torch
import triton
import triton.language as tl

from examples.common.operands import check_elementwise

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 1024
EAGER_PASSES, FUSED_PASSES = 3 + 2 + 2, 3


@triton.jit
def fused_add_relu_mul_kernel(x_ptr, y_ptr, out_ptr, scale, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=inside).to(tl.float32)
    added = x + y
    # `added > 0` would turn NaN into 0; this form lets NaN through, as torch.relu does.
    rectified = tl.where(added < 0, 0.0, added)
    scale = tl.cast(scale, tl.float32)  # torch.compile passes a float in 64 bits
    tl.store(out_ptr + offsets, (rectified * scale).to(out_ptr.dtype.element_ty), mask=inside)


def fused_add_relu_mul(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """relu(x + y) * scale for contiguous x and y of one shape, in float32, float16 or bfloat16.

    The arithmetic is float32 and rounds to the output's dtype once, where eager rounds the sum and the product.
    Raises TypeError for another dtype, two dtypes, or a scale that is no Python number; ValueError for two shapes, two
    devices or a layout that is not contiguous; RuntimeError for a device without Triton or an input that requires grad.
    """
    check_elementwise("fused_add_relu_mul", DTYPES, x, y)
    if not isinstance(scale, (int, float)):
        raise TypeError(f"fused_add_relu_mul: scale is a {type(scale).__name__}; pass a Python number")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_elements = x.numel()
    if n_elements:
        num_warps = BLOCK * x.element_size() // (16 * 32)  # one 128-bit access per thread and tensor
        grid = (triton.cdiv(n_elements, BLOCK),)
        fused_add_relu_mul_kernel[grid](x, y, out, float(scale), n_elements, BLOCK=BLOCK, num_warps=num_warps)
    return out


def eager(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.relu(x + y) * scale


def reference(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.relu(x.double() + y.double()) * scale


def demo(h: Harness) -> None:
    for n in (0, 1, 997, BLOCK + 1):
        h.check(fused_add_relu_mul, reference, h.randn(n), h.randn(n), 1.5, terms=0, roundings=2)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e38, -1e-38, 2.0, -3.0], device=h.device)
    zeros = torch.zeros_like(special)
    h.check(fused_add_relu_mul, reference, special, zeros, 2.0, what="NaN, infinities, extremes", terms=0)

    x = h.meta(1 << 20, dtype=torch.float32)
    h.codegen(fused_add_relu_mul, x, x, 2.0, find=dict.fromkeys((80, 90, 100, 120), ("ld.global.v4", "st.global.v4")))

    tables = []
    for n in h.pick(interpreted=(1 << 16, 1 << 12), quick=(1 << 26, 1 << 20), full=(1 << 28, 1 << 20)):
        n = h.fit(n, bytes_each=48)
        x, y = h.randn(n), h.randn(n)
        variants = {"torch": eager, "torch.compile": h.compiled(eager), "triton": fused_add_relu_mul}
        work = Work(bytes=FUSED_PASSES * x.nbytes)
        tables.append(h.compare(variants, reference, x, y, 2.0, baseline="torch", work=work, terms=0, roundings=2))
    h.answer(lambda: worth(*tables))


def worth(large, small) -> str:
    """What was measured, beside what counting bytes predicts."""
    gain, bound = large.over("torch"), EAGER_PASSES / FUSED_PASSES
    verdict = "so bytes explain it" if near(gain, bound, within=0.05) else "so bytes do not explain it"
    compiled = " and ".join(f"{table.over('torch', 'torch.compile'):.2f}x" for table in (large, small))
    return (
        f"{gain:.2f}x eager for {large.case}, where 7 passes over memory against 3 predict {bound:.2f}x, {verdict}; "
        f"{small.over('torch'):.2f}x for {small.case}; torch.compile's own fusion: {compiled}"
    )


if __name__ == "__main__":
    run(demo)
