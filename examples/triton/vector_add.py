"""Vector addition: programs, blocks and masks, the shape of every Triton kernel.

Technique  The vector is cut into blocks; program i owns block i and moves it with one masked load per input and one
           masked store. Three tensor passes are all it needs (2 reads, 1 write), so memory bandwidth is its
           only limit: 3 * n * itemsize bytes over the copy bandwidth is the floor.
Question   What are programs, blocks and masks, and how close to the memory's limit does the plainest kernel get?
Needs      triton
Shapes     x, y of one shape, both contiguous -> x + y, same shape and dtype. Any number of elements.
Dtypes     float32, float16, bfloat16.
Errors     TypeError for another dtype or two dtypes; ValueError for two shapes or a layout that is not contiguous;
           RuntimeError for a device without Triton or an input that requires grad.
Wins when  never against torch's own add, which moves the same bytes at the same rate: the point is to be equal.
Source     chapter section "Triton kernel basics".
Run        python examples/triton/vector_add.py
"""

from __future__ import annotations

from harness import Harness, Work, require_triton_device, run

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 1024


@triton.jit
def vector_add_kernel(x_ptr, y_ptr, out_ptr, n_elements, BLOCK: tl.constexpr):
    # int64: with more than 2**31 elements the 32-bit product would wrap to another block's address.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n_elements  # the last block is rarely full; without the mask it writes past the end
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, x + y, mask=inside)


def vector_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y for two contiguous tensors of one shape; limits and errors are in the module docstring."""
    require_triton_device("vector_add", x, y)
    if x.dtype not in DTYPES or y.dtype != x.dtype:
        raise TypeError(f"vector_add: dtypes {x.dtype} and {y.dtype}; both must be the same one of {DTYPES}")
    if x.shape != y.shape:
        raise ValueError(f"vector_add: shapes {tuple(x.shape)} and {tuple(y.shape)} differ; expand or slice one first")
    if not (x.is_contiguous() and y.is_contiguous()):
        raise ValueError(f"vector_add: strides {x.stride()} and {y.stride()}; call .contiguous() first")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_elements = x.numel()
    if n_elements:  # a grid of zero programs is a launch error
        # 16 bytes per thread and tensor: one 128-bit access each, with enough threads to keep memory busy.
        num_warps = BLOCK * x.element_size() // (16 * 32)
        grid = (triton.cdiv(n_elements, BLOCK),)
        vector_add_kernel[grid](x, y, out, n_elements, BLOCK=BLOCK, num_warps=num_warps)
    return out


def reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.double() + y.double()


def demo(h: Harness) -> None:
    # Nothing, one element, a prime, one block, one block and one: where masks go wrong.
    for n in (0, 1, 997, BLOCK, BLOCK + 1):
        h.check(vector_add, reference, h.randn(n), h.randn(n), terms=0)
    half = [h.randn(3, 781, dtype=torch.float16) for _ in range(2)]
    h.check(vector_add, reference, *half, terms=0)  # terms=0: nothing is summed, so only the result is rounded

    x = h.meta(1 << 20, dtype=torch.float32)
    h.codegen(vector_add, x, x, find=dict.fromkeys((80, 90, 100, 120), ("ld.global.v4", "st.global.v4")))

    n = h.fit(h.pick(interpreted=1 << 16, quick=1 << 26, full=1 << 28), bytes_each=48)
    x, y = h.randn(n), h.randn(n)
    variants = {"torch": torch.add, "torch.compile": h.compiled(torch.add), "triton": vector_add}
    h.compare(variants, reference, x, y, baseline="torch", work=Work(bytes=3 * x.nbytes), terms=0)


if __name__ == "__main__":
    run(demo)
