"""CUDA graphs: launch many small kernels as one, and the rules that the recorded addresses bring with them.

A kernel that takes longer to launch than to run leaves the GPU waiting. A CUDA graph records the launches once and
replays all of them with a single launch. The model here is STEPS launches of one tiny kernel: 512 numbers, 6 KB of
memory and no FLOPs worth counting, so that nearly all of a call is launching.

Two different things help. Replaying removes the gaps between kernels; fusing removes the kernels. torch.compile fuses
by default; mode="reduce-overhead" also replays, which costs more than the one launch left here. The row "unfused" shows
what launches by compiled code cost. A graph holds addresses, not tensors: hence rules for inputs, outputs and weights.
Under reduce-overhead, too, the next call overwrites a result. Only the first few late reads raise: clone what you keep.

Question   What do launch gaps cost, what closes them, and what breaks when a graph is replayed?
Needs      torch
Wins when  the host cannot keep ahead of the GPU: small batches, many small kernels. Where each kernel takes longer than
           its launch there is no gap to close, and a graph only adds memory and copies.
Study      studies/compiler/cuda_graphs.py (gaps between kernels; reduce-overhead's results read after the next call)
Source     chapter sections "3. CUDA Graphs" and "Compilation Modes".
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
TUNED = "torch.compile max-autotune"  # which records a CUDA graph too
# Each operation stays a kernel of its own: not fused, and its result stored (or the next one would inline it).
NO_FUSION = {"max_fusion_size": 1, "realize_opcount_threshold": 0}


def refill(held: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Copy inputs into the tensors that a graph reads.

    Raises ValueError for another number of inputs, shape, dtype or device: copy_ would broadcast and cast in silence.
    """
    got, captured = ([f"{tuple(x.shape)} {x.dtype} {x.device}" for x in tensors] for tensors in (inputs, held))
    if got != captured:
        raise ValueError(f"refill: got {got}, captured {captured}; pad, cast or move them, or capture another graph")
    for to, given in zip(held, inputs, strict=True):
        to.copy_(given)


class Captured:
    """fn, recorded on inputs of one shape and replayed. The next call overwrites its result: clone what you keep.

    Raises ValueError for an input that is not on a GPU; a call raises what refill() does.
    """

    def __init__(self, fn: Callable, *inputs: torch.Tensor) -> None:
        if not all(x.is_cuda for x in inputs):
            raise ValueError("Captured: an input is not on a GPU, and a CUDA graph holds nothing else; pass x.cuda()")
        self.inputs = [x.clone() for x in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(WARM_UP):
                fn(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), torch.no_grad():
            self.output = fn(*self.inputs)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        refill(self.inputs, inputs)
        self.graph.replay()
        return self.output


class Scale(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        # A parameter: reduce-overhead reads those where they are. A plain tensor it would copy in at each call.
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


def variants_of(chain: Chain, x: torch.Tensor) -> dict[str, Callable]:
    torch.compiler.reset()
    variants = {EAGER: chain, FUSED: torch.compile(chain, fullgraph=True)}
    if x.is_cuda:
        variants[BY_HAND] = Captured(chain, x)
        variants[UNFUSED] = torch.compile(chain, fullgraph=True, options=NO_FUSION)
        variants[REDUCED] = torch.compile(chain, fullgraph=True, mode="reduce-overhead")
        variants[TUNED] = torch.compile(chain, fullgraph=True, mode="max-autotune")
    return variants


def which(got: torch.Tensor, candidates: dict[str, torch.Tensor]) -> str:
    """Whose result this is."""
    return next((name for name, want in candidates.items() if torch.allclose(got, want, 1e-3, 1e-3)), "none of them")


def rules(h: Harness, chain: Chain) -> dict[str, str]:
    """A replay reads the addresses of its capture: for each change after it, whose result the replay gives."""
    first, second = h.randn(WIDTH), h.randn(WIDTH)
    captured, weight, found = Captured(chain, first), chain.shift.weight, {}
    wants = {"of the old input": chain(first), "right": chain(second)}
    first.copy_(second)  # the caller's tensor, which the graph does not know
    captured.graph.replay()
    found["a new input tensor"] = which(captured.output, wants)
    result = captured(second)
    found["an input copied in"] = which(result, wants)
    captured(torch.zeros_like(second))  # the next call, before that result is read
    wants = {"overwritten": chain(torch.zeros_like(second)), **wants}
    found["a late read"] = which(result, wants)
    chain.shift.weight = nn.Parameter(weight + 1, requires_grad=False)
    wants = {"of the old weight": wants["right"], "right": chain(second)}
    found["a weight replaced"] = which(captured(second), wants)
    weight.add_(1)
    found["a weight changed in place"] = which(captured(second), wants)
    chain.shift.weight = weight.sub_(1)
    return found


def demo(h: Harness) -> None:
    chain, x = make_chain(h), h.randn(WIDTH)
    table = h.compare(
        variants_of(chain, x), chain.float64, x, baseline=EAGER, work=Work(), title=f"{STEPS} tiny kernels",
        timing=Timing(end_to_end=True), terms=STEPS,
    )  # fmt: skip
    found = rules(h, chain) if x.is_cuda and not h.profile else {}
    h.table("after a capture", {what: {"result": result} for what, result in found.items()})

    def answer() -> str:
        if not x.is_cuda:
            fused = table.over(EAGER, FUSED)
            cause = "most of eager's time was dispatch" if fused > 2 else "dispatch was not most of eager's time"
            return (
                f"{STEPS} operations as one compiled function: {fused:.1f}x eager, so {cause}. No CUDA graphs on a CPU."
            )
        wrong = [what for what, result in found.items() if result != "right"]
        rows = {"replayed as a CUDA graph": BY_HAND, "fused": FUSED, "fused and replayed": REDUCED}
        gains = [f"{way} {table.over(EAGER, r):.2f}x ({table.over(EAGER, r, host=2):.2f}x)" for way, r in rows.items()]
        return (
            f"{STEPS} tiny kernels over eager (host twice as fast): {', '.join(gains)}. Wrong after a capture: "
            f"{', '.join(wrong) or 'nothing'}."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
