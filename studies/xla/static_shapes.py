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
    # where, not a product: whatever the padding has become, NaN too, it must not count.
    mean = torch.where(real, x, 0).sum(0) / count
    variance = torch.where(real, x - mean, 0).square().sum(0) / count
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def cut_on_the_device(h: Harness, width: int) -> None:
    """The same eight batches, cut on the host, on the device, or by a mask."""
    model = nn.Linear(width, width).requires_grad_(False).to(xla.device())
    batches = [h.randn(rows, width) for rows in range(1, 9)]

    def hosted(x):
        return model(pad_batch(x, (8,))[0].to(xla.device())).cpu()[: len(x)]

    def cut(x):
        return model(pad_batch(x, (8,))[0].to(xla.device()))[: len(x)].cpu()

    def picked(x):
        padded, mask = (t.to(xla.device()) for t in pad_batch(x, (8,)))
        return model(padded[mask]).cpu()

    counted = {}
    ways = {"pad and cut on the host": hosted, "cut on the device": cut, "pick by a mask": picked}
    for name, way in ways.items():
        with xla.watch() as ran:
            got = [way(x) for x in batches]
        exact = copy.deepcopy(model).cpu().double()
        h.check(
            lambda *_, got=got: tuple(got), lambda *xs, exact=exact: tuple(exact(x.double()) for x in xs), *batches,
            what=f"{name}, 1 to 8 rows", terms=width, poison=False,
        )  # fmt: skip
        counted[name] = {"compiles": ran.compiles, "on the host": ", ".join(ran.fallbacks) or "none"}
    h.table("eight batches of 1 to 8 rows, padded to 8", counted)


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
    wants = reference(*batches)
    errors = {}
    for masked in (False, True):
        off = [(normed(x, masked).double() - want).norm() / want.norm() for x, want in zip(batches, wants, strict=True)]
        errors["with the mask" if masked else "without"] = {
            str(len(x)): float(f"{each:.2g}") for x, each in zip(batches, off, strict=True)
        }
    h.table("batch norm padded to 64: relative error by rows", errors)
    h.fact("compiles of the masked one", ran.compiles)
    changed = {}
    for name, masked in {"batch norm, masked": True, "batch norm, not masked": False}.items():
        pairs = [(normed(x, masked), normed(x, masked, math.nan)) for x in batches]
        changed[name] = sum(int((zeros != nans).sum()) for zeros, nans in pairs)
    elements = sum(x.numel() for x in batches)
    h.fact(f"of {elements} real results, changed by NaN in place of zeros as padding", changed)


def dynamo(h: Harness, width: int) -> None:
    """torch.compile for XLA: Dynamo's graph may have a symbol for the rows, but each size is compiled by XLA."""
    counted = {}
    for number, (name, options) in enumerate({"default": {}, "dynamic=True": {"dynamic": True}}.items()):
        # A width of its own for each, so that none finds the programs of another.
        model = nn.Sequential(nn.Linear(width + number, 5), nn.GELU()).requires_grad_(False)
        on_xla, graphs = copy.deepcopy(model).to(xla.device()), []

        def counting(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend("openxla")(graph, inputs)

        torch.compiler.reset()
        compiled = torch.compile(on_xla, backend=counting, **options)
        batches = [h.randn(rows, width + number) for rows in range(2, 10)]
        with torch._dynamo.config.patch(recompile_limit=len(batches)), logs(), xla.watch() as ran:
            got = []
            for x in batches:
                got.append(compiled(x.to(xla.device())).cpu())
        h.check(
            lambda *_, got=got: tuple(got), reference_of(model), *batches,
            what=f"openxla, {name}, 2 to 9 rows", terms=width, roundings=4, poison=False,
        )  # fmt: skip
        counted[name] = {"Dynamo's graphs": len(graphs), "XLA's compiles": ran.compiles}
    torch.compiler.reset()
    h.table("torch.compile(backend=openxla), eight batches of 2 to 9 rows", counted)
