"""shared_memory: every kernel at the edges of its blocks, and the bytes of shared memory that its formulas predict."""

from harness.codegen import CodegenError, compile_for
from harness.session import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.triton import shared_memory
from examples.triton.shared_memory import TILES, allocated, loaded_bytes, matmul_tile, reference, scale, tile_bytes
from examples.triton.shared_memory_single_use import BLOCK, DTYPES, HALF, WARPS, column_sum, matmul_strip, row_sum

# One element, one column, primes, one block plus one, no rows.
MATRICES = [(1, 1), (70, 1), (3, 781), (17, 257), (2, BLOCK + 1), (0, 5)]
PRODUCTS = [(1, 1, 1), (37, 53, 61), (129, 64, 64), (16, 257, 65), (17, 33, 64), (1, 300, 40), (30, 1, 40), (5, 7, 0)]
FLOATS = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def check_all(h, x):
    rows, cols = x.shape
    if x.is_contiguous():
        h.check(scale, lambda x: 2 * x.double(), x, terms=0, roundings=1)
    h.check(row_sum, lambda x: x.double().sum(1), x, terms=cols)
    for stages in (1, 4):
        h.check(lambda x, n=stages: column_sum(x, n), lambda x: x.double().sum(0), x, what="column", terms=rows)


def check_products(h, a, b, *tiles, stages=3):
    h.check(matmul_strip, reference, a[:40], b, what="strip", terms=a.shape[1])
    for tile in tiles or TILES:
        what = f"{tuple(a.shape)} {tuple(b.shape)} {tile}, {stages} stages"
        h.check(lambda a, b, tile=tile: matmul_tile(a, b, *tile, stages), reference, a, b, what=what, terms=a.shape[1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums(h, dtype):
    for shape in MATRICES:
        check_all(h, h.randn(*shape, dtype=dtype))


@pytest.mark.parametrize("shape", PRODUCTS)
def test_products(h, shape):
    M, N, K = shape
    check_products(h, h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half))


@given(rows=st.integers(0, 40), cols=st.integers(1, 1500))
def test_any_matrix(rows, cols):
    h = Harness("test")
    check_all(h, h.randn(rows, cols))


@given(
    M=st.integers(0, 60), N=st.integers(0, 90), K=st.integers(0, 100), tile=st.sampled_from(list(TILES)),
    stages=st.integers(1, 4),
)  # fmt: skip
def test_any_product(M, N, K, tile, stages):
    h = Harness("test")
    check_products(h, h.randn(M, K, dtype=torch.float16), h.randn(K, N, dtype=torch.float16), tile, stages=stages)


def test_strides(h):
    x = h.randn(9, 1000)
    check_all(h, x[:, 100:881])  # a row stride above n_cols, a start that is not aligned
    check_all(h, x[::2, :781])
    check_all(h, x[:1, :781].expand(6, 781))
    a, b = h.randn(48, 160, dtype=h.half), h.randn(160, 320, dtype=h.half)
    for left, right in (
        (a.t(), b[:48, :100]),  # transposed; padded rows
        (a[:, ::2], b[:80, ::3]),  # every second, every third column
        (a[:1].expand(7, 160), b),  # a stride of 0
        (a[:, 1:], b[:159, 1:50]),  # starts that are not aligned
    ):
        check_products(h, left[:20], right, (16, 16), (128, 256))


def test_large_tiny_and_special_values(h):
    x = h.randn(6, 1500)
    for values in (x * 1e30, x * 1e-30):
        check_all(h, values)
    inf, nan = float("inf"), float("nan")
    x[0, 3], x[1, 1200], x[2, 7], x[2, 9] = inf, nan, inf, -inf
    check_all(h, x)
    a, b = h.randn(20, 70, dtype=h.half), h.randn(70, 30, dtype=h.half)
    a[3, 5], a[7, 0], a[9, 69], a[11] = inf, nan, -inf, 0.0
    check_products(h, a, b)
    check_products(h, a[12:] * 16, b * 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_tile_and_depth_on_the_gpu(h, dtype, stages):
    for M, N, K in ((512, 768, 1024), (1000, 520, 777)):
        check_products(h, h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype), stages=stages)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_matrices_on_the_gpu(h, dtype):
    check_all(h, h.randn(5000, 8192, dtype=dtype))


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(30)
    x = torch.empty(2**31 // 4096 + 5, 4096, dtype=torch.bfloat16, device=h.device).normal_()
    sums = row_sum(x)
    for part in (slice(0, 3), slice(-3, None)):
        rows = x[part].contiguous()
        h.check(lambda *_, part=part: sums[part], lambda x: x.double().sum(1), rows, what="row_sum", terms=4096)
    wanted = sum(part.double().sum(0) for part in x.split(65536))
    h.check(lambda *_: column_sum(x, 4), lambda *_: wanted, x[:1], what="column_sum", terms=x.shape[0])
    assert torch.equal(scale(x)[-3:], 2 * x[-3:])
    b = h.randn(4096, 8, dtype=torch.bfloat16)
    for matmul in (matmul_tile, matmul_strip):
        c = matmul(x, b)
        h.check(lambda *_, c=c: c[-100:], reference, x[-100:].contiguous(), b, what="tall", terms=4096)


def test_bad_input(h):
    x = h.randn(4, 8)
    a, b, meta = x.half(), x.half().t(), x.to("meta")
    for wrapper, args, error, message in [
        (scale, ([1.0],), TypeError, "got list"),
        (scale, (x.int(),), TypeError, r"torch\.int32"),
        (scale, (x.t(),), ValueError, r"strides \(1, 8\); call \.contiguous"),
        (row_sum, (x.int(),), TypeError, r"torch\.int32"),
        (row_sum, (x[0],), ValueError, r"shape \(8,\)"),
        (row_sum, (x.t(),), ValueError, r"strides \(1, 8\); .*x\.contiguous"),
        (row_sum, (x[:, :0],), ValueError, "no columns"),
        (column_sum, (x.double(),), TypeError, r"torch\.float64"),
        (column_sum, (x.reshape(1, 4, 8),), ValueError, r"shape \(1, 4, 8\)"),
        (column_sum, (meta,), RuntimeError, "on meta"),
        *((column_sum, (x, stages), ValueError, "num_stages .* is not one of") for stages in (0, 1.5, True)),
        (matmul_strip, (x, x.t()), TypeError, r"torch\.float32 and torch\.float32"),
        (matmul_strip, (a, a), ValueError, r"shapes \(4, 8\) and \(4, 8\); need \[M, K\]"),
        (matmul_strip, (a, b.to("meta")), ValueError, "move them to one device"),
        (matmul_tile, (a, b.float()), TypeError, r"torch\.float16 and torch\.float32"),
        (matmul_tile, (a, b[:, 0]), ValueError, r"\[M, K\] and \[K, N\]"),
        *((matmul_tile, (a, b, rows, 256), ValueError, "no tile .* x 256; there are") for rows in (16, 128.0, [128])),
        (matmul_tile, (a, b, 16, 16, 5), ValueError, "num_stages 5 is not one of"),
        (matmul_tile, (a.clone().requires_grad_(), b), RuntimeError, "no backward"),
    ]:
        with pytest.raises(error, match=f"{wrapper.__name__}: .*{message}"):
            wrapper(*args)


def compiled(wrapper, *args, sm):
    (kernel,) = compile_for(wrapper, args, sms=(sm,))
    assert (kernel.error, kernel.fits) == (None, True)
    return kernel


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_take_no_shared_memory_and_stages_do(sm, dtype):
    x = torch.empty(4096, 4096, dtype=dtype, device="meta")
    assert compiled(scale, x, sm=sm).shared == 0
    assert compiled(column_sum, x, 1, sm=sm).shared == 0
    assert compiled(row_sum, x, sm=sm).shared == 4 * WARPS
    staged = compiled(column_sum, x, 4, sm=sm)
    assert staged.shared == 3 * BLOCK * dtype.itemsize
    assert staged.found["cp.async"]


@pytest.mark.parametrize("sm", [80, 90, 100])
@pytest.mark.parametrize("tile", TILES)
def test_shared_memory_of_a_tile_is_its_operands(sm, tile):
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    for stages in (1, 3):
        kernel = compiled(matmul_tile, a, a, *tile, stages, sm=sm)
        assert kernel.shared == tile_bytes(kernel, *tile, stages)
        assert kernel.spills <= (0 if sm == 90 else 32)  # bytes of one thread, around its store
        assert kernel.found[{90: "wgmma", 100: "tcgen05.mma"}.get(sm, "mma.sync") if tile[0] >= 64 else "mma.sync"]


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_a_matmul_without_reuse_takes_no_shared_memory(sm):
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    kernel = compiled(matmul_strip, a, a, sm=sm)
    assert (kernel.shared, kernel.spills) == (0, 0)
    assert kernel.found["ld.global.v4"]
    assert kernel.found["fma.f32"]


def test_a_wrong_prediction_fails_the_lesson(h, monkeypatch):
    monkeypatch.setattr(shared_memory, "BLOCK", 512)  # the prediction's; the compiling process has its own
    with pytest.raises(CodegenError, match=r"tl\.load, 4 stages on sm_80: 12288 bytes .*, predicted 6144"):
        allocated(h)


def test_loaded_bytes():
    assert loaded_bytes(4096, 4096, 4096, 16, 16, 2) == 2 * 4096**3 * 2 // 16
    assert loaded_bytes(4096, 4096, 4096, 128, 256, 2) == 4096**3 * 2 * 3 // 256
    assert loaded_bytes(1, 1, 10, 1, 1, 2) == 40
