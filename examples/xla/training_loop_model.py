"""What training_loop trains: a small transformer, and sequences whose next token follows from the two before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from examples.common.transformer import Config, Transformer

CONFIG = Config(width=52, layers=1, heads=2, kv_heads=1, hidden=116, vocab=23, max_tokens=24)
LARGE = replace(CONFIG, width=96, layers=2, heads=4, kv_heads=2, hidden=260, vocab=43)


def sequences(rows: int, tokens: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, tokens]: two random tokens, and then each follows from the two before it."""
    columns = list(torch.randint(vocab, (2, rows), generator=generator))
    while len(columns) < tokens:
        columns.append((columns[-1] + 2 * columns[-2] + 3) % vocab)
    return torch.stack(columns, dim=1)


def batches(data: torch.Tensor, rows: int, drop_last: bool = False) -> Iterator[torch.Tensor]:
    """An epoch: its last batch holds what is left over, unless it is dropped."""
    return (part for part in data.split(rows) if len(part) == rows or not drop_last)


class LanguageModel(nn.Module):
    """tokens [batch, n] int64, n at least 3 -> the loss [batch, n - 2] of each token from the third on."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.body = Transformer.random(config, torch.device("cpu"), torch.float32).train().requires_grad_(True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        body, wanted = self.body, tokens[:, 2:]
        x = body.embedding(tokens[:, :-1])
        cos, sin = (table[: x.shape[1]] for table in (body.cos, body.sin))
        for block in body.blocks:
            x = block(x, cos, sin)
        logits = F.linear(body.norm(x[:, 1:]), body.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)
