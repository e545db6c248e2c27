"""when_it_helps: the bytes and FLOPs of a forward pass, counted without data."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from examples.common.transformer import Config, Transformer


class EagerWork(TorchDispatchMode):
    """(bytes, FLOPs) of each operation that eager dispatches: everything it reads and writes. Views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.is_view or func in (torch.ops.aten._unsafe_view.default, torch.ops.aten.empty_like.default):
            return out
        tensors = [x for x in tree_leaves((args, kwargs or {}, out)) if isinstance(x, torch.Tensor)]
        flops = 0
        if count := flop_registry.get(func.overloadpacket):
            flops = count(*args, **(kwargs or {}), out_val=out)
        if func is torch.ops.aten.embedding.default:
            tensors = [out, out]  # the rows that are looked up, not the table
        self.steps.append((sum(x.numel() * x.element_size() for x in tensors), flops))
        return out


class _OneStep(TorchFunctionMode):
    """What the meta device decomposes and eager does not: attention anywhere, and RMSNorm on a GPU (one kernel)."""

    def __init__(self, work: EagerWork, on_gpu: bool) -> None:
        super().__init__()
        self.work, self.on_gpu = work, on_gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.rms_norm and self.on_gpu:
            x, weight = args[0], kwargs["weight"]
            self.work.steps.append(((2 * x.numel() + weight.numel()) * x.element_size(), 0))
            return torch.empty_like(x)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3]
        batch, heads, tokens, width = q.shape
        moved = sum(x.numel() for x in (q, k, v, q)) * q.element_size()
        self.work.steps.append((moved, 2 * batch * heads * tokens * (tokens + 1) * width))
        return torch.empty_like(q)


def eager_steps(
    config: Config, batch: int, tokens: int, dtype: torch.dtype, on_gpu: bool = False
) -> list[tuple[int, int]]:
    """(bytes, FLOPs) of each operation of an eager forward pass, from running it without data."""
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
    with EagerWork() as work, _OneStep(work, on_gpu), torch.no_grad():
        model(ids)
    return work.steps


def twin(config: Config) -> Config:
    """The same model as far as the host sees it: as many layers and operations, on almost no data."""
    return replace(config, width=256, heads=4, kv_heads=2, hidden=512, vocab=512)
