"""What lessons that train one model on several ranks share: the result in float64, and a compiler that is counted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Compiler:
    """A backend for torch.compile: Inductor on a GPU; elsewhere graphs run as they are. `graphs` counts them."""

    def __init__(self, on_gpu: bool) -> None:
        self.graphs, self.compile = 0, torch._dynamo.lookup_backend("inductor" if on_gpu else "aot_eager")

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        self.graphs += 1
        return self.compile(graph, inputs)


def first_and_last_norm(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The norm before the first attention of a LanguageModel, and the one after its last block. Their gradients stand
    for all: the whole backward pass comes before the first norm's."""
    return model.body.blocks[0].attention_norm, model.body.norm


def reference(model: nn.Module, tokens: torch.Tensor, ranks: int, rank: int, alone: bool = False) -> tuple:
    """In float64, one row at a time, for tokens [rows, n + 1] of all ranks: the losses [rows / ranks, n] of this rank's
    part, and the gradients [width] of both norms for the mean loss of all tokens; with `alone` of this rank's part."""
    exact = model.float64().requires_grad_(False)
    norms = [norm.weight.requires_grad_() for norm in first_and_last_norm(exact)]
    own, losses = tokens.chunk(ranks)[rank], []
    for row in own if alone else tokens:
        losses.append(exact(row[None]))
        losses[-1].mean().backward()
        losses[-1] = losses[-1].detach()
    first = 0 if alone else rank * len(own)
    return torch.cat(losses[first : first + len(own)]), *(norm.grad / len(losses) for norm in norms)
