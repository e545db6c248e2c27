"""The layer around the operators of custom_op: a bias, silu(gate) * up, a weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.common.training import in_float64


def silu_mul_torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def layer(op):
    """The operator as a gated MLP of experts has it: a bias before, halves of one matrix in, a routing weight after."""

    def between(packed: Tensor, bias: Tensor, route: Tensor) -> Tensor:
        gate, up = (packed + bias).chunk(2, dim=-1)  # halves: not contiguous
        return op(gate, up) * route

    return between


layer_reference = in_float64(layer(silu_mul_torch))


def layer_budget(dtype: torch.dtype) -> dict:
    """Where a bias, an operator and a weight each round to `dtype`: silu turns one rounding of -6 into seven."""
    return {"terms": 0, "roundings": 8, "acc": dtype}


def layer_inputs(h, rows: int, cols: int) -> tuple[Tensor, ...]:
    packed, bias = h.randn(rows, 2 * cols, dtype=h.half), h.randn(2 * cols, dtype=h.half)
    return packed, bias, h.randn(rows, 1).sigmoid().to(h.half)
