"""regional_compilation, measured: do seconds follow parameters or blocks, when is the whole model ahead, training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from harness import Harness

import torch

from compile_inspect import watch
from examples.common.transformer import SMALL, TINY, Transformer
from examples.compiler.regional_compilation import EACH, NESTED, WHOLE, cold, each_block, make_model, sizes, whole


def study(h: Harness) -> None:
    if h.profile:
        return
    for table in h.lesson or ():
        if table.timed:
            steady(h, table)
    config, depths, tokens = sizes(h)
    with torch.no_grad():
        by_width(h, config, depths[0], tokens)
    training(h)


def steady(h: Harness, table) -> None:
    """What the cheaper compilation costs at each call, and how many calls it takes to lose what it saved."""
    rows = {row.variant: row for row in table.rows}
    for name in (EACH, NESTED):
        saved, slower = rows[WHOLE].first_call_s - rows[name].first_call_s, rows[name].ms / rows[WHOLE].ms - 1
        text = f"{name}: {saved:+.1f} s saved over the whole model cold, each call takes {slower:+.0%}"
        if saved > 0 and slower > 0.02:
            text += f": the whole model is ahead after {saved * 1000 / (rows[name].ms - rows[WHOLE].ms):,.0f} calls"
        h.say(text)


def by_width(h: Harness, config, layers: int, tokens: torch.Tensor) -> None:
    """As many blocks with more or fewer weights, and one block more: does the time follow the parameters?"""
    other, rows = SMALL if config == TINY else TINY, {}
    for each in (replace(config, layers=layers), replace(other, layers=layers), replace(config, layers=layers + 1)):
        torch.compiler.reset()
        with h.progress(f"{each.layers} layers of width {each.width}"):
            _, seen = cold(whole, make_model(h, each, each.layers), tokens % each.vocab)
        row = {"parameters": each.parameters, "cold s": round(seen.seconds, 2)}
        rows[f"{each.layers} layers of width {each.width}"] = row
    torch.compiler.reset()
    h.table("compiling the whole model", rows)
    same, others, deeper = rows.values()
    small, large = sorted((same, others), key=lambda row: row["parameters"])
    more, longer = large["parameters"] / small["parameters"], large["cold s"] / small["cold s"]
    h.say(
        "claim compile-cost, so many seconds for so many parameters: "
        f"{'no, for distinct blocks' if longer < more**0.5 else 'not refuted in this run'}. {more:.0f}x the parameters "
        f"in as many blocks take {longer:.2f}x as long; a block more {deeper['cold s'] - same['cold s']:+.2f} s"
    )


def gradients(model: Transformer, forward: Callable) -> Callable:
    """tokens -> the gradients of all weights that have one."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return lambda tokens: torch.autograd.grad(forward(tokens).square().mean(), weights)


def training(h: Harness) -> None:
    """How many graphs one block compiled needs in training, by AOTAutograd alone."""
    config = replace(TINY, width=64, hidden=128, vocab=256, layers=4)
    model = Transformer.random(config, h.device, torch.float32).train().requires_grad_(True)
    exact = copy.deepcopy(model).double()
    exact.cos, exact.sin = exact.angles(config.max_tokens, h.device)
    tokens, graphs = h.randint(config.vocab, 2, 16), {}
    for name, trained in (("all weights", True), ("embedding frozen", False)):
        model.embedding.requires_grad_(trained)
        exact.embedding.requires_grad_(trained)
        torch.compiler.reset()
        step = gradients(model, each_block(model, backend="aot_eager"))
        with watch() as seen:
            h.check(
                step, gradients(exact, exact), tokens, what=f"gradients, {name}", poison=False, dtype=torch.float32,
                terms=1_000_000, roundings=64,
            )  # fmt: skip
        graphs[name] = seen.graphs
    torch.compiler.reset()
    h.fact("graphs that each block compiled needs in training", graphs)
    if graphs["embedding frozen"] > graphs["all weights"]:
        h.say("the first block is another case when its input needs no gradient: the others' graph is not for it")
