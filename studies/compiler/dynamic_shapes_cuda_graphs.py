"""dynamic_shapes under CUDA graphs: one compiled graph, and a recording for each size that it meets."""

from __future__ import annotations

from harness import Harness

import torch
from torch import nn

from compile_inspect import cuda_graphs, logs, watch
from examples.compiler.dynamic_shapes import SIZES, GatedMLP, Served, time_mix

CUDA_GRAPHS = {"mode": "reduce-overhead"}
SKIPPING = {"options": {"triton.cudagraphs": True, "triton.cudagraph_skip_dynamic_graphs": True}}
RECORDED = {
    "marked, no CUDA graphs": ("mark_dynamic", {}),
    "marked, reduce-overhead": ("mark_dynamic", CUDA_GRAPHS),
    "marked, cudagraph_skip_dynamic_graphs": ("mark_dynamic", SKIPPING),
    "powers of two, reduce-overhead": ("powers of two", CUDA_GRAPHS),
}


class Replayed(Served):
    """Under CUDA graphs an output lives until the next call, so that each is copied out."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x).clone()


def device_mib() -> float:
    """Memory in use on the GPU, in MiB, once unused blocks are given back."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def recorded(model: nn.Module, name: str, batches) -> tuple[Served, dict]:
    """A policy called until everything that it records is recorded, and what that took.

    A size that is new to a graph runs as a warm-up the first time and is recorded the second time.
    """
    policy, options = RECORDED[name]
    served = (Replayed if options else Served)(model, policy, **options)
    before = cuda_graphs()
    shown = torch._inductor.config.patch(shape_padding=False)  # as in compile_all
    with shown, logs(cudagraphs=True) as lines, watch() as seen:
        for _ in range(3):
            served.first(batches[0])
        of_one, used = cuda_graphs() - before, device_mib()
        for _ in range(3):
            for x in batches:
                served.first(x)
        of_all = cuda_graphs() - before
    grown = round(device_mib() - used, 1)
    warned = [text.split(". Please")[0] for _, text in lines if "distinct" in text]
    return served, {
        "graphs compiled": seen.graphs, "CUDA graphs of one size": of_one, "CUDA graphs": of_all,
        "MiB more than for one size": grown, "warnings": warned,
    }  # fmt: skip


def cuda_graphs_over_sizes(h: Harness, model: nn.Module, batches) -> None:
    """One compiled graph, and a CUDA graph for each size that it meets: their number, memory, time, alternatives."""
    if h.device.type != "cuda":
        h.say("CUDA graphs with dynamic shapes: skipped, needs a GPU")
        return
    torch.compiler.reset()
    served, table = {}, {}
    for name in RECORDED:
        with h.progress(f"recording {name}"):
            served[name], table[name] = recorded(model, name, batches)
    if not h.profile:
        h.fact(f"CUDA graphs for batches of {len(batches[0])} to {len(batches[-1])}", table)
        _, marked, skipping, padded = table.values()
        number, more = "CUDA graphs", "MiB more than for one size"
        h.fact(
            "verdict dynamic-cudagraphs",
            f"{'false' if marked[number] else 'true'}: {len(batches)} sizes gave {marked['graphs compiled']} compiled "
            f"graph and {marked[number]} CUDA graphs, {marked[more]} MiB; padded to powers of two {padded[number]}, "
            f"{padded[more]} MiB; with cudagraph_skip_dynamic_graphs {skipping[number]}",
        )
    time_mix(h, model, served, batches, "mix under CUDA graphs")


def study(h: Harness) -> None:
    """A small model: launching is what a CUDA graph saves."""
    width = h.pick(quick=128, full=256)
    dtype = torch.bfloat16 if h.device.type == "cuda" else torch.float32
    model = GatedMLP(width, 4 * width).to(h.device, dtype).requires_grad_(False)
    cuda_graphs_over_sizes(h, model, [h.randn(rows, 1, width, dtype=dtype) for rows in SIZES[1:]])
