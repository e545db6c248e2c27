"""Pieces of Gluon pipelines: a ring of buffers with its barriers, slots and phases, and stores through shared memory.

A ring has STAGES slots: a buffer for each operand, and two mbarriers, full and empty. The n-th use of a slot is phase n
of both. The producer waits for phase n - 1 of empty, loads, and the bytes of its loads complete phase n of full; the
consumers wait for that, multiply, and their arrivals complete phase n of empty. A wait names a phase by its parity
alone, 0 or 1, so no barrier may be two phases ahead of a partition that waits at it. A new barrier counts as past the
phase of parity 1: a producer that starts with phase 1 finds every slot empty. Where a kernel needs a proof that its
partitions cannot deadlock, or that its buffers are free when written, it is in docs/memory_ordering.md.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from examples.common.device import architecture, compiling_for
from examples.common.tiles import split_columns

# Triton 3.9 has new names for the first two; there tensor memory knows the layout of what is read from it.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
get_tmem_reg_layout = getattr(blackwell, "get_tmem_reg_layout", None)
OWN_LAYOUT = gl.constexpr(get_tmem_reg_layout is None)
REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


def gluon_architecture(device: torch.device) -> int | None:
    """90 for sm_90, of a GPU or what is compiled for; None in the interpreter, which cannot run Gluon."""
    here = device.type == "cuda" or (device.type == "meta" and compiling_for())
    return architecture(device) if here else None


def require_wgmma(name: str, device: torch.device, instead: str) -> None:
    """Raises RuntimeError unless this is sm_90: elsewhere the compiler would not fail at wgmma, but end the process."""
    if (sm := gluon_architecture(device)) != 90:
        here = f"this is sm_{sm}" if sm else "Gluon kernels are not interpreted"
        raise RuntimeError(f"{name}: needs sm_90, for its wgmma ({here}): use {instead}")


@gluon.jit
def reinterpret(buf, dtype: gl.constexpr, SHAPE: gl.constexpr, layout: gl.constexpr):
    """The same bytes of shared memory, or columns of tensor memory, with another dtype, shape and layout."""
    if REINTERPRET:
        return buf.reinterpret(dtype, SHAPE, layout)
    else:
        return buf._reinterpret(dtype, SHAPE, layout)


@gluon.jit
def view_as(buf, SHAPE: gl.constexpr):
    """The same bytes of shared memory as blocks of another shape, such as [2 * COUNT, ROWS // 2, ...]."""
    if REINTERPRET:  # not by reinterpret(): Triton 3.6 passes a layout that was read from a buffer to no function
        return buf.reinterpret(buf.dtype, SHAPE, buf.layout)
    else:
        return buf._reinterpret(buf.dtype, SHAPE, buf.layout)


@gluon.jit
def load_columns(acc, START: gl.constexpr, WIDTH: gl.constexpr):
    """WIDTH columns of an accumulator in tensor memory (sm_100), in registers."""
    part = acc.slice(START, WIDTH)
    if OWN_LAYOUT:
        return part.load()
    else:
        layout: gl.constexpr = blackwell.TensorMemoryLayout((acc.shape[0], WIDTH), col_stride=1)
        return part.load(get_tmem_reg_layout(gl.float32, (acc.shape[0], WIDTH), layout, gl.num_warps()))


@gluon.jit
def buffers(desc, COUNT: gl.constexpr):
    """COUNT buffers in shared memory for blocks of a descriptor, laid out as TMA and the tensor cores take them."""
    SHAPE: gl.constexpr = [COUNT] + desc.block_shape  # noqa: RUF005  (Gluon has no stars)
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """COUNT mbarriers in shared memory, not initialized yet."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def init_ring(full, empty, COUNT: gl.constexpr, CONSUMERS: gl.constexpr):
    """full counts one arrival, the producer's; empty one of each consumer. The caller's fence_async_shared() must
    follow: it shows them to TMA."""
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The next slot of a ring; the parity that is waited for changes with every round."""
    slot += 1
    again = slot == STAGES
    return gl.where(again, 0, slot), gl.where(again, phase ^ 1, phase)


@gluon.jit
def previous_slot(slot, STAGES: gl.constexpr):
    return gl.where(slot == 0, STAGES - 1, slot - 1)


@gluon.jit
def release_previous(empty, slot, STAGES: gl.constexpr, pred=True):
    """The slot of the step before may be loaded again: its MMAs are done when those of this step have started."""
    mbarrier.arrive(empty.index(previous_slot(slot, STAGES)), pred=pred)


@gluon.jit
def store_tile(desc, buf, value, row, col):
    """Start a TMA store of `value` from `buf`, which must be free; the fence shows TMA what threads wrote."""
    buf.store(value.to(desc.dtype))
    fence_async_shared()
    async_store(desc, [row, col], buf)


@gluon.jit
def store_parts(
    desc, bufs, value, row, col, FIRST_BUFFER: gl.constexpr, BUFFERS: gl.constexpr, PART: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Store `value` in PARTS parts of its columns, in turn from BUFFERS buffers: one is written while another is read.

    A call passes PART = 0 and the first of its buffers in `bufs`. The last stores may still be reading when it returns.
    """
    if PARTS > 1:
        width: gl.constexpr = value.shape[1] // 2
        left, right = split_columns(value)
        store_parts(desc, bufs, left, row, col, FIRST_BUFFER, BUFFERS, PART, PARTS // 2)
        store_parts(desc, bufs, right, row, col + width, FIRST_BUFFER, BUFFERS, PART + PARTS // 2, PARTS // 2)
    else:
        tma.store_wait(BUFFERS - 1)  # all but the latest have been read: this buffer too
        store_tile(desc, bufs.index(FIRST_BUFFER + PART % BUFFERS), value, row, col)
