"""regional_compilation, measured: what shares one block's code, what undoes that, and a block of another class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from harness import Harness

import torch
from torch import nn

from compile_inspect import guards_of, logs, watch
from examples.common.transformer import TINY, Block, Config, Transformer
from examples.compiler.regional_compilation import WAYS, call_block, each_block, nested_region

MINI = replace(TINY, width=64, hidden=128, vocab=256)


@torch.no_grad()
def study(h: Harness) -> None:
    if h.profile:
        return
    what_shares(h, layers=9)
    one_block_of_another_class(h)


class Scaled(Block):
    """A block with a number of its own, as in many models: its depth, or a scale that follows from it."""

    def __init__(self, config: Config, scale: int | torch.Tensor) -> None:
        super().__init__(config)
        self.scale = scale

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().forward(x, cos, sin) * self.scale


def dynamo_alone(way: Callable, model: Transformer, tokens: torch.Tensor) -> dict:
    """What Dynamo makes of the model: graphs, or subgraphs of a region; a backend that compiles nothing."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _) -> Callable:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    with logs(), watch() as seen:  # the warning at the limit, which is counted here
        try:
            way(model, backend=backend, fullgraph=False)(tokens)
        except RuntimeError as error:  # from a region: torch 2.13 gives up where 2.11 makes a subgraph for each
            return {"raises": str(error).split(". ")[0].split(" for function code")[0]}
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    calls = [node.args[0].target for node in nodes if "invoke_subgraph" in str(node.target)]
    if way is nested_region:
        return {"subgraphs": len(set(calls)), "calls of them": len(calls)}
    again = {"why again": seen.recompiles[-1].split(" # ")[0].partition(": ")[2].strip()} if seen.recompiles else {}
    return {"graphs": seen.graphs, **again}


def what_shares(h: Harness, layers: int) -> None:
    """On small blocks: one graph for all of them, and a number of its own in each, which defeats sharing."""
    config, found = replace(MINI, layers=layers), {}
    tokens, plain = h.randint(config.vocab, 1, 8), Transformer.random(config, h.device, torch.float32)
    models = {"equal blocks": plain}
    for kind, scale_of in {"an int": int, "a tensor": lambda i: torch.tensor(i, device=h.device)}.items():
        model = models[f"{kind} of its own"] = copy.deepcopy(plain)
        model.blocks = nn.ModuleList(Scaled(config, scale_of(i + 1)) for i in range(layers)).to(h.device)
        model.eval().requires_grad_(False)
    for kind, model in models.items():
        found[f"{kind}, each"] = dynamo_alone(each_block, model, tokens)
        if kind == "equal blocks":
            on_weights = [line for line in guards_of(call_block)[0] if "ID_MATCH" in line and "_parameters" in line]
            h.fact("guards on which weight object a block has", len(on_weights))
        found[f"{kind}, region"] = dynamo_alone(nested_region, model, tokens)
    torch.compiler.reset()
    h.table(f"{layers} blocks", found)


def one_block_of_another_class(h: Harness) -> None:
    """Each way, and a region marked on a function that is handed the block: is the odd block's own forward run?"""
    region = torch.compiler.nested_compile_region(call_block)

    def by_function(model: Transformer, **options) -> Callable:
        return torch.compile(lambda tokens: model(tokens, run_block=region), **options)

    class Tripled(Block):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(x, cos, sin)

    model = Transformer.random(replace(MINI, layers=3), h.device, torch.float32)
    model.blocks[1].__class__ = Tripled
    tokens, results = h.randint(MINI.vocab, 1, 8), {}
    want = model(tokens)
    for name, way in {**WAYS, "region marked on a function": by_function}.items():
        torch.compiler.reset()
        got = way(model, backend="eager", fullgraph=True)(tokens)
        results[name] = "right" if torch.allclose(got, want, rtol=1e-3, atol=1e-3) else "wrong, without an error"
    torch.compiler.reset()
    h.fact("one block of three is of another class", results)
