"""Large models: what torch.compile gives 1 billion and 40 billion parameters, and what compiling them costs.

Technique  A compiler saves launches and passes over activations. It does not save reading the weights. How much it
           helps therefore follows from how a call's time is divided, not from how large the model is: at one token, 40
           billion parameters are read for milliseconds while the host launches, and at 512 tokens matrix products
           take the time. What grows with the number of layers is compiling the whole: every layer is traced and
           scheduled again. Compiling one block and calling it for each layer costs the same for 4 layers and for 60,
           and a CUDA graph captured around it launches all of them at once.
Question   Does compiling still help when a model is 40 times as large, and what does it cost then?
Needs      torch
Shapes     tokens [1, 1] and [1, 512] int64 -> logits of the last token, [1, vocab].
Dtypes     bfloat16 on a GPU, float32 on a CPU.
Errors     ValueError from Captured() for tokens of another shape than were captured, or not on a GPU.
Wins when  launches or activations take time that the weights do not hide; it cannot help once they do.
Source     chapter sections "torch.compile fundamentals" (40 billion parameters get slower, being memory-bound) and
           "Compilation cost" (40 billion parameters compile for minutes); both are put next to this run.
Run        python examples/compiler/large_models.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from harness import Harness, Work, run
from harness.compiler import empty_cache, empty_compiler, wake_compiler, watch
from harness.transformer import FORTY_BILLION, ONE_BILLION, SMALL, Block, Config, Transformer, pieces

import torch

EAGER, WHOLE, BLOCKS = "torch eager", "torch.compile whole model", "torch.compile one block"
CAPTURED = "CUDA graph of compiled blocks"
# What the chapter says of each: speed-up by compiling, and seconds of compiling.
CHAPTER = {"1 B": ((1.03, 1.18), (5, 10)), "40 B": ((0.99, 0.99), (120, 300))}


def run_block(block: Block, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One layer. Compiled, it is one graph for all layers: their weights are its inputs."""
    return block(x, cos, sin)


def compiled_blocks(model: Transformer) -> Callable:
    """The model with one compiled function in place of each block."""
    step = torch.compile(run_block, dynamic=False)
    return lambda tokens: model(tokens, step)


class Captured:
    """fn(tokens), launched as one CUDA graph. The result is overwritten by the next call: clone it to keep it.

    Raises ValueError for tokens that are not on a GPU, or of another shape than those captured.
    """

    def __init__(self, fn: Callable, tokens: torch.Tensor) -> None:
        if not tokens.is_cuda:
            raise ValueError(f"Captured: tokens are on {tokens.device}; a CUDA graph needs them on a GPU")
        self.tokens, self.graph = tokens.clone(), torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream()  # what a first call allocates and tunes must not be captured
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                fn(self.tokens)
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(self.graph):
            self.out = fn(self.tokens)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape != self.tokens.shape:
            raise ValueError(
                f"Captured: tokens {tuple(tokens.shape)}, captured {tuple(self.tokens.shape)}; capture again"
            )
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.out


def bytes_needed(config: Config, dtype: torch.dtype) -> int:
    """Weights, one block of them in float64 for the reference, and 2 GiB for the rest."""
    return config.parameters * dtype.itemsize + 8 * config.block_parameters + 2 * 2**30


def lacks_memory(h: Harness, config: Config, dtype: torch.dtype) -> str | None:
    """Why this model cannot run here, if it cannot."""
    need = bytes_needed(config, dtype)
    if h.device.type == "cpu":
        return None if not h.full or config is not FORTY_BILLION else f"needs a GPU with {need / 2**30:.0f} GiB"
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    return None if free >= need else f"needs {need / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free"


def demo(h: Harness) -> None:
    on_gpu = h.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    small = {"25 M": replace(SMALL, layers=3)} if on_gpu else {"19 M": replace(SMALL, layers=2)}
    models = h.pick(quick=small, full={"1 B": ONE_BILLION, "40 B": FORTY_BILLION})
    if not h.full:
        h.say("1 and 40 billion parameters need --full; 40 also a GPU with about 90 GiB")
    speedups = {}
    wake_compiler(h.device)
    with torch.no_grad():
        for name, config in models.items():
            if reason := lacks_memory(h, config, dtype):
                h.fact(name, f"skipped: {reason}")
                continue
            speedups[name] = one_model(h, name, config, dtype)
    conclude(h, speedups)


def one_model(h: Harness, name: str, config: Config, dtype: torch.dtype) -> dict[str, dict]:
    with h.progress(f"the weights of {name}"):
        model = Transformer.random(config, h.device, dtype, h.seed)
    h.fact(name, {"parameters": config.parameters, "GB of weights": round(config.parameters * dtype.itemsize / 1e9, 2)})
    rows = {}
    for tokens in h.pick(quick=(1,), full=(1, 512)):
        # The whole model is compiled once: for the cost of it. It runs what the blocks run.
        table, whole_s = one_size(h, name, model, tokens, whole=tokens == 1)
        if table and table.rows[0].ms:
            least = sum(p.bytes * p.count for p in pieces(config, 1, tokens, dtype.itemsize))
            rows[f"1x{tokens}"] = {
                "rows": {row.variant: row for row in table.rows}, "bytes": least, "whole s": whole_s,
            }  # fmt: skip
    return rows


def one_size(h: Harness, name: str, model: Transformer, tokens: int, whole: bool):
    config, dtype = model.config, model.embedding.weight.dtype
    ids = h.randint(config.vocab, 1, tokens)
    case = f"{name}, 1x{tokens} tokens"
    facts, seconds = {}, {}
    with empty_compiler():
        variants: dict[str, Callable] = {EAGER: model}
        if whole:
            variants[WHOLE] = torch.compile(model, dynamic=False)
        variants[BLOCKS] = compiled_blocks(model)
        for variant, fn in variants.items():
            if variant == EAGER:
                fn(ids)
                continue
            # A folder each: the block's kernels are among those of the whole model.
            with h.progress(f"{variant}, {case}"), empty_cache(), watch() as seen:
                fn(ids)
                if ids.is_cuda:
                    torch.cuda.synchronize()
            seconds[variant] = seen.seconds
            facts[variant] = {
                "first call s": round(seen.seconds, 2), "graphs": seen.graphs,
                "operations traced": sum(frame.graph_ops for frame in seen.frames),
            }  # fmt: skip
        if ids.is_cuda:
            started = time.perf_counter()
            variants[CAPTURED] = Captured(variants[BLOCKS], ids)
            torch.cuda.synchronize()
            seconds[CAPTURED] = seconds[BLOCKS] + time.perf_counter() - started
        h.fact(f"{case}: compiling", facts)
        work = Work.in_steps(
            ((p.bytes, p.flops) for p in pieces(config, 1, tokens, dtype.itemsize) for _ in range(p.count)), dtype
        )
        table = h.compare(
            variants, model.float64, ids, baseline=EAGER, work=work, title="large_models", case=case, whole_calls=True,
            beside=2.0, first_calls=seconds, dtype=dtype,
        )  # fmt: skip
    return table, seconds.get(WHOLE)


def conclude(h: Harness, models: dict[str, dict]) -> None:
    for name, sizes in models.items():
        for case, one in sizes.items():
            rows = one["rows"]
            best = max((row for variant, row in rows.items() if variant != EAGER), key=lambda row: row.speedup)
            launched = rows[EAGER].enqueue_us
            share = f", {min(1.0, launched / rows[EAGER].ms / 1000):.0%} of it launching" if launched else ""
            h.say(
                f"{name} {case}: eager {rows[EAGER].ms:.2f} ms{share}; its least bytes alone at "
                f"{one['bytes'] / rows[EAGER].ms / 1e9:.2f} TB/s; best {best.variant} {best.speedup:.2f}x"
            )
        if name in CHAPTER and sizes:
            (low, high), (fast, slow) = CHAPTER[name]
            measured = {
                f"measured, {case}": {
                    variant: round(row.speedup, 2) for variant, row in one["rows"].items() if variant != EAGER
                }
                for case, one in sizes.items()
            }
            first = next(iter(sizes.values()))["rows"]  # the whole model is compiled for this size only
            compiling = {variant: round(first[variant].first_call_s, 1) for variant in (WHOLE, BLOCKS)}
            h.fact(
                f"{name}: the chapter's claims",
                {"speed-up claimed": [low, high]} | measured
                | {"seconds of compiling claimed": [fast, slow], "seconds measured": compiling},
            )  # fmt: skip


if __name__ == "__main__":
    run(demo)
