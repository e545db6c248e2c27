"""Tensor parallelism by DTensor and torch.compile: each rank has a part of every weight, and computes on all tokens.

Column parallel: a rank has some of a weight's outputs, whole attention heads and a part of gate's and up's columns. Row
parallel: these are the inputs of its part of the next weight, and the ranks' results are summed by an all-reduce for
each such pair of weights. Sequence parallel splits the all-reduce: a reduce-scatter leaves each rank the sum for its
part of the tokens, where it normalizes and adds the residual; an all-gather comes before the next column parallel
weight. In rings both send the same: 2 (ranks - 1) / ranks times the activations per pair, forward and again backward.

Here a GEMM waits for the bytes, and the bytes for the previous GEMM: unlike in fsdp2, no other block hides them. Async
tensor parallelism is an Inductor pass that fuses a collective and its GEMM into one operator, which sends parts over
symmetric memory while it computes others: NCCL's kernels then carry no bytes. Fused weights (qkv, gate_up) need their
rows in the order of the ranks first. Every rank has all tokens, so n ranks are at best n times as fast as one.

Question   What do column, row and sequence parallel send, how near to n GPUs' speed are they, and what does async add?
Needs      torch, 2 or 4 or 8 ranks, peers
Wins when  GPUs share NVLink, and a layer does not fit one of them or the batch is too small to be split.
Source     goes beyond the chapter; torch.distributed.tensor.parallel's documentation
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace

from harness import Harness, Timing, Work, run

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import compile_fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from compile_inspect import logs
from examples.common.collectives import in_graph, in_rings, sent_in_ring, traced
from examples.common.memory import peak_bytes
from examples.common.transformer import TINY, WIDE, Block, Transformer

PLAIN, PLAIN_COMPILED = "torch, one process", "torch.compile, one process"
TENSOR, TENSOR_COMPILED = "torch, tensor parallel", "torch.compile, tensor parallel"
SEQUENCE, SEQUENCE_COMPILED, ASYNC = (
    "torch, sequence parallel",
    "torch.compile, sequence parallel",
    "torch.compile, async",
)
ABOVE = "GiB above what is held"  # before the call: the weights
COMPILED = (TENSOR_COMPILED, SEQUENCE_COMPILED, ASYNC)


def in_order_of_ranks(linear: torch.nn.Linear, parts: list[int], ranks: int) -> None:
    """Reorder a fused weight with outputs `parts`: first what rank 0 needs of each part, then rank 1, and so on."""
    pieces = [part.chunk(ranks) for part in linear.weight.detach().split(parts)]
    linear.weight = torch.nn.Parameter(torch.cat([piece[rank] for rank in range(ranks) for piece in pieces]))


def parallelize(block: Block, ranks: int, sequence: bool) -> Block:
    """The block, in parts; with `sequence` it takes and returns [batch, tokens / ranks, width] on each rank.

    Changes `block` itself: its config, the order of the rows of qkv and gate_up, and all weights, which become DTensors
    (with `sequence` the norms' too). Raises ValueError where kv_heads or columns are no multiple of the ranks.
    """
    c = block.config
    if c.kv_heads % ranks or c.hidden % ranks:
        raise ValueError(
            f"parallelize: {c.kv_heads} kv_heads and {c.hidden} columns on {ranks} ranks; both must divide evenly "
            "among the ranks: use fewer"
        )
    in_order_of_ranks(block.qkv, [c.width, c.kv_width, c.kv_width], ranks)
    in_order_of_ranks(block.gate_up, [c.hidden, c.hidden], ranks)
    block.config = replace(c, width=c.width // ranks, heads=c.heads // ranks, kv_heads=c.kv_heads // ranks)
    between = Shard(1) if sequence else Replicate()  # the stream of activations from pair to pair
    plan = dict.fromkeys(("qkv", "gate_up"), ColwiseParallel(input_layouts=between))
    plan |= dict.fromkeys(("attention_out", "down"), RowwiseParallel(output_layouts=between))
    plan |= dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel()) if sequence else {}
    return parallelize_module(block, init_device_mesh(block.down.weight.device.type, (ranks,)), plan)


class Step:
    """x and dy [batch, tokens, width], alike on all ranks -> this rank's tokens of y and dx, the gradient of the first
    norm, and this rank's columns of the last weight's gradient.

    `sent` counts the collectives of the compiled graphs, before the async pass; `fused` the operators that it made.
    """

    def __init__(self, block: Block, angles: tuple, ranks: int, rank: int, how: str) -> None:
        self.block, self.angles, self.ranks, self.rank, self.how = block, angles, ranks, rank, how
        self.sequence, self.sent, self.fused = how in (SEQUENCE, SEQUENCE_COMPILED, ASYNC), {}, 0
        if how not in (PLAIN, PLAIN_COMPILED):
            self.block = parallelize(block, ranks, self.sequence)
        if how == ASYNC:
            with warnings.catch_warnings():  # deprecated, but the pass still needs it
                warnings.simplefilter("ignore", FutureWarning)
                symmetric_memory.enable_symm_mem_for_group(torch.distributed.group.WORLD.group_name)
        compiled = how in (PLAIN_COMPILED, *COMPILED)
        self.run = torch.compile(self.block, dynamic=False, backend=self.backend) if compiled else self.block

    def backend(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        """Inductor, with its graphs' collectives counted; on a CPU graphs run as they are."""
        if self.angles[0].is_cuda:
            options = {"post_grad_custom_pre_pass": self.count, "post_grad_custom_post_pass": self.count_fused}
            return compile_fx(graph, inputs, config_patches=options | {"_micro_pipeline_tp": self.how == ASYNC})

        def counted(graph: torch.fx.GraphModule, _) -> Callable:
            self.count(graph.graph)
            return make_boxed_func(graph)

        return aot_autograd(fw_compiler=counted)(graph, inputs)

    def count(self, graph: torch.fx.Graph) -> None:
        for kind, found in in_graph(graph).items():
            self.sent[kind] = tuple(map(sum, zip(self.sent.get(kind, (0, 0)), found, strict=True)))

    def count_fused(self, graph: torch.fx.Graph) -> None:
        self.fused += sum(str(node.target).startswith("symm_mem.fused") for node in graph.nodes)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(self.ranks, dim=1)[self.rank]

    def __call__(self, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.block.zero_grad(set_to_none=True)
        if self.sequence:
            x, dy = self.part(x).contiguous(), self.part(dy).contiguous()
        x = x.detach().requires_grad_()
        y = self.run(x, *self.angles)
        y.backward(dy)
        y, dx = y.detach(), x.grad
        y, dx = (y, dx) if self.sequence else (self.part(y), self.part(dx))
        norm, down = self.block.attention_norm.weight.grad, self.block.down.weight.grad
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return y, dx, norm, down.to_local() if isinstance(down, DTensor) else self.part(down)


def reference(block: Block, angles: tuple, x: torch.Tensor, dy: torch.Tensor, ranks: int, rank: int) -> tuple:
    """What Step returns, in float64, one row of the batch at a time."""
    exact, angles, parts = copy.deepcopy(block).double(), tuple(each.double() for each in angles), []
    for row, grad in zip(x.double().split(1), dy.double().split(1), strict=True):
        y = exact(row.requires_grad_(), *angles)
        y.backward(grad)
        parts.append([each.chunk(ranks, dim=1)[rank] for each in (y.detach(), row.grad)])
    y, dx = map(torch.cat, zip(*parts, strict=True))
    return y, dx, exact.attention_norm.weight.grad, exact.down.weight.grad.chunk(ranks, dim=1)[rank]


def inputs(h: Harness) -> tuple:
    """A block, the angles of its positions, x and dy: 4x2048 tokens for each rank at full size, of which every
    rank has all, and a block of 218 million parameters."""
    on_gpu, small = h.machine.mode == "gpu", replace(TINY, heads=16, kv_heads=8)  # which up to 8 ranks share
    config, rows, tokens = h.pick((small, 1, 64), (WIDE, 4, 2048)) if on_gpu else (small, 1, 32)
    dtype = h.half if on_gpu else torch.float32
    model = Transformer.random(replace(config, layers=1, vocab=1), h.device, dtype).requires_grad_(True)
    x, dy = (h.randn(rows * h.ranks, tokens, config.width, dtype=dtype) for _ in range(2))
    return model.blocks[0], (model.cos[:tokens], model.sin[:tokens]), x, dy


def row_of(step: Step, x: torch.Tensor, dy: torch.Tensor) -> dict:
    """What one call sends if collectives are rings, keeps, and waits for. Raises AssertionError if the bytes sent are
    not those of theory."""
    theory = 8 * (step.ranks - 1) * x.nbytes // step.ranks  # two pairs, forward and backward, each 2 (n - 1) / n
    if step.how in COMPILED and sent_in_ring(step.sent, step.ranks) != theory:
        raise AssertionError(f"{step.how}: {step.sent} in its graphs, and rings send {theory} bytes by theory")
    peak = peak_bytes(step, x, dy) if x.is_cuda else 0
    trace = traced(step, x, dy)
    sent = step.sent if step.how in COMPILED else trace.sent
    row = {"MB by theory": round(theory / 1e6, 2)} | in_rings(sent, step.ranks)
    if x.is_cuda:
        row |= {"fused": step.fused, ABOVE: round(peak / 2**30, 2), "NCCL ms": round(trace.communicating, 2)}
        row |= {} if step.how == ASYNC else {"hidden": round(trace.overlap, 3)}
    return row


def answer(h: Harness, rows: dict[str, dict]) -> str:
    (table,) = h.tables
    told = {
        how: f"{table.over(PLAIN_COMPILED, how) / h.ranks:.2f} ({row.get(ABOVE, 0.0):.1f})" for how, row in rows.items()
    }
    fused = f", async {told[ASYNC]}" if ASYNC in told else ""
    fastest = max((how for how in COMPILED if how in rows), key=lambda how: table.over(PLAIN_COMPILED, how))
    return (
        f"{fastest} is fastest. Part of {h.ranks}x one compiled GPU's speed ({ABOVE}): tensor parallel "
        f"{told[TENSOR]}, compiled {told[TENSOR_COMPILED]}; sequence {told[SEQUENCE]}, compiled "
        f"{told[SEQUENCE_COMPILED]}{fused}. A rank sends {rows[TENSOR]['MB by theory']:.0f} MB."
    )


def demo(h: Harness) -> None:
    block, angles, x, dy = inputs(h)
    want = reference(block, angles, x, dy, h.ranks, h.rank)
    ways = (PLAIN, PLAIN_COMPILED, TENSOR, TENSOR_COMPILED, SEQUENCE, SEQUENCE_COMPILED)
    if h.machine.mode == "gpu":
        ways += (ASYNC,)
    else:
        h.say("Async tensor parallelism is not run: it needs GPUs.")
    steps = {how: Step(copy.deepcopy(block), angles, h.ranks, h.rank, how) for how in ways}
    with logs():  # Dynamo warns that it leaves out torch's profiler marks
        h.compare(
            steps, lambda *_: want, x, dy, baseline=PLAIN, work=Work(), title="a block, forward and backward",
            case=f"{len(x)}x{x.shape[1]} tokens", timing=Timing(end_to_end=True), max_error_ratio=2.0,
        )  # fmt: skip
        if h.profile:
            return
        rows = {how: row_of(steps[how], x, dy) for how in ways[2:]}
    h.table("what a rank sends", rows)
    h.answer(lambda: answer(h, rows))


if __name__ == "__main__":
    run(demo)
