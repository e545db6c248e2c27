"""Study of the Gluon matmul: what each step wins, and what the compiler writes for Triton's source.

1. TTGIR is the first stage of a kernel in which all is explicit. Its operations are counted for both languages: what
   the compiler adds to `desc.load`, `tl.dot` and `desc.store`, the author of a Gluon kernel writes.
2. Every step, timed in the lesson, and the kernels that Triton's compiler makes of the same tile (one program per tile,
   and persistent with the tile stored in halves), over cuBLAS.

3. Clusters: with Triton 3.9 two CTAs load the block of b that both need once (gluon_matmul_cluster.py). Both kernels
   get b as weight.t(), which that one asks for.
"""

from __future__ import annotations

import functools
import re

from harness import Harness, Work, geomean
from harness.codegen import dump

import torch

from examples.common.operands import short_of_k
from examples.tma.gluon_matmul import STEPS, compare, gluon_matmul, reference
from examples.tma.gluon_matmul_cluster import gluon_matmul_cluster, lacks_clusters
from examples.tma.gluon_matmul_ring import gluon_matmul_one_buffer, gluon_matmul_ring

# Kernels of triton/persistent_matmul.py on the same tile: one program per tile, and that file's last step.
COMPILED = ("tile", "split")
# How TTGIR writes what Gluon has its author write.
WRITTEN = {
    "buffers": "ttg.local_alloc", "barriers": "ttng.init_barrier", "loads": "ttng.async_tma_copy_global_to_local",
    "expects": "ttng.barrier_expect", "waits": "ttng.wait_barrier", "arrivals": "ttng.arrive_barrier",
    "MMAs": "ttng.warp_group_dot", "MMA waits": "ttng.warp_group_dot_wait", "fences": "ttng.fence_async_shared",
    "stores": "ttng.async_tma_copy_local_to_global", "store waits": "ttng.async_tma_store_wait",
}  # fmt: skip


def operations(ttgir: str) -> dict[str, int]:
    """How often each of WRITTEN is in it, and among how many partitions it is divided."""
    counts = {label: len(re.findall(rf"\b{re.escape(name)}\b", ttgir)) for label, name in WRITTEN.items()}
    return counts | {"partitions": 1 + len(re.findall(r"\bpartition\d+\(", ttgir))}


def show_code(h: Harness) -> None:
    x, hopper = h.meta(4096, 4096), ("cp.async.bulk.tensor", "mbarrier", "wgmma")
    for kernel in (gluon_matmul_one_buffer, gluon_matmul_ring):
        h.codegen(kernel, x, x, find={90: hopper})
    for step in STEPS[::2]:  # "persistent" has the code of "partitions", and the lesson shows the last
        h.codegen(gluon_matmul, x, x, step, find={90: (*hopper, "setmaxnreg")})
    if not lacks_clusters():
        h.codegen(gluon_matmul_cluster, x, x.t(), find={90: (*hopper, "setmaxnreg")})
    if not h.shows_code:
        return
    compiled = h.peer("triton/persistent_matmul").matmul_persistent
    calls = {f"triton {each}": (compiled, (x, x, each)) for each in COMPILED}
    calls |= {"one buffer": (gluon_matmul_one_buffer, (x, x)), "ring": (gluon_matmul_ring, (x, x))}
    calls |= {step: (gluon_matmul, (x, x, step)) for step in STEPS if step != "persistent"}
    counts = {name: operations(dump(wrapper, args, sm=90)["ttgir"]) for name, (wrapper, args) in calls.items()}
    rows = {label: {kernel: count[label] for kernel, count in counts.items()} for label in (*WRITTEN, "partitions")}
    h.table("what TTGIR says explicitly", rows)


def clusters(h: Harness, n: int) -> None:
    """The table of n x n x n, b with contiguous columns."""
    a, b = h.randn(n, n, dtype=h.half), h.randn(n, n, dtype=h.half).t()
    h.compare(
        {"cuBLAS": torch.matmul, "staggered": gluon_matmul, "cluster": gluon_matmul_cluster}, reference, a, b,
        baseline="cuBLAS", title="clusters, b = weight.t()", case=f"{n}x{n}x{n}", terms=n,
        work=Work(bytes=3 * a.nbytes, flops=2 * n**3, dtype=h.half), wrong=short_of_k(reference),
    )  # fmt: skip


def study(h: Harness) -> None:
    show_code(h)
    if h.interpreted or h.machine.sm != 90:
        h.say("no step is run here: they need sm_90, and Gluon is not interpreted")
        return
    matmul = h.peer("triton/persistent_matmul").matmul_persistent
    variants = {f"triton {each}": functools.partial(matmul, variant=each) for each in COMPILED}
    tables = [*h.lesson, *(compare(h, n, variants) for n in h.pick(quick=(4096,), full=(4096, 8192)))]
    if all(table.timed for table in tables):
        names = [*variants, "one buffer", "ring", *STEPS]
        means = {name: {"geometric mean": round(geomean(tables, "cuBLAS", name), 4)} for name in names}
        h.table("over cuBLAS", means)
    if lacks_clusters():
        h.say(f"clusters are not run here: gluon_matmul_cluster {lacks_clusters()}")
    else:
        for n in h.pick(quick=(4096,), full=(4096, 8192)):
            clusters(h, n)
