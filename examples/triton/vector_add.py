"""Vector addition: programs, blocks and masks, the shape of every Triton kernel.

A kernel describes one program; a launch runs a grid of them. Here the vector is cut into blocks of 1024 elements, and
program i owns block i: it loads the block of x and that of y, adds them, and stores the sums. The last block is rarely
full, so each access has a mask, and a masked-off lane touches no memory.

Each sum takes two reads and one write: 3 * n * itemsize bytes, one addition for every 12 bytes of float32, in whose
time a GPU could do tens. So memory is the limit, and the yardstick is the bandwidth of a plain copy. A copy's may be a
little lower, since half of its bytes are writes, and here a third are.

Question   What are programs, blocks and masks, and how close to the memory's limit does the plainest kernel get?
Needs      triton
Wins when  never: torch.add moves the same bytes at the same rate, and keeps that rate for 16-bit vectors whose length
           is not divisible by 16, where this kernel falls back to single elements (the study). The aim is to be equal.
Study      studies/triton/vector_add.py
Source     chapter section "Basic Triton Kernel"
"""

from __future__ import annotations

from harness import Harness, Work, near, run

import torch
import triton
import triton.language as tl

from examples.common.operands import check_elementwise

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
    """x + y for contiguous x and y of one shape, with any number of elements, in float32, float16 or bfloat16.

    Raises TypeError for another dtype or two dtypes; ValueError for two shapes, two devices or a layout that is not
    contiguous; RuntimeError for a device without Triton or an input that requires grad.
    """
    check_elementwise("vector_add", DTYPES, x, y)
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
    table = h.compare(variants, reference, x, y, baseline="torch", work=Work(bytes=3 * x.nbytes), terms=0)

    def answer() -> str:
        share, speed = table["triton"].of_ceiling, f"{table.over('torch'):.2f}x as fast as torch.add"
        if near(table["triton"], table["torch"]):
            speed = "as fast as torch.add: memory is the limit of both"
        why = " (which writes once per read, this once per two)" if share >= 1.005 else ""
        return f"At {n} elements, {share:.0%} of the bandwidth of a plain copy{why}, {speed}"

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
