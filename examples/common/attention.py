"""What the attention lessons share: checks of operands, a float64 reference, its operations, and torch's own calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def check_attention(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head_dims, causal: bool, scale: float | None
) -> float:
    """The scale of the scores, 1 / sqrt(D) unless given, of q [B, H, S, D] and k [B, H_kv, S_kv, D]; v has any sizes.

    Raises TypeError for a causal that is no bool; ValueError for rank, a k that does not fit q, a head dim that is not
    in `head_dims`, no keys, causal with two lengths, and a scale that is not positive and normal in float32.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"{name}: causal is {causal!r}; pass True or False")
    shapes = f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"{name}: {shapes}; need four dimensions: q [B, H, S, D] and k [B, H_kv, S_kv, D]")
    B, H, S, D = q.shape
    H_kv, S_kv = k.shape[1:3]
    if k.shape[0] != B or k.shape[3] != D or not H_kv or H % H_kv:
        raise ValueError(f"{name}: {shapes}; k needs q's B and D and a number of heads dividing H")
    if D not in head_dims:
        raise ValueError(
            f"{name}: head dim {D} is not one of {tuple(head_dims)}; pad with zeros to the next, pass scale={D}**-0.5 "
            "(by default it would be that of the padded D), and drop the columns that this adds to the result"
        )
    if S_kv == 0:
        raise ValueError(f"{name}: {shapes}; without a key there is nothing to attend to")
    if causal and S_kv != S:
        raise ValueError(f"{name}: causal with {S} queries and {S_kv} keys; which key a query ends at is not defined")
    if scale is None:
        return D**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 2**-126 <= scale < 2**127:
        raise ValueError(f"{name}: scale is {scale!r}; pass a number above 0 that is finite and normal in float32")
    return scale


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale * q @ k^T) @ v in float64, one head at a time: the scores of all of them would fill a GPU."""
    B, H, S, D = q.shape
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    hidden = torch.ones(S, k.shape[2], dtype=torch.bool, device=q.device).triu(1) if causal else None
    for b, h in itertools.product(range(B), range(H)):
        h_kv = h // (H // k.shape[1])
        scores = q[b, h].double() @ k[b, h_kv].double().T * (D**-0.5 if scale is None else scale)
        if causal:
            scores.masked_fill_(hidden, -math.inf)
        out[b, h] = torch.softmax(scores, dim=-1) @ v[b, h_kv].double()
    return out


def attention_flops(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
    """Two products of 2 * S * S_kv * D operations a head; a causal mask leaves half of them."""
    B, H, S, D = q.shape
    return 4 * B * H * S * k.shape[2] * D // (2 if causal else 1)


def attention_budget(dtype: torch.dtype, keys: int) -> dict:
    """Weights are rounded to `dtype` before `keys` products are summed: twice the largest error seen on an H200, which
    is 1.25 eps of the row's size, for this kernel as for cuDNN's."""
    return {"terms": keys, "operand_eps": 0.3 * torch.finfo(dtype).eps}


def sdpa(backend: SDPBackend, causal: bool) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """torch's attention by one of its backends: a function of q, k and v."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call
