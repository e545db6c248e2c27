"""The order of tiles against one in plain Python."""

import torch
import triton
import triton.language as tl
from hypothesis import example, given
from hypothesis import strategies as st

from examples.common.tiles import tile_coords


@triton.jit
def order_kernel(out_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    tile = tl.program_id(0)
    row, col = tile_coords(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    tl.store(out_ptr + 2 * tile, row)
    tl.store(out_ptr + 2 * tile + 1, col)


def order(M, N, block_m, block_n, group):
    """Down each column of tiles of a group of rows, then the next column; then the next group."""
    rows, cols = range(0, M, block_m), range(0, N, block_n)
    return [
        (row, col) for first in range(0, len(rows), group) for col in cols for row in rows[first : first + group]
    ]  # fmt: skip


@example(130, 65, 16, 4)  # the last group has one row of tiles
@example(1, 1, 16, 8)
@given(st.integers(1, 200), st.integers(1, 100), st.sampled_from([16, 64]), st.sampled_from([1, 3, 4, 8]))
def test_tiles_come_in_groups_of_rows(M, N, block, group):
    want = order(M, N, block, 32, group)
    out = torch.full((len(want), 2), -1, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
    order_kernel[(len(want),)](out, M, N, block, 32, group)
    assert [tuple(place) for place in out.tolist()] == want
    assert len(set(want)) == triton.cdiv(M, block) * triton.cdiv(N, 32)
