"""spmd, measured: rows that the devices do not divide, and what torch_xla says of what cannot be."""

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


def error_of(fn: Callable) -> str:
    """What fn() raises, in its first line."""
    try:
        fn()
    except Exception as error:
        # XLA ends some messages with a link that changes from process to process, so that nobody compares them.
        return f"{type(error).__name__}: {re.sub(r':? goo.gle/.*', '', str(error).splitlines()[0])}"
    return "no error"


def refusals(device: torch.device) -> dict[str, dict[str, str]]:
    """What torch_xla says of what cannot be; spmd_sharding.py refuses it all, the uneven rows too."""
    mesh = make_mesh((DEVICES,), ("x",))
    t, ten = (torch.ones(rows, 4).to(device) for rows in (8, 10))
    attempts = {
        "a mesh of 8": lambda: xs.Mesh(list(range(8)), (8,), ("x",)),
        "a spec of rank 1": lambda: xs.mark_sharding(t, mesh, ("x",)),
        "an unknown axis": lambda: xs.mark_sharding(t, mesh, ("z", None)),
        "10 rows over 4": lambda: xs.mark_sharding(ten, mesh, ("x", None)),
        "a tensor on the CPU": lambda: xs.mark_sharding(torch.ones(8, 4), mesh, ("x", None)),
    }
    return {what: {"torch_xla": error_of(attempt)} for what, attempt in attempts.items()}


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
