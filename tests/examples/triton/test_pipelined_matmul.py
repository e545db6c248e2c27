"""pipelined_matmul: every count of stages at every edge, shared memory as predicted, copies in the code, bad input."""

import functools

import pytest
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits, architecture, device_limits
from examples.triton import pipelined_matmul as lesson
from examples.triton.pipelined_matmul import (
    BLOCK_NS,
    STAGES,
    matmul_pipelined,
    reference,
    shared_bytes,
    stages_that_fit,
)
from tests.examples.triton.helpers import any_product, check_beyond_int32, code, matrices, meta, products, refused


def check(h, a, b, stages=None, block_n=128):
    """By default with all stages that fit on a GPU, and one in the interpreter, which ignores them."""
    fitting = stages_that_fit(block_n, architecture(h.device), device_limits(h.device).shared_bytes)
    for s in [stages] if stages else fitting[: 1 if h.interpreted else None]:
        what = f"{tuple(a.shape)} {a.stride()} {tuple(b.shape)} {b.stride()} by {block_n}, {s} stages"
        fn = functools.partial(matmul_pipelined, num_stages=s, block_n=block_n)
        h.check(fn, reference, a, b, terms=a.shape[1], what=what)


@pytest.mark.parametrize("block_n", BLOCK_NS)
def test_edges_layouts_and_extremes(h, block_n):
    """More steps than stages too, and more rows of tiles than a group has, in two columns of tiles."""
    for a, b in products(h, (16, 16, 460), (9 * 128 + 1, block_n + 8, 8)):
        check(h, a, b, 3, block_n)


test_any_shape = any_product(check, K=400, stages=st.sampled_from(STAGES[:4]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", lesson.DTYPES)
def test_shapes_on_the_gpu(h, dtype):
    for shape in [(512, 768, 1024), (1000, 520, 777), (16, 4096, 4096), (1, 1, 50_000)]:
        for block_n in BLOCK_NS:
            check(h, *matrices(h, *shape, dtype), block_n=block_n)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(h, gpu_gib):
    check_beyond_int32(h, gpu_gib, matmul_pipelined, transposed=True)


@pytest.mark.parametrize(
    ("sm", "block_n", "stages", "mma"),
    [(80, 128, 1, "mma.sync"), (80, 128, 3, "mma.sync"), (90, 128, 4, "wgmma"), (90, 256, 3, "wgmma"),
     (100, 128, 2, "tcgen05.mma"), (120, 128, 3, "mma.sync")],
)  # fmt: skip
def test_shared_memory_and_copies_by_stages(sm, block_n, stages, mma):
    """One buffer per stage where the tensor cores read shared memory late, one fewer elsewhere, as predicted."""
    spills = 0 if block_n == 128 else 10**6
    kernel = code(sm, mma, matmul_pipelined, *[meta(8192, 8192)] * 2, stages, block_n, spills=spills)
    assert kernel.shared == shared_bytes(stages, block_n, sm)
    if block_n == 128:
        # 32 KiB by 256 threads of 16 bytes: 8 copies a stage, and on sm_100 the loop's first step is apart.
        assert kernel.found.get("cp.async", 0) == (0 if stages == 1 else 8 * (stages + (sm == 100)))
        assert ("ld.global.v4" in kernel.found) == (stages == 1)


def test_a_pipeline_that_does_not_fit(h, monkeypatch):
    for sm, most in {80: [5, 4], 89: [4, 3], 90: [5, 4], 100: [5, 4], 120: [4, 3]}.items():
        assert [max(stages_that_fit(n, sm, SHARED_LIMIT[sm])) for n in BLOCK_NS] == most
    assert stages_that_fit(128, 90, 1000) == ()
    a = h.randn(4, 4, dtype=h.half)
    monkeypatch.setattr(lesson, "device_limits", lambda device: Limits(132, SHARED_LIMIT[90]))
    monkeypatch.setattr(lesson, "architecture", lambda device: 90)
    too_much = r"5 stages .* need 245760 bytes .* have 232448 here; .*\(1, 2, 3, 4\)"
    refused(matmul_pipelined, ValueError, too_much, a, a, 5, block_n=256)
    for stages in (0, 6, 2.0, True, "3"):
        refused(matmul_pipelined, ValueError, "num_stages .* is not one of", a, a, stages)
    refused(matmul_pipelined, ValueError, "block_n 64 is not one of", a, a, 3, 64)
