"""training_step: the language model that is trained, and what eager's autograd keeps of its forward for backward."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from examples.common.transformer import Config, Transformer


class LanguageModel(nn.Module):
    """tokens [batch, n + 1] int64 -> the loss of each next token, [batch, n] float32, by a random transformer.

    `mixed` is autocast to bfloat16, as in mixed precision training; parameters and gradients stay float32. Raises
    TypeError for other tokens than int64, ValueError unless they are a matrix of 2 to max_tokens + 1 columns.
    """

    def __init__(self, config: Config, device: torch.device, mixed: bool) -> None:
        super().__init__()
        self.body = Transformer.random(config, device, torch.float32).train().requires_grad_(True)
        self.mixed = mixed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        body, most = self.body, self.body.config.max_tokens + 1
        if tokens.dtype != torch.int64:
            raise TypeError(f"LanguageModel: tokens are {tokens.dtype}; pass tokens.long()")
        if tokens.ndim != 2 or not 2 <= tokens.shape[1] <= most:
            raise ValueError(f"LanguageModel: tokens are {tuple(tokens.shape)}; pass [batch, 2..{most}]")
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.mixed):
            x = body.embedding(given)
            cos, sin = (table[: given.shape[1]] for table in (body.cos, body.sin))
            if self.mixed:  # else queries and keys would be widened to float32, and rounded again for attention
                cos, sin = cos.bfloat16(), sin.bfloat16()
            for block in body.blocks:
                x = block(x, cos, sin)
            logits = F.linear(body.norm(x), body.embedding.weight)
            return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)

    def float64(self) -> LanguageModel:
        model = copy.deepcopy(self).double()
        model.mixed = False
        return model


def saved_by_autograd(model: nn.Module, *inputs) -> tuple[int, int]:
    """(tensors, bytes) that eager forward keeps for backward, without parameters and inputs, each storage once."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # held, so that no later storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    return len(kept), sum(storage.nbytes() for storage in kept.values())
