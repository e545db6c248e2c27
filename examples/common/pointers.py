"""The tiles of a GEMM by pointers of any strides: where they begin, the loads of one step along K, the store into C."""

import triton
import triton.language as tl


@triton.jit
def tile_pointers(
    a_ptr, b_ptr, row, col, M, N, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Pointers to the first tiles of A and B for the tile of C at (row, col), and how far a step along K moves each.

    Rows and columns past the edge wrap around; store_tile discards them. int64: a matrix may have over 2**31 elements.
    """
    rows = (row + tl.arange(0, BLOCK_M)) % M
    cols = (col + tl.arange(0, BLOCK_N)) % N
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None].to(tl.int64) * stride_am + inner[None, :].to(tl.int64) * stride_ak
    b_ptrs = b_ptr + inner[:, None].to(tl.int64) * stride_bk + cols[None, :].to(tl.int64) * stride_bn
    return a_ptrs, b_ptrs, BLOCK_K * tl.cast(stride_ak, tl.int64), BLOCK_K * tl.cast(stride_bk, tl.int64)


@triton.jit
def load_tiles(a_ptrs, b_ptrs, left, EVEN_K: tl.constexpr):
    """The tiles of A and B of one step; `left` is what remains of K, and the last step masks what is beyond."""
    if EVEN_K:  # a mask costs a predicate per load; most sizes need none
        return tl.load(a_ptrs), tl.load(b_ptrs)
    else:
        inner = tl.arange(0, a_ptrs.shape[1])
        a = tl.load(a_ptrs, mask=inner[None, :] < left, other=0)
        b = tl.load(b_ptrs, mask=inner[:, None] < left, other=0)
        return a, b


@triton.jit
def store_tile(c_ptr, acc, row, col, M, N, stride_cm, stride_cn):
    """The part of a tile that is inside C, in C's dtype."""
    rows = row + tl.arange(0, acc.shape[0])
    cols = col + tl.arange(0, acc.shape[1])
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * stride_cm + cols[None, :].to(tl.int64) * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))
