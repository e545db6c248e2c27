"""tma_matmul: every step at every edge, the same sums in each, what each compiles to, bad input."""

from harness.catalog import Needs
from harness.codegen import compile_for
from harness.session import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits
from examples.tma import tma_matmul as module
from examples.tma.tma_matmul import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_NS,
    STEPS,
    fitting,
    reference,
    shared_bytes,
    tma_matmul,
)

# One row, one tile plus one in each direction in turn, several tiles, more steps than stages, nothing to sum, nothing.
SHAPES = [(1, 8, 8), (129, 64, 64), (64, 264, 64), (64, 64, 72), (257, 520, 8), (16, 16, 456), (5, 16, 0), (0, 8, 8)]


def check_each(h, a, b, what="", **options):
    for step in STEPS:
        fn = lambda a, b: tma_matmul(a, b, step, **options)  # noqa: B023, E731
        h.check(fn, reference, a, b, terms=a.shape[1], what=f"{step} {tuple(a.shape)} {tuple(b.shape)} {what}")


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(h, shape):
    M, N, K = shape
    check_each(h, h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half))


@given(
    M=st.integers(0, 150), N=st.integers(0, 40), K=st.integers(0, 20), step=st.sampled_from(STEPS),
    block_n=st.sampled_from(BLOCK_NS),
)  # fmt: skip
def test_any_shape(M, N, K, step, block_n):
    h = Harness("test", Needs.parse("triton"))
    a, b = h.randn(M, 8 * K, dtype=h.half), h.randn(8 * K, 8 * N, dtype=h.half)
    h.check(
        lambda a, b: tma_matmul(a, b, step, block_n), reference, a, b, terms=8 * K, what=f"{step} {M}x{8 * N}x{8 * K}"
    )


@pytest.mark.parametrize("block_n", BLOCK_NS)
def test_every_step_sums_in_the_same_order(h, block_n):
    """Steps change how data travel and nothing of the arithmetic, so not one bit differs."""
    a, b = h.randn(150, 200, dtype=h.half), h.randn(200, 296, dtype=h.half)
    first, *others = (tma_matmul(a, b, step, block_n) for step in STEPS)
    assert all(torch.equal(first, other) for other in others)


def test_padded_rows_and_a_row_of_any_stride(h):
    check_each(h, h.randn(70, 152, dtype=h.half)[:, :136], h.randn(136, 80, dtype=h.half)[:, 8:72])
    row = torch.as_strided(h.randn(1, 16, dtype=h.half), (1, 16), (3, 1))  # a stride that is never used
    check_each(h, row, h.randn(16, 8, dtype=h.half))


def test_nan_and_infinity_stay_in_their_row_and_column(h):
    a, b = torch.ones(130, 72, dtype=h.half, device=h.device), torch.ones(72, 264, dtype=h.half, device=h.device)
    a[129, 71], b[70, 263] = float("nan"), float("inf")
    for step in STEPS:
        c = tma_matmul(a, b, step)
        assert c[129].isnan().all()
        assert c[:129, 263].isinf().all()
        assert (c[:129, :263] == 72).all()


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
def test_large_and_repeated(h, step):
    a, b = h.randn(2053, 4096, dtype=h.half), h.randn(4096, 3080, dtype=h.half)
    h.check(lambda a, b: tma_matmul(a, b, step), reference, a, b, terms=4096, what=step)
    first = tma_matmul(a, b, step)
    for _ in range(20):
        assert torch.equal(tma_matmul(a, b, step), first)


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
def test_more_than_2_31_elements(h, step):
    """Rows of c and of a beyond int32: the last rows tell."""
    M, N, K = 2**16 + 8, 2**15, 16
    if h.fit(M, bytes_each=4 * N) < M:
        pytest.skip("needs 12 GiB of GPU memory")
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    c = tma_matmul(a, b, step)[-64:]
    h.check(lambda a, b: c, reference, a[-64:], b, terms=K, what=step, poison=False)


MMA = {90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


def compiled(sm, M, N, K, *options, dtype=torch.bfloat16):
    operands = torch.empty(M, K, dtype=dtype, device="meta"), torch.empty(K, N, dtype=dtype, device="meta")
    kernels = [compile_for(tma_matmul, (*operands, step, *options), sms=(sm,))[0] for step in STEPS]
    assert [(kernel.error, kernel.spills, kernel.fits) for kernel in kernels] == [(None, 0, True)] * len(STEPS)
    return kernels


@pytest.mark.parametrize("sm", MMA)
def test_each_step_is_what_it_says(sm):
    tma = "cp.async.bulk.tensor"
    pointers, loads, store, parts = kernels = compiled(sm, 4096, 4096, 4096)
    assert all(kernel.found.get(MMA[sm]) for kernel in kernels)
    assert [bool(kernel.found.get("cp.async")) for kernel in kernels] == [True, False, False, False]
    assert [bool(kernel.found.get("st.global.v4")) for kernel in kernels] == [True, True, False, False]
    assert 0 == pointers.found.get(tma, 0) < loads.found[tma] < store.found[tma] < parts.found[tma]


@pytest.mark.parametrize(("block_n", "stages"), [(256, 4), (128, 3)])
def test_steps_differ_in_nothing_else(block_n, stages):
    """The same shared memory but for barriers, and wide copies also where K has a tail."""
    kernels = compiled(90, 4072, 4104, 4072, block_n, stages, dtype=torch.float16)
    for kernel in kernels:
        assert 0 <= kernel.shared - 2 * stages * (BLOCK_M + block_n) * BLOCK_K < 256
        assert kernel.shared <= shared_bytes(block_n, stages)
    # Each thread copies 16 bytes at a time; so many of these fill the tile, in the loop and before it.
    assert kernels[0].found["cp.async"] == stages * (BLOCK_M + block_n) * BLOCK_K * 2 // 16 // 256


@pytest.mark.parametrize(
    ("sm", "rule"), [(80, (256, 3)), (89, (128, 3)), (90, (256, 4)), (100, (256, 4)), (120, (128, 3))]
)
def test_which_tile_fits(sm, rule, monkeypatch):
    monkeypatch.setattr(module, "device_limits", lambda device: Limits(1, SHARED_LIMIT[sm]))
    assert fitting(torch.device("cpu")) == rule
    assert fitting(torch.device("cpu"), 128, 2) == (128, 2)
    with pytest.raises(ValueError, match=r"tma_matmul: block_n 256 with stages 8 does not fit the \d+ bytes"):
        fitting(torch.device("cpu"), 256, 8)


def _bad(device):
    a = torch.randn(4, 16, device=device).half()
    b = torch.randn(16, 8, device=device).half()
    flat = torch.zeros(200, dtype=torch.float16, device=device)
    return {
        "no tensor": (([1.0], b), TypeError, r"expected a torch\.Tensor, got list"),
        "float32": ((a.float(), b.float()), TypeError, r"torch\.float32"),
        "two dtypes": ((a, b.float()), TypeError, r"torch\.float16 and torch\.float32"),
        "inner sizes": ((a, b.t()), ValueError, r"shapes \(4, 16\) and \(8, 16\)"),
        "no step": ((a, b, "faster"), ValueError, r"step 'faster' is not one of \('pointers', "),
        "None for a step": ((a, b, None), ValueError, "step None is not one of"),
        "another tile": ((a, b, "parts", 64), ValueError, r"block_n 64 is not one of \(None, 256, 128\)"),
        "a tile in floats": ((a, b, "parts", 128.0), ValueError, r"block_n 128\.0"),
        "no stages": ((a, b, "parts", 128, 0), ValueError, "stages 0 is not one of"),
        "nine stages": ((a, b, "parts", 128, 9), ValueError, "stages 9 is not one of"),
        "true stages": ((a, b, "parts", 128, True), ValueError, "stages True"),
        "stages that do not fit": ((a, b, "parts", 256, 5), ValueError, "block_n 256 with stages 5 does not fit"),
        "K of 12": ((a[:, :12], b[:12]), ValueError, "K is 12 and N 8; TMA needs .*pad both to multiples of 8"),
        "N of 4": ((a, b[:, :4]), ValueError, "K is 16 and N 4"),
        "b transposed": ((a, torch.zeros(8, 16, dtype=a.dtype, device=device).t()), ValueError, "b has shape"),
        "unaligned start of pointers": ((flat[1:65].view(4, 16), b, "pointers"), ValueError, "a has .* starts 2"),
        "unaligned rows": ((a, flat[:192].view(16, 12)[:, :8]), ValueError, r"b has shape \(16, 8\), .*\(12, 1\)"),
        "requires grad": ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        "a device without kernels": ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    }


@pytest.mark.parametrize("name", _bad("cpu"))
def test_bad_input(h, name):
    args, error, message = _bad(h.device)[name]
    with pytest.raises(error, match=f"tma_matmul: .*{message}"):
        tma_matmul(*args)
