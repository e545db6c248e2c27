"""spmd, measured: rows that the devices do not divide, and what torch_xla and the lesson refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from harness import Harness
from harness.process import report

import torch
import torch_xla.distributed.spmd as xs
from torch_xla import runtime

from examples.common import xla
from examples.xla.spmd import DEVICES, make_mesh, on_devices, shard, shards

RAGGED = (10, 5)  # rows


def study(h: Harness) -> None:
    if h.profile:
        return
    k, n = h.pick((88, 104), (576, 1728))
    a, b = h.randn(max(RAGGED), k), h.randn(k, n)
    with h.progress(f"a mesh of {DEVICES} devices"):
        reported, out = on_devices(child_refusals, (a, b))
    rows = {}
    for count in RAGGED:
        name = f"{count} rows"
        h.check(
            lambda *_, name=name: out[name], lambda a, b: a.double() @ b.double(), a[:count], b,
            what=f"{name} over {DEVICES} devices", terms=k, poison=False,
        )  # fmt: skip
        held, real = reported[name]["held"], reported[name]["rows"]
        rows[name] = {"held": str(held), "of which real": str(real), "padding": sum(held) - sum(real)}
    h.table(f"rows over {DEVICES} devices", rows)
    h.table("refused", reported["refusals"])
    off = torch.ones(8, 4, device=xla.device())
    h.fact(
        "refused in this process, where SPMD is off",
        {
            "torch_xla": error_of(lambda: xs.mark_sharding(off, xs.Mesh([0], (1,), ("x",)), ("x", None))),
            "here": error_of(lambda: make_mesh((1,), ("x",))),
        },
    )
    xla.settle()


def error_of(fn: Callable) -> str:
    """What fn() raises, in its first line."""
    try:
        fn()
    except Exception as error:
        # XLA ends some messages with a link that changes from process to process, so that nobody compares them.
        return f"{type(error).__name__}: {re.sub(r':? goo.gle/.*', '', str(error).splitlines()[0])}"
    return "no error"


def refusals(device: torch.device) -> dict[str, dict[str, str]]:
    """What torch_xla says of what cannot be, and what this file says."""
    mesh = make_mesh((DEVICES,), ("x",))
    t, cut, ten = (torch.ones(rows, 4).to(device) for rows in (8, 8, 10))
    shard(cut, mesh, ("x", None))
    both = {
        "a mesh of 8": (lambda: xs.Mesh(list(range(8)), (8,), ("x",)), lambda: make_mesh((8,), ("x",))),
        "a mesh of 2": (lambda: xs.Mesh([0, 1], (2,), ("x",)), lambda: make_mesh((2,), ("x",))),
    }
    specs = {
        "a spec of rank 1": ("x",), "an unknown axis": ("z", None), "an axis twice": ("x", "x"),
        "10 rows over 4": ("x", None),
    }  # fmt: skip
    for what, spec in specs.items():
        given = ten if what.startswith("10") else t
        both[what] = (
            lambda given=given, spec=spec: xs.mark_sharding(given, mesh, spec),
            lambda given=given, spec=spec: shard(given.clone(), mesh, spec),
        )
    on_cpu, rows = torch.ones(8, 4), ("x", None)
    both["a tensor on the CPU"] = (lambda: xs.mark_sharding(on_cpu, mesh, rows), lambda: shard(on_cpu, mesh, rows))
    reported = {what: {"torch_xla": error_of(theirs), "here": error_of(ours)} for what, (theirs, ours) in both.items()}
    reported["cut again, otherwise"] = {"torch_xla": error_of(lambda: xs.mark_sharding(cut, mesh, (None, "x")))}
    return reported


def child_refusals(folder: str) -> None:
    runtime.use_spmd()
    a, b = torch.load(Path(folder, "given.pt"), weights_only=True)
    mesh, device, out, reported = make_mesh((DEVICES,), ("x",)), xla.device(), {}, {}
    for rows in RAGGED:
        t = shard(a[:rows].to(device), mesh, ("x", None), pad=True)
        out[f"{rows} rows"] = (t @ b.to(device)).cpu()
        kept = [each.indices[0] for each in xs.XLAShardedTensor(t).local_shards]
        reported[f"{rows} rows"] = {"held": [shape[0] for shape in shards(t)], "rows": [s.stop - s.start for s in kept]}
    torch.save(out, Path(folder, "out.pt"))
    report(refusals=refusals(device), **reported)
