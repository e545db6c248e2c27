"""descriptors, measured: windows of every rank and layout, the code of each form, the allocator, the host's time.

1. window() on tensors of every rank and odd layouts, beyond every edge, with zeros and with NaN around them.
2. What each form of the copy is in PTX, and what it becomes where there is no TMA.
3. What a launch without an allocator says, whose the setting is, and how much workspace a launch takes.
4. What a call takes on the host; what descriptors made by programs take on the GPU, for each tile.
"""

from __future__ import annotations

import contextvars
import math
import random
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable

from harness import Harness
from harness.codegen import CodegenError, dump

import torch
import triton

from examples.common.device import device_limits
from examples.tma.descriptors import (
    COPIES,
    PROGRAMS_PER_SM,
    TILE,
    Workspace,
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
    return tuple(window_reference(x, starts, sizes, padding=padding) for padding in ("zero", "nan")) * len(FORMS)


def show_code(h: Harness) -> None:
    """What each form is in PTX, and what it becomes where there is no TMA."""
    x, rows = h.meta(4096, 4096, dtype=torch.float16), {}
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
            launch_copy("device", x, y)

    try:
        contextvars.Context().run(launch_alone)  # a context in which nobody has set one
        message = "nothing"
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    h.fact("a launch that finds no allocator", message)
    facts = {"within with_workspace": type(heard[0]).__name__, "in a thread started there": type(heard[1]).__name__}
    h.fact("allocator found", facts | {"after it": "as before"})
    with_workspace(mine, lambda: launch_copy("device", x, y))
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
    kept = descriptor(x), descriptor(y)
    workspace = Workspace(h.device)
    calls = {
        "make 2 TensorDescriptors": lambda: (descriptor(x), descriptor(y)),
        "require_descriptor, twice": lambda: [require_descriptor("copy", t, TILE) for t in (x, y)],
    }
    if h.device.type == "cuda":
        calls |= {
            "launch, pointers": lambda: launch_copy("pointers", x, y),
            "launch, host descriptors kept": lambda: launch_copy("host", x, y, kept),
            "launch, host descriptors made": lambda: launch_copy("host", x, y),
            "launch, device descriptors": lambda: with_workspace(workspace, lambda: launch_copy("device", x, y)),
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


def explain(h: Harness, table) -> None:
    """What the lesson's table says of one tile: who makes the descriptors is all in which its kernels differ."""
    n = int(table.case.split("x")[0])
    ms = {form: table[form].ms for form in COPIES}
    tiles = math.prod(triton.cdiv(n, b) for b in TILE)
    sms = device_limits(h.device).sms
    each = {form: 1e6 * (ms[form] - ms["host"]) * sms / tiles for form in COPIES[2:]}
    h.fact("ns of an SM more than with host descriptors, per tile", {form: round(t, 1) for form, t in each.items()})
    h.say(
        f"{tiles} tiles of {2 * math.prod(TILE) // 1024} KiB: descriptors made by each program cost "
        f"{ms['device'] / ms['host'] - 1:+.1%} of the time, made once by {PROGRAMS_PER_SM * sms} programs "
        f"{ms['device, kept'] / ms['host'] - 1:+.1%}; host descriptors are at {table.over('pointers', 'host'):.2f}x "
        "the speed of pointers"
    )


def study(h: Harness) -> None:
    for name, case in windows(h).items():
        h.check(every_form, references, *case, what=f"window {name}", terms=0, constant_ok=True)
    if h.profile:
        return
    if h.shows_code:
        show_code(h)
    show_allocator(h)
    if h.timing:
        show_host_cost(h)
    for table in h.lesson:
        if table:
            explain(h, table)
