"""FSDP2 and torch.compile: fully_shard keeps a part of each weight, and gathers a block's weights where it runs.

Each rank holds 1/n of the parameters, gradients and optimizer state. Before a block runs forward, and again before it
runs backward, its weights are all-gathered; after backward its gradients are reduce-scattered. That sends 3 times the
parameters over the links where DDP sends 2; in bytes, on a GPU, about as much as DDP, because the policy gathers
bfloat16 and reduces float32. Most of it can hide behind other blocks' work: fully_shard prefetches.

The way "checkpointed" computes each block's activations again in backward: its wrapper is compiled with the block.

fully_shard's hooks run around a module's forward, and Dynamo traces none of them: compiled before fully_shard or after,
a block's graph lies between its hooks. The whole model breaks at the first block's hooks, in a loop where Dynamo cannot
resume, so blocks are compiled alone. Efficiency: a lone compiled process's time over the fastest way's.

Question   What does compiling each block before or after fully_shard change: memory, overlap, the first call?
Needs      torch, 2 ranks
Wins when  parameters, gradients and optimizer state do not fit each GPU, and computing a block takes longer than
           gathering its weights.
Study      studies/distributed/fsdp2.py (gathered again for backward, or kept from forward; bytes against theory)
Source     goes beyond the chapter; torch.distributed.fsdp's documentation of fully_shard
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from harness import Harness, Timing, Work, run

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from compile_inspect import logs
from examples.common.collectives import in_rings, traced
from examples.common.data_parallel import Compiler, first_and_last_norm, reference
from examples.common.memory import peak_bytes
from examples.common.transformer import TINY, WIDE
from examples.compiler.training_step_model import LanguageModel

PLAIN, PLAIN_COMPILED, EAGER = "torch, one process", "torch.compile, one process", "torch FSDP2"
BEFORE, AFTER, WHOLE = "torch.compile, then fully_shard", "torch.compile after fully_shard", "torch.compile, whole"
CHECKPOINTED, ABOVE = "torch.compile, checkpointed", "GiB above what is held"
SHARDED = (EAGER, BEFORE, AFTER, WHOLE, CHECKPOINTED)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Step:
    """tokens of all ranks -> the losses of this rank's part, and the gradients of the first and the last norm.

    On a GPU the policy makes blocks compute in bfloat16, and so does the single process. `keep` leaves a block's
    weights gathered between forward and backward.
    """

    def __init__(self, model: LanguageModel, ranks: int, rank: int, how: str, keep: bool = False) -> None:
        self.ranks, self.rank, self.model, self.norms = ranks, rank, model, first_and_last_norm(model)
        body, on_gpu = model.body, model.body.cos.is_cuda
        self.compiler = Compiler(on_gpu)
        shard = partial(fully_shard, **({"mp_policy": POLICY} if on_gpu else {}))
        if how in (PLAIN, PLAIN_COMPILED) and on_gpu:
            model.bfloat16()
        for i, block in enumerate(body.blocks):
            if how == CHECKPOINTED:
                block = checkpoint_wrapper(block)
            if how in (BEFORE, PLAIN_COMPILED, CHECKPOINTED):
                block = self.compiled(block)
            if how in SHARDED:
                shard(block, reshard_after_forward=not keep)
            if how == AFTER:
                block = self.compiled(block)
            body.blocks[i] = block
        if how in SHARDED:
            shard(model)
        self.run = self.compiled(model) if how == WHOLE else model

    def compiled(self, module: torch.nn.Module) -> torch.nn.Module:
        return torch.compile(module, dynamic=False, backend=self.compiler)

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.model.zero_grad(set_to_none=True)
        losses = self.run(tokens.chunk(self.ranks)[self.rank])
        losses.mean().backward()
        grads = [norm.weight.grad for norm in self.norms]
        whole = (grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads)
        return losses.detach().float(), *(grad.float() for grad in whole)


def sizes(h: Harness) -> tuple[Callable[[], LanguageModel], torch.Tensor]:
    """A function that makes the model, with the same weights each time, and all tokens: 8x2048 a rank at full size."""
    config, rows, length = h.pick((TINY, 2, 65), (WIDE, 8, 2049))
    if h.machine.mode != "gpu":
        config, rows, length = replace(TINY, layers=2), 1, 33
    return partial(LanguageModel, config, h.device, mixed=False), h.randint(config.vocab, rows * h.ranks, length)


def row_of(step: Step, tokens: torch.Tensor) -> dict:
    """One step: graphs, bytes this rank sends in rings, memory above what was held, and the share that is hidden."""
    peak = peak_bytes(step, tokens) if tokens.is_cuda else 0
    trace = traced(step, tokens)
    row = {"graphs": step.compiler.graphs} | in_rings(trace.sent, step.ranks)
    if trace.communicating:
        hidden = round(trace.overlap, 3)
        row |= {ABOVE: round(peak / 2**30, 2), "NCCL ms": round(trace.communicating, 2), "hidden": hidden}
    return row


def answer(h: Harness, rows: dict[str, dict]) -> str:
    (table,) = h.tables
    ways = {"before fully_shard": BEFORE, "after it": AFTER, "the whole model": WHOLE}
    times, first = zip(*((table[name].ms, table[name].first_call_s) for name in ways.values()), strict=True)
    speeds = ", ".join(f"{what} {table.over(EAGER, name):.2f}x" for what, name in ways.items())
    if max(times) <= 1.01 * min(times):
        speeds = f"{', '.join(ways)}: all {table.over(EAGER, BEFORE):.2f}x"
    best = min(SHARDED, key=lambda name: table[name].ms)
    eager, compiled, checkpointed = (rows[name].get(ABOVE, 0.0) for name in (EAGER, BEFORE, CHECKPOINTED))
    hidden = [rows[name].get("hidden", 0.0) for name in SHARDED]
    return (
        f"Compile {speeds} eager FSDP2, {compiled} for {eager} {ABOVE}; checkpointed "
        f"{table.over(EAGER, CHECKPOINTED):.2f}x, {checkpointed}. First calls up to {max(first):.0f} s. "
        f"Efficiency {table.over(PLAIN_COMPILED, best):.2f}; hidden {min(hidden):.0%} to {max(hidden):.0%}."
    )


def demo(h: Harness) -> None:
    new, tokens = sizes(h)
    wants = {alone: reference(new(), tokens, h.ranks, h.rank, alone) for alone in (False, True)}
    steps = {name: Step(new(), h.ranks, h.rank, name) for name in (EAGER, PLAIN, PLAIN_COMPILED, *SHARDED[1:])}
    with logs():  # Dynamo warns that it leaves out torch's profiler marks
        h.compare(
            steps, lambda _: wants[False], tokens, baseline=EAGER, work=Work(), title="forward and backward",
            references=dict.fromkeys((PLAIN, PLAIN_COMPILED), lambda _: wants[True]), max_error_ratio=2.0,
            case=f"{len(tokens) // h.ranks}x{tokens.shape[1] - 1} tokens a rank",
            timing=Timing(end_to_end=True, cold=True), dtype=torch.float32,
        )  # fmt: skip
        if h.profile:
            return
        rows = {name: row_of(steps[name], tokens) for name in SHARDED}
    h.table("what is compiled and sent", rows)
    h.answer(lambda: answer(h, rows))


if __name__ == "__main__":
    run(demo)
