"""Regional compilation: compile the block that repeats, not the model: what it saves, and what it costs.

Technique  A model of N equal blocks is compiled three ways. Whole: Dynamo unrolls the loop over the blocks, and every
           later phase works on N copies. Each block: one function that calls a block is compiled, and the same code
           serves all of them, because their weights are inputs of its graph, not constants in it. Nested region:
           one graph of the whole model, in which nested_compile_region on the block's forward keeps the block as one
           subgraph, called N times. A Python number that differs between blocks undoes the last two, for then the
           blocks differ. Mark the class' forward, not a function that is handed the block: what that can do to a
           block of another class is shown.
Question   How does the time to compile grow with depth, and what does compiling only one block cost later?
Needs      torch
Shapes     tokens [batch, tokens] int64 -> the logits of each row's last token, [batch, vocab].
Dtypes     the model's: float32 on a CPU, bfloat16 on a GPU.
Errors     TypeError from whole, each_block and nested_region for anything but the Transformer of harness.transformer.
           A block with a graph break: RuntimeError by torch at the first call (fullgraph=True is the default here).
Wins when  blocks repeat and are compiled cold: development, autoscaling, many shapes. Where the host is the limit, N
           calls of compiled code with N sets of guards cost more than one: then compile the whole, or the region.
Source     chapter section "Regional compilation".
Run        python examples/compiler/regional_compilation.py
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace

from harness import Harness, Work, run
from harness.compiler import Compiled, empty_cache, guards, logs, wake_compiler, watch
from harness.transformer import ONE_BILLION, SMALL, TINY, Block, Config, Transformer

import torch
import torch.nn.functional as F
from torch import nn

EAGER, WHOLE, EACH, NESTED = "torch eager", "torch.compile whole", "torch.compile each block", "torch.compile region"
LIKE_EAGER = 2.0  # times eager's own error from float64


def call_block(block: Block, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return block(x, cos, sin)


def whole(model: Transformer, **options) -> Callable:
    """The model as one graph."""
    _require_transformer("whole", model)
    return torch.compile(model, **{"fullgraph": True, **options})


def each_block(model: Transformer, **options) -> Callable:
    """The model in Python, every block through one compiled function; model.blocks[i].compile() does the same."""
    _require_transformer("each_block", model)
    compiled = torch.compile(call_block, **{"fullgraph": True, **options})
    return lambda tokens: model(tokens, run_block=compiled)


def nested_region(model: Transformer, **options) -> Callable:
    """The model as one graph that holds the block once; the model given keeps its blocks as they are."""
    _require_transformer("nested_region", model)
    marked = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})  # with the same weights
    for block in marked.blocks:
        block.__class__ = marked_class(type(block))
    return torch.compile(marked, **{"fullgraph": True, **options})


@functools.cache
def marked_class(block: type[Block]) -> type[Block]:
    """What @torch.compiler.nested_compile_region above `def forward` in the class would make of it."""
    forward = torch.compiler.nested_compile_region(block.forward)
    return type(f"Marked{block.__name__}", (block,), {"forward": forward})


WAYS = {WHOLE: whole, EACH: each_block, NESTED: nested_region}


def _require_transformer(name: str, model: object) -> None:
    if not isinstance(model, Transformer):
        raise TypeError(f"{name}: got a {type(model).__name__}; pass a harness.transformer.Transformer")


def make_model(h: Harness, config: Config, layers: int, dtype: torch.dtype) -> Transformer:
    return Transformer.random(replace(config, layers=layers), h.device, dtype, seed=h.seed)


# --- what compiling costs


def cold(way: Callable, model: Transformer, tokens: torch.Tensor) -> tuple[Callable, Compiled]:
    """The compiled model, and what its first call compiled, from an empty cache."""
    with empty_cache(), watch() as seen:
        fn = way(model)
        fn(tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
    return fn, seen


def costs(seen: Compiled) -> dict:
    return {
        "cold s": round(seen.seconds, 2), "graphs": seen.graphs, "ops traced": sum(f.graph_ops for f in seen.frames),
        "guards": sum(f.guards for f in seen.frames), "kernels generated": seen.kernels,
    }  # fmt: skip


def depth(layers: int) -> str:
    return f"{layers} layer{'s' if layers > 1 else ''}"


def by_depth(
    h: Harness, config: Config, depths: tuple[int, ...], dtype: torch.dtype, tokens: torch.Tensor
) -> tuple[Transformer, dict, dict]:
    """Compile models of one or two depths in each way: the last model, its compiled forms, what each way compiled."""
    wake_compiler(h.device)
    found: dict[str, list[Compiled]] = {name: [] for name in WAYS}
    compiled = {}
    for layers in depths:
        torch.compiler.reset()
        model = make_model(h, config, layers, dtype)
        for name, way in WAYS.items():
            with h.progress(f"{name}, {depth(layers)}"):
                compiled[name], seen = cold(way, model, tokens)
            found[name].append(seen)
        h.fact(depth(layers), {name: costs(each[-1]) for name, each in found.items()})

    if len(depths) == 1:
        h.say("what does a layer more take? --full compiles two depths")
        return model, compiled, found
    few, many = depths
    slopes = {name: (b.seconds - a.seconds) / (many - few) for name, (a, b) in found.items()}
    for name, (a, b) in found.items():
        h.say(
            f"{name}: from {few} to {depth(many)} {a.seconds:.1f} to {b.seconds:.1f} s, {slopes[name]:+.2f} s a layer; "
            f"{a.kernels} to {b.kernels} kernels generated"
        )
    h.fact("seconds a layer", {name: round(slope, 3) for name, slope in slopes.items()})
    return model, compiled, found


def by_width(
    h: Harness, config: Config, layers: int, known: Compiled, dtype: torch.dtype, tokens: torch.Tensor
) -> None:
    """As many blocks with more or fewer weights: does the time to compile follow the parameters?"""
    other = SMALL if config == TINY else TINY
    torch.compiler.reset()
    with h.progress(f"{WHOLE}, {depth(layers)} of width {other.width}"):
        _, seen = cold(whole, make_model(h, other, layers, dtype), tokens % other.vocab)
    cases = [(replace(each, layers=layers), found) for each, found in ((config, known), (other, seen))]
    told = {f"width {c.width}": {"parameters": c.parameters, "cold s": round(f.seconds, 2)} for c, f in cases}
    h.fact(f"whole, {depth(layers)}", told)
    (small, faster), (large, slower) = sorted(cases, key=lambda case: case[0].parameters)
    more, longer = large.parameters / small.parameters, slower.seconds / faster.seconds
    deeper = h.record.facts["seconds a layer"]
    confirmed = longer < more**0.5 and deeper[EACH] < 0.5 * deeper[WHOLE]
    h.say(
        "claim compile-cost, so many seconds for so many parameters: "
        f"{'no, for distinct blocks' if confirmed else 'not refuted in this run'}. {more:.0f}x the parameters in as "
        f"many blocks take {longer:.2f}x as long; a layer more {deeper[WHOLE]:+.2f} s where it is compiled again, "
        f"{deeper[EACH]:+.2f} s where it is not"
    )


# --- why one block's code serves all


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
        x = x + self.attention(self.attention_norm(x), cos, sin) * self.scale
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up) * self.scale


class Tripled(Block):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x, cos, sin)


class Recorder:
    """A backend that compiles nothing, and keeps what it was given."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.inputs: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        self.graphs.append(graph)
        self.inputs.append(len(inputs))
        return graph.forward

    def regions(self) -> tuple[int, int]:
        """Distinct subgraphs, and calls of them."""
        calls = [
            node.args[0].target
            for graph in self.graphs
            for node in graph.graph.nodes
            if node.op == "call_function" and "invoke_subgraph" in str(node.target)
        ]
        return len(set(calls)), len(calls)


def why_one_serves_all(h: Harness, layers: int) -> None:
    """Dynamo alone, on small blocks: what the graph takes in, and what breaks the sharing."""
    config = replace(TINY, width=64, hidden=128, vocab=256, layers=layers)
    tokens = h.randint(config.vocab, 1, 8)
    told = {}

    def count(name: str, model: Transformer, way: Callable) -> None:
        torch.compiler.reset()
        backend = Recorder()
        with logs(), watch() as seen:  # the warning at the limit is told as a count
            try:
                way(model, backend=backend, fullgraph=False)(tokens)
            except RuntimeError as error:  # of a region: torch 2.13 gives up where 2.11 makes a subgraph for each
                told[name] = {"raises": str(error).split(". ")[0].split(" for function code")[0]}
                return
        told[name] = {"graphs": seen.graphs}
        if way is nested_region:
            told[name] = dict(zip(("subgraphs", "calls of them"), backend.regions(), strict=True))
        elif seen.recompiles:
            told[name]["why again"] = seen.recompiles[-1].split(" # ")[0].strip()
        if model is plain and way is each_block:
            weights = sum(1 for _ in model.blocks[0].parameters())
            lines = guards(call_block)[0]
            which = [line for line in lines if "ID_MATCH" in line and "_parameters" in line]
            h.fact("a block's graph takes in", {"tensors": backend.inputs[0], "weights among them": weights})
            h.fact("its guards", {"all": len(lines), "on which weight object it is": len(which)})
            if not which and backend.inputs[0] > weights:  # else they would be constants in the graph
                h.say("weights come in as inputs and no guard asks for one of them by identity: any block's will do")

    plain = Transformer.random(config, h.device, torch.float32)
    count("equal blocks, each", plain, each_block)
    count("equal blocks, region", plain, nested_region)
    for kind, scale_of in SCALES.items():
        model = copy.deepcopy(plain)
        model.blocks = nn.ModuleList(Scaled(config, scale_of(i)) for i in range(layers)).to(h.device)
        model.eval().requires_grad_(False)
        count(f"{kind} of its own, each", model, each_block)
        count(f"{kind} of its own, region", model, nested_region)
    torch.compiler.reset()
    h.fact(f"{layers} blocks", told)
    number, limit = told["an int of its own, each"]["graphs"], torch._dynamo.config.recompile_limit
    beyond = f", the recompile limit: blocks from the {number + 1}th on run eagerly" if number >= limit else ""
    h.say(
        f"graphs for {layers} blocks: {told['equal blocks, each']['graphs']}; with an int of its own in each {number}"
        f"{beyond}; with the same as a float {told['a float of its own, each']['graphs']}, as a tensor "
        f"{told['a tensor of its own, each']['graphs']}"
    )


def one_block_of_another_class(h: Harness) -> None:
    """Each way, and a region marked on a function that is handed the block: is the odd block's own forward run?"""
    region = torch.compiler.nested_compile_region(call_block)

    def by_function(model: Transformer, **options) -> Callable:
        return torch.compile(lambda tokens: model(tokens, run_block=region), **options)

    model = Transformer.random(replace(TINY, width=64, hidden=128, vocab=256, layers=3), h.device, torch.float32)
    odd = Tripled(model.config).to(h.device)
    odd.load_state_dict(model.blocks[1].state_dict())
    model.blocks[1] = odd.eval().requires_grad_(False)
    tokens, told = h.randint(256, 1, 8), {}
    want = model(tokens)
    for name, way in {**WAYS, "region marked on a function": by_function}.items():
        torch.compiler.reset()
        got = way(model, backend="eager", fullgraph=True)(tokens)
        told[name] = "right" if torch.allclose(got, want, rtol=1e-3, atol=1e-3) else "wrong, without an error"
    torch.compiler.reset()
    h.fact("one block of three is of another class", told)
    if wrong := [name for name, result in told.items() if result != "right"]:
        h.say(f"torch {torch.__version__} does not look at the class: {', '.join(wrong)}; mark the class' own forward")


# --- training


def gradients(model: Transformer, forward: Callable) -> Callable:
    """tokens -> the gradients of all weights."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return lambda tokens: torch.autograd.grad(forward(tokens).square().mean(), weights)


def float64_gradients(model: Transformer) -> Callable:
    exact = copy.deepcopy(model).double()
    exact.cos, exact.sin = exact.angles(model.config.max_tokens, model.cos.device)
    return gradients(exact, exact)


def training(h: Harness) -> None:
    """Graphs in training, by AOTAutograd alone; on full sizes also what Inductor takes for them."""
    config = replace(TINY, width=64, hidden=128, vocab=256, layers=4)
    model = Transformer.random(config, h.device, torch.float32).train().requires_grad_(True)
    tokens = h.randint(config.vocab, 2, 16)
    reference = float64_gradients(model)
    budget = {"dtype": torch.float32, "terms": 1_000_000, "roundings": 64}
    told = {}
    for name, trained in (("all weights", True), ("embedding frozen", False)):
        model.embedding.requires_grad_(trained)
        torch.compiler.reset()
        step = gradients(model, each_block(model, backend="aot_eager"))
        with watch() as seen:
            if trained:
                h.check(step, reference, tokens, what="gradients, each block", poison=False, **budget)
            else:
                step(tokens)
        told[name] = seen.graphs
    h.fact("graphs that each block compiled needs in training", told)
    if told["embedding frozen"] > told["all weights"]:
        h.say("the first block is another case when its input needs no gradient: the others' graph is not for it")
    if not h.full:
        torch.compiler.reset()
        return
    model = Transformer.random(replace(TINY, layers=8), h.device, torch.float32).train().requires_grad_(True)
    tokens, reference = h.randint(TINY.vocab, 2, 64), float64_gradients(model)
    seconds = {}
    for name, way in WAYS.items():
        torch.compiler.reset()
        step = gradients(model, way(model))
        with empty_cache(), watch() as seen:
            step(tokens)
            if tokens.is_cuda:
                torch.cuda.synchronize()
        h.check(step, reference, tokens, what=f"gradients, {name}", poison=False, **budget)
        seconds[name] = {"cold s": round(seen.seconds, 2), "graphs": seen.graphs, "kernels generated": seen.kernels}
    h.fact("training, 8 layers", seconds)
    torch.compiler.reset()


def demo(h: Harness) -> None:
    gpu = h.machine.mode == "gpu"
    config = h.pick(quick=TINY, full=ONE_BILLION if gpu else SMALL)
    dtype = torch.bfloat16 if gpu else torch.float32
    *few, many = h.pick(quick=(2, 4), full=(4, 16)) if gpu else h.pick(quick=(2,), full=(2, 12))
    many = max(1 + sum(few), h.fit(many, bytes_each=2 * config.block_parameters * dtype.itemsize))
    tokens = h.randint(config.vocab, 1, h.pick(quick=64, full=128))

    with torch.no_grad():
        if h.profile:
            model, found = make_model(h, config, many, dtype), {}
            compiled = {name: way(model) for name, way in WAYS.items()}
        else:
            model, compiled, found = by_depth(h, config, (*few, many), dtype, tokens)
        seconds = {name: each[-1].seconds for name, each in found.items()}
        table = h.compare(
            {EAGER: model, **compiled}, model.float64, tokens, baseline=EAGER, work=Work(),
            title=f"{many} layers, forward", case=f"{'x'.join(map(str, tokens.shape))} tokens",
            whole_calls=True, beside=LIKE_EAGER, first_calls=seconds, dtype=dtype,
        )  # fmt: skip
        if h.profile:
            return
        if table and h.timing:
            steady(h, table, seconds)
        del model, compiled
        if gpu or h.full:
            by_width(h, config, few, found[WHOLE][0], dtype, tokens)
        else:
            h.say("do seconds follow the parameters? --full compiles as many blocks of another width, too")
        why_one_serves_all(h, layers=12 if gpu or h.full else 9)
        one_block_of_another_class(h)
    training(h)


def steady(h: Harness, table, seconds: dict[str, float]) -> None:
    """What the cheaper compilation costs at each call, and how many calls it takes to lose what it saved."""
    rows = {row.variant: row for row in table.rows}
    for name in (EACH, NESTED):
        saved, slower = seconds[WHOLE] - seconds[name], rows[name].ms / rows[WHOLE].ms - 1
        text = f"{name}: {saved:+.1f} s saved over the whole model cold, each call takes {slower:+.0%}"
        if saved > 0 and slower > 0.02:
            text += f": the whole model is ahead after {saved * 1000 / (rows[name].ms - rows[WHOLE].ms):,.0f} calls"
        h.say(f"{text}; {rows[name].speedup:.2f}x eager, which the whole model is {rows[WHOLE].speedup:.2f}x")


if __name__ == "__main__":
    run(demo)
