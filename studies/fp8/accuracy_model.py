"""Study of accuracy, the logits of a transformer in FP8: with outlier channels that change no bit in bfloat16."""

from __future__ import annotations

import copy
from dataclasses import replace

from harness import Harness

import torch
from torch import nn

from examples.common.transformer import ONE_BILLION, Config, Transformer
from examples.fp8.accuracy import ALL_RECIPES, RECIPES, FP8Linear, Recipe
from examples.fp8.accuracy_data import EXTREME, spaced
from studies.fp8.accuracy import digits, power_of_two

SMALL = Config(width=512, layers=2, heads=8, kv_heads=4, hidden=1024, vocab=1024)


def in_fp8(model: Transformer, recipe: Recipe) -> Transformer:
    """A copy whose linear layers compute by `recipe`. The embedding, which is also the output head, stays as it is."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear):
                setattr(block, name, FP8Linear(child.weight, recipe))
    return model


def with_outliers(model: Transformer, channels: list[int], factor: float) -> Transformer:
    """A copy that computes the same, `channels` of what each norm hands on `factor`, a power of two, times as large."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for block in model.blocks:
            for norm, consumer in ((block.attention_norm, block.qkv), (block.mlp_norm, block.gate_up)):
                norm.weight[channels] *= factor
                consumer.weight[:, channels] /= factor
    return model


def compare_logits(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """got [rows, vocab] beside the float64 logits: relative error, divergence of the softmax, same best token."""
    off = ((got.double() - want).square().mean() / want.square().mean()).sqrt().item()
    ours, theirs = got.double().log_softmax(-1), want.log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
    same = (got.argmax(-1) == want.argmax(-1)).double().mean().item()
    return {"relative error": digits(off), "KL, nats": digits(divergence), "same top 1": digits(same)}


def show_logits(h: Harness) -> None:
    config, rows, tokens = SMALL, 64, 4
    if h.full and h.device.type == "cuda":  # hours on a CPU
        config, rows, tokens = replace(ONE_BILLION, layers=8, vocab=32768), 512, 32
    rows = h.fit(rows, 4 * tokens * 2 * config.hidden * 8)  # the widest activations in float64, a few times
    model = Transformer.random(config, h.device, torch.bfloat16, h.seed)
    before, ids = h.randint(config.vocab, rows, tokens), h.randint(config.vocab, rows, tokens)
    channels = list(range(config.width))[spaced(config.width, 512)]
    with torch.no_grad():
        want, found, plain = model.float64(ids), {}, None
        for factor in (1.0, 2.0**10, EXTREME):
            outliers = with_outliers(model, channels, factor)
            logits = outliers(ids)
            plain = logits if plain is None else plain
            level = found[power_of_two(factor)] = {"bfloat16": compare_logits(logits, want)}
            for name, recipe in RECIPES.items():
                fp8 = in_fp8(outliers, recipe)
                if recipe.stale:
                    fp8(before)
                level[name] = compare_logits(fp8(ids), want)
            which = f"{len(channels)} of {config.width} channels {power_of_two(factor)} times the rest"
            h.table(f"logits of {config.layers} layers, {which}, beside float64", level)
            if factor > 1:
                h.say(f"bfloat16 has the same bits as without outliers: {torch.equal(logits, plain)}")
    h.say(f"{rows} rows of {tokens} tokens; weights as they are initialised, so the softmax is flat and top 1 is close")
    for name in ALL_RECIPES:
        off = [f"{level[name]['relative error']:.1%} at {factor}" for factor, level in found.items()]
        h.say(f"{name}: logits are off by {', '.join(off)}")


def study(h: Harness) -> None:
    if not h.profile:
        show_logits(h)
