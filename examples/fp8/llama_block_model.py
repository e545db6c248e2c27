"""llama_block: the block by kernels of this repository, a training step of such a block, and a float64 reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.common.transformer import Block, rotate
from examples.fp8 import llama_block_ops as ops

# torch's attention, the fastest first that takes the call: on a Hopper cuDNN's is.
LIBRARY_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Kernels(nn.Module):
    """A Block with the same weights in which kernels of this repository do what `use` names; torch does the rest.

    `use`: "norm" (RMSNorm with the residual before it), "attention", "linear" (the forward products) and "swiglu"
    (gate, up and their product in one kernel; it has no gradient). Raises ValueError for another name.
    """

    USES = ("norm", "attention", "linear", "swiglu")

    def __init__(self, block: Block, use: Iterable[str] = ()) -> None:
        super().__init__()
        self.block, self.use = block, frozenset(use)
        if unknown := self.use - {*self.USES}:
            raise ValueError(f"{type(self).__name__}: use {sorted(unknown)}; name some of {self.USES}")

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        c, (batch, tokens, width) = self.block.config, x.shape
        normed, x = self.norm(x.reshape(-1, width), None, self.block.attention_norm)
        heads = self.linear(normed, "qkv").view(batch, tokens, c.heads + 2 * c.kv_heads, c.head_width).transpose(1, 2)
        turned, v = heads.split([c.heads + c.kv_heads, c.kv_heads], dim=1)
        q, k = rotate(turned, cos, sin).split([c.heads, c.kv_heads], dim=1)
        out = self.attention(q, k, v).transpose(1, 2).reshape(-1, width)
        normed, x = self.norm(self.linear(out, "attention_out"), x, self.block.mlp_norm)
        return (x + self.linear(self.gated(normed), "down")).view(batch, tokens, width)

    def norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: nn.RMSNorm) -> tuple:
        """The norm of x + residual, and x + residual."""
        if "norm" in self.use:
            y, summed, _ = ops.rms_norm(x, residual, norm.weight, norm.eps)
            return y, x if residual is None else summed
        x = x if residual is None else x + residual
        return norm(x), x

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(self.block, name).weight
        return ops.linear(x, weight) if "linear" in self.use else F.linear(x, weight)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if "attention" in self.use:
            return ops.attention(q, k, v)[0]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        if "swiglu" in self.use:
            return ops.swiglu_linear(x, self.block.gate_up.weight)
        gate, up = self.linear(x, "gate_up").chunk(2, dim=-1)
        return F.silu(gate) * up


class Prefill:
    """x [batch, tokens, width] -> y, by a block, or what torch.compile made of one."""

    def __init__(self, run: Callable, angles: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.run, self.angles = run, angles

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), sdpa_kernel(LIBRARY_ATTENTION, set_priority=True):
            return self.run(x, *self.angles)


class Training:
    """x, dy [batch, tokens, width] -> y, the gradient of x, and those of `weights`, by a block or a compiled one."""

    def __init__(self, run: Callable, angles: tuple[torch.Tensor, torch.Tensor], weights: Iterable) -> None:
        self.run, self.angles, self.weights = run, angles, tuple(weights)

    def __call__(self, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        with torch.enable_grad(), sdpa_kernel(LIBRARY_ATTENTION, set_priority=True):
            y = self.run(x, *self.angles)
        return y.detach(), *torch.autograd.grad(y, (x, *self.weights), dy)


def reference(block: Block, angles: tuple, x: torch.Tensor, dy: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """What Prefill or, with dy, Training returns, in float64 with the very weights. One sequence at a time: no token
    sees another sequence, so the results are those of all, and the gradients of the weights add up."""
    exact, angles = copy.deepcopy(block).double().requires_grad_(dy is not None), tuple(t.double() for t in angles)
    results, inputs = [], []
    for i, row in enumerate(x.split(1)):
        inputs.append(row.double().requires_grad_(dy is not None))
        y = exact(inputs[-1], *angles)
        if dy is not None:
            y.backward(dy[i : i + 1].double())
        results.append(y.detach())
    y = torch.cat(results)
    if dy is None:
        return (y,)
    return y, torch.cat([each.grad for each in inputs]), *(weight.grad for weight in exact.parameters())


def off_by(got, wants: tuple[torch.Tensor, ...]) -> float:
    """Root mean square of the error over that of what is wanted, of the worst of the results."""
    results = got if isinstance(got, tuple) else (got,)
    return max(
        ((result.double() - want).square().mean() / want.square().mean()).sqrt().item()
        for result, want in zip(results, wants, strict=True)
    )
