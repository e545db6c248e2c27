"""shared_memory: every kernel at the edges of its blocks, and the bytes of shared memory that its formulas predict."""

import pytest
import torch

from examples.triton.shared_memory import TILES, matmul_tile, tile_bytes
from examples.triton.shared_memory_single_use import (
    BLOCK,
    HALF,
    WARPS,
    column_sum,
    matmul_strip,
    row_sum,
    scale,
)
from tests.examples.triton.helpers import INF, NAN, check_product, code, matrices, meta, products, refused


def check_all(h, x):
    rows, cols = x.shape
    if x.is_contiguous():
        h.check(scale, lambda x: 2 * x.double(), x, terms=0, roundings=1)
    h.check(row_sum, lambda x: x.double().sum(1), x, terms=cols)
    for stages in (1, 4):
        h.check(lambda x, n=stages: column_sum(x, n), lambda x: x.double().sum(0), x, what="column", terms=rows)


def check_products(h, a, b, tile, stages=3):
    check_product(h, matmul_strip, a[:5], b)
    check_product(h, matmul_tile, a, b, *tile, stages)


def test_sums(h):
    """One element, one column, primes, one block plus one, no rows; rows apart; large, tiny, NaN and infinities."""
    for i, shape in enumerate([(1, 1), (70, 1), (3, 781), (17, 257), (2, BLOCK + 1), (0, 5)]):
        check_all(h, h.randn(*shape, dtype=(torch.float32, torch.float16)[i % 2]))
    x = h.randn(9, 1500)
    special = x[:6].clone()
    special[0, 3], special[1, 1200], special[2, 7], special[2, 9] = INF, NAN, INF, -INF
    for values in (x[:, 100:881], x[::2, :781], x[:1, :781].expand(6, 781), x * 1e30, x * 1e-30, special):
        check_all(h, values)


def test_products(h):
    check_product(h, matmul_strip, *matrices(h, 2, BLOCK + 5, 3))
    for i, (a, b) in enumerate(products(h, (16, 257, 65))):
        small = a.shape[0] * b.shape[1] < 2000  # small tiles are slow where programs run one after the other
        check_products(h, a, b, list(TILES)[i % 2 if small else 2 + i % 3])


@pytest.mark.gpu
def test_real_sizes_and_more_elements_than_an_int32_counts(h, gpu_gib):
    for dtype in (torch.float32, *HALF):
        check_all(h, h.randn(5000, 8192, dtype=dtype))
    for stages in (1, 2, 3, 4):
        for tile in TILES:
            check_products(h, *matrices(h, 1000, 520, 777, HALF[stages % 2]), tile, stages)
    gpu_gib(30)
    x = torch.empty(2**31 // 4096 + 5, 4096, dtype=torch.bfloat16, device=h.device).normal_()
    last, b = x[-100:].contiguous(), h.randn(4096, 8, dtype=torch.bfloat16)
    h.check(lambda *_: row_sum(x)[-100:], lambda x: x.double().sum(1), last, what="row_sum", terms=4096)
    wanted = sum(part.double().sum(0) for part in x.split(65536))
    h.check(lambda *_: column_sum(x, 4), lambda *_: wanted, x[:1], what="column_sum", terms=x.shape[0])
    assert torch.equal(scale(x)[-3:], 2 * x[-3:])
    for matmul in (matmul_tile, matmul_strip):
        check_product(h, lambda *_, matmul=matmul: matmul(x, b)[-100:], last, b)


def test_bad_input(h):
    x = h.randn(4, 8)
    a, b = x.half(), x.half().t()
    refused(row_sum, ValueError, "no columns", x[:, :0])
    refused(column_sum, ValueError, "num_stages .* is not one of", x, 0)
    for rows in (16, 128.0, [128]):
        refused(matmul_tile, ValueError, "no tile .* x 256; there are", a, b, rows, 256)
    refused(matmul_tile, ValueError, "num_stages 5 is not one of", a, b, 16, 16, 5)


def test_zeros_take_no_shared_memory_and_stages_do():
    x, half = meta(4096, 4096, dtype=torch.float32), meta(4096, 4096)
    cases = [(scale, (x,), 0), (row_sum, (half,), 4 * WARPS), (column_sum, (half, 4), 6 * BLOCK)]
    for wrapper, args, shared in [*cases, (matmul_strip, (half, half), 0)]:
        assert code(90, "cp.async" if wrapper is column_sum else "", wrapper, *args).shared == shared


@pytest.mark.parametrize(
    ("sm", "tile", "stages", "mma"),
    [(90, (128, 256), 1, "wgmma"), (90, (16, 16), 3, "mma.sync"), (100, (128, 256), 3, "tcgen05.mma")],
)
def test_shared_memory_of_a_tile_is_its_operands(sm, tile, stages, mma):
    # Spilled are some bytes of a thread, around its store.
    kernel = code(sm, mma, matmul_tile, *[meta(4096, 4096)] * 2, *tile, stages, spills=0 if sm == 90 else 32)
    assert kernel.shared == tile_bytes(kernel, *tile, stages)
