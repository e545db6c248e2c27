"""DistributedDataParallel and torch.compile: one graph, or gradients that are sent while backward still runs.

Each rank has the whole model and its part of the batch. DDP reduces gradients in buckets (25 MiB), each as soon as
backward has filled it, so that communication hides behind the backward of earlier layers. A ring moves 2 (n - 1) / n
times the gradients' bytes through each rank's link: 4 GB for 1 billion float32 gradients and two ranks. A parameter is
never split: at full size each weight is larger than a bucket, and gets an all-reduce of its own.

A compiled backward returns all gradients only when it ends, so little is left to hide communication behind. By default
Dynamo's DDPOptimizer therefore cuts the graph where DDP's buckets end, one graph for each. Compiled autograd instead
traces the all-reduces into one graph of the whole backward, where Inductor orders them: at its end, in the recorded
run. But NCCL's kernels compete with the GEMMs for SMs and memory, and take longer: not all that is hidden is saved.
Efficiency is the time of one process, compiled and without communication, over that of the fastest way.

Question   Where does DDP break the compiled graph, and is communication still overlapped with backward?
Needs      torch, 2 ranks
Wins when  the model, its gradients and the optimizer's state fit each GPU. Compile the DDP module, as torch's notes
           say: Dynamo takes the size of the buckets from it.
Study      studies/distributed/ddp.py (size of the buckets against graphs, all-reduces, overlap and time)
Source     goes beyond the chapter; torch.distributed's notes on DDP and on DDPOptimizer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from harness import Harness, Timing, Work, run

import torch
from torch._inductor import config as inductor
from torch.nn.parallel import DistributedDataParallel

from compile_inspect import logs
from examples.common.collectives import Trace, drawn, traced
from examples.common.data_parallel import Compiler, first_and_last_norm, reference
from examples.common.transformer import TINY, WIDE
from examples.compiler.training_step_model import LanguageModel

EAGER, PLAIN, PLAIN_COMPILED = "torch DDP", "torch, no communication", "torch.compile, no communication"
BUCKETS, ONE_GRAPH, AUTOGRAD = "torch.compile, DDPOptimizer", "torch.compile, one graph", "torch.compile, autograd too"
EVENTS = "start and end in ms of kernels of rank 0, event by event"
# torch._dynamo.config for each way to compile the DDP module, where it is compiled.
CONFIGS = {
    BUCKETS: {"optimize_ddp": "ddp_optimizer"},
    ONE_GRAPH: {"optimize_ddp": "no_optimization"},
    AUTOGRAD: {"optimize_ddp": "python_reducer", "compiled_autograd": True},
}


class Step:
    """tokens of all ranks -> the losses of this rank's part, and the gradients of the first and the last norm.

    The optimizer would add the same time to each way, and is left out.
    """

    def __init__(self, model: LanguageModel, ranks: int, rank: int, how: str, bucket_mib: float = 0) -> None:
        self.ranks, self.rank, self.how, self.norms = ranks, rank, how, first_and_last_norm(model)
        self.bucket_mib = bucket_mib or (25 if model.body.cos.is_cuda else 1)  # 25 is DDP's default
        self.compiler = Compiler(model.body.cos.is_cuda)
        with self.settings():
            self.model = model
            if how not in (PLAIN, PLAIN_COMPILED):
                self.model = DistributedDataParallel(model, bucket_cap_mb=self.bucket_mib, gradient_as_bucket_view=True)
        self.run = (
            self.model if how in (EAGER, PLAIN) else torch.compile(self.model, dynamic=False, backend=self.compiler)
        )

    @contextmanager
    def settings(self) -> Iterator[None]:
        fuse = (
            {"_fuse_ddp_communication": True, "_fuse_ddp_bucket_size": self.bucket_mib} if self.how == AUTOGRAD else {}
        )
        with torch._dynamo.config.patch(**CONFIGS.get(self.how, {})), inductor.patch(**fuse):
            yield

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.model.zero_grad(set_to_none=True)
        with self.settings():
            losses = self.run(tokens.chunk(self.ranks)[self.rank])
            losses.mean().backward()
        return losses.detach(), *(norm.weight.grad.clone() for norm in self.norms)


def sizes(h: Harness) -> tuple[Callable[[], LanguageModel], torch.Tensor]:
    """A function that makes the model, with the same weights each time, and all tokens: 8x2048 a rank at full size."""
    gpu = h.machine.mode == "gpu"
    config, rows, length = h.pick((TINY, 2, 65), (WIDE, 8, 2049)) if gpu else (replace(TINY, layers=1), 1, 33)
    return partial(LanguageModel, config, h.device, gpu), h.randint(config.vocab, rows * h.ranks, length)


def case_of(h: Harness, tokens: torch.Tensor) -> str:
    return f"{len(tokens) // h.ranks}x{tokens.shape[1] - 1} tokens a rank"


def show(h: Harness, steps: dict[str, Step], traces: dict[str, Trace]) -> None:
    """What each way reduces, and when the GPU's kernels ran, for the page's picture."""
    rows, gradients = {}, 4 * sum(p.numel() for p in steps[EAGER].model.parameters())
    for name, trace in traces.items():
        calls, reduced = trace.sent["all_reduce"]
        rows[name] = {"graphs": steps[name].compiler.graphs, "all-reduces": calls, "bytes": reduced}
        if trace.nccl:
            rows[name] |= {"NCCL ms": round(trace.communicating, 2), "overlapped": f"{trace.overlap:.0%}"}
    h.table(f"what is reduced, of {gradients} bytes of gradients", rows)
    if all(trace.nccl for trace in traces.values()):
        h.record.facts[EVENTS] = {
            name: {"NCCL": drawn(trace.nccl), "other kernels": drawn(trace.others)} for name, trace in traces.items()
        }


def demo(h: Harness) -> None:
    new, tokens = sizes(h)
    wants = {alone: reference(new(), tokens, h.ranks, h.rank, alone) for alone in (False, True)}
    steps = {name: Step(new(), h.ranks, h.rank, name) for name in (EAGER, PLAIN, PLAIN_COMPILED, *CONFIGS)}
    with logs():  # Dynamo warns that it leaves out torch's profiler marks
        table = h.compare(
            steps, lambda _: wants[False], tokens, baseline=EAGER, work=Work(), title="forward, backward, all-reduce",
            references=dict.fromkeys((PLAIN, PLAIN_COMPILED), lambda _: wants[True]), max_error_ratio=2.0,
            case=case_of(h, tokens), timing=Timing(end_to_end=True), dtype=torch.float32,
        )  # fmt: skip
        traces = {} if h.profile else {name: traced(steps[name], tokens) for name in (EAGER, *CONFIGS)}
    show(h, steps, traces)

    def answer() -> str:
        ms = {name: trace.communicating for name, trace in traces.items()}
        nccl = {name: f"({ms[name]:.1f} ms, {trace.overlap:.0%})" for name, trace in traces.items()}
        speed = {name: f"{table.over(EAGER, name):.2f}x {nccl[name]}" for name in CONFIGS}
        best, graphs = min(CONFIGS, key=lambda name: table[name].ms), steps[BUCKETS].compiler.graphs
        return (
            f"Over eager DDP (NCCL, overlapped): DDPOptimizer, {graphs} graphs, {speed[BUCKETS]}, "
            f"one graph {speed[ONE_GRAPH]}, compiled autograd {speed[AUTOGRAD]}; eager {nccl[EAGER]}. "
            f"Efficiency {table.over(PLAIN_COMPILED, best):.2f}."
            f"{' NCCL takes longer where it overlaps.' if ms[BUCKETS] > ms[ONE_GRAPH] else ''}"
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
