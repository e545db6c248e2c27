"""CUDA graphs: launch many small kernels as one, and the rules that the recorded addresses bring with them.

A kernel that takes longer to launch than to run leaves the GPU waiting. A CUDA graph records the launches once and
replays them all with one. The model here is STEPS launches of one tiny kernel: 512 numbers, 6 KB of memory and no FLOPs
worth counting, so that nearly all of a call is launching.

Two different things help. Replaying removes the gaps between kernels; fusing removes the kernels. torch.compile fuses
by default, mode="reduce-overhead" replays too, and with fusion switched off the compiled code shows what its own
launches cost. A recording holds addresses, not tensors: hence the rules about inputs, outputs and weights.

Question   What do launch gaps cost, what closes them, and what breaks when a graph is replayed?
Needs      torch
Wins when  the host cannot keep ahead of the GPU: small batches, many small kernels. Where each kernel takes longer than
           its launch there is no gap to close, and the graph's memory and copies are all that remains of it.
Study      studies/compiler/cuda_graphs.py, studies/compiler/cuda_graphs_replay.py
Source     chapter section "CUDA Graphs and reduce-overhead".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from harness import Harness, Timing, Work, run

import torch
from torch import nn

STEPS = 100
WIDTH = 512  # a thread block, or less than Inductor splits over the threads of a CPU: all latency
WARM_UP = 3  # calls before a capture: libraries allocate and choose their kernels in the first ones

EAGER, BY_HAND = "torch eager", "CUDA graph of eager"
UNFUSED, FUSED, REDUCED = "torch.compile unfused", "torch.compile", "torch.compile reduce-overhead"
# Each operation stays a kernel of its own: its result is stored (or it would become part of the next one), not fused.
NO_FUSION = {"max_fusion_size": 1, "realize_opcount_threshold": 0}


def refill(held: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Copy inputs into the tensors that a graph reads.

    Raises ValueError for another number of inputs, shape or device, and TypeError for another dtype: copy_ would
    broadcast and cast without a word.
    """
    if len(inputs) != len(held):
        raise ValueError(f"refill: {len(inputs)} inputs, but {len(held)} were captured; pass as many")
    for i, (to, given) in enumerate(zip(held, inputs, strict=True)):
        if given.dtype != to.dtype:
            raise TypeError(f"refill: input {i} is {given.dtype}, captured as {to.dtype}; cast it, or capture again")
        if given.shape != to.shape or given.device != to.device:
            raise ValueError(
                f"refill: input {i} is {tuple(given.shape)} on {given.device}, captured as {tuple(to.shape)} on "
                f"{to.device}; pad or move it, or capture another graph for it"
            )
    for to, given in zip(held, inputs, strict=True):
        to.copy_(given)


class Captured:
    """fn, recorded on inputs of one shape and replayed. Its result is overwritten by the next call: clone what stays.

    `pool` is the memory of graphs that are replayed one after the other: torch.cuda.graph_pool_handle() makes one.
    Raises ValueError for no input, or for one that is not on a GPU; a call raises what refill() does.
    """

    def __init__(self, fn: Callable, *inputs: torch.Tensor, pool=None) -> None:
        if not inputs:
            raise ValueError("Captured: no inputs; pass an example of each")
        if wrong := [f"input {i} is on {x.device}" for i, x in enumerate(inputs) if not x.is_cuda]:
            raise ValueError(f"Captured: {wrong[0]}; a CUDA graph holds the GPU's work only, pass x.cuda()")
        self.inputs = [x.clone() for x in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(WARM_UP):
                fn(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool), torch.no_grad():
            self.output = fn(*self.inputs)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        refill(self.inputs, inputs)
        self.graph.replay()
        return self.output


class Scale(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        # A parameter, because a graph reads those where they are; a plain tensor would be copied in at each call.
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Shift(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class Chain(nn.Module):
    """x [n] -> [n], float32: STEPS kernels, each of which waits for the one before; in modules, as models are."""

    def __init__(self, scale: torch.Tensor, shift: torch.Tensor) -> None:
        super().__init__()
        self.scale, self.shift = Scale(scale), Shift(shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(STEPS // 2):
            x = self.shift(self.scale(x))
        return x

    def float64(self, x: torch.Tensor) -> torch.Tensor:
        return copy.deepcopy(self).double()(x.double())


def make_chain(h: Harness, width: int = WIDTH) -> Chain:
    # Near 1: after all the steps the result still depends on x.
    return Chain(1 + h.randn(width, scale=0.01), h.randn(width, scale=0.02))


def which(got: torch.Tensor, candidates: dict[str, torch.Tensor]) -> str:
    """Whose result this is."""
    return next((name for name, want in candidates.items() if torch.allclose(got, want, 1e-3, 1e-3)), "none of them")


def rules(h: Harness, chain: Chain) -> dict[str, dict]:
    """What a replay reads is at the addresses of its capture: each change, and whose result the replay gives."""
    first, second = h.randn(WIDTH), h.randn(WIDTH)
    held = first.clone()
    captured, weight = Captured(chain, held), chain.shift.weight
    wants = {"stale": chain(first), "right": chain(second)}
    held.copy_(second)  # the caller's tensor, which the graph does not know
    captured.graph.replay()
    rows = {"the input in a new tensor": {"result": which(captured.output, wants)}}
    h.check(lambda x: captured(x), chain.float64, second, terms=STEPS, what="copied in", poison=False)
    rows["the input copied in"] = {"result": which(captured.output, wants)}
    result = captured(second)
    captured(first)
    rows["a result read after the next call"] = {"result": which(result, {"overwritten": wants["stale"], **wants})}
    old = chain(second)
    chain.shift.weight = nn.Parameter(weight + 1, requires_grad=False)
    wants = {"stale": old, "right": chain(second)}
    rows["a weight replaced"] = {"result": which(captured(second), wants)}
    weight.add_(1)
    rows["a weight changed in place"] = {"result": which(captured(second), wants)}
    chain.shift.weight = weight.sub_(1)
    return rows


def demo(h: Harness) -> None:
    chain, x = make_chain(h), h.randn(WIDTH)
    on_gpu = h.machine.mode == "gpu"
    variants = {EAGER: chain, FUSED: h.compiled(chain, fullgraph=True)}
    if on_gpu:
        variants[BY_HAND] = Captured(chain, x)
        variants[UNFUSED] = torch.compile(chain, fullgraph=True, options=NO_FUSION)
        variants[REDUCED] = torch.compile(chain, fullgraph=True, mode="reduce-overhead")
    table = h.compare(
        variants, chain.float64, x, baseline=EAGER, work=Work(), title=f"{STEPS} tiny kernels",
        timing=Timing(end_to_end=True), terms=STEPS,
    )  # fmt: skip
    outcome = rules(h, chain) if on_gpu and not h.profile else {}
    if outcome:
        h.table("after a capture", outcome)

    def answer() -> str:
        fused = table.over(EAGER, FUSED)
        if not on_gpu:
            cause = "most of eager's time was dispatch" if fused > 2 else "dispatch was not most of eager's time"
            return (
                f"{STEPS} operations as one compiled function: {fused:.1f}x eager, so {cause}. No CUDA graphs on a CPU."
            )
        wrong = [what for what, row in outcome.items() if row["result"] != "right"]
        return (
            f"{STEPS} tiny kernels against eager: replayed {table.over(EAGER, BY_HAND):.1f}x, fused {fused:.1f}x, both "
            f"{table.over(EAGER, REDUCED):.1f}x. Wrong after a capture: {', '.join(wrong) or 'nothing'}."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
