"""SPMD: one program over several devices; say how tensors are sharded, and read in the HLO what is communicated.

With torch_xla.runtime.use_spmd() one process sees one device. mark_sharding (here: shard) says over which axes of a
mesh each dimension of a tensor is sharded. XLA derives the sharding of everything computed from there, and inserts
collectives where a device needs what another one holds.

Here the mesh consists of virtual CPU devices in a process of its own: nothing gets faster. A product is sharded in six
ways; what the devices send stands next to what theory asks for: here XLA makes an all-reduce where a reduce-scatter
would do, and sends twice as many bytes. The study does the same for a training step, in four layouts.

Question   Which sharding of a product costs which communication, and what does each device hold?
Needs      torch_xla>=2.9
Wins when  a model, its optimizer's state or its batch do not fit one chip, and the chips' links carry what is listed
           here. On one machine's CPU there is nothing to win: the devices are threads that share its cores.
Variants   spmd_sharding.py (a mesh and a sharding, checked), spmd_collectives.py (reads the collectives of a program)
Study      studies/xla/spmd.py (layouts of a training step)
Source     goes beyond the chapter; GSPMD (arXiv 2105.04663) and the SPMD guide of PyTorch/XLA
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from harness import Harness, run
from harness.process import Child, report

import torch
import torch_xla.distributed.spmd as xs
from torch_xla import runtime

from examples.common import xla
from examples.xla.spmd_collectives import Programs, collectives, communication
from examples.xla.spmd_sharding import Spec, make_mesh, shard

DEVICES = 4


class Product(NamedTuple):
    """How a product is sharded, and the collectives that it needs by theory: (op, devices, elements of its result)."""

    a: Spec
    b: Spec
    theory: Callable[[int, int, int], list[tuple[str, int, int]]]
    c: Spec | None = None  # None: as XLA derives it
    mesh: tuple[int, ...] = (DEVICES,)
    axes: tuple[str, ...] = ("x",)


PRODUCTS = {
    "rows of a": Product(("x", None), (None, None), lambda m, k, n: []),
    "columns of b": Product((None, None), (None, "x"), lambda m, k, n: []),
    "rows of a, columns of b, two axes": Product(
        ("x", None), (None, "y"), lambda m, k, n: [], mesh=(2, DEVICES // 2), axes=("x", "y")
    ),
    "rows of a, columns of b, one axis": Product(
        ("x", None), (None, "x"), lambda m, k, n: [("all-gather", DEVICES, m * k)]
    ),
    "the summed dimension": Product((None, "x"), ("x", None), lambda m, k, n: [("all-reduce", DEVICES, m * n)]),
    "the summed dimension, rows of the result": Product(
        (None, "x"), ("x", None), lambda m, k, n: [("reduce-scatter", DEVICES, m * n // DEVICES)], c=("x", None)
    ),
}


def shards(t: torch.Tensor) -> list[list[int]]:
    """The shape of the part that each device holds."""
    xla.settle()
    return [list(each.data.shape) for each in xs.XLAShardedTensor(t.detach()).local_shards]


def run_product(case: Product, a: torch.Tensor, b: torch.Tensor, programs: Programs) -> tuple[torch.Tensor, dict]:
    mesh, device = make_mesh(case.mesh, case.axes), xla.device()
    a, b = shard(a.to(device), mesh, case.a), shard(b.to(device), mesh, case.b)
    c = a @ b
    if case.c:
        shard(c, mesh, case.c)
    xla.settle()
    (text,) = programs.new()
    return c.cpu(), {"collectives": list(collectives(text)), "a": shards(a), "b": shards(b), "c": shards(c)}


def child_products(folder: str) -> None:
    runtime.use_spmd()
    a, b = torch.load(Path(folder, "given.pt"), weights_only=True)
    programs, out, reported = Programs(Path(folder, "hlo")), {}, {}
    for name, case in PRODUCTS.items():
        out[name], reported[name] = run_product(case, a, b, programs)
    torch.save(out, Path(folder, "out.pt"))
    report(devices=runtime.global_runtime_device_count(), **reported)


def on_devices(child: Callable, given: object) -> tuple[dict, dict[str, torch.Tensor | list[torch.Tensor]]]:
    """Run child(folder) in a process with DEVICES devices: what it reports, and the tensors that it saves.

    The child finds `given` in given.pt and writes out.pt; XLA dumps its programs into hlo.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save(given, Path(folder, "given.pt"))
        flags = f"--xla_dump_to={folder}/hlo --xla_dump_hlo_as_text"
        env = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES), "XLA_FLAGS": flags}
        with Child(child, folder, env=env) as process:
            return process.result(), torch.load(Path(folder, "out.pt"), weights_only=True)


def demo(h: Harness) -> None:
    if h.profile:
        return h.say("the devices are threads of another process; there is nothing here for a profiler")
    m, k, n = h.pick((72, 88, 104), (1152, 576, 1728))
    a, b = h.randn(m, k), h.randn(k, n)
    with h.progress(f"a mesh of {DEVICES} devices"):
        reported, out = on_devices(child_products, (a, b))
    held, rows = {}, {}
    for name, case in PRODUCTS.items():
        h.check(
            lambda *_, name=name: out[name], lambda a, b: a.double() @ b.double(), a, b,
            what=f"{m}x{k}x{n}, {name}", terms=k, poison=False,
        )  # fmt: skip
        held[name] = {what: "x".join(map(str, reported[name][what][0])) for what in "abc"}
        rows[name] = communication(reported[name]["collectives"], case.theory(m, k, n))
    h.table(f"what each of {reported['devices']} devices holds of {m}x{k} @ {k}x{n}, by what is sharded", held)
    h.table("communication of a product, bytes", rows)

    def answer() -> str:
        sent = {name: row for name, row in rows.items() if row["sent / by theory"][0]}
        shown = "; ".join(
            f"{name}: {row['sent / by theory'][0] / 1000:.0f} kB, {row['collectives']}" for name, row in sent.items()
        )
        return f"{len(rows) - len(sent)} of {len(rows)} shardings send nothing. A device sends for {shown}."

    h.answer(answer, timed=False)


if __name__ == "__main__":
    run(demo)
