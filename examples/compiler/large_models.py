"""Large models: what torch.compile gives 1 billion and 40 billion parameters, and what compiling them costs.

A compiler saves launches and passes over activations. It does not save reading the weights. How much it helps therefore
follows from how a call's time is divided, not from how large the model is. At one token the GPU reads 40 B (60 layers
of width 8192) in 20 ms, about as long as the host takes to launch eager's kernels. It reads 1 B (16 of width 2048, the
model of modes) in 0.6 ms and waits for the host: its ratio depends on the host, and modes may report another. At 512
tokens matrix products dominate 40 B's time; 1 B still waits for the host. In the chapter a 40 B model is slowed to
0.99x because it is bound by memory; here nothing is slower.

Compiling the whole model takes longer with every layer: each is traced and scheduled again. Compiling one block and
calling it for each layer (regional compilation) traces one layer, whether there are 60 or 16; a CUDA graph captured
around the calls launches all layers at once. The chapter's compile times (1 B 5-10 s, 10 B 30-60 s, 40 B 2-5 min)
follow parameters; the whole model's follow the number of layers. The study compiles all 60 of 40 B.

Question   Does compiling still help when a model is 40 times as large, and what does it cost then?
Needs      torch
Wins when  launches, or passes over activations, add to the time that reading the weights and the products take.
Study      studies/compiler/large_models.py (10 B; 40 B whole, and one block with max-autotune)
Source     chapter sections "When torch.compile Helps", "Mode Comparison", "Compilation Overhead" and "Pitfall 1:
           Compiling Memory-Bound Models".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from harness import Harness, Timing, Work, run

import torch

from compile_inspect import fresh_cache, fresh_compiler, warm_up, watch
from examples.common.transformer import FORTY_BILLION, ONE_BILLION, SMALL, Block, Config, Transformer, steps

EAGER, WHOLE, BLOCKS = "torch eager", "torch.compile whole model", "torch.compile one block"
CAPTURED = "CUDA graph of compiled blocks"


def run_block(block: Block, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One layer. Compiled, it is one graph for all layers: their weights are its inputs."""
    return block(x, cos, sin)


def compiled_blocks(model: Transformer, **options) -> Callable:
    """The model with one compiled function in place of each block."""
    step = torch.compile(run_block, dynamic=False, **options)
    return lambda tokens: model(tokens, step)


def captured(fn: Callable, tokens: torch.Tensor) -> Callable:
    """fn, which has run on such tokens before, as one CUDA graph; the next call overwrites the result.

    Raises ValueError for tokens of another shape: the graph reads fixed memory, into which copy_ would broadcast them.
    """
    held, graph = tokens.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn(held)

    def replay(tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape != held.shape:
            raise ValueError(f"captured: tokens {tuple(tokens.shape)}, captured {tuple(held.shape)}; capture again")
        held.copy_(tokens)
        graph.replay()
        return out

    return replay


def fitting(config: Config, device: torch.device, dtype: torch.dtype) -> Config | None:
    """config, or as many of its layers as fit: weights, one block in float64 for the reference, 4 GiB for the rest.

    None if not even one layer fits, and for 40 B on a CPU.
    """
    if device.type == "cpu":
        return None if config is FORTY_BILLION else config
    torch.cuda.empty_cache()
    block = config.block_parameters
    rest = (config.parameters - config.layers * block) * dtype.itemsize + 8 * block + 4 * 2**30
    layers = min(config.layers, (torch.cuda.mem_get_info(device)[0] - rest) // (block * dtype.itemsize))
    return replace(config, layers=layers) if layers > 0 else None


def models(h: Harness, configs: dict[str, Config], dtype: torch.dtype) -> Iterator[tuple[str, str, Transformer]]:
    """What was asked for, what it is here, and the model: delete it before the next, or that one finds less memory."""
    for name, asked in configs.items():
        config = fitting(asked, h.device, dtype)
        if config is None:
            h.say(f"{name} skipped: no GPU here has memory for one layer of it")
            continue
        here = name if config == asked else f"{config.parameters / 1e9:.0f} B"
        if here != name:
            h.say(f"{name} is {here} here: {config.layers} of {asked.layers} layers fit into the memory")
        yield name, here, Transformer.random(config, h.device, dtype, h.seed)


def compile_all(model: Transformer, ids: torch.Tensor, whole: bool) -> tuple[dict[str, Callable], dict[str, dict]]:
    """The variants, called once, and what each first call took; the whole model is compiled only if asked for."""
    variants: dict[str, Callable] = {WHOLE: torch.compile(model, dynamic=False)} if whole else {}
    variants[BLOCKS] = compiled_blocks(model)
    facts = {}
    for variant, fn in variants.items():
        with fresh_cache(), watch() as seen:  # a cache each: the block's kernels are among the whole model's
            fn(ids)
            if ids.is_cuda:
                torch.cuda.synchronize()
        traced = sum(frame.graph_ops for frame in seen.frames)
        facts[variant] = {"first call s": round(seen.seconds, 2), "graphs": seen.graphs, "operations traced": traced}
    if ids.is_cuda:
        with watch() as seen:
            variants[CAPTURED] = captured(variants[BLOCKS], ids)
            torch.cuda.synchronize()
        facts[CAPTURED] = {"first call s": round(facts[BLOCKS]["first call s"] + seen.seconds, 2)}
    return {EAGER: model} | variants, facts


def one_size(h: Harness, name: str, model: Transformer, tokens: int, whole: bool):
    config, dtype = model.config, model.embedding.weight.dtype
    ids, case = h.randint(config.vocab, 1, tokens), f"{name}, 1x{tokens} tokens"
    with fresh_compiler():
        with h.progress(f"compiling {case}"):
            variants, facts = compile_all(model, ids, whole)
        h.table(f"{case}: compiling", facts)
        seconds = {variant: fact["first call s"] for variant, fact in facts.items()}
        return h.compare(
            variants, model.float64, ids, baseline=EAGER, title="large_models", case=case,
            work=Work.in_steps(steps(config, 1, tokens, dtype.itemsize), dtype),
            timing=Timing(end_to_end=True, first_calls=seconds), max_error_ratio=2.0, dtype=dtype,
        )  # fmt: skip


def answer(tables: dict[str, list]) -> str:
    told, cold = [], []
    for name, sizes in tables.items():
        first = sizes[0]
        row = first.rows[-1].variant  # a CUDA graph of compiled blocks where there is a GPU
        gains = [f"{each.over(EAGER, row):.2f}x ({each.over(EAGER, row, host=2):.2f}x)" for each in sizes]
        told.append(f"{name} {' and '.join(gains)}")
        whole = f" (all layers: {first[WHOLE].first_call_s:.0f} s)" if WHOLE in first else ""
        cold.append(f"{first[BLOCKS].first_call_s:.1f} s at {name}{whole}")
    kind = "Blocks compiled, in one CUDA graph" if CAPTURED in first else "Blocks compiled"
    tokens = "1 and 512 tokens" if len(sizes) == 2 else "1 token"
    gains = f"{kind}, over eager (host twice as fast), {tokens}: {', '.join(told)}"
    return f"{gains}. Compiling one block takes {', '.join(cold)}."


def demo(h: Harness) -> None:
    on_gpu = h.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    small = {"25 M": replace(SMALL, layers=3)} if on_gpu else {"19 M": replace(SMALL, layers=2)}
    configs = h.pick(quick=small, full={"1 B": ONE_BILLION, "40 B": FORTY_BILLION})
    sizes = h.pick(quick=(1,), full=(1, 512))
    tables: dict[str, list] = {}
    warm_up(h.device)
    with torch.no_grad():
        for asked, name, model in models(h, configs, dtype):
            # The whole model is compiled only to see its cost: it runs what the blocks run. 40 B is in the study.
            whole = {1: asked != "40 B", 512: False}
            tables[name] = [one_size(h, name, model, tokens, whole[tokens]) for tokens in sizes]
            del model
    if tables:
        h.answer(lambda: answer(tables))


if __name__ == "__main__":
    run(demo)
