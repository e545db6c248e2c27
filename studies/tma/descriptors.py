"""descriptors, measured: windows of every rank and layout, the code of each form, the allocator, the host's time.

1. window() on tensors of every rank and odd layouts, beyond every edge, with zeros and with NaN around them.
2. What each form of the copy is in PTX.
3. What a launch without an allocator says, and how much workspace a launch takes.
4. What a call takes on the host; what descriptors made by programs take on the GPU, for each tile.
"""

from __future__ import annotations

import contextvars
import math
import re
from collections import Counter

from harness import Harness
from harness.codegen import CodegenError, dump
from harness.hardware import enqueue_ms

import torch
import triton

from examples.common.device import device_limits
from examples.tma.descriptors import (
    COPIES,
    PROGRAMS_PER_SM,
    TILE,
    copy,
    descriptor,
    launch_copy,
    with_workspace,
)
from examples.tma.descriptors_rules import require_descriptor
from examples.tma.descriptors_window import FORMS, window, window_reference

WORKSPACE = 128  # bytes of one descriptor


def windows(h: Harness) -> dict[str, tuple[torch.Tensor, tuple, tuple, tuple | None]]:
    """Tensors of every rank and odd layouts, each with a window that leaves it on some side."""
    half = h.half
    return {
        "1-D": (h.randn(777, dtype=half), (-8,), (900,), None),
        "2-D, sizes of nothing in particular": (h.randn(67, 96, dtype=half)[:, :91], (0, 0), (67, 91), (32, 64)),
        "2-D, quite outside": (h.randn(5, 8, dtype=half), (5, 0), (4, 8), None),
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
    return tuple(window_reference(x, starts, sizes, padding=padding) for padding in ("zero", "nan")) * len(FORMS)


def show_code(h: Harness) -> None:
    """What each form is in PTX."""
    x, rows = h.meta(4096, 4096, dtype=torch.float16), {}
    for form in COPIES[:3]:
        ptx = dump(copy, (form, x), sm=90)["ptx"]
        names = re.findall(r"^\t(?:@!?%p\d+ )?([a-z][\w.:]*)", ptx, re.MULTILINE)
        count = Counter(name.split(".")[0] for name in names)
        arguments = re.findall(r"^\t\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\n]*?(?:\[(\d+)\])?,?$", ptx, re.MULTILINE)
        rows[form] = {
            "instructions": len(names),
            "tensormap": count["tensormap"],
            "fence": count["fence"],
            "bytes of arguments": sum(int(bits) // 8 * int(many or 1) for bits, many in arguments),
        }
    if rows["host"]["tensormap"] or not rows["device"]["tensormap"]:
        raise CodegenError(f"descriptors: tensormap instructions belong to the device form alone, found {rows}")
    h.table("PTX of a copy on sm_90", rows)


def show_allocator(h: Harness) -> None:
    """What a launch without an allocator says, and how much workspace a launch takes."""
    x = h.randn(200, 96, dtype=h.half)
    y, asked = torch.empty_like(x), []

    def remember(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        asked.append(f"{size} bytes, aligned to {alignment}")
        return torch.empty(size, dtype=torch.uint8, device=h.device)

    try:
        contextvars.Context().run(launch_copy, "device", x, y)  # a context in which nobody has set one
        message = "nothing"
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    h.fact("a launch that finds no allocator", message)
    context = contextvars.copy_context()
    context.run(triton.set_allocator, remember)
    context.run(launch_copy, "device", x, y)
    programs = math.prod(triton.cdiv(n, b) for n, b in zip(x.shape, TILE, strict=True))
    found = {"programs": programs, "descriptors": 2, "predicted bytes": 2 * programs * WORKSPACE, "asked": asked}
    h.fact("workspace of a launch", found)


def show_host_cost(h: Harness) -> None:
    """What a call takes on the host."""
    x = h.randn(64, 64, dtype=h.half)
    y = torch.empty_like(x)
    kept = descriptor(x), descriptor(y)
    calls = {
        "make 2 TensorDescriptors": lambda: (descriptor(x), descriptor(y)),
        "require_descriptor, twice": lambda: [require_descriptor("copy", t, TILE) for t in (x, y)],
        "launch, pointers": lambda: launch_copy("pointers", x, y),
        "launch, host descriptors kept": lambda: launch_copy("host", x, y, kept),
        "launch, host descriptors made": lambda: launch_copy("host", x, y),
        "launch, device descriptors": lambda: with_workspace(h.device, lambda: launch_copy("device", x, y)),
    }
    for call in calls.values():
        call()  # compiles
    h.fact("host us for each call", {name: round(1000 * enqueue_ms(call), 2) for name, call in calls.items()})


def explain(h: Harness, table) -> None:
    """What the lesson's table says of one tile: who makes the descriptors is all in which its kernels differ."""
    n = int(table.case.split("x")[0])
    sms, tiles = device_limits(h.device).sms, math.prod(triton.cdiv(n, b) for b in TILE)
    more = {form: table[form].ms - table["host"].ms for form in COPIES[2:]}
    each = {form: round(1e6 * ms * sms / tiles, 1) for form, ms in more.items()}
    h.fact("ns of an SM more than with host descriptors, per tile", each)
    h.say(
        f"{tiles} tiles of {2 * math.prod(TILE) // 1024} KiB: descriptors made by each program cost "
        f"{more['device'] / table['host'].ms:+.1%} of the time, made once by {PROGRAMS_PER_SM * sms} programs "
        f"{more['device, kept'] / table['host'].ms:+.1%}"
    )


def study(h: Harness) -> None:
    for name, case in windows(h).items():
        h.check(every_form, references, *case, what=f"window {name}", terms=0, constant_ok=True)
    if h.profile:
        return
    if h.shows_code:
        show_code(h)
    show_allocator(h)
    if h.timing and h.device.type == "cuda":
        show_host_cost(h)
    for table in h.lesson:
        if table:
            explain(h, table)
