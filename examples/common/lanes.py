"""Addresses that ptxas takes for different in each lane, so that a loop can load a number ahead of its use."""

from __future__ import annotations

import triton
import triton.language as tl

from examples.common.rows import ASSEMBLY


@triton.jit
def index_of_lane(index, zero):
    """index + lane * zero, where zero is 0, which ptxas does not know.

    What all lanes share ptxas may move to a uniform register, immediately after the load, and the move waits for it.
    """
    if not ASSEMBLY:
        return index
    return tl.inline_asm_elementwise(
        "{ .reg .b32 lane; mov.u32 lane, %laneid; mad.lo.s32 $0, lane, $2, $1; }",
        "=r,r,r", [index, zero], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
