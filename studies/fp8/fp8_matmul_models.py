"""fp8_matmul, whole models: what FP8 Linears give a transformer beside the same one compiled in bfloat16.

Four blocks of Llama 3 8B. At 4x2048 tokens 96 % of the FLOPs are in Linears, whose products FP8 does at twice the rate;
of 2.0 GB of weights 1.7 are theirs, and FP8 halves them. With the embedding, which is also the head, left in bfloat16,
a compute-bound call can gain up to 1.9x, one that only reads weights up to 1.8x. Quantizing activations costs part of
that: a pass over each Linear's input (two if per tensor), which Inductor fuses with what makes that input.

Weights are quantized ahead, activations in every call. As blocks repeat, one is compiled and called for each layer; the
call is captured in a CUDA graph, as servers do, so that the host hardly counts. Eager bfloat16 is not captured.
torch.compile would break the graph at fp8_matmul, so it is an opaque operator there.

The budget: a rounding to e4m3 (3 bits) is 2**4 times as coarse as one to bfloat16 (7 bits), and it happens to both
operands of a Linear where bfloat16 rounds one, so the error of FP8's logits is at most 16 * sqrt(2) times eager's. A
model with one scale of one block four times too large must exceed that. Random weights have no outliers: what those do
to each recipe is in accuracy.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from harness import Harness, Table, Timing, Work
from harness.check import CheckError, VacuousCheck

import torch
from torch import nn

from compile_inspect import own_code, warm_up
from examples.common.fp8_gemm import torch_dequantized
from examples.common.quantize import torch_quantize_blocks
from examples.common.transformer import WIDE, Block, Config, Transformer, pieces
from examples.fp8.fp8_matmul import fp8_matmul

EAGER, COMPILED = "torch eager bfloat16", "torch.compile bfloat16"
TENSOR, ROW, WRAPPER = "FP8 per tensor", "FP8 per row", "FP8 per row, fp8_matmul"
LINEARS = ("qkv", "attention_out", "gate_up", "down")
LIMIT = 16 * math.sqrt(2)  # of eager bfloat16's own error; bfloat16 compiled may be off twice as far as that
TINY = Config(width=128, layers=2, heads=4, kv_heads=2, hidden=192, vocab=512)


def scaled_mm(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """torch's FP8 product in bfloat16; on a CPU, whose own takes minutes, in float32."""
    if not a.is_cuda:
        return torch_dequantized(a, b, scale_a, scale_b)
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)


@torch.library.custom_op("companion_study::fp8_product", mutates_args=())
def fp8_product(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    return fp8_matmul(a, b, scale_a, scale_b, check_scales=False)


@fp8_product.register_fake
def _(a, b, scale_a, scale_b):
    return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)


PRODUCTS = {TENSOR: ("tensor", scaled_mm), ROW: ("row", scaled_mm), WRAPPER: ("row", fp8_product)}


def quantized(x: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, K] in e4m3, and its scales: [] per tensor, [rows, 1] per row."""
    q, scale = torch_quantize_blocks(x, recipe)
    return q, scale.reshape(()) if recipe == "tensor" else scale


class FP8Linear(nn.Module):
    """A bias-free Linear for inference: its weight is quantized here, its input at every call."""

    def __init__(self, linear: nn.Linear, recipe: str, product: Callable) -> None:
        super().__init__()
        self.recipe, self.product = recipe, product
        q, scale = quantized(linear.weight, recipe)
        self.register_buffer("weight", q)
        self.register_buffer("scale", scale if recipe == "tensor" else scale.t().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = quantized(x.reshape(-1, x.shape[-1]), self.recipe)
        return self.product(q, self.weight.t(), scale, self.scale).view(*x.shape[:-1], -1)


def in_fp8(model: Transformer, recipe: str, product: Callable) -> Transformer:
    """The model with FP8Linear for every Linear of its blocks."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        for name in LINEARS:
            setattr(block, name, FP8Linear(getattr(block, name), recipe, product))
    return model


def run_block(block: Block, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return block(x, cos, sin)


def compiled(h: Harness, model: Transformer) -> Callable:
    """The model with its block compiled, and on a GPU, from the second call on, as one CUDA graph for those tokens."""
    # Each has its own code, so that it does not go through the guards of the others.
    backend = "aot_eager" if h.interpreted else "inductor"
    step = torch.compile(own_code(run_block), dynamic=False, fullgraph=True, backend=backend)
    held: list = []

    def call(tokens: torch.Tensor) -> torch.Tensor:
        if not tokens.is_cuda:
            return model(tokens, step)
        if not held:
            model(tokens, step)  # compiles, which cannot be captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = model(tokens, step)
            held.extend((tokens, graph, out))
        if tokens is not held[0]:
            raise ValueError(
                f"compiled: tokens {tuple(tokens.shape)} are not the tensor of the first call, which the CUDA graph "
                "reads; copy_ them into that one, or make another with compiled()"
            )
        held[1].replay()
        return held[2]

    return call


def takes(h: Harness, name: str, model: Transformer, tokens: torch.Tensor) -> bool:
    """Whether its products take so many rows here: torch._scaled_mm refuses some scales on some GPUs."""
    try:
        model(tokens)
    except (RuntimeError, ValueError) as error:
        h.say(f"no {name} for {tokens.numel()} tokens here: {str(error).splitlines()[0]}")
        return False
    return True


def off_by(got: torch.Tensor, want: torch.Tensor) -> float:
    """The root mean square of the error, relative to that of what is wanted."""
    return ((got.double() - want).square().mean() / want.square().mean()).sqrt().item()


def one_size(h: Harness, model: Transformer, models: dict[str, Transformer], tokens: torch.Tensor):
    """The table of one size, and the relative RMS error of each of its variants' logits."""
    torch.compiler.reset()
    want = model.float64(tokens)
    here = {COMPILED: model} | {name: each for name, each in models.items() if takes(h, name, each, tokens)}
    variants = {EAGER: model} | {name: compiled(h, each) for name, each in here.items()}
    table = h.compare(
        variants, lambda _: want, tokens, baseline=EAGER, work=Work(), title="whole models",
        case=f"{tokens.shape[0]}x{tokens.shape[1]} tokens", timing=Timing(end_to_end=True),
        max_error_ratio=LIMIT, dtype=torch.bfloat16,
    )  # fmt: skip
    if COMPILED in table and (ratio := LIMIT * table[COMPILED].error) > 2:
        raise CheckError(f"{COMPILED}, {table.case}: off by {ratio:.1f} times what {EAGER} is, 2 allowed")
    return table, {row.variant: round(off_by(variants[row.variant](tokens), want), 5) for row in table.rows}


def wrong_scale(model: Transformer, fp8: Transformer, tokens: torch.Tensor) -> float:
    """The error of the logits in units of eager bfloat16's, the scale of the first block's last weight times four.

    Raises VacuousCheck where that is within the budget.
    """
    want, scale = model.float64(tokens), fp8.blocks[0].down.scale
    scale.mul_(4)
    try:
        # As h.compare has it, eager is off by one rounding of the result at least.
        ratio = off_by(fp8(tokens), want) / max(off_by(model(tokens), want), torch.finfo(torch.bfloat16).eps)
    finally:
        scale.mul_(0.25)
    if ratio <= LIMIT:
        raise VacuousCheck(f"a model with a wrong scale would pass: {ratio:.1f} times {EAGER}, {LIMIT:.1f} allowed")
    return round(ratio, 1)


def weights(h: Harness, models: dict[str, Transformer]) -> None:
    def mb(module: nn.Module) -> float:
        return sum(x.nbytes for x in itertools.chain(module.parameters(), module.buffers())) / 1e6

    rows = {name: {"all": round(mb(each), 3), "blocks": round(mb(each.blocks), 3)} for name, each in models.items()}
    h.table("MB of weights", rows)


def in_linears(config: Config, batch: int, tokens: int) -> float:
    """The share of a call's FLOPs that are in the Linears of its blocks."""
    work = pieces(config, batch, tokens, 2)
    return round(sum(p.count * p.flops for p in work if p.name in LINEARS) / sum(p.count * p.flops for p in work), 4)


def conclude(tables: list[Table]) -> str:
    """What FP8 gives over bfloat16 compiled at each size, and at which it helps: on a host twice as fast, too."""
    told, helps = [], {}
    for table in tables:
        rows = [row.variant for row in table.rows if row.ours]
        told.append(f"{table.case}: " + ", ".join(f"{row} {table.by_host(COMPILED, row)}" for row in rows))
        gains = [min(table.over(COMPILED, row), table.over(COMPILED, row, host=2)) for row in rows]
        helps[table.case] = max(gains, default=0.0) > 1.02
    yes, no = (", ".join(case for case, does in helps.items() if does is wanted) for wanted in (True, False))
    return (
        f"Whole models, over {COMPILED}: {'; '.join(told)}. "
        f"FP8 helps at {yes or 'none of these sizes'}{f' and not at {no}' if yes and no else ''}."
    )


@torch.no_grad()
def study(h: Harness) -> None:
    config = h.pick(interpreted=TINY, quick=replace(WIDE, layers=2), full=WIDE)
    sizes = h.pick(interpreted=[(1, 16), (2, 1)], quick=[(1, 512), (64, 1)],
                   full=[(4, 2048), (1, 512), (64, 1), (1, 1)])  # fmt: skip
    if not h.interpreted:
        warm_up(h.device)
    model = Transformer.random(config, h.device, torch.bfloat16, h.seed)
    models = {name: in_fp8(model, *how) for name, how in PRODUCTS.items()}
    weights(h, {"bfloat16": model} | models)
    h.fact("share of the FLOPs in Linears", {f"{b}x{t} tokens": in_linears(config, b, t) for b, t in sizes})
    if not h.profile:
        ratio = wrong_scale(model, models[ROW], h.randint(config.vocab, 2, 16))
        h.fact(f"error over eager's with one wrong scale ({LIMIT:.1f} allowed)", ratio)
    tables, errors = [], {}
    for size in sizes:
        table, errors[table.case] = one_size(h, model, models, h.randint(config.vocab, *size))
        tables.append(table)
    if not h.profile:
        h.table("relative RMS error of the logits", errors)
    if all(table.timed for table in tables):
        h.say(conclude(tables))
