"""pipelined_matmul: every count of stages at every edge, shared memory as predicted, copies in the code, bad input."""

import functools

from harness.codegen import compile_for

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits, architecture, device_limits
from examples.triton import pipelined_matmul
from examples.triton.pipelined_matmul import (
    BLOCK_NS,
    DTYPES,
    STAGES,
    matmul_pipelined,
    reference,
    shared_bytes,
    stages_that_fit,
)

# One element, a prime, one tile plus one in each dimension, more steps than stages, nothing to sum, nothing.
SHAPES = [(1, 1, 1), (37, 53, 61), (129, 64, 64), (64, 257, 64), (64, 64, 65), (16, 16, 460), (5, 7, 0), (0, 5, 3)]


def fitting(h, block_n=128):
    return stages_that_fit(block_n, architecture(h.device), device_limits(h.device).shared_bytes)


def check(h, a, b, *counts, block_n=128):
    """With `counts` of stages; by default every second one on a GPU, and one in the interpreter, which ignores them."""
    for s in counts or fitting(h, block_n)[: 1 if h.interpreted else None : 2]:
        what = f"{tuple(a.shape)} {a.stride()} {tuple(b.shape)} {b.stride()} by {block_n}, {s} stages"
        fn = functools.partial(matmul_pipelined, num_stages=s, block_n=block_n)
        h.check(fn, reference, a, b, terms=a.shape[1], what=what)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(h, shape):
    M, N, K = shape
    for block_n in BLOCK_NS:
        check(h, h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half), block_n=block_n)


@given(M=st.integers(0, 200), N=st.integers(0, 200), K=st.integers(0, 400), stages=st.sampled_from(STAGES[:4]))
def test_any_shape(M, N, K, stages):
    from harness.session import Harness

    h = Harness("test")
    dtype = torch.float16
    check(h, h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype), stages)


def test_groups_of_tiles(h):
    """More rows of tiles than a group has, a last group that is not full, two columns of tiles."""
    check(h, h.randn(9 * 128 + 1, 8, dtype=h.half), h.randn(8, 136, dtype=h.half))


def test_strides(h):
    a, b = h.randn(96, 160, dtype=h.half), h.randn(200, 320, dtype=h.half)
    for left, right in (
        (a.t(), b[:96, :100]),  # transposed; padded rows
        (a[:, ::2], b[:80, ::3]),  # every second, every third column: nothing that cp.async could copy
        (a[:1].expand(70, 160), b[:160]),  # a stride of 0
        (a[:, 1:], b[:159, 1:50]),  # starts that are not aligned
        (h.randn(50, 50, dtype=h.half).t(), h.randn(70, 50, dtype=h.half).t()),
    ):
        check(h, left, right, 3)


def test_extremes(h):
    """Large and tiny values keep their scale; NaN and infinity reach what torch says they reach, and nothing else."""
    a, b = h.randn(40, 70, dtype=h.half), h.randn(70, 50, dtype=h.half)
    check(h, a * 64, b * 4, 3)
    check(h, a * 2.0**-6, b * 2.0**-4, 3)
    a[3, 5], a[7, 11], b[2, 9] = float("nan"), float("inf"), float("-inf")
    check(h, a, b, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_on_the_gpu(h, dtype):
    for M, N, K in [(512, 768, 1024), (1000, 520, 777), (16, 4096, 4096), (1, 1, 50_000)]:
        a, b = h.randn(M, K, dtype=dtype), h.randn(K, N, dtype=dtype)
        for block_n in BLOCK_NS:
            check(h, a, b, *fitting(h, block_n), block_n=block_n)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    gpu_gib(40)
    a = torch.empty(2**31 // 64 + 64, 64, dtype=torch.bfloat16, device=h.device).normal_()
    b = h.randn(64, 64, dtype=torch.bfloat16)
    for left, right in ((a, b), (b, a.t())):
        c = matmul_pipelined(left, right)
        part = slice(-100, None)
        want = reference(left[part], right) if left is a else reference(left, right[:, part])
        got = (c[part] if left is a else c[:, part]).contiguous()
        h.check(lambda *_, got=got: got, lambda *_, want=want: want, b, terms=64, what="the last of 2**31")
        del c


TENSOR_CORES = {80: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.parametrize("sm", TENSOR_CORES)
def test_shared_memory_and_copies_by_stages(sm):
    """One buffer per stage where the tensor cores read shared memory late, one fewer elsewhere, as predicted."""
    x = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    for block_n, stages in [*((128, s) for s in stages_that_fit(128, sm, SHARED_LIMIT[sm])), (256, 3)]:
        (kernel,) = compile_for(matmul_pipelined, (x, x, stages, block_n), sms=(sm,))
        assert kernel.shared == shared_bytes(stages, block_n, sm)
        assert (kernel.error, kernel.fits) == (None, True)
        assert kernel.found[TENSOR_CORES[sm]]
        if block_n == 128:
            # 32 KiB by 256 threads of 16 bytes: 8 copies a stage, and on sm_100 the loop's first step is apart.
            assert kernel.found.get("cp.async", 0) == (0 if stages == 1 else 8 * (stages + (sm == 100)))
            assert ("ld.global.v4" in kernel.found) == (stages == 1)
            assert kernel.spills == 0


def test_how_many_stages_fit():
    for sm, most in {80: [5, 4], 89: [4, 3], 90: [5, 4], 100: [5, 4], 120: [4, 3]}.items():
        assert [max(stages_that_fit(n, sm, SHARED_LIMIT[sm])) for n in BLOCK_NS] == most
    assert stages_that_fit(128, 90, 1000) == ()


def test_a_pipeline_that_does_not_fit(h, monkeypatch):
    a = h.randn(4, 4, dtype=h.half)
    monkeypatch.setattr(pipelined_matmul, "device_limits", lambda device: Limits(132, SHARED_LIMIT[90]))
    monkeypatch.setattr(pipelined_matmul, "architecture", lambda device: 90)
    with pytest.raises(ValueError, match=r"5 stages .* need 245760 bytes .* have 232448 here; .*\(1, 2, 3, 4\)"):
        matmul_pipelined(a, a, 5, block_n=256)


def test_bad_input(h):
    a, b = h.randn(4, 8, dtype=torch.float16), h.randn(8, 5, dtype=torch.float16)
    for args, error, message in [
        (([1.0], b), TypeError, "got list"),
        ((a.float(), b.float()), TypeError, r"torch\.float32"),
        ((a, b.float()), TypeError, r"torch\.float16 and torch\.float32"),
        ((a, b[:, 0]), ValueError, r"need \[M, K\] and \[K, N\]"),
        ((a, b.t()), ValueError, r"shapes \(4, 8\) and \(5, 8\)"),
        *(((a, b, stages), ValueError, "num_stages .* is not one of") for stages in (0, 6, 2.0, True, "3")),
        *(((a, b, 3, block_n), ValueError, "block_n .* is not one of") for block_n in (64, 128.0)),
        ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        ((a, b.to("meta")), ValueError, "move them to one device"),
        ((a.to("meta"), b.to("meta")), RuntimeError, "on meta"),
    ]:
        with pytest.raises(error, match=f"matmul_pipelined: .*{message}"):
            matmul_pipelined(*args)
