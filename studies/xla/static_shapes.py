"""static_shapes, measured: padding and cutting on the device, padding that shows, and torch.compile's symbols."""

from __future__ import annotations

import copy
import math

from harness import Harness

import torch
from torch import nn

from compile_inspect import logs
from examples.common import xla
from examples.xla.static_shapes import LARGEST, pad_batch, reference_of


def study(h: Harness) -> None:
    if h.profile:
        return
    cut_on_the_device(h, width=46)
    leaks(h, width=58)
    dynamo(h, width=82)


def normalize(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Batch norm over the real rows. Their number is a sum on the device: as a Python number it may be a constant."""
    real, count = mask[:, None], mask.sum()
    # where, not a product: whatever the padding has become, even NaN, it must not count.
    mean = torch.where(real, x, 0).sum(0) / count
    variance = torch.where(real, x - mean, 0).square().sum(0) / count
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def cut_on_the_device(h: Harness, width: int) -> None:
    """The same eight batches, cut on the host or on the device."""
    model = nn.Linear(width, width).requires_grad_(False)
    on_xla, batches = copy.deepcopy(model).to(xla.device()), [h.randn(rows, width) for rows in range(1, 9)]

    def padded(x):
        return on_xla(pad_batch(x, (8,))[0].to(xla.device()))

    counted = {}
    ways = {"host": lambda x: padded(x).cpu()[: len(x)], "device": lambda x: padded(x)[: len(x)].cpu()}
    for name, way in ways.items():
        with xla.watch() as ran:
            got = [way(x) for x in batches]
        what = f"1 to 8 rows, padding cut off on the {name}"
        h.check(lambda *_, got=got: tuple(got), reference_of(model), *batches, what=what, terms=width, poison=False)
        counted[name] = ran.compiles
    h.fact("programs of eight batches of 1 to 8 rows, padded to 8, by where the padding is cut off", counted)


def leaks(h: Harness, width: int) -> None:
    """Padding that shows: statistics over the batch; and padding that cannot: NaN in its place changes no bit."""
    model = nn.Linear(width, width).requires_grad_(False)
    on_xla, exact = copy.deepcopy(model).to(xla.device()), copy.deepcopy(model).double()
    batches = [h.randn(rows, width) for rows in (2, 3, 5, 17, 63)]

    def reference(*xs):
        return tuple(normalize(exact(x.double()), torch.ones(len(x), dtype=torch.bool)) for x in xs)

    def normed(x, masked: bool, fill: float = 0.0):
        padded, mask = pad_batch(x, (LARGEST,))
        padded = torch.where(mask[:, None], padded, fill).to(xla.device())
        mask = mask if masked else torch.ones_like(mask)
        return normalize(on_xla(padded), mask.to(xla.device())).cpu()[: len(x)]

    with xla.watch() as ran:
        h.check(
            lambda *xs: tuple(normed(x, masked=True) for x in xs), reference, *batches,
            what="batch norm, padded and masked", terms=width * LARGEST, poison=False,
        )  # fmt: skip
    errors, changed = {}, {}
    for name, masked in {"without": False, "with the mask": True}.items():
        errors[name], changed[name] = {}, 0
        for x, want in zip(batches, reference(*batches), strict=True):
            got = normed(x, masked)
            errors[name][str(len(x))] = float(f"{(got - want).norm() / want.norm():.2g}")
            changed[name] += int((got != normed(x, masked, math.nan)).sum())
    h.table("batch norm padded to 64: relative error by rows", errors)
    h.fact("compiles of the masked one", ran.compiles)
    elements = sum(x.numel() for x in batches)
    h.fact(f"of {elements} real results, changed by NaN in place of zeros as padding", changed)


def dynamo(h: Harness, width: int) -> None:
    """torch.compile for XLA: Dynamo's graph has a symbol for the rows, but each size is compiled by XLA."""
    model = nn.Sequential(nn.Linear(width, 5), nn.GELU()).requires_grad_(False)
    on_xla, graphs = copy.deepcopy(model).to(xla.device()), []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("openxla")(graph, inputs)

    torch.compiler.reset()
    compiled = torch.compile(on_xla, backend=counting, dynamic=True)
    batches = [h.randn(rows, width) for rows in range(2, 10)]
    with logs(), xla.watch() as ran:
        got = tuple(compiled(x.to(xla.device())).cpu() for x in batches)
    h.check(lambda *_: got, reference_of(model), *batches, what="openxla, dynamic=True, 2 to 9 rows", terms=width,
            roundings=4, poison=False)  # fmt: skip
    torch.compiler.reset()
    told = {"Dynamo's graphs": len(graphs), "XLA's compiles": ran.compiles}
    h.fact("torch.compile(backend=openxla, dynamic=True), eight batches of 2 to 9 rows", told)
