"""pipelined_matmul: every count of stages at every edge, shared memory as predicted, copies in the code, bad input."""

import pytest
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits, architecture, device_limits
from examples.triton import pipelined_matmul as lesson
from examples.triton.pipelined_matmul import STAGES, matmul_pipelined, shared_bytes, stages_that_fit
from tests.examples.triton import helpers
from tests.examples.triton.helpers import check_product, code, matrices, meta, products, refused


def test_edges_layouts_and_extremes(h):
    """More steps than stages too, and more rows of tiles than a group has, in two columns of tiles."""
    for a, b in products(h, (16, 16, 460), (9 * 128 + 1, 136, 8)):
        check_product(h, matmul_pipelined, a, b)


test_any_shape = helpers.any_product(matmul_pipelined, K=400, num_stages=st.sampled_from(STAGES[:4]))


@pytest.mark.gpu
def test_real_sizes_and_more_elements_than_an_int32_counts(h, gpu_gib):
    for dtype in lesson.DTYPES:
        for shape in [(512, 768, 1024), (1000, 520, 777), (16, 4096, 4096), (1, 1, 50_000)]:
            for stages in stages_that_fit(architecture(h.device), device_limits(h.device).shared_bytes):
                check_product(h, matmul_pipelined, *matrices(h, *shape, dtype), stages)
    helpers.check_beyond_int32(h, gpu_gib, matmul_pipelined, transposed=True)


@pytest.mark.parametrize(
    ("sm", "stages", "mma"),
    [(80, 1, "mma.sync"), (90, 4, "wgmma"), (100, 2, "tcgen05.mma"), (120, 3, "mma.sync")],
)
def test_shared_memory_and_copies_by_stages(sm, stages, mma):
    """One buffer per stage where the tensor cores read shared memory late, one fewer elsewhere, as predicted."""
    kernel = code(sm, mma, matmul_pipelined, *[meta(8192, 8192)] * 2, stages)
    assert kernel.shared == shared_bytes(stages, sm)
    # 32 KiB by 256 threads of 16 bytes: 8 copies a stage, and on sm_100 the loop's first step is apart.
    assert kernel.found.get("cp.async", 0) == (0 if stages == 1 else 8 * (stages + (sm == 100)))
    assert ("ld.global.v4" in kernel.found) == (stages == 1)


def test_a_pipeline_that_does_not_fit(h, monkeypatch):
    for sm, most in {80: 5, 89: 4, 90: 5, 100: 5, 120: 4}.items():
        assert max(stages_that_fit(sm, SHARED_LIMIT[sm])) == most
    a = h.randn(4, 4, dtype=h.half)
    monkeypatch.setattr(lesson, "device_limits", lambda device: Limits(132, SHARED_LIMIT[89]))
    monkeypatch.setattr(lesson, "architecture", lambda device: 89)
    refused(matmul_pipelined, ValueError, "5 stages need 131072 .* have 101376 here", a, a, 5)
    for stages in (0, 2.0, True):
        refused(matmul_pipelined, ValueError, "num_stages .* is not one of", a, a, stages)
