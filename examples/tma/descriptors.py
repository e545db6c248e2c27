"""Descriptors: made on the host or on the device, what each costs, and every rule a tensor and its block must keep.

A TMA copy is told where a tensor lies by a descriptor of 128 bytes: start, sizes, strides, the box that one copy moves,
and the fill value for elements outside the tensor. The tensor has 1 to 5 dimensions, the last one contiguous; its start
and its other strides are multiples of 16 bytes. A descriptor is made in one of two places:
  host    TensorDescriptor(x, shape, strides, block): the driver encodes it anew at each launch, and it goes to the
          kernel as an argument, as 128 bytes of constant memory;
  device  tl.make_tensor_descriptor(x_ptr, ...) in the kernel: each program writes one (tensormap.replace in the PTX)
          into 128 bytes of workspace, for which Triton asks the allocator that triton.set_allocator was given.

Question   Which tensors can a descriptor describe, who notices when one cannot, and what does making one cost?
Needs      triton, sm_90
Wins when  host: the launch knows the tensor. device: only the kernel does (groups of tensors, a list of pointers), and
           many tiles share a descriptor. In the copy below, the loop that sharing needs costs about what sharing saves.
Variants   descriptors_rules.py (require_descriptor checks every rule)
Study      studies/tma/descriptors.py (each rule broken, on the GPU)
Source     goes beyond the chapter; limits: cuTensorMapEncodeTiled in the CUDA driver API; triton issue 10927; of
           coordinates: CUDA programming guide, triton pull request 9112, triton issue 11583
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable

from harness import Harness, Work, run

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from examples.common.device import device_limits, require_triton_device
from examples.common.operands import check_choice
from examples.common.tiles import copy_pointers_kernel, tile_corner
from examples.common.tma import rows_for_tma, tma_strides
from examples.common.untraced import untraced
from examples.tma.descriptors_rules import RULES, noticed, require_descriptor

TILE, WARPS = (64, 64), 4  # 8 KiB, so small that what a program does once shows
PROGRAMS_PER_SM = 16  # that keep their descriptors: as many of 4 warps as an SM holds
COPIES = ("pointers", "host", "device", "device, once per program")


@triton.jit
def _copy_tile(tile, x_desc, y_desc, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row, col = tile_corner(tile, N, BLOCK_M, BLOCK_N)
    y_desc.store([row, col], x_desc.load([row, col]))


@triton.jit
def copy_host_kernel(x_desc, y_desc, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    _copy_tile(tl.program_id(0), x_desc, y_desc, N, BLOCK_M, BLOCK_N)


@triton.jit
def copy_device_kernel(
    x_ptr, y_ptr, M, N, stride_xm, stride_ym, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    x_desc = tl.make_tensor_descriptor(x_ptr, [M, N], [stride_xm, 1], [BLOCK_M, BLOCK_N])
    y_desc = tl.make_tensor_descriptor(y_ptr, [M, N], [stride_ym, 1], [BLOCK_M, BLOCK_N])
    if KEPT:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
            _copy_tile(tile, x_desc, y_desc, N, BLOCK_M, BLOCK_N)
    else:
        _copy_tile(tl.program_id(0), x_desc, y_desc, N, BLOCK_M, BLOCK_N)


def with_workspace(device: torch.device, launch: Callable[[], None]) -> None:
    """launch() with an allocator for the descriptors that its kernel makes; the caller's own stays the caller's.

    The setting belongs to a context (contextvars): a new thread has none, and what is set in a copy is gone after it.
    """

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        # From torch's allocator, which hands out multiples of 512 bytes in the order of the current stream.
        return torch.empty(size, dtype=torch.uint8, device=device)

    context = contextvars.copy_context()
    context.run(triton.set_allocator, allocate)
    context.run(launch)


def launch_copy(form: str, x: torch.Tensor, y: torch.Tensor) -> None:
    """Starts one of COPIES without a check; the device forms use the allocator that they find."""
    M, N = x.shape
    tiles = triton.cdiv(M, TILE[0]) * triton.cdiv(N, TILE[1])
    sizes = (M, N, x.stride(0), y.stride(0), *TILE)
    if form == "host":
        x_desc, y_desc = (TensorDescriptor(each, [M, N], tma_strides(each), list(TILE)) for each in (x, y))
        copy_host_kernel[(tiles,)](x_desc, y_desc, N, *TILE, num_warps=WARPS)
    elif form == "pointers":
        copy_pointers_kernel[(tiles,)](x, y, *sizes, num_warps=WARPS)
    else:
        kept = form == "device, once per program"
        programs = min(tiles, PROGRAMS_PER_SM * device_limits(x.device).sms) if kept else tiles
        copy_device_kernel[(programs,)](x, y, *sizes, KEPT=kept, num_warps=WARPS)


@untraced
def copy(form: str, x: torch.Tensor) -> torch.Tensor:
    """A copy of x [M, N], not empty, of a dtype in descriptors_rules.DTYPES, by one of COPIES, in tiles of 64 x 64.

    The copy's rows start at multiples of 16 bytes. Raises TypeError for another dtype; ValueError for any other rule of
    require_descriptor or an unknown form; RuntimeError for a device without Triton or an input that requires grad.
    """
    require_triton_device("copy", x)
    check_choice("copy", COPIES, form=form)
    require_descriptor("copy", x, TILE)
    launch = functools.partial(launch_copy, form, x, y := rows_for_tma(x))
    with_workspace(x.device, launch) if form.startswith("device") else launch()
    return y


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.double()


def answer(table, by_triton: list[str]) -> str:
    more_us = table["host"].enqueue_us - table["pointers"].enqueue_us
    host, each, kept = (table.over("pointers", form) for form in ("host", "device", "device, once per program"))
    return (
        f"TensorDescriptor notices {len(by_triton)} of {len(RULES)} broken rules, require_descriptor all. Made on the "
        f"host, descriptors add {more_us:.0f} us a launch and copy at {host:.2f}x pointers' speed on the GPU; made by "
        f"each program for its one tile {each:.2f}x, for many tiles {kept:.2f}x."
    )


def demo(h: Harness) -> None:
    for M, N in [(1, 1), (65, 131), (200, 96)]:
        x = h.randn(M, triton.cdiv(N, 8) * 8, dtype=h.half)[:, :N]
        for form in COPIES:
            h.check(functools.partial(copy, form), reference, x, what=f"copy, {form} {M}x{N}", terms=0)
    x, tma = h.meta(4096, 4096, dtype=torch.float16), ("cp.async.bulk.tensor", "mbarrier")
    h.codegen(copy, "host", x, find={80: (), 89: (), 90: tma, 100: tma, 120: tma})
    h.codegen(copy, "device", x, find={90: tma})
    n = h.pick(interpreted=136, quick=4096, full=8192) if h.timing else 136
    x = h.randn(h.fit(n, bytes_each=40 * n), n, dtype=h.half)
    table = h.compare(
        {"torch": torch.clone} | {form: functools.partial(copy, form) for form in COPIES}, reference, x, title="copy",
        baseline="torch", work=Work(bytes=2 * x.nbytes), terms=0, peers=["pointers"],
    )  # fmt: skip
    by_triton = noticed(h.device)
    h.answer(lambda: answer(table, by_triton))


if __name__ == "__main__":
    run(demo)
