"""The order of tiles against one in plain Python, and columns halved and stored in parts."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given
from hypothesis import strategies as st

from examples.common.device import require_triton_device
from examples.common.tiles import split_columns, store_parts, tile_coords
from examples.common.tma import tma_descriptor


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


@triton.jit
def halves_kernel(x_ptr, left_ptr, right_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    left, right = split_columns(tl.load(x_ptr + rows * COLS + tl.arange(0, COLS)[None, :]))
    at = rows * (COLS // 2) + tl.arange(0, COLS // 2)[None, :]
    tl.store(left_ptr + at, left)
    tl.store(right_ptr + at, right)


@triton.jit
def parts_kernel(x_ptr, desc, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :])
    store_parts(desc, x, 2, 16, PARTS)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_columns_are_halved_and_stored_in_parts(h, parts):
    x = h.randn(16, 64)
    require_triton_device("parts", x)
    left, right = h.randn(16, 32), h.randn(16, 32)
    halves_kernel[(1,)](x, left, right, 16, 64)
    assert torch.equal(torch.cat([left, right], dim=1), x)
    if h.machine.mode == "gpu" and h.machine.sm < 90:
        pytest.skip("stores by TMA")
    out = torch.zeros(32, 128, dtype=torch.float16, device=h.device)
    parts_kernel[(1,)](x, tma_descriptor(out, [16, 64 // parts]), 16, 64, parts)
    want = torch.zeros_like(out)
    want[2:18, 16:80] = x.half()
    assert torch.equal(out, want)
