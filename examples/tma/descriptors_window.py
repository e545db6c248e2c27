"""A window into a tensor of 1 to 5 dimensions, also where it leaves the tensor: what TMA does with boxes beyond edges.

A box may lie partly or quite outside: loads fill in zeros (or NaN) there, to the element; window() is that and nothing
else. Coordinates are loaded from anywhere, negative ones too, and stored to from 0 on; the last one is in either case a
multiple of 16 bytes, also where the box lies quite outside. A store ends at the last row, but in it at the next
multiple of 16 bytes: what the block holds there is written, so rows that end elsewhere need padding of their own. A box
has at most 256 elements a side; a larger block Triton copies as several. Each seen on an H200; no negative stores: CUDA
programming guide; the last coordinate: triton pull request 9112; where a store ends: triton issue 11583.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from examples.common.device import require_triton_device
from examples.common.operands import check_choice
from examples.common.tma import launch_with_scratch, rows_for_tma, tma_descriptor
from examples.tma.descriptors_rules import MAX_BLOCK, require_box, require_descriptor

WINDOW_WARPS = 4
FORMS = ("host", "device")


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


def default_block(shape: tuple, itemsize: int, most: int = 8192) -> tuple[int, ...]:
    """A block of up to `most` bytes: as long in the last dimension as the tensor, up to 256 elements, then higher."""
    block = []
    for i, size in enumerate(reversed(shape)):
        least = 16 // itemsize if i == 0 else 1
        room = max(1, most // (itemsize * math.prod(block)))
        block.append(max(least, min(triton.next_power_of_2(size), 256, room)))
    return tuple(reversed(block))


def launch_window(form: str, x, y, starts: tuple, padding: str, into: bool = False) -> None:
    """Without a check. x and y: TensorDescriptors, or for the device the same four values as they are."""
    tiles = tuple(triton.cdiv(n, b) for n, b in zip(y.shape, y.block_shape, strict=False))  # a broken rule may differ
    blocks = (starts, tiles, tuple(map(tl.constexpr, y.block_shape)), len(y.block_shape), into)
    grid = (math.prod(tiles),)
    if form == "host":
        window_host_kernel[grid](x, y, *blocks, num_warps=WINDOW_WARPS)
        return
    layouts = [tuple(values) for t in (x, y) for values in (t.shape, t.strides[:-1])]
    launch_with_scratch(
        y.base.device,
        lambda: window_device_kernel[grid](x.base, y.base, *layouts, *blocks, padding, num_warps=WINDOW_WARPS),
    )


def window(
    x: torch.Tensor, starts: tuple, sizes: tuple, block: tuple | None = None, padding: str = "zero", form: str = "host"
) -> torch.Tensor:
    """x[start : start + size, ...], for negative starts, too: zeros (or NaN) where x has nothing.

    x has 1 to 5 dimensions, the last one contiguous, start and other strides multiples of 16 bytes, in one of DTYPES
    (NaN: of NAN_DTYPES). starts and sizes have a number for each dimension; the last start is a multiple of 16 bytes.
    The rows of the result are apart by a multiple of 16 bytes. `form` is one of FORMS: descriptors from the host, or
    made by each program.

    Raises TypeError for another dtype, starts or sizes that are no ints; ValueError for a broken rule of RULES, a count
    of starts or sizes that is not x's rank, an unknown form; RuntimeError for a device without Triton or an input that
    requires grad.
    """
    require_triton_device("window", x)
    if not isinstance(sizes, (tuple, list)) or any(type(n) is not int for n in sizes):
        raise TypeError(f"window: sizes is {sizes!r}; pass a tuple of ints")
    if len(sizes) != x.ndim or min(sizes, default=0) < 0:
        raise ValueError(f"window: sizes {tuple(sizes)} for x of shape {tuple(x.shape)}; one per dimension, from 0 on")
    check_choice("window", FORMS, form=form)
    block = default_block(tuple(sizes), x.element_size()) if block is None and x.ndim else block
    require_descriptor("window", x, block, padding)
    require_box("window", x, starts)  # the stores to y begin at its tiles, and the padding of its rows is its own
    if any(n >= 2**31 - MAX_BLOCK - size for n, size in zip(starts, sizes, strict=True)):
        raise ValueError(f"window: starts {tuple(starts)} and sizes {tuple(sizes)}; coordinates are int32")
    y = rows_for_tma(x, tuple(sizes))
    if y.numel():
        described = tma_descriptor(x, list(block), padding), tma_descriptor(y, list(block))
        launch_window(form, *described, tuple(starts), padding)
    return y


def window_reference(x: torch.Tensor, starts: tuple, sizes: tuple, *_, padding: str = "zero", **__) -> torch.Tensor:
    want = torch.full(tuple(sizes), math.nan if padding == "nan" else 0.0, dtype=torch.float64, device=x.device)
    ranges = [(max(0, s), min(n, s + size)) for s, n, size in zip(starts, x.shape, sizes, strict=True)]
    if all(low < high for low, high in ranges):
        into = tuple(slice(low - s, high - s) for (low, high), s in zip(ranges, starts, strict=True))
        want[into] = x[tuple(slice(low, high) for low, high in ranges)].double()
    return want
