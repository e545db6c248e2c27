"""Regional compilation: compile the block that repeats, not the model: what it saves, and what it costs.

A model of N equal blocks is compiled three ways:

  whole        Dynamo unrolls the loop over the blocks, and every later phase works on N copies;
  each block   one function that calls a block is compiled; the same code serves all of them, because their weights
               are inputs of its graph and not constants in it;
  region       one graph of the whole model, in which nested_compile_region on the block's forward keeps the block as
               one subgraph, called N times.

A Python number that differs between blocks defeats the last two, because then the blocks differ. Mark the class's
forward; the study also marks a function that takes the block, and checks each way on a block of another class.

Question   How does the time to compile grow with depth, and what does compiling only one block cost later?
Needs      torch
Wins when  blocks repeat and are compiled cold: development, autoscaling, many shapes. Where the host is the limit, N
           calls of compiled code with N sets of guards cost more than one: then compile the whole, or use the region.
Study      studies/compiler/regional_compilation.py (what undoes sharing; a block of another class)
Source     chapter section "Common Issues" (compiling submodules separately); how goes beyond the chapter.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace

from harness import Harness, Timing, Work, run

import torch

from compile_inspect import Compiled, fresh_cache, warm_up, watch
from examples.common.transformer import ONE_BILLION, SMALL, TINY, Block, Config, Transformer

EAGER, WHOLE, EACH, NESTED = "torch eager", "torch.compile whole", "torch.compile each block", "torch.compile region"


def call_block(block: Block, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return block(x, cos, sin)


def whole(model: Transformer, **options) -> Callable:
    """The model as one graph."""
    return torch.compile(model, **{"fullgraph": True, **options})


def each_block(model: Transformer, **options) -> Callable:
    """The model in Python, every block through one compiled function; model.blocks[i].compile() does the same."""
    compiled = torch.compile(call_block, **{"fullgraph": True, **options})
    return lambda tokens: model(tokens, run_block=compiled)


def nested_region(model: Transformer, **options) -> Callable:
    """The model as one graph that holds the block once; the model given keeps its blocks as they are."""
    marked = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})  # with the same weights
    for block in marked.blocks:
        block.__class__ = marked_class(type(block))
    return torch.compile(marked, **{"fullgraph": True, **options})


@functools.cache
def marked_class(block: type[Block]) -> type[Block]:
    """The class as it would be with @torch.compiler.nested_compile_region above its `def forward`."""
    forward = torch.compiler.nested_compile_region(block.forward)
    return type(f"Marked{block.__name__}", (block,), {"forward": forward})


WAYS = {WHOLE: whole, EACH: each_block, NESTED: nested_region}


def make_model(h: Harness, config: Config, layers: int) -> Transformer:
    dtype = torch.bfloat16 if h.machine.mode == "gpu" else torch.float32
    return Transformer.random(replace(config, layers=layers), h.device, dtype, seed=h.seed)


def cold(way: Callable, model: Transformer, tokens: torch.Tensor) -> tuple[Callable, Compiled]:
    """The compiled model, and what its first call compiled, from an empty cache."""
    with fresh_cache(), watch() as seen:
        fn = way(model)
        fn(tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
    return fn, seen


def sizes(h: Harness) -> tuple[Config, list[int], torch.Tensor]:
    """The blocks' configuration, how many blocks each model has (the most last), and the tokens."""
    gpu = h.machine.mode == "gpu"
    config = h.pick(quick=TINY, full=ONE_BILLION if gpu else SMALL)
    *few, many = h.pick(quick=(2, 4), full=(2, 12)) if gpu else h.pick(quick=(2,), full=(2, 12))
    many = max(1 + sum(few), h.fit(many, bytes_each=2 * config.block_parameters * (2 if gpu else 4)))
    return config, [*few, many], h.randint(config.vocab, 1, h.pick(quick=64, full=128))


def answer(table, seconds: dict[str, dict[int, float]]) -> str:
    cold, calls = [], []
    for name, by_depth in seconds.items():
        way = name.removeprefix("torch.compile ")
        cold.append(f"{way} {' and '.join(f'{s:.1f}' for s in by_depth.values())} s")
        calls.append(f"{way} {table.over(EAGER, name):.2f}x ({table.over(EAGER, name, host=2):.2f}x)")
    depths = [*next(iter(seconds.values()))]
    return (
        f"Time to compile {' and '.join(map(str, depths))} layers: {', '.join(cold)}. "
        f"A call of {depths[-1]}, over eager (host twice as fast): {', '.join(calls)}."
    )


def demo(h: Harness) -> None:
    config, depths, tokens = sizes(h)
    warm_up(h.device)
    compiled, seconds, rows = {}, {name: {} for name in WAYS}, {}
    with torch.no_grad():
        if tokens.is_cuda:  # not timed: the first compile with many kernels starts the worker processes
            cold(each_block, make_model(h, config, depths[0]), tokens)
        for layers in depths[-1:] if h.profile else depths:
            torch.compiler.reset()
            model = make_model(h, config, layers)
            for name, way in WAYS.items():
                with h.progress(f"{name}, {layers} layers"):
                    compiled[name], seen = cold(way, model, tokens)
                seconds[name][layers] = seen.seconds
                rows[f"{layers} layers, {name.removeprefix('torch.compile ')}"] = {
                    "cold s": round(seen.seconds, 2), "graphs": seen.graphs, "kernels generated": seen.kernels,
                    "ops traced": sum(f.graph_ops for f in seen.frames), "guards": sum(f.guards for f in seen.frames),
                }  # fmt: skip
        h.table("compiling, from an empty cache", {} if h.profile else rows)
        table = h.compare(
            {EAGER: model, **compiled}, model.float64, tokens, baseline=EAGER, work=Work(),
            title=f"{depths[-1]} layers, forward", case=f"{'x'.join(map(str, tokens.shape))} tokens",
            timing=Timing(end_to_end=True, first_calls={name: each[layers] for name, each in seconds.items()}),
            max_error_ratio=2.0, dtype=model.embedding.weight.dtype,
        )  # fmt: skip
    h.answer(lambda: answer(table, seconds))


if __name__ == "__main__":
    run(demo)
