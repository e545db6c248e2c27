"""What a decoding step is timed on: caches as models keep them, the same memory in pages, and torch's own calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention


def inputs(h, B: int, H: int, H_kv: int, S_q: int, S: int, D: int, page: int = 0) -> tuple[torch.Tensor, ...]:
    """q, and k and v as most models keep them: [B, S, H_kv, D] in memory. With `page` a pool of pages, in any order,
    lengths from S downwards, and a block_table.
    """
    q = h.randn(B, H, S_q, D, dtype=h.half)
    if not page:
        return q, *(h.randn(B, S, H_kv, D, dtype=h.half).transpose(1, 2) for _ in range(2))
    pages = triton.cdiv(S, page)
    k, v = (h.randn(B * pages + 1, page, H_kv, D, dtype=h.half).transpose(1, 2) for _ in range(2))
    table = h.randn(B * pages + 1).argsort()[: B * pages].int().view(B, pages)
    return q, k, v, (S - 37 * torch.arange(B, device=h.device)).clamp(min=0).int(), table


def any_order(h, B: int, pages: int) -> torch.Tensor:
    """A block_table for in_pages(), in any order per sequence: a query that sees all its keys gives the same result."""
    return (h.randn(B, pages).argsort(1) + pages * torch.arange(B, device=h.device)[:, None]).int()


def in_pages(x: torch.Tensor, page: int = 16) -> torch.Tensor:
    """k or v of inputs(), [B, H_kv, S, D], as pages [B * S / page, H_kv, page, D] of the same memory."""
    B, H_kv, S, D = x.shape
    return x.transpose(1, 2).view(B * S // page, page, H_kv, D).transpose(1, 2)


def _sdpa(backend: SDPBackend) -> Callable:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def flex(q: torch.Tensor, k: torch.Tensor) -> Callable:
    """FlexAttention for these lengths; without a block mask all keys are one block to it, which it does not split."""
    mask = create_block_mask(lambda b, h, i, j: j >= 0, None, None, q.shape[2], k.shape[2], device=q.device)
    return partial(flex_attention, block_mask=mask, enable_gqa=True)


def libraries(h, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable]:
    """torch's flash attention, which splits keys too; on a GPU FlexAttention, and cuDNN where torch lets it decode."""
    calls = {"torch flash (FA2)": _sdpa(SDPBackend.FLASH_ATTENTION)}
    if h.device.type == "cuda":
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, True)
        if torch.backends.cuda.can_use_cudnn_attention(params):
            calls["cuDNN"] = _sdpa(SDPBackend.CUDNN_ATTENTION)
        calls["FlexAttention"] = h.compiled(flex(q, k))
    return calls
