"""Fusion: add, ReLU and multiply in one kernel instead of three, and what that can be worth.

Technique  Eager runs three kernels, and each reads its inputs from memory and writes its result back: add moves
           3 tensors, ReLU 2, multiply 2, together 7 passes. One kernel keeps the intermediates in registers and
           moves 3. When memory is the limit, time follows bytes, so the most that fusion can give is 7 / 3 = 2.33x.
           A tensor that fits in L2 behaves differently: the intermediates never reach memory, and what counts
           is the number of launches.
Question   What is fusing three elementwise kernels worth, and why not more?
Needs      triton
Shapes     x, y of one shape, both contiguous, and a number scale -> relu(x + y) * scale, same shape and dtype.
Dtypes     float32, float16, bfloat16; the arithmetic is float32, rounded once, where eager rounds three times.
Errors     TypeError for another dtype or two dtypes; ValueError for two shapes or a layout that is not contiguous;
           RuntimeError for a device without Triton or an input that requires grad.
Wins when  the tensors are larger than L2; torch.compile finds the same fusion by itself.
Source     chapter section "Fused Add-ReLU-Mul kernel", whose "3-4x" the bytes rule out.
Run        python examples/triton/fused_add_relu_mul.py
"""

from __future__ import annotations

from harness import Harness, Work, require_triton_device, run

import torch
import triton
import triton.language as tl

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
    tl.store(out_ptr + offsets, (rectified * scale).to(out_ptr.dtype.element_ty), mask=inside)


def fused_add_relu_mul(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """relu(x + y) * scale for two contiguous tensors of one shape; limits and errors are in the module docstring."""
    name = "fused_add_relu_mul"
    require_triton_device(name, x, y)
    if x.dtype not in DTYPES or y.dtype != x.dtype:
        raise TypeError(f"{name}: dtypes {x.dtype} and {y.dtype}; both must be the same one of {DTYPES}")
    if not isinstance(scale, (int, float)):
        raise TypeError(f"{name}: scale is a {type(scale).__name__}; pass a Python number")
    if x.shape != y.shape:
        raise ValueError(f"{name}: shapes {tuple(x.shape)} and {tuple(y.shape)} differ; expand or slice one first")
    if not (x.is_contiguous() and y.is_contiguous()):
        raise ValueError(f"{name}: strides {x.stride()} and {y.stride()}; call .contiguous() first")
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


def explain(h: Harness, x: torch.Tensor, table) -> None:
    """Put the measured ratio next to the one that counting bytes predicts."""
    eager_row, fused_row = table.rows[0], table.rows[-1]
    ideal = EAGER_PASSES / FUSED_PASSES
    h.say(f"bytes allow {EAGER_PASSES}/{FUSED_PASSES} = {ideal:.2f}x out of cache; measured {fused_row.speedup:.2f}x")
    cache = torch.cuda.get_device_properties(x.device).L2_cache_size
    if FUSED_PASSES * x.nbytes < cache:
        h.say(
            f"three tensors of {x.nbytes / 2**20:.0f} MiB fit in {cache / 2**20:.0f} MiB of L2: eager's intermediates "
            f"never reach memory, and its two further kernels cost {(eager_row.ms - fused_row.ms) * 1000:.1f} us"
        )
    else:
        eager_tbps = EAGER_PASSES * x.nbytes / eager_row.ms / 1e9
        h.say(
            f"eager moves {EAGER_PASSES} passes at {eager_tbps:.2f} TB/s, fused {FUSED_PASSES} at {fused_row.tbps:.2f}"
        )


def demo(h: Harness) -> None:
    for n in (0, 1, 997, BLOCK + 1):
        h.check(fused_add_relu_mul, reference, h.randn(n), h.randn(n), 1.5, terms=0, roundings=2)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e38, -1e-38, 2.0, -3.0], device=h.device)
    h.check(
        fused_add_relu_mul,
        reference,
        special,
        torch.zeros_like(special),
        2.0,
        what="NaN, infinities, extremes",
        terms=0,
    )

    x = h.meta(1 << 20, dtype=torch.float32)
    h.codegen(fused_add_relu_mul, x, x, 2.0, find=dict.fromkeys((80, 90, 100, 120), ("ld.global.v4", "st.global.v4")))

    for n in h.pick(interpreted=(1 << 16,), quick=(1 << 26, 1 << 20), full=(1 << 28, 1 << 20)):
        n = h.fit(n, bytes_each=48)
        x, y = h.randn(n), h.randn(n)
        variants = {"torch": eager, "torch.compile": h.compiled(eager), "triton fused": fused_add_relu_mul}
        work = Work(bytes=FUSED_PASSES * x.nbytes)
        table = h.compare(variants, reference, x, y, 2.0, baseline="torch", work=work, terms=0, roundings=2)
        if table and table.rows[-1].ms and x.is_cuda:
            explain(h, x, table)


if __name__ == "__main__":
    run(demo)
