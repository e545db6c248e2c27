"""shared_memory: every kernel at the edges of its blocks, and the bytes of shared memory that its formulas predict."""

from harness.codegen import CodegenError, compile_for, dump

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.triton import shared_memory
from examples.triton.shared_memory import (
    BLOCK,
    BLOCK_K,
    DTYPES,
    HALF,
    TILES,
    WARPS,
    allocations,
    column_sum,
    loaded_bytes,
    matmul_strip,
    matmul_tile,
    reference,
    row_sum,
    scale,
    show_shared,
    tile_bytes,
)

# One element, one column, primes, one block plus one, no rows, no columns.
MATRICES = [(1, 1), (70, 1), (3, 781), (17, 257), (2, BLOCK + 1), (0, 5), (5, 0)]
PRODUCTS = [(1, 1, 1), (37, 53, 61), (129, 64, 64), (16, 257, 65), (17, 33, 64), (1, 300, 40), (30, 1, 40), (5, 7, 0)]
GPU_DTYPES = [
    torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
]  # fmt: skip


def check_all(h, x):
    rows, cols = x.shape
    if x.is_contiguous():
        h.check(scale, lambda x: 2 * x.double(), x, terms=0, roundings=1)
    h.check(row_sum, lambda x: x.double().sum(1), x, terms=cols)
    for stages in (1, 4):
        h.check(lambda x, n=stages: column_sum(x, n), lambda x: x.double().sum(0), x, what="column", terms=rows)


def check_products(h, a, b, tiles=TILES):
    h.check(matmul_strip, reference, a[:40], b, what="strip", terms=a.shape[1])
    for tile in tiles:
        h.check(lambda a, b, tile=tile: matmul_tile(a, b, *tile), reference, a, b, what=f"{tile}", terms=a.shape[1])


@pytest.mark.parametrize("shape", MATRICES)
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_sums(h, shape, dtype):
    check_all(h, h.randn(*shape, dtype=dtype))


@pytest.mark.parametrize("shape", PRODUCTS)
def test_products(h, shape):
    M, N, K = shape
    check_products(h, h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half))


@given(rows=st.integers(0, 40), cols=st.integers(1, 1500))
def test_any_matrix(rows, cols):
    check_all(quiet(), quiet().randn(rows, cols))


@given(
    M=st.integers(0, 60), N=st.integers(0, 90), K=st.integers(0, 100), tile=st.sampled_from(list(TILES)),
    stages=st.integers(1, 4),
)  # fmt: skip
def test_any_product(M, N, K, tile, stages):
    h = quiet()
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    h.check(lambda a, b: matmul_tile(a, b, *tile, stages), reference, a, b, what=f"{M}x{N}x{K} {tile}", terms=K)


def quiet():
    from harness.catalog import Needs
    from harness.session import Harness

    from rich.console import Console

    return Harness("test", Needs.parse("triton"), console=Console(quiet=True))


def test_rows_apart_in_memory(h):
    x = h.randn(9, 1000)
    check_all(h, x[:, 100:881])  # a row stride above n_cols, a start that is not aligned
    check_all(h, x[::2, :781])
    check_all(h, x[:1, :781].expand(6, 781))


def test_strides_of_products(h):
    a, b = h.randn(48, 160, dtype=h.half), h.randn(160, 320, dtype=h.half)
    for left, right in (
        (a.t(), b[:48, :100]),  # transposed; padded rows
        (a[:, ::2], b[:80, ::3]),  # every second, every third column
        (a[:1].expand(7, 160), b),  # a stride of 0
        (a[:, 1:], b[:159, 1:50]),  # starts that are not aligned
    ):
        check_products(h, left[:20], right, tiles=[(16, 16), (128, 256)])


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
        a, b = h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype)
        for tile in TILES:
            h.check(lambda a, b, tile=tile: matmul_tile(a, b, *tile, stages), reference, a, b, what=f"{tile}", terms=K)
        h.check(matmul_strip, reference, a, b, terms=K)


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
    for product in (matmul_tile, matmul_strip):
        c = product(x, b)
        h.check(lambda *_, c=c: c[-100:], reference, x[-100:].contiguous(), b, what="tall", terms=4096)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_larger_tile_is_faster(h):
    from harness.hardware import gpu_ms

    a, b = h.randn(4096, 4096, dtype=h.half), h.randn(4096, 4096, dtype=h.half)
    ms = [sorted(gpu_ms(lambda tile=tile: matmul_tile(a, b, *tile)))[0] for tile in ((16, 16), (32, 32), (128, 256))]
    assert ms[0] > 1.2 * ms[1]
    assert ms[1] > 1.2 * ms[2]


def _bad(device):
    x = torch.randn(4, 8, device=device)
    a, b = x.half(), x.half().t()
    return {
        "scale of a list": (scale, ([1.0],), TypeError, r"expected a torch\.Tensor, got list"),
        "scale of integers": (scale, (x.int(),), TypeError, r"torch\.int32 is not one of"),
        "scale of a transposed matrix": (scale, (x.t(),), ValueError, r"strides \(1, 8\); call x\.contiguous"),
        "sum of integers": (row_sum, (x.int(),), TypeError, r"torch\.int32 is not one of"),
        "sum of a vector": (row_sum, (x[0],), ValueError, r"got shape \(8,\); call x\.reshape"),
        "sum of columns apart": (row_sum, (x.t(),), ValueError, r"strides \(1, 8\); .*x\.contiguous"),
        "columns of float64": (column_sum, (x.double(),), TypeError, r"torch\.float64"),
        "columns of a batch": (column_sum, (x.reshape(1, 4, 8),), ValueError, r"got shape \(1, 4, 8\)"),
        "columns with no stage": (column_sum, (x, 0), ValueError, "num_stages is 0; pass an int from 1 to 4"),
        "columns with half a stage": (column_sum, (x, 1.5), ValueError, r"num_stages is 1\.5"),
        "columns with a true stage": (column_sum, (x, True), ValueError, "num_stages is True"),
        "a tile in floats": (matmul_tile, (a, b, 128.0, 256), ValueError, r"no tile 128\.0 x 256; there are"),
        "a tile in a list": (matmul_tile, (a, b, [128], 256), ValueError, r"no tile \[128\] x 256; there are"),
        "strip of float32": (matmul_strip, (x, x.t()), TypeError, r"torch\.float32 and torch\.float32"),
        "strip of two dtypes": (matmul_strip, (a, b.float()), TypeError, r"torch\.float16 and torch\.float32"),
        "strip of inner sizes": (matmul_strip, (a, a), ValueError, r"shapes \(4, 8\) and \(4, 8\); need \[M, K\]"),
        "tile of a vector": (matmul_tile, (a, b[:, 0]), ValueError, r"\[M, K\] and \[K, N\]"),
        "tile of float32": (matmul_tile, (x, x.t()), TypeError, r"torch\.float32 and torch\.float32"),
        "a tile that is not there": (
            matmul_tile,
            (a, b, 16, 128),
            ValueError,
            r"no tile 16 x 128; there are \(16, 16\)",
        ),
        "a tile of too many stages": (matmul_tile, (a, b, 16, 16, 5), ValueError, "num_stages is 5"),
        "requires grad": (matmul_tile, (a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        "two devices": (matmul_strip, (a, b.to("meta")), ValueError, "move them to one device"),
        "a device without kernels": (column_sum, (x.to("meta"),), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    wrapper, args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"{wrapper.__name__}: .*{message}"):
        wrapper(*args)


def compiled(wrapper, *args, sm):
    (kernel,) = compile_for(wrapper, args, sms=(sm,))
    assert kernel.error is None
    assert kernel.fits
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
@pytest.mark.parametrize("stages", [1, 3])
def test_shared_memory_of_a_tile_is_its_operands(sm, tile, stages):
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    kernel = compiled(matmul_tile, a, a, *tile, stages, sm=sm)
    assert kernel.shared == tile_bytes(kernel, *tile, stages)
    assert kernel.spills <= (0 if sm == 90 else 32)  # bytes of one thread, around its store
    large = tile[0] >= 64
    instruction = {90: "wgmma", 100: "tcgen05.mma"}.get(sm, "mma.sync") if large else "mma.sync"
    assert kernel.found[instruction]


def test_a_product_without_reuse_takes_no_shared_memory():
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    for sm in (80, 90, 100):
        kernel = compiled(matmul_strip, a, a, sm=sm)
        assert kernel.shared == 0
        assert kernel.spills == 0
        assert kernel.found["ld.global.v4"]
        assert kernel.found["fma.f32"]


def test_ttgir_names_the_buffers():
    x = torch.empty(4096, 4096, device="meta")
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert allocations(dump(scale, (x,), sm=90)["ttgir"]) == []
    assert allocations(dump(column_sum, (x, 1), sm=90)["ttgir"]) == []
    assert allocations(dump(column_sum, (x, 4), sm=90)["ttgir"]) == [f"3x{BLOCK}xf32"]
    buffers = allocations(dump(matmul_tile, (a, a, 128, 256, 3), sm=90)["ttgir"])
    assert sorted(buffers) == [f"3x128x{BLOCK_K}xbf16", f"3x{BLOCK_K}x256xbf16"]


def test_a_wrong_prediction_fails_the_demo(h, monkeypatch):
    monkeypatch.setattr(shared_memory, "BLOCK", 512)  # the prediction's; the compiling process has its own
    with pytest.raises(
        CodegenError, match="column_sum, 4 stages on sm_80: 12288 bytes of shared memory, predicted 6144"
    ):
        show_shared(h)


def test_loaded_bytes():
    assert loaded_bytes(4096, 4096, 4096, 16, 16, 2) == 2 * 4096**3 * 2 // 16
    assert loaded_bytes(4096, 4096, 4096, 128, 256, 2) == 4096**3 * 2 * 3 // 256
    assert loaded_bytes(1, 1, 10, 1, 1, 2) == 40
