"""A cache of keys and values, contiguous or in pages: the checks of a decoding kernel's operands."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch

from examples.common.device import require_triton_device

QUERIES_MAX = 16  # the last positions of a sequence that are decoded at once


class Sizes(NamedTuple):
    """Of q [B, H, S_q, D] and a cache: its heads, the keys of a sequence at most, those of a page (0: no pages)."""

    B: int
    H: int
    H_kv: int
    S_q: int
    D: int
    keys: int
    page: int


def check_cache(name: str, dtypes, head_dims, q, k, v, lengths, block_table, scale) -> tuple[Sizes, float]:
    """The sizes and the scale of the scores, 1 / sqrt(D) unless given.

    Raises what require_triton_device does; TypeError for another dtype; ValueError for sizes that do not fit q, a head
    dim that is not in `head_dims`, more queries than QUERIES_MAX, no keys, values of a row that are not adjacent, and a
    scale that is not positive and normal in float32. What `lengths` and `block_table` hold is on the GPU: not checked.
    """
    indices = {"lengths": lengths, "block_table": block_table}
    given = {label: x for label, x in indices.items() if x is not None}
    require_triton_device(name, q, k, v, *given.values())
    if q.dtype not in dtypes or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"{name}: dtypes {q.dtype}, {k.dtype}, {v.dtype}; all must be the same one of {dtypes}")
    shapes = f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape != v.shape:
        raise ValueError(
            f"{name}: {shapes}; need q [B, H, S_q, D], and k and v both [B, H_kv, S_kv, D] or [pages, H_kv, page, D]"
        )
    # They are constants of a kernel, and no symbols to torch.compile.
    H, S_q, D, H_kv = map(operator.index, (*q.shape[1:], k.shape[1]))
    B, keys, page = q.shape[0], k.shape[2], 0
    if k.shape[3] != D or not H_kv or H % H_kv:
        raise ValueError(f"{name}: {shapes}; k needs q's D and a number of heads dividing H")
    if D not in head_dims:
        raise ValueError(
            f"{name}: head dim {D} is not one of {tuple(head_dims)}; pad with zeros to the next, pass scale={D}**-0.5 "
            "(by default it would be that of the padded D), and drop the columns that this adds to the result"
        )
    if not 1 <= S_q <= QUERIES_MAX:
        raise ValueError(f"{name}: {S_q} queries; decode 1 to {QUERIES_MAX}, and prefill with flash_attention")
    for label, x in given.items():
        if x.dtype is not torch.int32:
            raise TypeError(f"{name}: {label} is {x.dtype}; pass {label}.int()")
        if x.ndim != 1 + (x is block_table) or x.shape[0] != B or (x.shape[-1] > 1 and x.stride(-1) != 1):
            raise ValueError(
                f"{name}: {label} has shape {tuple(x.shape)} and strides {x.stride()}; for {B} sequences need lengths "
                "[B] and block_table [B, max_pages], adjacent in memory"
            )
    if block_table is not None:
        page = operator.index(k.shape[2])
        keys = block_table.shape[1] * page
    elif k.shape[0] != B:
        raise ValueError(f"{name}: {shapes}; k needs q's B, or is it in pages, and the block_table is missing?")
    if not 1 <= keys <= 2**30:
        raise ValueError(f"{name}: {keys} keys; a cache has 1 to 2**30 for a sequence")
    for label, x in {"q": q, "k": k, "v": v}.items():
        if x.stride(3) != 1:
            raise ValueError(f"{name}: {label} has strides {x.stride()}; D must be contiguous: {label}.contiguous()")
    if scale is None:
        scale = D**-0.5
    elif isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 2**-126 <= scale < 2**127:
        raise ValueError(f"{name}: scale is {scale!r}; pass a number above 0 that is finite and normal in float32")
    return Sizes(B, H, H_kv, S_q, D, keys, page), scale


def cached(x: torch.Tensor, b: int, n: int, block_table: torch.Tensor | None) -> torch.Tensor:
    """The first n keys, or values, of sequence b: [H_kv, n, D]."""
    if block_table is None:
        return x[b, :, :n]
    pages = block_table[b, : -(-n // x.shape[2])].long()
    return x[pages].transpose(0, 1).flatten(1, 2)[:, :n]
