"""Two bugs that the interpreter shows, a bad value and a race, and the order in which it runs programs.

What the interpreter cannot show: races within a program, tiles that exceed shared memory, bfloat16 (silently wrong),
and tl.device_assert (skipped; Python's assert is not).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from examples.common.operands import check_elementwise

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 1024


@triton.jit
def sqrt_kernel(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements, other=1.0).to(tl.float32)
    # Checked in the interpreter and, on a GPU, with TRITON_DEBUG=1. One value: a block is true whatever it holds.
    assert tl.min(x, axis=0) >= 0, "x is negative"
    tl.store(y_ptr + offsets, tl.sqrt(x).to(y_ptr.dtype.element_ty), mask=offsets < n_elements)


@triton.jit
def total_kernel(x_ptr, total_ptr, n_elements, BLOCK: tl.constexpr, RACY: tl.constexpr):
    if RACY and tl.program_id(0) == 0:
        tl.store(total_ptr, 0.0)  # the planted bug: no other program waits for this
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements, other=0.0)
    tl.atomic_add(total_ptr, tl.sum(x.to(tl.float32), axis=0))


def elementwise(name: str, kernel, x: torch.Tensor) -> torch.Tensor:
    """What `kernel` makes of a contiguous x in float32, float16 or bfloat16."""
    check_elementwise(name, DTYPES, x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():  # a grid of zero programs is a launch error
        kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
    return y


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """sqrt(x) for a contiguous x of DTYPES. A negative value gives NaN, or an error where asserts are checked."""
    return elementwise("sqrt", sqrt_kernel, x)


def total(x: torch.Tensor, racy: bool = False) -> torch.Tensor:
    """The sum of a contiguous x of DTYPES, as a float32 scalar on x's device.

    `racy`: the kernel itself clears the scalar, instead of a launch before it; with no elements it stays unwritten.
    """
    check_elementwise("total", DTYPES, x)
    result = (torch.empty if racy else torch.zeros)((), dtype=torch.float32, device=x.device)
    if x.numel():
        total_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, result, x.numel(), BLOCK=BLOCK, RACY=racy)
    return result


@contextmanager
def programs_in_reverse() -> Iterator[None]:
    """The interpreter runs the programs of a grid in order; within this, from the last to the first.

    A result that changes depends on the order. One that does not may still lose updates on a GPU, where a load, an
    addition and a store stand for tl.atomic_add: interpreted programs never overlap.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    in_order = builder.set_grid_idx
    builder.set_grid_idx = lambda *at: in_order(*(size - 1 - i for size, i in zip(builder.grid_dim, at, strict=True)))
    try:
        yield
    finally:
        builder.set_grid_idx = in_order
