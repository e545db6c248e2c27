"""What N ranks compile: all of it N times, on GPUs even with a shared cache; and the rank that recompiles alone.

Ranks of one program compile the same graphs at the same time, on the cores of one host. Even with a shared cache
folder, the first call finds nothing, because all of them look before any has finished. Ranks on CPUs that start once
rank 0 is done find its code. But a graph's key names its GPU: rank 1, on cuda:1, finds nothing that rank 0 compiled for
cuda:0, in the same folder or in artifacts sent to it, and only waits longer. (Not tried: compile_on_one_rank in
torch.compiler.config, in newer torch, and, for many hosts, TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE, in Redis.)

A rank whose batch has another size compiles again, alone, while the others wait in a collective, up to their timeout.
Counting graphs shows it; one shape, a dynamic one, or torch.compiler.set_enable_guard_collectives(True) avoids it.

Question   What do N ranks compiling at once cost, who compiles what another has, and who waits for a rank alone?
Needs      torch, 2 ranks
Wins when  ranks start often, or compile for minutes, and each keeps its cache; GPUs that share one save nothing.
Source     goes beyond the chapter; torch.compiler's documentation of its caches
"""

from __future__ import annotations

import os
import time
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
ALONE, OWN, SHARED, FIRST, SENT = "rank 0 alone", "own folders", "one folder", "rank 0 first", "its artifacts"


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
    """A first call with that cache folder: (the result, whether this rank compiled)."""
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
    """The first call of all ranks: this rank's result; the seconds until all have theirs, and which ranks compiled."""
    rank = dist.get_rank()
    folder = folder / how.replace(" ", "_").replace("'", "")  # the C++ compiler gets the path unquoted
    own = folder / str(rank)
    dist.barrier()
    started = time.perf_counter()
    if how == OWN or (how in (ALONE, SENT) and rank == 0):
        out, compiled = first_call(inputs, own)
    elif how == SHARED or (how == FIRST and rank == 0):
        out, compiled = first_call(inputs, folder)
    if how == ALONE and rank:
        out, compiled = network(*inputs).cpu(), False
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


def sizes_differ(dynamic: bool, pad: bool, inputs: tuple) -> dict:
    """Two steps with an all-reduce; in the second one rank 1 has fewer rows. Graphs of each rank, and who waited."""
    torch.compiler.reset()
    compiler, (x, *weights) = Compiler(inputs[0].is_cuda), inputs
    step = torch.compile(network, dynamic=dynamic, backend=compiler)
    for rows in (len(x), len(x) - 8 * (dist.get_rank() == 1)):
        part = x[:rows].clone()  # a copy: for a slice, the whole batch's size would be guarded too
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


# Whether shapes are compiled as dynamic ones, and whether rows are padded.
POLICIES = {"static": (False, False), "padded": (False, True), "dynamic": (True, False)}


def answer(h: Harness, rows: dict[str, dict], alone: dict[str, dict]) -> str:
    gpu = h.device.type == "cuda"  # ranks on a CPU share its cores: no times
    times = {how: f" {row['s']:.2f} s" if gpu else "" for how, row in rows.items()}
    calls = (f"{how}{times[how]} ({len(row['compiled by ranks'])})" for how, row in rows.items())
    again = " and ".join(name for name, row in alone.items() if row["recompiled alone"]) or "none"
    wait = f"; others wait {max(row['others wait s'] for row in alone.values()):.1f} s" if gpu else ""
    fewer = f"Rank 1, with fewer rows, recompiles if: {again}{wait}."
    return f"First call on {h.ranks} ranks (how many compile): {', '.join(calls)}. {fewer}"


def demo(h: Harness) -> None:
    up, down = h.randn(WIDTH, 4 * WIDTH, scale=WIDTH**-0.5), h.randn(4 * WIDTH, WIDTH, scale=(4 * WIDTH) ** -0.5)
    inputs, rows = (h.randn(64, WIDTH), up, down), {}
    with TemporaryDirectory() as mine, torch.no_grad():
        folder = Path(from_rank_0(mine))
        first_call(inputs, Path(mine, "imports"))  # Inductor's imports, and what it asks the C++ compiler once
        for how in (ALONE, OWN, SHARED, FIRST, SENT):
            with h.progress(how):
                out, rows[how] = together(how, inputs, folder)
            y = out.to(h.device)
            h.check(lambda *_, y=y: y, reference, *inputs, what=how, terms=5 * WIDTH, poison=False)
        dist.barrier()  # rank 0's folder is deleted once all are done
        alone = {name: sizes_differ(*policy, inputs) for name, policy in POLICIES.items()}
    h.table("first calls of all ranks", rows)
    h.table("rank 1 has fewer rows", alone)
    h.answer(lambda: answer(h, rows, alone), timed=False)


if __name__ == "__main__":
    run(demo)
