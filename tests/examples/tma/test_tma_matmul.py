"""tma_matmul: every step at every edge, the same sums in each, what each compiles to, bad input."""

from harness.codegen import compile_for

import pytest
import torch

from examples.tma import tma_matmul as module
from examples.tma.tma_matmul import BLOCK_K, BLOCK_M, BLOCK_NS, STEPS, fitting, reference, tma_matmul
from tests.examples.tma.helpers import odd_operands, pretend
from tests.examples.triton.helpers import meta, refused


def check_each(h, a, b):
    for step in STEPS:
        fn = lambda a, b: tma_matmul(a, b, step)  # noqa: B023, E731
        h.check(fn, reference, a, b, terms=a.shape[1], what=f"{step} {tuple(a.shape)} {tuple(b.shape)}")


def test_every_step_sums_in_the_same_order(h, monkeypatch):
    """Steps change how data travel and nothing of the arithmetic, so not one bit differs."""
    a, b = h.randn(150, 200, dtype=h.half), h.randn(200, 296, dtype=h.half)
    for block_n in BLOCK_NS:
        monkeypatch.setattr(module, "fitting", lambda device, block_n=block_n: (block_n, 3))
        first, *others = (tma_matmul(a, b, step) for step in STEPS)
        assert all(torch.equal(first, other) for other in others)


def test_shapes_padded_rows_a_row_of_any_stride_and_extremes(h):
    for M, N, K in [(65, 264, 72), (257, 520, 8), (16, 16, 456), (0, 8, 8)]:
        check_each(h, h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half))
    check_each(h, h.randn(70, 152, dtype=h.half)[:, :136], h.randn(136, 80, dtype=h.half)[:, 8:72])
    for x, w in odd_operands(h):
        check_each(h, x, w.t().contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
def test_on_the_gpu(h, step, gpu_gib):
    """A large product, and rows of c and of a beyond int32: the last rows tell."""
    a, b = h.randn(2053, 4096, dtype=h.half), h.randn(4096, 3080, dtype=h.half)
    h.check(lambda a, b: tma_matmul(a, b, step), reference, a, b, terms=4096, what=step)
    gpu_gib(12)
    a, b = h.randn(2**16 + 8, 16, dtype=h.half), h.randn(16, 2**15, dtype=h.half)
    c = tma_matmul(a, b, step)[-64:]
    h.check(lambda a, b: c, reference, a[-64:], b, terms=16, what=step, poison=False)


def test_each_step_is_what_it_says_and_differs_in_nothing_else():
    """The same shared memory but for barriers, and wide copies also where K has a tail."""
    (M, N, K), (block_n, stages) = (4072, 4104, 4072), (256, 4)
    kernels = [compile_for(tma_matmul, (meta(M, K), meta(K, N), step), sms=(90,))[0] for step in STEPS]
    assert [(kernel.error, kernel.spills) for kernel in kernels] == [(None, 0)] * len(STEPS)
    found = {name: [kernel.found.get(name, 0) for kernel in kernels] for name in ("cp.async", "cp.async.bulk.tensor")}
    assert found["cp.async.bulk.tensor"] == sorted(set(found["cp.async.bulk.tensor"])), "each step adds to it"
    # Each thread copies 16 bytes at a time; so many of these fill the tile, in the loop and before it.
    assert found["cp.async"] == [stages * (BLOCK_M + block_n) * BLOCK_K * 2 // 16 // 256, 0, 0, 0]
    assert [bool(kernel.found.get("st.global.v4")) for kernel in kernels] == [True, True, False, False]
    for kernel in kernels:
        assert 0 <= kernel.shared - 2 * stages * (BLOCK_M + block_n) * BLOCK_K < 256


def test_which_tile_fits_and_bad_input(h, monkeypatch):
    for K, N, options, message in [
        (16, 8, ("faster",), r"step 'faster' is not one of \('pointers', "),
        (12, 8, (), "K is 12 and N 8; TMA needs .*pad both to multiples of 8"),
        (16, 4, (), "K is 16 and N 4"),
    ]:
        refused(tma_matmul, ValueError, message, h.randn(4, K, dtype=h.half), h.randn(K, N, dtype=h.half), *options)
    for sm, rule in [(80, (256, 3)), (89, (128, 3)), (90, (256, 4)), (100, (256, 4)), (120, (128, 3))]:
        pretend(monkeypatch, [module], 1, sm)
        assert fitting(torch.device("cpu")) == rule
