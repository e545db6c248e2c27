"""dynamic_shapes, measured: one CUDA graph for each size."""

from __future__ import annotations

import gc

from harness import Harness, Skip

import torch
from torch import nn

from compile_inspect import cuda_graphs_held, logs, watch
from examples.compiler.dynamic_shapes import EAGER, LARGEST, GatedMLP, Served, time_mix

RECORDED = {
    "marked, no CUDA graphs": ("mark_dynamic", {}),
    "marked, reduce-overhead": ("mark_dynamic", {"mode": "reduce-overhead"}),
    "powers of two, reduce-overhead": ("powers of two", {"mode": "reduce-overhead"}),
}


class Replayed(Served):
    """Under CUDA graphs an output lives only until the next call, so each is copied out."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x).clone()


def device_mib() -> float:
    """Memory in use on the GPU, in MiB, once unused blocks and cuBLAS's workspaces are given back.

    cuBLAS keeps a workspace from the first matrix product on; recording a CUDA graph frees it.
    """
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def recorded(model: nn.Module, name: str, batches) -> tuple[Served, dict]:
    """A policy called until everything that it records is recorded, and what that took.

    A size that is new to a graph runs as a warm-up the first time, and is recorded the second time.
    """
    policy, options = RECORDED[name]
    served = (Replayed if options else Served)(model, policy, **options)
    before, used = cuda_graphs_held(), device_mib()
    shown = torch._inductor.config.patch(shape_padding=False)  # as in compile_all
    with shown, logs(cudagraphs=True) as lines, watch() as seen:
        for _ in range(3):
            for x in batches:
                served.first(x)
    warned = [text.split(". Please")[0] for _, text in lines if "distinct" in text]
    return served, {
        "graphs compiled": seen.graphs, "CUDA graphs": cuda_graphs_held() - before,
        "MiB": round(device_mib() - used, 1), "warnings": warned,
    }  # fmt: skip


def cuda_graphs_over_sizes(h: Harness, model: nn.Module, batches) -> None:
    """One compiled graph, and a CUDA graph for each size that it sees: their number, memory and time."""
    torch.compiler.reset()
    served, table = {}, {}
    for name in RECORDED:
        with h.progress(f"recording {name}"):
            served[name], table[name] = recorded(model, name, batches)
    if not h.profile:
        h.fact(f"CUDA graphs for batches of {len(batches[0])} to {len(batches[-1])}", table)
        _, marked, padded = table.values()
        h.say(
            f"claim dynamic-cudagraphs: {'false' if marked['CUDA graphs'] else 'true'}. {len(batches)} sizes gave "
            f"{marked['graphs compiled']} compiled graph and {marked['CUDA graphs']} CUDA graphs, {marked['MiB']} MiB; "
            f"padded to powers of two {padded['CUDA graphs']}, {padded['MiB']} MiB"
        )
    case = f"{len(batches)} sizes, x {batches[0][0].numel()}"
    if timed := time_mix(h, model, served, batches, "mix under CUDA graphs", case):
        told = ", ".join(f"{name} {timed.by_host(EAGER, f'torch.compile {name}')}" for name in served)
        h.say(f"over eager, which has no guards and copies no output: {told}")


def study(h: Harness) -> None:
    if h.device.type != "cuda":
        raise Skip("needs a GPU: a CPU has no CUDA graphs")
    width = h.pick(quick=128, full=256)  # small: launching is what a CUDA graph saves
    model = GatedMLP(width, 4 * width).to(h.device, torch.bfloat16).requires_grad_(False)
    cuda_graphs_over_sizes(h, model, [h.randn(rows, 1, width, dtype=torch.bfloat16) for rows in range(2, LARGEST + 1)])
