"""What the fused collectives are compared with: torch's GEMM and collective, one after the other and each alone, and
torch's own fused operators."""

from __future__ import annotations

from collections.abc import Callable

import torch


def separate(scatter: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """torch's collective before or after its GEMM, neither split; rows are gathered into a buffer that is reused."""
    distributed, kept = torch.distributed, {}

    def buffer(like: torch.Tensor, rows: int) -> torch.Tensor:
        if "y" not in kept:
            kept["y"] = torch.empty(rows, like.shape[1], dtype=like.dtype, device=like.device)
        return kept["y"]

    def gather(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = buffer(x, len(x) * distributed.get_world_size())
        distributed.all_gather_into_tensor(gathered, x)
        return gathered @ w

    def reduce_scatter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = x @ w
        y = torch.empty(len(x) // distributed.get_world_size(), w.shape[1], dtype=x.dtype, device=x.device)
        distributed.reduce_scatter_tensor(y, parts)
        return y

    return reduce_scatter if scatter else gather


def gemm_alone(scatter: bool, rank: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """This rank's GEMM, given every rank's inputs: what is left if the collective is fully hidden."""
    return (lambda x, w: x[rank] @ w[rank]) if scatter else torch.matmul


def collective_alone(scatter: bool, part: torch.Tensor) -> Callable[..., torch.Tensor]:
    """torch's collective on `part`, this rank's: gives this rank's rows of the sum, or everyone's rows, in a reused
    buffer. It ignores its arguments."""
    distributed, world = torch.distributed, torch.distributed.get_world_size()
    rows = len(part) // world if scatter else len(part) * world
    y = torch.empty(rows, part.shape[1], dtype=part.dtype, device=part.device)
    collective = distributed.reduce_scatter_tensor if scatter else distributed.all_gather_into_tensor

    def call(*_) -> torch.Tensor:
        collective(y, part)
        return y

    return call


def torch_fused(scatter: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """torch's own fused operators, which split the GEMM into one per rank's rows; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    from torch.distributed import _symmetric_memory  # noqa: F401 - defines them

    group = torch.distributed.group.WORLD.group_name
    if scatter:
        return lambda x, w: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group)
    return lambda x, w: torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group, return_A=False)[1][0]
