"""regional_compilation: why one block's code serves all blocks, what undoes it, and a block of another class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from harness import Harness

import torch
from torch import nn

from compile_inspect import guards, logs, watch
from examples.common.transformer import TINY, Block, Config, Transformer
from examples.compiler.regional_compilation import WAYS, call_block, each_block, nested_region

MINI = replace(TINY, width=64, hidden=128, vocab=256)
# A number that differs between blocks, as many models have: their depth, a scale that follows from it.
SCALES = {
    "an int": lambda i: i + 1,
    "a float": lambda i: (i + 1) ** -0.5,
    "a tensor": lambda i: torch.tensor((i + 1) ** -0.5),
}


class Scaled(Block):
    def __init__(self, config: Config, scale: int | float | torch.Tensor) -> None:
        super().__init__(config)
        if isinstance(scale, torch.Tensor):
            self.register_buffer("scale", scale)
        else:
            self.scale = scale

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().forward(x, cos, sin) * self.scale


def study(h: Harness) -> None:
    if h.profile:
        return
    with torch.no_grad():
        why_one_serves_all(h, layers=12 if h.full or h.machine.mode == "gpu" else 9)
        one_block_of_another_class(h)


def dynamo_alone(way: Callable, model: Transformer, tokens: torch.Tensor) -> tuple[dict, list[int]]:
    """What Dynamo makes of the model, and the number of inputs of each graph; a backend that compiles nothing."""
    graphs, inputs = [], []

    def backend(graph: torch.fx.GraphModule, given: list) -> Callable:
        graphs.append(graph)
        inputs.append(len(given))
        return graph.forward

    torch.compiler.reset()
    with logs(), watch() as seen:  # the warning at the limit is a count here
        try:
            way(model, backend=backend, fullgraph=False)(tokens)
        except RuntimeError as error:  # of a region: torch 2.13 gives up where 2.11 makes a subgraph for each
            return {"raises": str(error).split(". ")[0].split(" for function code")[0]}, inputs
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    calls = [node.args[0].target for node in nodes if "invoke_subgraph" in str(node.target)]
    if way is nested_region:
        return {"subgraphs": len(set(calls)), "calls of them": len(calls)}, inputs
    found = {"graphs": seen.graphs}
    if seen.recompiles:
        found["why again"] = seen.recompiles[-1].split(" # ")[0].strip()
    return found, inputs


def why_one_serves_all(h: Harness, layers: int) -> None:
    """On small blocks: what the graph takes in, and what breaks the sharing."""
    config = replace(MINI, layers=layers)
    tokens = h.randint(config.vocab, 1, 8)
    plain = Transformer.random(config, h.device, torch.float32)
    found = {}
    found["equal blocks, each"], (inputs, *_) = dynamo_alone(each_block, plain, tokens)
    lines, weights = guards(call_block)[0], len(list(plain.blocks[0].parameters()))
    on_weights = [line for line in lines if "ID_MATCH" in line and "_parameters" in line]
    h.fact("a block's graph takes in", {"tensors": inputs, "weights among them": weights})
    h.fact("its guards", {"all": len(lines), "on which weight object it is": len(on_weights)})
    if not on_weights and inputs > weights:  # else they would be constants in the graph
        h.say("weights come in as inputs and no guard asks for one of them by identity: any block's will do")
    found["equal blocks, region"], _ = dynamo_alone(nested_region, plain, tokens)
    for kind, scale_of in SCALES.items():
        model = copy.deepcopy(plain)
        model.blocks = nn.ModuleList(Scaled(config, scale_of(i)) for i in range(layers)).to(h.device)
        model.eval().requires_grad_(False)
        found[f"{kind} of its own, each"], _ = dynamo_alone(each_block, model, tokens)
        found[f"{kind} of its own, region"], _ = dynamo_alone(nested_region, model, tokens)
    torch.compiler.reset()
    h.table(f"{layers} blocks", found)
    number, limit = found["an int of its own, each"]["graphs"], torch._dynamo.config.recompile_limit
    beyond = f", the recompile limit: blocks from the {number + 1}th on run eagerly" if number >= limit else ""
    h.say(
        f"graphs for {layers} blocks: {found['equal blocks, each']['graphs']}; with an int of its own in each {number}"
        f"{beyond}; with the same as a float {found['a float of its own, each']['graphs']}, as a tensor "
        f"{found['a tensor of its own, each']['graphs']}"
    )


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
    if wrong := [name for name, result in results.items() if result != "right"]:
        h.say(f"torch {torch.__version__} does not look at the class: {', '.join(wrong)}; mark the class' own forward")
