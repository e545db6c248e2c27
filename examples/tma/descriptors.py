"""Descriptors: made on the host or on the device, what each costs, and every rule a tensor and its block must keep.

Technique  A TMA copy is told where a tensor lies by a descriptor of 128 bytes: start, sizes, strides, the box that one
           copy moves, and what stands for elements outside the tensor. It is made in one of two places:
           host      TensorDescriptor(x, shape, strides, block): the driver encodes it anew at each launch, and it goes
                     to the kernel as an argument, as 128 bytes of constant memory;
           device    tl.make_tensor_descriptor(x_ptr, ...) in the kernel: each program writes one (tensormap.replace in
                     the PTX) into 128 bytes of workspace, for which Triton asks the allocator that
                     triton.set_allocator was given. That setting belongs to a context (contextvars): a new thread has
                     none, and what is set within copy_context().run(...) is gone after it, as here.
           A box may lie partly or quite outside: loads fill in zeros (or NaN) there, to the element; window() is
           that and nothing else. Coordinates are loaded from anywhere, negative ones too, and stored to from 0 on;
           the last one is in either case a multiple of 16 bytes, also where the box lies quite outside. A store ends
           at the last row, but in it at the next multiple of 16 bytes: what the block holds there is written, so
           rows that end elsewhere need padding of their own. A box has at most 256 elements a side; a larger block
           Triton copies as several. Triton checks some of the rules on the host, fewer on the device, where a row
           stride that is no multiple of 16 bytes goes through, and of coordinates none: what breaks those ends in an
           illegal instruction. require_descriptor() and require_box() check them all; the table below breaks each. Two
           are refused because the driver documents neither, not because they do harm: a stride of 0 (an expanded
           tensor) was copied right by an H200, by either descriptor, and for a size of 0 no program is launched.
Question   Which tensors can a descriptor describe, who notices when one cannot, and what does making one cost?
Needs      triton, sm_90
Shapes     x of 1 to 5 dimensions, the last one contiguous, start and other strides multiples of 16 bytes; starts (the
           last one a multiple of 16 bytes) and sizes of a window, one for each dimension -> y of those sizes, its rows
           apart by a multiple of 16 bytes.
Dtypes     integers and floats of 8 to 64 bits, float8 too; NaN as padding: float16, bfloat16, float32, float64.
Errors     TypeError for another dtype, starts or sizes that are no ints; ValueError for every rule of the table, a
           count of starts or sizes that is not x's rank, a form there is not; RuntimeError for a device without Triton
           or an input that requires grad.
Wins when  host: the launch knows the tensor. device: only the kernel does (groups of tensors, a list of pointers), and
           many tiles share a descriptor, since each program that makes one executes some dozens of instructions more.
           In the copy below, whose tiles are small, the walk that shares it costs about what that saves.
Source     Triton's own checks: triton/tools/tensor_descriptor.py and make_tensor_descriptor in triton/language; limits:
           cuTensorMapEncodeTiled in the CUDA driver API; the silent case: triton issue 10927. Of boxes, each seen on
           an H200: no negative stores, CUDA programming guide on TMA; the last coordinate, triton pull request 9112
           and an assertion of its interpreter; where a store ends, triton issue 11583.
Run        python examples/tma/descriptors.py
"""

from __future__ import annotations

import contextvars
import functools
import math
import random
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import NamedTuple

from harness import (
    Harness,
    Work,
    device_limits,
    interpreted,
    require_tma_layout,
    require_triton_device,
    run,
    tma_descriptor,
)
from harness.codegen import CodegenError, compile_for, dump
from harness.process import Child, ChildFailed, report

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

NAN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, *NAN_DTYPES
)  # fmt: skip
MAX_BLOCK = 2**20  # elements: Triton's limit of any tensor in a kernel
BARRIERS = 64  # bytes of shared memory beside a block
WORKSPACE = 128  # bytes of one descriptor
TILE, WARPS = (64, 64), 4  # of the timed copies: small, so that what a program does once shows
PROGRAMS_PER_SM = 16  # that keep their descriptors: as many of 4 warps as an SM holds
FORMS = ("host", "device")
BOX_BLOCK = (16, 32)
COPIES = ("pointers", "host", "device", "device, kept")


@triton.jit
def _corner(tile, starts, tiles, BLOCK, RANK: tl.constexpr, SHIFTED: tl.constexpr):
    """Coordinates of a tile, the last dimension running fastest; SHIFTED: in x, where the window starts elsewhere."""
    first = tile % tiles[RANK - 1] * BLOCK[RANK - 1]
    if SHIFTED:
        first += starts[RANK - 1]
    corner = (first,)
    for i in tl.static_range(1, RANK):
        tile = tile // tiles[RANK - i]
        first = tile % tiles[RANK - 1 - i] * BLOCK[RANK - 1 - i]
        if SHIFTED:
            first += starts[RANK - 1 - i]
        corner = (first,) + corner  # noqa: RUF005  (Triton knows no stars)
    return corner


@triton.jit
def window_host_kernel(x_desc, y_desc, starts, tiles, BLOCK, RANK: tl.constexpr, INTO: tl.constexpr):
    """The window lies in x; INTO: in y, where a store starts elsewhere."""
    block = x_desc.load(_corner(tl.program_id(0), starts, tiles, BLOCK, RANK, not INTO))
    y_desc.store(_corner(tl.program_id(0), starts, tiles, BLOCK, RANK, INTO), block)


@triton.jit
def window_device_kernel(
    x_ptr, y_ptr, x_shape, x_strides, y_shape, y_strides, starts, tiles,
    BLOCK, RANK: tl.constexpr, INTO: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    # The last stride has to be a constant 1. Triton knows no stars.
    x_desc = tl.make_tensor_descriptor(x_ptr, x_shape, x_strides + (1,), BLOCK, padding_option=PADDING)  # noqa: RUF005
    y_desc = tl.make_tensor_descriptor(y_ptr, y_shape, y_strides + (1,), BLOCK)  # noqa: RUF005
    block = x_desc.load(_corner(tl.program_id(0), starts, tiles, BLOCK, RANK, not INTO))
    y_desc.store(_corner(tl.program_id(0), starts, tiles, BLOCK, RANK, INTO), block)


@triton.jit
def copy_pointers_kernel(x_ptr, y_ptr, M, N, stride_xm, stride_ym, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < M) & (cols < N)
    rows = rows.to(tl.int64)
    tl.store(y_ptr + rows * stride_ym + cols, tl.load(x_ptr + rows * stride_xm + cols, mask=inside), mask=inside)


@triton.jit
def _copy_tile(tile, x_desc, y_desc, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    tiles_n = tl.cdiv(N, BLOCK_N)
    row, col = tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
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


def require_descriptor(name: str, x: torch.Tensor, block: tuple, padding: str = "zero", label: str = "x") -> None:
    """Every rule of a descriptor of x with this block: raises TypeError or ValueError that says which and what to do.

    After require_triton_device, which refuses memory that the GPU cannot reach: Triton encodes its address unasked.
    """
    shape, itemsize = tuple(x.shape), x.element_size()
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{name}: {label} has dtype {x.dtype}; TMA copies {', '.join(map(str, DTYPES))}: view it as one"
        )
    if not 1 <= x.ndim <= 5:
        raise ValueError(
            f"{name}: {label} has {x.ndim} dimensions {shape}; a descriptor has 1 to 5: reshape or split it"
        )
    if not isinstance(block, (tuple, list)) or len(block) != x.ndim:
        raise ValueError(f"{name}: block {block!r} for {label} of shape {shape}; give a size for each dimension")
    if any(type(n) is not int or n < 1 or n & (n - 1) for n in block):
        raise ValueError(f"{name}: block {tuple(block)} for {label}; each size must be a power of two")
    if block[-1] * itemsize < 16:
        raise ValueError(
            f"{name}: block {tuple(block)} for {label}: {block[-1]} of {itemsize} bytes; the last size times the "
            f"element must be at least 16 bytes, so at least {16 // itemsize}"
        )
    if math.prod(block) > MAX_BLOCK:
        raise ValueError(
            f"{name}: block {tuple(block)} for {label} has more than {MAX_BLOCK} elements; take a smaller one"
        )
    if padding not in ("zero", "nan"):
        raise ValueError(f"{name}: padding is {padding!r} for {label}; it is 'zero' or 'nan'")
    if padding == "nan" and x.dtype not in NAN_DTYPES:
        raise ValueError(
            f"{name}: padding 'nan' for {label} of {x.dtype}; that is for {', '.join(map(str, NAN_DTYPES))}"
        )
    if not x.numel():
        raise ValueError(f"{name}: {label} of shape {shape} is empty; a descriptor has sizes from 1: return before it")
    if max(shape) >= 2**31:
        raise ValueError(f"{name}: {label} has shape {shape}; coordinates are int32, so split it below 2**31")
    if any(step * itemsize >= 2**40 for step in x.stride()):
        raise ValueError(f"{name}: {label} has strides {x.stride()}; a stride is below 2**40 bytes: copy it closer")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        for d in range(x.ndim - 1):
            if x.stride(d) == 1 and x.shape[d] > 1:
                raise ValueError(
                    f"{name}: {label} has strides {x.stride()}; the last dimension must be contiguous: describe "
                    f"{label}.transpose({d}, -1) and transpose the block in the kernel, or call {label}.contiguous()"
                )
    require_tma_layout(name, **{label: x})
    if (need := math.prod(block) * itemsize + BARRIERS) > (limit := device_limits(x.device).shared_bytes):
        raise ValueError(f"{name}: block {tuple(block)} for {label} takes {need} bytes of the {limit} of shared memory")


def require_box(name: str, x: torch.Tensor, corner: tuple, store: bool = False, label: str = "x") -> None:
    """Every rule of where a box of a descriptor of x may begin, and of x where it is stored to: TypeError, ValueError.

    A store also writes what is left of the last 16 bytes of x's rows. Whoever owns the memory there describes it, too.
    """
    shape, itemsize = tuple(x.shape), x.element_size()
    if not isinstance(corner, (tuple, list)) or any(type(n) is not int for n in corner):
        raise TypeError(f"{name}: coordinates {corner!r} for {label} of shape {shape}; pass a tuple of ints")
    if len(corner) != x.ndim:
        raise ValueError(f"{name}: coordinates {tuple(corner)} for {label} of shape {shape}; one for each dimension")
    if any(not -(2**31) <= n < 2**31 for n in corner):
        raise ValueError(f"{name}: coordinates {tuple(corner)} for {label}; coordinates are int32")
    if corner[-1] * itemsize % 16:
        raise ValueError(
            f"{name}: coordinates {tuple(corner)} for {label} of {x.dtype}; the last one must be a multiple of 16 "
            f"bytes, here of {16 // itemsize}: begin at {corner[-1] * itemsize // 16 * 16 // itemsize}"
        )
    if store and min(corner) < 0:
        raise ValueError(
            f"{name}: coordinates {tuple(corner)} for {label}; TMA stores to no negative ones: begin at 0, with the "
            "rest of the block"
        )
    if store and shape[-1] * itemsize % 16:
        raise ValueError(
            f"{name}: {label} has shape {shape}, rows of {shape[-1] * itemsize} bytes; a store writes on to the next "
            "multiple of 16: pad the last dimension and describe the padding as part of it"
        )


class Workspace:
    """An allocator for triton.set_allocator; remembers what was asked of it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.asked = device, []

    def __call__(self, size: int, alignment: int, stream: int | None) -> torch.Tensor:
        self.asked.append((size, alignment))
        # From torch's allocator, which hands out multiples of 512 bytes in the order of the current stream.
        return torch.empty(size, dtype=torch.uint8, device=self.device)


def with_workspace(workspace: Callable, launch: Callable[[], None]) -> None:
    """launch() with this allocator; whatever allocator the caller has set stays the caller's."""

    def launch_with_it() -> None:
        triton.set_allocator(workspace)
        launch()

    contextvars.copy_context().run(launch_with_it)


def default_block(shape: tuple, itemsize: int, most: int = 8192) -> tuple[int, ...]:
    """A block of up to `most` bytes: as long in the last dimension as the tensor, up to 256 elements, then higher."""
    block = []
    for i, size in enumerate(reversed(shape)):
        least = 16 // itemsize if i == 0 else 1
        room = max(1, most // (itemsize * math.prod(block)))
        block.append(max(least, min(triton.next_power_of_2(size), 256, room)))
    return tuple(reversed(block))


def _output(x: torch.Tensor, sizes: tuple) -> torch.Tensor:
    """Memory in which what lies between a row's end and the next multiple of 16 bytes is a store's to write."""
    step = max(1, 16 // x.element_size())
    rows = torch.empty((*sizes[:-1], triton.cdiv(sizes[-1], step) * step), dtype=x.dtype, device=x.device)
    return rows[..., : sizes[-1]]


def _launch(form: str, x, y, starts: tuple, padding: str, into: bool = False) -> None:
    """Starts a window kernel. x and y: TensorDescriptors, or for the device the same four values as they are."""
    tiles = tuple(triton.cdiv(n, b) for n, b in zip(y.shape, y.block_shape, strict=False))  # unchecked() may differ
    blocks = (starts, tiles, tuple(map(tl.constexpr, y.block_shape)), len(y.block_shape), into)
    grid = (math.prod(tiles),)
    if form == "host":
        window_host_kernel[grid](x, y, *blocks, num_warps=WARPS)
        return
    layouts = [tuple(values) for t in (x, y) for values in (t.shape, t.strides[:-1])]
    with_workspace(
        Workspace(y.base.device),
        lambda: window_device_kernel[grid](x.base, y.base, *layouts, *blocks, padding, num_warps=WARPS),
    )


def window(
    x: torch.Tensor, starts: tuple, sizes: tuple, block: tuple | None = None, padding: str = "zero", form: str = "host"
) -> torch.Tensor:
    """x[start : start + size, ...], for negative starts, too: zeros (or NaN) where x has nothing.

    `form` is one of FORMS: descriptors from the host, or made by each program.
    """
    require_triton_device("window", x)
    for label, values in (("starts", starts), ("sizes", sizes)):
        if not isinstance(values, (tuple, list)) or any(type(n) is not int for n in values):
            raise TypeError(f"window: {label} is {values!r}; pass a tuple of ints")
        if len(values) != x.ndim:
            raise ValueError(f"window: {len(values)} {label} for x of shape {tuple(x.shape)}; pass one per dimension")
    if any(n < 0 for n in sizes):
        raise ValueError(f"window: sizes {tuple(sizes)}; they cannot be negative")
    if any(not -(2**31) <= n < 2**31 - MAX_BLOCK - size for n, size in zip(starts, sizes, strict=True)):
        raise ValueError(f"window: starts {tuple(starts)} and sizes {tuple(sizes)}; coordinates are int32")
    if not isinstance(form, str) or form not in FORMS:
        raise ValueError(f"window: form is {form!r}; take one of {FORMS}")
    block = default_block(tuple(sizes), x.element_size()) if block is None and x.ndim else block
    require_descriptor("window", x, block, padding)
    require_box("window", x, starts)  # the stores to y begin at its tiles, and the padding of its rows is its own
    y = _output(x, tuple(sizes))
    if y.numel():
        described = tma_descriptor(x, list(block), padding), tma_descriptor(y, list(block))
        _launch(form, *described, tuple(starts), padding)
    return y


def unchecked_box(form: str, x: torch.Tensor, y: torch.Tensor, into: bool, *starts: int) -> torch.Tensor:
    """x into y from `starts` on, or y from those of x on, in boxes of BOX_BLOCK, without a check of ours."""
    _launch(form, *(tma_descriptor(t, list(BOX_BLOCK)) for t in (x, y)), starts, "zero", into)
    return y


def unchecked(form: str, x: torch.Tensor, padding: str, *block: int) -> torch.Tensor:
    """A copy of x as upstream would make it, without one check of ours: what breaks a rule goes to Triton as it is."""
    described = x, list(x.shape), list(x.stride()), list(block)
    x_desc = TensorDescriptor(*described, padding) if form == "host" else SimpleNamespace(
        **dict(zip(("base", "shape", "strides", "block_shape"), described, strict=True))
    )  # fmt: skip
    y = _output(x, tuple(x.shape))
    if y.device.type == "cpu" and not interpreted():
        y = y.cuda()  # so that x is all that is wrong
    y_desc = SimpleNamespace(base=y, shape=y.shape, strides=y.stride(), block_shape=list(block))
    if form == "host":
        y_desc = tma_descriptor(y, list(block))
    _launch(form, x_desc, y_desc, (0,) * x.ndim, padding)
    return y


def _launch_copy(form: str, x: torch.Tensor, y: torch.Tensor, descriptors: tuple | None = None) -> None:
    """Starts one of COPIES; the device forms use the allocator that they find."""
    M, N = x.shape
    tiles = triton.cdiv(M, TILE[0]) * triton.cdiv(N, TILE[1])
    if form == "host":
        x_desc, y_desc = descriptors or (tma_descriptor(x, list(TILE)), tma_descriptor(y, list(TILE)))
        copy_host_kernel[(tiles,)](x_desc, y_desc, N, *TILE, num_warps=WARPS)
        return
    sizes = (M, N, x.stride(0), y.stride(0), *TILE)
    if form == "pointers":
        copy_pointers_kernel[(tiles,)](x, y, *sizes, num_warps=WARPS)
        return
    kept = form == "device, kept"
    programs = min(tiles, PROGRAMS_PER_SM * device_limits(x.device).sms) if kept else tiles
    copy_device_kernel[(programs,)](x, y, *sizes, KEPT=kept, num_warps=WARPS)


def copy(form: str, x: torch.Tensor) -> torch.Tensor:
    """A copy of a matrix by one of COPIES, in tiles of 64 x 64."""
    require_triton_device("copy", x)
    if not isinstance(form, str) or form not in COPIES:
        raise ValueError(f"copy: form is {form!r}; take one of {COPIES}")
    if x.ndim != 2:
        raise ValueError(f"copy: need a matrix, got shape {tuple(x.shape)}")
    require_descriptor("copy", x, TILE)
    y = _output(x, tuple(x.shape))
    if form.startswith("device"):
        with_workspace(Workspace(x.device), lambda: _launch_copy(form, x, y))
    else:
        _launch_copy(form, x, y)
    return y


def reference(x: torch.Tensor, starts: tuple, sizes: tuple, *_, padding: str = "zero", **__) -> torch.Tensor:
    want = torch.full(tuple(sizes), math.nan if padding == "nan" else 0.0, dtype=torch.float64, device=x.device)
    ranges = [(max(0, s), min(n, s + size)) for s, n, size in zip(starts, x.shape, sizes, strict=True)]
    if all(low < high for low, high in ranges):
        into = tuple(slice(low - s, high - s) for (low, high), s in zip(ranges, starts, strict=True))
        want[into] = x[tuple(slice(low, high) for low, high in ranges)].double()
    return want


# Each rule: a tensor that breaks it and nothing else (on `device`), the padding, the block. Those in OFFLINE would
# take too much memory to run. cuTensorMapEncodeTiled asks for sizes from 1, and the strides that its documentation
# computes are never 0: what becomes of others is nowhere promised, also where it goes well.
def _half(device: torch.device | str, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    if torch.device(device).type == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    return (torch.arange(math.prod(shape), device=device) % 251 + 1).reshape(shape).to(dtype)


RULES: dict[str, tuple[str, Callable]] = {
    "start at 16 bytes": ("x[:, 1:]", lambda d: (_half(d, 64, 64)[:, 1:], "zero", (16, 32))),
    "row stride of 16 bytes": ("rows of 63", lambda d: (_half(d, 64, 63), "zero", (16, 32))),
    "adjacent columns": ("x.t()", lambda d: (_half(d, 64, 64).t(), "zero", (16, 32))),
    "adjacent columns (sliced)": ("x[:, ::2]", lambda d: (_half(d, 64, 64)[:, ::2], "zero", (16, 32))),
    "no stride of 0": ("x[:1].expand", lambda d: (_half(d, 1, 64).expand(64, 64), "zero", (16, 32))),
    "strides below 2**40 bytes": ("2**41 bytes", lambda d: (
        torch.empty(2**40 + 64, dtype=torch.float16, device="meta").as_strided((2, 64), (2**40, 1)), "zero", (1, 64))),
    "sizes below 2**31": ("2**31 rows", lambda d: (_half("meta", 2**31, 16), "zero", (16, 16))),
    "sizes from 1": ("no rows", lambda d: (_half(d, 0, 64), "zero", (16, 32))),
    "1 to 5 dimensions": ("6", lambda d: (_half(d, 2, 2, 2, 2, 2, 8), "zero", (1, 1, 1, 1, 1, 8))),
    "a block size each": ("1 for 2", lambda d: (_half(d, 64, 64), "zero", (32,))),
    "powers of two": ("16 x 24", lambda d: (_half(d, 64, 64), "zero", (16, 24))),
    "16 bytes a block row": ("4 of 2 bytes", lambda d: (_half(d, 64, 64), "zero", (16, 4))),
    "2**20 in a block": ("2048 x 1024", lambda d: (_half(d, 64, 64), "zero", (2048, 1024))),
    "block fits shared memory": ("512 KiB", lambda d: (_half(d, 1024, 256), "zero", (1024, 256))),
    "a dtype of TMA": ("bool", lambda d: (_half(d, 64, 64, dtype=torch.bool), "zero", (16, 32))),
    "a dtype of TMA (complex)": ("complex64", lambda d: (_half(d, 64, 64, dtype=torch.complex64), "zero", (16, 32))),
    "zero or nan": ("'edge'", lambda d: (_half(d, 64, 64), "edge", (16, 32))),
    "NaN for floats": ("int32", lambda d: (_half(d, 64, 64, dtype=torch.int32), "nan", (16, 32))),
    "NaN for floats (float8)": ("e4m3", lambda d: (_half(d, 64, 64, dtype=torch.float8_e4m3fn), "nan", (16, 32))),
}  # fmt: skip
OFFLINE = ("strides below 2**40 bytes", "sizes below 2**31")


class Box(NamedTuple):
    """A move of 64 rows of float16 by boxes of 16 x 32 that breaks one rule of coordinates, and none of descriptors."""

    broken_by: str
    starts: tuple[int, int]
    into: bool = False  # stored from `starts` on, else loaded from there
    columns: int = 64


BOXES = {
    "last coordinate of 16 bytes": Box("load at column 1", (0, 1)),
    "last coordinate of 16 bytes (outside)": Box("load at column 300", (0, 300)),
    "last coordinate of 16 bytes (store)": Box("store at column 1", (0, 1), into=True),
    "no negative stores (rows)": Box("store at row -3", (-3, 0), into=True),
    "no negative stores (columns)": Box("store at column -8", (0, -8), into=True),
    "16 bytes a stored row": Box("store of 63 columns", (0, 0), into=True, columns=63),
}
UNWRITTEN = -1.0


def box_of(rule: str, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, bool, tuple[int, int]]:
    """x, y with poison in and beside it, whether the starts are y's, and the starts."""
    box = BOXES[rule]
    x = _half(device, 64, 64)[:, : box.columns]
    return x, x.new_full((64, 128), UNWRITTEN)[:, : box.columns], box.into, box.starts


def box_outcome(form: str, rule: str, device: str) -> str:
    """What comes of a move that breaks the rule: the error, or how many values are wrong, and where."""
    x, y, into, starts = box_of(rule, device)
    memory = y.as_strided((64, 128), (128, 1))
    want = memory.clone()
    if into:  # y has the negative window of x, where x has something
        moved = reference(x, tuple(-n for n in starts), y.shape, padding="nan")
        want[:, : y.shape[1]] = torch.where(moved.isnan(), UNWRITTEN, moved).to(y.dtype)
    else:
        want[:, : y.shape[1]] = reference(x, starts, y.shape).to(y.dtype)
    try:
        unchecked_box(form, x, y, into, *starts)
        wrong = (memory != want).cpu()
    except Exception as error:
        return _said(error)
    inside, columns = int(wrong[:, : y.shape[1]].sum()), wrong.any(0).nonzero().flatten().tolist()
    if beside := int(wrong.sum()) - inside:
        return f"{inside} of {y.numel()} wrong, and {beside} beside them, to column {columns[-1]}"
    return f"{inside} of {y.numel()} wrong" if inside else "right"


def tensor_of(rule: str, device: torch.device | str) -> tuple[torch.Tensor, str, tuple]:
    if rule == "memory of the GPU":
        return _half("cpu", 64, 64), "zero", (16, 32)
    return RULES[rule][1](device)


def truncated(x: torch.Tensor) -> torch.Tensor:
    """What a descriptor reads that keeps 16-byte steps only: start and strides rounded down, columns adjacent."""
    step = 16 // x.element_size()
    strides = [stride // step * step for stride in x.stride()[:-1]]
    return x.as_strided(x.shape, [*strides, 1], x.storage_offset() // step * step)


def outcome(form: str, rule: str, device: str) -> str:
    """What comes of a launch that breaks the rule: the error, or how many values are wrong."""
    x, padding, block = tensor_of(rule, device)
    try:
        y = unchecked(form, x, padding, *block).cpu()
    except Exception as error:
        return _said(error)
    x = x.cpu()
    wrong = int((y.float() != x.float()).sum())
    if wrong and torch.equal(y.float(), truncated(x).float()):
        return f"{wrong} of {x.numel()} wrong: it read strides {truncated(x).stride()}"
    return f"{wrong} of {x.numel()} wrong" if wrong else "right"


def _said(error: BaseException | str) -> str:
    while isinstance(error, BaseException) and error.__cause__ is not None:  # of Triton's wrappers, the innermost
        error = error.__cause__
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return re.sub(r"TensorDescriptor\(.*", "...", next(iter(text.strip().splitlines()), "")).strip()


def child_outcome(form: str, rule: str) -> None:
    """In a process of its own: what TMA cannot do may end the process's use of the GPU."""
    report(outcome=(box_outcome if rule in BOXES else outcome)(form, rule, "cuda"))


def show_rules(h: Harness) -> None:
    """Break every rule: what Triton says when the kernel is made, what a launch does then, what our check says."""
    gpu = h.device.type == "cuda" and h.timing  # a run that only checks meets no fault
    rules = [*RULES, *(["memory of the GPU"] if gpu else []), *BOXES]
    rows: dict[str, dict] = {}
    said: dict[str, dict[str, str]] = {}
    with ExitStack() as stack, h.progress("breaking every rule"):
        runs: dict[tuple[str, str], Child | str] = {}
        for rule in rules:
            if rule in BOXES:
                x, y, into, starts = box_of(rule, "meta")
                wrapper, arguments = unchecked_box, (x, y, into, *starts)
            else:
                x, padding, block = tensor_of(rule, "meta" if rule in RULES else "cpu")
                wrapper, arguments = unchecked, (x, padding, *block)
            answers = {}
            for form in ("host", "device"):
                (kernel, *_) = compile_for(wrapper, (form, *arguments), sms=(90,))
                answers[form] = _said(kernel.error) if kernel.error else "accepted"
                if kernel.error or rule in OFFLINE:
                    continue
                if gpu:
                    runs[rule, form] = stack.enter_context(Child(child_outcome, form, rule, timeout=45))
                elif h.interpreted:
                    runs[rule, form] = (box_outcome if rule in BOXES else outcome)(form, rule, "cpu")
            said[rule] = answers
        for (rule, form), result in runs.items():
            if isinstance(result, Child):
                try:
                    result = result.result()["outcome"]
                except (ChildFailed, TimeoutError) as error:
                    result = f"no result: {str(error).splitlines()[-1]}"
            said[rule][f"{form}, run"] = result
    for rule in rules:
        said[rule]["our check"] = ours = refused(rule, h.device)
        ran = {form: said[rule].get(f"{form}, run") for form in ("host", "device")}
        rows[rule] = {
            "broken by": broken_by(rule),
            **{f"{form} descriptor": said[rule][form].split(":")[0] for form in ("host", "device")},
            "and run": [f"{form}: {text.split(': ')[0]}" for form, text in ran.items() if text],
            "our check": ours.split(":")[0],
        }
    h.table(f"rules broken; run {'by the GPU' if gpu else 'by the interpreter' if h.interpreted else 'nowhere'}", rows)
    h.fact("what was said", said)
    through = {form: [rule for rule in rules if said[rule][form] == "accepted"] for form in ("host", "device")}
    silent = [f"{rule} ({form})" for (rule, form) in runs if " wrong" in said[rule][f"{form}, run"]]
    h.say(
        f"of {len(rules)} broken rules Triton accepts {len(through['host'])} in a host descriptor, "
        f"{len(through['device'])} in one of the device; wrong without a word: {'; '.join(silent) or 'none here'}"
    )
    if gpu:
        ends = {rule: said[rule]["host, run"].split(": ")[-1] for rule in BOXES}
        h.say("boxes that break a rule: " + "; ".join(f"{BOXES[rule].broken_by}: {end}" for rule, end in ends.items()))
        h.say(f"refused, though nothing went wrong here: {', '.join(harmless(said)) or 'none'}")


def harmless(said: dict[str, dict[str, str]]) -> list[str]:
    """The rules that were broken by a launch or two, and all that ran gave the right result."""
    ran = {rule: [text for form, text in each.items() if form.endswith(", run")] for rule, each in said.items()}
    return [rule for rule, ends in ran.items() if ends and set(ends) == {"right"}]


def broken_by(rule: str) -> str:
    if rule in BOXES:
        return BOXES[rule].broken_by
    return RULES[rule][0] if rule in RULES else "a CPU tensor"


def refused(rule: str, device: torch.device) -> str:
    """The words of our own check; raises AssertionError when it lets the rule pass."""
    try:
        if rule in BOXES:
            x, y, into, starts = box_of(rule, device)
            require_box("copy", y if into else x, starts, store=into)
        else:
            x, padding, block = tensor_of(rule, device)
            if rule == "memory of the GPU":
                require_triton_device("copy", x)
            require_descriptor("copy", x, block, padding)
    except (TypeError, ValueError, RuntimeError) as error:
        return _said(error).split(";")[0]
    raise AssertionError(f"our check let {rule!r} pass, broken by {broken_by(rule)}")


def show_code(h: Harness) -> None:
    """What each form is in PTX, and what it becomes where there is no TMA."""
    x = h.meta(4096, 4096, dtype=torch.float16)
    tma = ("cp.async.bulk.tensor", "mbarrier")
    h.codegen(copy, "host", x, find={80: (), 89: (), 90: tma, 100: tma, 120: tma})
    rows = {}
    for form in COPIES[:3]:
        with h.progress(f"compiling {form}"):
            ptx, old = (dump(copy, (form, x), sm=sm)["ptx"] for sm in (90, 80))
        names = re.findall(r"^\t(?:@!?%p\d+ )?([a-z][\w.:]*)", ptx, re.MULTILINE)
        count = Counter(name.split(".")[0] for name in names)
        arguments = re.findall(r"^\t\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\n]*?(?:\[(\d+)\])?,?$", ptx, re.MULTILINE)
        rows[form] = {
            "instructions": len(names),
            "tensormap": count["tensormap"],
            "fence": count["fence"],
            "bytes of arguments": sum(int(bits) // 8 * int(many or 1) for bits, many in arguments),
            "loads on sm_80": [f"{name} x{n}" for name, n in Counter(re.findall(r"ld\.global\S*", old)).items()],
        }
    if rows["host"]["tensormap"] or not rows["device"]["tensormap"]:
        raise CodegenError(f"descriptors: tensormap instructions belong to the device form alone, found {rows}")
    h.table("PTX of a copy on sm_90", rows)
    host, device = rows["host"], rows["device"]
    wide, narrow = (row["loads on sm_80"][0] for row in (device, host))
    h.say(
        f"two descriptors made by the kernel: {device['tensormap']} tensormap instructions, {device['fence']} fences "
        f"instead of {host['fence']}; below sm_90 both are ordinary loads, {wide} where the kernel says that the last "
        f"stride is 1, {narrow} where it came as an argument"
    )


def show_allocator(h: Harness) -> None:
    """What a launch without an allocator says, whose the setting is, and how much workspace a launch takes."""

    def found() -> object:
        from triton.runtime import _allocation  # to look, not to set

        return _allocation._allocator.get()

    before, mine, heard = found(), Workspace(h.device), []
    with_workspace(mine, lambda: heard.append(found()))
    with_workspace(mine, lambda: _in_thread(lambda: heard.append(found())))
    if heard[0] is not mine or found() is not before:
        raise AssertionError("descriptors: the allocator was not set, or was left behind")
    x = h.randn(200, 96, dtype=h.half)
    y = torch.empty_like(x)

    def launch_alone() -> None:
        if h.interpreted:
            found()(WORKSPACE, WORKSPACE, None)  # what a launch would call
        else:
            _launch_copy("device", x, y)

    try:
        contextvars.Context().run(launch_alone)  # a context in which nobody has set one
        said = "nothing"
    except RuntimeError as error:
        said = _said(error)
    h.fact("a launch that finds no allocator", said)
    facts = {"within with_workspace": type(heard[0]).__name__, "in a thread started there": type(heard[1]).__name__}
    h.fact("allocator found", facts | {"after it": "as before"})
    with_workspace(mine, lambda: _launch_copy("device", x, y))
    programs = math.prod(triton.cdiv(n, b) for n, b in zip(x.shape, TILE, strict=True))
    asked = [f"{size} bytes, aligned to {alignment}" for size, alignment in mine.asked] or ["interpreted: none"]
    h.fact(
        "workspace of a launch",
        {"programs": programs, "descriptors": 2, "predicted bytes": 2 * programs * WORKSPACE, "asked": asked[0]},
    )


def _in_thread(fn: Callable[[], None]) -> None:
    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()


def host_us(calls: dict[str, Callable], device: torch.device, repeats: int = 100) -> dict[str, float]:
    """Microseconds of the host for each call: batches between synchronizations, in random order; medians."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(9):
        for name in random.Random(turn).sample(list(calls), len(calls)):
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(repeats):
                calls[name]()
            times[name].append((time.perf_counter() - started) * 1e6 / repeats)
    return {name: round(statistics.median(each), 2) for name, each in times.items()}


def show_host_cost(h: Harness) -> None:
    """What a call takes on the host; without a GPU, what of it is Python of Triton's and ours."""
    x = h.randn(64, 64, dtype=h.half)
    y = torch.empty_like(x)
    kept = tuple(tma_descriptor(t, list(TILE)) for t in (x, y))
    workspace = Workspace(h.device)
    calls = {
        "make 2 TensorDescriptors": lambda: [tma_descriptor(t, list(TILE)) for t in (x, y)],
        "require_descriptor, twice": lambda: [require_descriptor("copy", t, TILE) for t in (x, y)],
    }
    if h.device.type == "cuda":
        calls |= {
            "launch, pointers": lambda: _launch_copy("pointers", x, y),
            "launch, host descriptors kept": lambda: _launch_copy("host", x, y, kept),
            "launch, host descriptors made": lambda: _launch_copy("host", x, y),
            "launch, device descriptors": lambda: with_workspace(workspace, lambda: _launch_copy("device", x, y)),
        }
        for launch in calls.values():
            launch()  # compiles
    us = host_us(calls, h.device)
    h.fact("host us for each call", us)
    if h.device.type == "cuda":
        plain = us["launch, pointers"]
        more = {name[8:]: t - plain for name, t in us.items() if name.startswith("launch, ")}
        h.say(
            f"beside {plain:.1f} us with pointers, two descriptors take on the host: "
            + ", ".join(f"{name} {t:+.1f} us" for name, t in more.items() if t)
        )


def show_speed(h: Harness, n: int) -> None:
    """The same copy by every form, in tiles so small that what each program does once shows."""
    n = h.fit(n, bytes_each=40 * n)
    x = h.randn(n, n, dtype=h.half)
    variants = {"torch": torch.clone} | {f"triton {form}": functools.partial(copy, form) for form in COPIES}
    table = h.compare(
        variants, lambda x: x.double(), x, baseline="torch", work=Work(bytes=2 * x.nbytes), terms=0, title="copy",
        comparators=["triton pointers"],
    )  # fmt: skip
    if not table or table.rows[-1].ms is None:
        return
    ms = {row.variant.removeprefix("triton "): row.ms for row in table.rows}
    tiles = math.prod(triton.cdiv(n, b) for b in TILE)
    each = {form: 1e6 * (ms[form] - ms["host"]) * device_limits(h.device).sms / tiles for form in COPIES[2:]}
    h.fact("ns of an SM more than with host descriptors, per tile", {form: round(t, 1) for form, t in each.items()})
    programs = PROGRAMS_PER_SM * device_limits(h.device).sms
    h.say(
        f"{tiles} tiles of {math.prod(TILE) * x.element_size() // 1024} KiB: descriptors made by each program cost "
        f"{ms['device'] / ms['host'] - 1:+.1%} of the time, made once by {programs} programs "
        f"{ms['device, kept'] / ms['host'] - 1:+.1%}; host descriptors are at {ms['pointers'] / ms['host']:.2f}x the "
        "speed of pointers"
    )


def windows(h: Harness) -> dict[str, tuple[torch.Tensor, tuple, tuple, tuple | None]]:
    """Tensors of every rank and odd layouts, each with a window that leaves it on some side."""
    half = h.half
    return {
        "1-D": (h.randn(777, dtype=half), (-8,), (900,), None),
        "1-D, one element": (h.randn(1, dtype=half), (0,), (1,), None),
        "2-D": (h.randn(37, 56, dtype=half), (-3, -16), (50, 90), (16, 32)),
        "2-D, sizes of nothing in particular": (h.randn(67, 96, dtype=half)[:, :91], (0, 0), (67, 91), (32, 64)),
        "2-D, quite outside": (h.randn(5, 8, dtype=half), (5, 0), (4, 8), None),
        "2-D, a block beyond the tensor": (h.randn(3, 8, dtype=half), (0, 0), (3, 8), (64, 64)),
        "2-D, a block of 512 rows": (h.randn(700, 8, dtype=half), (-100, 0), (900, 8), (512, 8)),
        "2-D, 1024 columns in a block": (h.randn(5, 1032, dtype=half), (1, 8), (3, 1032), (1, 1024)),
        "2-D, every third row": (h.randn(60, 64, dtype=half)[::3, 8:40], (1, 8), (25, 40), (8, 16)),
        "3-D, turned": (h.randn(6, 9, 40, dtype=half).transpose(0, 1), (-1, 3, 16), (7, 4, 32), (4, 2, 16)),
        "4-D": (h.randn(3, 4, 5, 48, dtype=half)[1:, :, ::2, 16:], (1, -1, 1, 16), (2, 4, 2, 32), (1, 4, 2, 16)),
        "5-D": (h.randn(2, 3, 4, 5, 24, dtype=half), (0, 1, -1, 2, 8), (2, 2, 3, 4, 16), (1, 2, 2, 4, 16)),
        "float32": (h.randn(20, 36), (2, 4), (30, 40), None),
    }


def every_form(x: torch.Tensor, starts: tuple, sizes: tuple, block: tuple | None) -> tuple[torch.Tensor, ...]:
    """The window once by each form, with zeros around it, and with NaN."""
    return tuple(window(x, starts, sizes, block, padding, form) for form in FORMS for padding in ("zero", "nan"))


def references(x: torch.Tensor, starts: tuple, sizes: tuple, block: tuple | None) -> tuple[torch.Tensor, ...]:
    return tuple(reference(x, starts, sizes, padding=padding) for padding in ("zero", "nan")) * len(FORMS)


def demo(h: Harness) -> None:
    for name, case in windows(h).items():
        h.check(every_form, references, *case, what=f"window {name}", terms=0, constant_ok=True)
    if not h.profile:
        if h.shows_code:
            show_code(h)
            show_rules(h)
        show_allocator(h)
        if h.timing:
            show_host_cost(h)
    show_speed(h, h.pick(interpreted=136, quick=4096, full=8192) if h.timing else 136)


if __name__ == "__main__":
    run(demo)
