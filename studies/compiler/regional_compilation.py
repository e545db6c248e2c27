"""regional_compilation, measured: do seconds follow parameters or blocks, when is the whole model ahead, training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from harness import Harness

import torch

from compile_inspect import fresh_cache, watch
from examples.common.transformer import SMALL, TINY, Transformer
from examples.compiler.regional_compilation import (
    EACH,
    NESTED,
    WAYS,
    WHOLE,
    cold,
    each_block,
    make_model,
    sizes,
    whole,
)


def study(h: Harness) -> None:
    if h.profile:
        return
    for table in h.lesson or ():
        if table.timed:
            steady(h, table)
    config, depths, tokens = sizes(h)
    if len(depths) > 1:
        with torch.no_grad():
            by_width(h, config, depths[0], tokens)
    else:
        h.say("do seconds follow the parameters? --full compiles as many blocks of another width, too")
    training(h)


def steady(h: Harness, table) -> None:
    """What the cheaper compilation costs at each call, and how many calls it takes to lose what it saved."""
    rows = {row.variant: row for row in table.rows}
    for name in (EACH, NESTED):
        saved, slower = rows[WHOLE].first_call_s - rows[name].first_call_s, rows[name].ms / rows[WHOLE].ms - 1
        text = f"{name}: {saved:+.1f} s saved over the whole model cold, each call takes {slower:+.0%}"
        if saved > 0 and slower > 0.02:
            text += f": the whole model is ahead after {saved * 1000 / (rows[name].ms - rows[WHOLE].ms):,.0f} calls"
        h.say(f"{text}; {rows[name].speedup:.2f}x eager, which the whole model is {rows[WHOLE].speedup:.2f}x")


def by_width(h: Harness, config, layers: int, tokens: torch.Tensor) -> None:
    """As many blocks with more or fewer weights, and one block more: does the time follow the parameters?"""
    other, seconds = SMALL if config == TINY else TINY, {}
    for each, count, way in ((config, layers, whole), (other, layers, whole), (config, layers + 1, whole)):
        torch.compiler.reset()
        with h.progress(f"{count} layers of width {each.width}"):
            _, seen = cold(way, make_model(h, each, count), tokens % each.vocab)
        seconds[each.width, count] = seen.seconds
    parameters = {c.width: replace(c, layers=layers).parameters for c in (config, other)}
    h.table(
        "compiling the whole model",
        {
            f"{count} layers of width {width}": {
                "parameters": replace(config if width == config.width else other, layers=count).parameters,
                "cold s": round(s, 2),
            }
            for (width, count), s in seconds.items()
        },
    )
    small, large = sorted((config, other), key=lambda each: each.width)
    more = parameters[large.width] / parameters[small.width]
    longer = seconds[large.width, layers] / seconds[small.width, layers]
    deeper = seconds[config.width, layers + 1] - seconds[config.width, layers]
    h.say(
        "claim compile-cost, so many seconds for so many parameters: "
        f"{'no, for distinct blocks' if longer < more**0.5 else 'not refuted in this run'}. {more:.0f}x the parameters "
        f"in as many blocks take {longer:.2f}x as long; a block more {deeper:+.2f} s"
    )
    torch.compiler.reset()


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
    graphs = {}
    for name, trained in (("all weights", True), ("embedding frozen", False)):
        model.embedding.requires_grad_(trained)
        torch.compiler.reset()
        step = gradients(model, each_block(model, backend="aot_eager"))
        with watch() as seen:
            if trained:
                h.check(step, reference, tokens, what="gradients, each block", poison=False, **budget)
            else:
                step(tokens)
        graphs[name] = seen.graphs
    h.fact("graphs that each block compiled needs in training", graphs)
    if graphs["embedding frozen"] > graphs["all weights"]:
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
        with fresh_cache(), watch() as seen:
            step(tokens)
            if tokens.is_cuda:
                torch.cuda.synchronize()
        h.check(step, reference, tokens, what=f"gradients, {name}", poison=False, **budget)
        seconds[name] = {"cold s": round(seen.seconds, 2), "graphs": seen.graphs, "kernels generated": seen.kernels}
    h.fact("training, 8 layers", seconds)
    torch.compiler.reset()
