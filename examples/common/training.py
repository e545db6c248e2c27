"""Forward and backward of a function as one call, and references in float64 of either."""

from __future__ import annotations

from collections.abc import Callable

import torch


def forward_backward(fn: Callable) -> Callable:
    """(*inputs, grad) -> (y, the gradient of each input), where y is fn(*inputs) and `grad` the gradient of y."""

    def both(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *inputs, grad = tensors
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            y = fn(*leaves)
            return y.detach(), *torch.autograd.grad(y, leaves, grad)

    return both


def in_float64(fn: Callable) -> Callable:
    """fn, for a reference: its tensors are widened first."""
    return lambda *args: fn(*(x.double() if isinstance(x, torch.Tensor) else x for x in args))
