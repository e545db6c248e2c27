"""What a loss over classes shares with its baselines: the check of its operands, and its gradient by autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch

from examples.common.device import require_triton_device
from examples.common.operands import check_choice, check_rows
from examples.common.rows import DTYPES


def check_classes(name: str, logits, target, reduction: str, ignore_index: int, smoothing: float) -> None:
    """Operands of a cross-entropy: what check_rows says of logits [n_rows, n_cols], and of int64 classes [n_rows].

    Raises TypeError for other classes or an ignore_index that is no int; ValueError for another number of classes, a
    reduction that torch does not have, and a smoothing that is no number from 0 to 1.
    """
    n_rows, _ = check_rows(name, logits, DTYPES)
    require_triton_device(name, logits, target)
    if target.dtype is not torch.int64:
        raise TypeError(f"{name}: target is {target.dtype}; pass classes as int64: target.long()")
    if target.shape != (n_rows,):
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}; logits {tuple(logits.shape)} need [{n_rows}]"
        )
    check_choice(name, ("mean", "sum", "none"), reduction=reduction)
    if type(ignore_index) is not int:
        raise TypeError(f"{name}: ignore_index is {ignore_index!r}; pass an int such as -100")
    if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)) or not 0 <= smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing is {smoothing!r}; pass a number from 0 to 1")


def gradient_of(fn: Callable) -> Callable:
    """(logits, target, **options) -> the gradient in logits of the sum of fn(...), which is computed on the way."""

    def gradient(logits: torch.Tensor, target: torch.Tensor, **options) -> torch.Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = fn(leaf, target, **options)
            return torch.autograd.grad(loss.sum() if loss.ndim else loss, leaf)[0]  # a sum of one number is a launch

    return gradient
