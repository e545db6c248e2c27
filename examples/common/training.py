"""Forward and backward of a function as one call: what a training step makes of it."""

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
