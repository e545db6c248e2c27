"""What N ranks compile: all of it N times, unless they share a cache; and the rank that recompiles alone.

Ranks of one program compile the same graphs at the same time, on the cores of one host. With one cache folder the first
call still finds nothing, as all of them look before any has finished: let rank 0 compile first. To other hosts its
artifacts are sent; torch's remote caches (TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE, in Redis) do that for a fleet. But a
graph's key names its GPU: rank 1, on cuda:1, finds nothing of what rank 0 compiled for cuda:0. (Newer versions of
torch have torch.compiler.config.compile_on_one_rank against it, which is not tried here.)

A rank whose batch has another size compiles again, alone, while the others wait for it in a collective: for seconds at
best, until their timeout at worst. Counting graphs on every rank finds it; one shape, or a dynamic one, avoids it.

Question   What do N ranks compiling at once cost, who compiles what another has, and who waits for a rank alone?
Needs      torch, 2 ranks
Wins when  ranks start often, or compiling takes minutes.
Source     goes beyond the chapter; torch.compiler's documentation of its caches
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from harness import Harness, run

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.utils import clear_caches

from examples.common.data_parallel import Compiler

WIDTH = 256
OWN, SHARED, FIRST, SENT = "a folder for each", "one folder, at once", "one folder, rank 0 first", "rank 0's artifacts"


def network(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return x + F.gelu(x @ up) @ down


def reference(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return network(x.double(), up.double(), down.double())


def from_rank_0(value: object) -> object:
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def by_rank(value: object) -> list:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def first_call(inputs: tuple, folder: Path, artifacts: bytes | None = None) -> tuple[torch.Tensor, bool]:
    """(the result, whether this rank compiled it) of a first call with that cache folder."""
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}):
        clear_caches()
        torch.compiler.reset()
        counters.clear()
        if artifacts:
            torch.compiler.load_cache_artifacts(artifacts)
        out = torch.compile(network, dynamic=False)(*inputs).cpu()  # which waits for the GPU
    clear_caches()
    return out, not counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def together(how: str, inputs: tuple, folder: Path) -> tuple[torch.Tensor, dict]:
    """The first call of all ranks: this one's result; the seconds until the last has it, and which ranks compiled."""
    rank = dist.get_rank()
    folder = folder / how.replace(" ", "_").replace("'", "")  # the C++ compiler is handed it without quotes
    own = folder / str(rank)
    dist.barrier()
    started = time.perf_counter()
    if how == OWN or (how == SENT and rank == 0):
        out, compiled = first_call(inputs, own)
    elif how == SHARED or (how == FIRST and rank == 0):
        out, compiled = first_call(inputs, folder)
    if how == FIRST:
        dist.barrier()
        if rank:
            out, compiled = first_call(inputs, folder)
    if how == SENT:
        artifacts = from_rank_0(torch.compiler.save_cache_artifacts()[0] if rank == 0 else None)
        if rank:
            out, compiled = first_call(inputs, own, artifacts)
    seconds = max(by_rank(time.perf_counter() - started))
    return out, {"s": round(seconds, 2), "compiled by ranks": [r for r, did in enumerate(by_rank(compiled)) if did]}


def sizes_differ(make: Callable, pad: bool, inputs: tuple) -> dict:
    """Two steps with an all-reduce; in the second one rank 1 has fewer rows. Graphs of each rank, and who waited."""
    torch.compiler.reset()
    compiler, (x, *weights) = Compiler(inputs[0].is_cuda), inputs
    step = make(compiler)
    for rows in (len(x), len(x) - 8 * (dist.get_rank() == 1)):
        part = x[:rows].clone()  # a batch of its own: of a slice, the size of the whole would be guarded
        part = F.pad(part, (0, 0, 0, len(x) - rows)) if pad else part
        total = step(part, *weights)[:rows].sum()
        total.item()  # so that what follows is the wait for other ranks
        started = time.perf_counter()
        dist.all_reduce(total)
        total.item()
        waited = time.perf_counter() - started
    graphs = by_rank(compiler.graphs)
    alone = [rank for rank, n in enumerate(graphs) if n > min(graphs)]
    return {"graphs of each rank": graphs, "recompiled alone": alone, "others wait s": round(max(by_rank(waited)), 2)}


POLICIES = {
    "static shapes": (lambda compiler: torch.compile(network, dynamic=False, backend=compiler), False),
    "static, padded": (lambda compiler: torch.compile(network, dynamic=False, backend=compiler), True),
    "dynamic": (lambda compiler: torch.compile(network, dynamic=True, backend=compiler), False),
}


def demo(h: Harness) -> None:
    up, down = h.randn(WIDTH, 4 * WIDTH, scale=WIDTH**-0.5), h.randn(4 * WIDTH, WIDTH, scale=(4 * WIDTH) ** -0.5)
    inputs, rows = (h.randn(64, WIDTH), up, down), {}
    with TemporaryDirectory() as mine, torch.no_grad():
        folder = Path(from_rank_0(mine))
        first_call(inputs, Path(mine, "imports"))  # Inductor's own, and what it asks the compiler once
        for how in (OWN, SHARED, FIRST, SENT):
            with h.progress(how):
                out, rows[how] = together(how, inputs, folder)
            y = out.to(h.device)
            h.check(lambda *_, y=y: y, reference, *inputs, what=how, terms=5 * WIDTH, poison=False)
        dist.barrier()  # rank 0's folder goes when all are done
        alone = {name: sizes_differ(make, pad, inputs) for name, (make, pad) in POLICIES.items()}
    h.table("first calls of all ranks", rows)
    h.table("rank 1 has fewer rows", alone)

    def answer() -> str:
        times = f", {rows[OWN]['s']:.1f} and {rows[FIRST]['s']:.1f} s" if h.device.type == "cuda" else ""
        compiled = ", ".join(f"{how} {len(row['compiled by ranks'])}" for how, row in rows.items())
        graphs = "; ".join(f"{name} {row['graphs of each rank']}" for name, row in alone.items())
        key = " (keys name GPUs)" if h.device.type == "cuda" and len(rows[FIRST]["compiled by ranks"]) > 1 else ""
        return f"Of {h.ranks} ranks compile{key}: {compiled}{times}. Fewer rows on rank 1, graphs: {graphs}."

    h.answer(answer, timed=False)


if __name__ == "__main__":
    run(demo)
