"""cross_entropy, measured: what each way to make the gradient costs, in time and in memory.

1. The code of the kernels: wide loads and stores, even if the number of classes is no multiple of 8 and rows begin
   anywhere; for long rows, loads in flight to shared memory.
2. Loss and gradient, by when the gradient is made, with a gradient of the loss of 1 and of another number; beside eager
   torch in 16 bits, which rounds its logarithms to 16 bits.
3. The peak memory of each, the logits included.
"""

from __future__ import annotations

import functools

from harness import Harness, Work

import torch
import torch.nn.functional as F

from examples.common.classes import gradient_of
from examples.triton.cross_entropy import BUDGET, WHEN, cross_entropy, loss_and_gradient, reference, torch_loss

CLASSES = (32000, 50257, 128256, 200064)


def code(h: Harness) -> None:
    wide = "ld.global.v4", "st.global.v4"
    for classes, find in ((128256, ("cp.async", "st.global.v4")), (50257, wide), (32000, wide)):
        target = h.meta(4096, dtype=torch.int64)
        kernels = h.codegen(loss_and_gradient, h.meta(4096, classes), target, find=dict.fromkeys((80, 90, 100), find))
        h.table(
            f"code at {classes} classes",
            {f"sm_{k.sm} {k.kernel}": {"registers": k.registers, "spills": k.spills} for k in kernels},
        )


def scaled(fn, factor: float):
    return lambda *args: factor * fn(*args)


def sweep(h: Harness, rows: int, classes: int, factor: float):
    logits, target = h.randn(rows, classes, dtype=h.half, scale=2.0), h.randint(classes, rows)
    calls = {"torch": torch_loss, "torch.compile": h.compiled(torch_loss)}  # the lesson has its max-autotune
    if not h.interpreted:
        calls["torch in 16 bits"] = F.cross_entropy
    calls |= {f"triton, {when}": functools.partial(cross_entropy, gradient=when) for when in WHEN[:2]}
    half = torch.finfo(h.half).eps / torch.finfo(torch.float32).eps
    return h.compare(
        {name: gradient_of(scaled(fn, factor)) for name, fn in calls.items()},
        lambda x, target: gradient_of(scaled(reference, factor))(x.double(), target),
        logits, target, baseline="torch", title=f"gradient of {factor:g} times the loss", case=f"{rows}x{classes}",
        work=Work(bytes=2 * logits.nbytes), default="triton, forward",
        # A logarithm of -20, rounded, and its exponential.
        budgets={"torch in 16 bits": {"roundings": int(16 * half), "gain": 0.02}}, **BUDGET,
    )  # fmt: skip


def peak_bytes(fn, hidden: torch.Tensor, target: torch.Tensor) -> int:
    """GPU memory that logits, their loss and their gradient take at the peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits = hidden.detach().requires_grad_() * 2  # as a layer's output: no leaf
    torch.autograd.grad(fn(logits, target), logits)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def memory(h: Harness, rows: int, classes: int) -> None:
    hidden, target = h.randn(rows, classes, dtype=h.half), h.randint(classes, rows)
    calls = {"torch": torch_loss, "torch in 16 bits": F.cross_entropy, "torch.compile": h.compiled(torch_loss)}
    calls |= {f"triton, {when}": functools.partial(cross_entropy, gradient=when) for when in WHEN}
    peaks = {}
    for name, fn in calls.items():
        peak_bytes(fn, hidden, target)  # compiles
        peaks[name] = peak_bytes(fn, hidden, target)
    h.table(
        f"peak memory at {rows}x{classes}",
        {name: {"MiB": peak >> 20, "times the logits": round(peak / hidden.nbytes, 2)} for name, peak in peaks.items()},
    )
    least = min(peaks, key=peaks.get)
    h.say(f"the least memory: {least}, {peaks[least] / peaks['torch.compile']:.2f} of torch.compile's")


def study(h: Harness) -> None:
    code(h)
    rows = h.pick(interpreted=4, quick=1024, full=8192)
    tables = [
        sweep(h, h.fit(rows, bytes_each=64 * classes), classes, factor)
        for classes in h.pick(interpreted=(5003,), quick=(50257, 128256), full=CLASSES)
        for factor in (1.0, 3.0)
    ]
    if h.device.type == "cuda" and not h.profile:
        memory(h, h.fit(rows, bytes_each=40 * 128256), 128256)
    for once, again in zip(tables[::2], tables[1::2], strict=True):
        if once.timed and again.timed:
            gains = [f"{each.over('triton, backward', 'triton, forward'):.2f}x" for each in (once, again)]
            h.say(
                f"{once.case}: the gradient made in the forward is {gains[0]} as fast as made in backward, and "
                f"{gains[1]} where the loss is scaled and it is made twice (bytes allow 1.5x and 0.75x)"
            )
