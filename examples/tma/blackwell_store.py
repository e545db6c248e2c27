"""The epilogue partition of blackwell.py and blackwell_scaled.py: from tensor memory to registers, to memory by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier, tma

from examples.common.gluon import async_store, load_columns, next_slot
from examples.common.tiles import tile_coords


@gluon.jit
def epilogue_partition(
    accs, c_desc, c_bufs, a_whole_ptr, b_whole_ptr, M, N, BLOCK_N: gl.constexpr, ACCS: gl.constexpr,
    BUFFERS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Eight warps: each can read one quarter of the lanes. A tile of 128 x 256 is 64 registers of two numbers a thread,
    which it has to spare, so the tile leaves tensor memory at once and nobody waits for its stores. With per-tensor
    scales (nvfp4) it multiplies by both."""
    acc_bufs, acc_full, acc_empty = accs
    BLOCK_M: gl.constexpr = c_desc.block_shape[0]
    WIDTH: gl.constexpr = c_desc.block_shape[1]
    PARTS: gl.constexpr = BLOCK_N // WIDTH
    whole = 1.0
    if a_whole_ptr is not None:
        whole = gl.load(a_whole_ptr) * gl.load(b_whole_ptr)
    slot = 0
    phase = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        mbarrier.wait(acc_full.index(slot), phase)
        acc = acc_bufs.index(slot)
        parts = ()
        for part in gl.static_range(PARTS):
            c = load_columns(acc, part * WIDTH, WIDTH)
            if a_whole_ptr is not None:
                c = c * whole
            parts = parts + (c.to(c_desc.dtype),)  # noqa: RUF005  (Gluon has no stars)
        mbarrier.arrive(acc_empty.index(slot))
        for part in gl.static_range(PARTS):
            c_buf = c_bufs.index(part % BUFFERS)
            tma.store_wait(BUFFERS - 1)  # all but the latest have been read: this buffer too
            c_buf.store(parts[part])
            fence_async_shared()
            async_store(c_desc, [row, col + part * WIDTH], c_buf)
        slot, phase = next_slot(slot, phase, ACCS)
    tma.store_wait(0)
