"""The order in which programs take the tiles of C: grouped rasterization, so that neighbours share inputs in L2."""

import triton
import triton.language as tl


@triton.jit
def tile_coords(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The first row and column of a tile, in groups of GROUP_M rows of tiles (examples/triton/matmul.py explains it).

    Tiles go down each column of a group before the next column; the last group may have fewer rows.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + tile % (GROUP_M * tiles_n) % group
    tile_n = tile % (GROUP_M * tiles_n) // group
    return tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit
def split_columns(x):
    """The left and the right half of the columns of x, without a move between threads where a thread holds both."""
    width: tl.constexpr = x.shape[1] // 2
    return x.reshape(x.shape[0], 2, width).permute(0, 2, 1).split()


@triton.jit
def store_parts(desc, x, row, col, PARTS: tl.constexpr):
    """Store x by TMA in PARTS parts of its columns: each takes that much less shared memory than all of x."""
    if PARTS > 1:
        width: tl.constexpr = x.shape[1] // 2
        left, right = split_columns(x)
        store_parts(desc, left, row, col, PARTS // 2)
        store_parts(desc, right, row, col + width, PARTS // 2)
    else:
        desc.store([row, col], x.to(desc.dtype))
