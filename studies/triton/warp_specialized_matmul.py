"""warp_specialized_matmul, in detail: every kind of loop on every architecture, the chapter's own, what is done twice.

On Hopper the compiler leaves barriers that no partition uses in the first bytes of the ring of loaded tiles, without
invalidating them as PTX demands. Without tools no result was ever wrong on an H200. Compute Sanitizer reports these
barriers as initialized twice, and results were wrong under its racecheck and synccheck, and once under memcheck. Where
the wrong columns were looked at (under the first two), their elements of b lie in those bytes, 4 for each buffer of the
ring. So under a sanitizer the lesson runs the specialized kernels without holding them to a reference.
"""

from __future__ import annotations

import re

from harness import Harness
from harness.codegen import CodegenError, compile_for, dump

import torch
import triton
import triton.language as tl

from examples.common.device import device_limits
from examples.common.operands import check_elementwise
from examples.triton.warp_specialized_matmul import BLOCK_K, BLOCKS, DTYPES, TIMED, matmul_specialized, outcome

SPECIALIZED, IGNORED, NOT_SUPPORTED = "specialized", "ignored", "not supported"  # what outcome() begins with
# Architecture, loop, rows of the tile, warps, descriptors: the rules of the lesson, and what this repository relies on.
FORMS = {
    (90, "k", 64, 4, "host"): SPECIALIZED, (90, "k", 128, 4, "host"): NOT_SUPPORTED,
    (90, "k", 128, 4, "kernel"): SPECIALIZED, (90, "k", 128, 8, "kernel"): IGNORED,
    (90, "tiles", 64, 4, "kernel"): SPECIALIZED, (90, "tiles", 128, 4, "kernel"): SPECIALIZED,
    (90, "flattened tiles", 64, 4, "kernel"): IGNORED, (100, "k", 128, 8, "kernel"): SPECIALIZED,
    (100, "flattened tiles", 128, 8, "host"): SPECIALIZED, (120, "k", 64, 4, "host"): SPECIALIZED,
}  # fmt: skip
COPY_BLOCK = 1024


@triton.jit
def copy_specialized_kernel(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    # There is no MMA in this loop, and the compiler partitions no other.
    first = tl.program_id(0).to(tl.int64) * BLOCK  # so that offsets near 2**31 elements do not wrap
    for start in tl.range(first, n_elements, tl.num_programs(0) * BLOCK, num_stages=3, warp_specialize=True):
        offsets = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n_elements), mask=offsets < n_elements)


def copy_specialized(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a contiguous float16 or bfloat16 x; RuntimeError where the compiler fails on the request."""
    check_elementwise("copy_specialized", DTYPES, x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        programs = min(triton.cdiv(x.numel(), COPY_BLOCK), 4 * device_limits(x.device).sms)
        copy_specialized_kernel[(programs,)](x, y, x.numel(), BLOCK=COPY_BLOCK, num_warps=4)
    return y


def study(h: Harness) -> None:
    if h.shows_code:
        show_forms(h)
        show_copy(h)
        show_shares(h)
    if h.interpreted or not compile_for(copy_specialized, (h.meta(4097),), sms=(h.machine.sm,))[0].error:
        h.check(copy_specialized, torch.Tensor.double, h.randn(4097, dtype=h.half), terms=0)


def show_forms(h: Harness) -> None:
    """Ask the compiler for every form; raises where it does not do what the lesson says."""
    x, rows = h.meta(4096, 4096), {}
    for (sm, loop, block_m, num_warps, descriptors), expected in FORMS.items():
        (kernel,) = h.codegen(matmul_specialized, x, x, loop, True, block_m, num_warps, descriptors, find={sm: ()})
        label = f"sm_{sm} {loop}, {block_m} rows, {num_warps} warps, {descriptors}"
        rows[label] = {"request": outcome(kernel)}
        if not outcome(kernel).startswith(expected):
            raise CodegenError(f"{label}: {outcome(kernel)}; the lesson says {expected}")
    h.table("warp_specialize=True, by form", rows)


def show_copy(h: Harness) -> None:
    """The chapter's loop: Hopper's compiler ignores the request, Blackwell's may fail on it."""
    kernels = h.codegen(copy_specialized, h.meta(1 << 20), find={90: (), 100: ()})
    h.table("the elementwise loop", {"4 warps": {f"sm_{kernel.sm}": outcome(kernel) for kernel in kernels}})
    for kernel in kernels:
        if kernel.found.get("setmaxnreg") or (kernel.error and kernel.sm == 90):
            raise CodegenError(f"copy_specialized on sm_{kernel.sm}: {outcome(kernel)}; the lesson says {IGNORED}")


def share_of_mma(ptx: str, block_m: int) -> float:
    """How often a specialized Hopper kernel multiplies its tile: each wgmma in its code belongs to one partition."""
    columns = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16\.", ptx)
    return sum(64 * int(n) * 16 for n in columns) / (block_m * BLOCKS[block_m][0] * BLOCK_K)


def show_shares(h: Harness) -> None:
    """A tile of 64 rows is multiplied by both consumers, one of 128 is split; raises where that changed."""
    x = h.meta(4096, 4096)
    shares = {}
    for label, form in TIMED.items():
        shares[label] = share_of_mma(dump(matmul_specialized, (x, x), form, sm=90)["ptx"], form["block_m"])
    if shares != {label: 2 if form["block_m"] == 64 else 1 for label, form in TIMED.items()}:
        raise CodegenError(f"matmul_specialized on sm_90: times that a tile is multiplied {shares}")
    h.fact("times that a tile is multiplied on sm_90", shares)
