"""Tiles of rows by TMA where the rows do not fill them: halves that overlap, instead of rows beyond the tensor.

TMA takes longer to fill a row of shared memory with zeros than to load one. So 96 rows in a tile of 128 become rows 0
to 63, and below them rows 32 to 95: the descriptor has an outer dimension of 2, with a stride of 32 rows. Tiles share
rows evenly: 192 are two tiles of 96, not one of 128 and one of 64.

Strides that overlap are not what CUDA's documentation of cuTensorMapEncodeTiled derives a stride from, but the driver
takes any that are multiples of 16 bytes; tests on a GPU make descriptors of the smallest ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from examples.common.stream_k import load_block
from examples.common.tma import tma_strides


@triton.jit
def load_rows(x, row, k, M, K, stride, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """A tile's rows of x, the first of which is `row`: by rows_descriptor, or as load_block does by a pointer."""
    if TMA:
        return x.load([0, row, k]).reshape(BLOCK_M, BLOCK_K)
    else:
        return load_block(x, row, k, M, K, stride, BLOCK_M, BLOCK_K, TMA)


def spare_rows(M: int, block_m: int) -> int:
    """By how many rows the halves of every tile overlap, so that hardly a row beyond M is filled; 0 where they cannot.

    A tile then begins block_m - spare rows after the one before it, and its second half block_m / 2 - spare rows after
    its first. The last tile may have fewer rows than the others, by less than there are tiles. Its first half then
    lacks as many at its end, so these must be among those that its second half has too.
    """
    tiles = triton.cdiv(M, block_m)
    spare, missing = divmod(tiles * block_m - M, tiles)
    return spare if missing <= spare < block_m // 2 else 0


def rows_descriptor(x: torch.Tensor, block_m: int, block_k: int):
    """A descriptor for load_rows of x [M, K], for which tma_takes holds: its box has a tile's rows, block_k columns."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (M, K), (stride, _), half = x.shape, tma_strides(x), block_m // 2
    if spare := spare_rows(M, block_m):
        apart = half - spare
        return TensorDescriptor(x, [2, M - apart, K], [apart * stride, stride, 1], [2, half, block_k])
    return TensorDescriptor(x, [1, M, K], [stride, stride, 1], [1, block_m, block_k])
