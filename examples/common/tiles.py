"""The order in which programs take tiles, grouped so that neighbours share inputs in L2; how tiles are stored."""

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
def tile_corner(tile, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first row and column of a tile, row by row: the order where tiles share nothing."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    return tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N


@triton.jit
def copy_pointers_kernel(x_ptr, y_ptr, M, N, stride_x, stride_y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A copy by ordinary loads and stores, one tile a program: what copies by TMA are put beside."""
    row, col = tile_corner(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    rows, cols = row + tl.arange(0, BLOCK_M)[:, None], col + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < M) & (cols < N)
    rows = rows.to(tl.int64)
    tl.store(y_ptr + rows * stride_y + cols, tl.load(x_ptr + rows * stride_x + cols, mask=inside), mask=inside)


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
