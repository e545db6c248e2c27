"""matmul: every edge of a tile, strides, precisions, what a search may choose, bad input, the code."""

import pytest
import torch
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits
from examples.triton import matmul as lesson
from examples.triton import matmul_tiles
from examples.triton.matmul import DTYPES, matmul
from examples.triton.matmul_tiles import CONFIGS, fitting_configs
from tests.examples.triton import helpers
from tests.examples.triton.helpers import check_product, code, matrices, meta, products, refused


def test_edges_layouts_and_extremes(h):
    for a, b in (*products(h), *(matrices(h, *shape, torch.float32) for shape in [(37, 53, 61), (64, 257, 65)])):
        check_product(h, matmul, a, b)


test_any_shape = helpers.any_product(matmul, group_m=st.integers(1, 9))


@pytest.mark.gpu
def test_real_sizes_and_more_elements_than_an_int32_counts(h, gpu_gib):
    for dtype in DTYPES:
        for shape in [(512, 768, 1024), (1000, 520, 777), (16, 4096, 4096), (4096, 16, 512), (1, 1, 50_000)]:
            check_product(h, matmul, *matrices(h, *shape, dtype))
    helpers.check_beyond_int32(h, gpu_gib, matmul, transposed=True)


def test_pruning_leaves_what_fits_and_never_nothing(monkeypatch):
    for (sm, limit), (M, N) in zip(SHARED_LIMIT.items(), ((1, 1), (16, 4096), (4096, 4096), (70, 1)) * 9, strict=False):
        monkeypatch.setattr(matmul_tiles, "device_limits", lambda _, limit=limit: Limits(100, limit))
        for dtype in DTYPES:
            left = fitting_configs(CONFIGS, {"a_ptr": meta(M, 8, dtype=dtype), "M": M, "N": N}, PRECISION="ieee")
            assert left, (sm, dtype, M, N)
            for m, n, k, stages in ((*config.kwargs.values(), config.num_stages) for config in left):
                assert (m + n) * k * dtype.itemsize * (stages - 1) <= limit
                assert (m <= max(64, 2 * M), n <= max(64, 2 * N)) == (True, True)
    # A tile that suits one size, layout, order or precision is another's worst: all are in the key of the search.
    assert set(lesson.tuned_kernel.keys) == {"M", "N", "K", "stride_ak", "stride_bk", "GROUP_M", "PRECISION"}


def test_bad_input(h):
    a, b = matrices(h, 4, 5, 8)
    refused(matmul, ValueError, "input_precision 'tf19' is not one of", a, b, "tf19")
    for group_m in (0, 1025, 1.5, "8"):
        refused(matmul, ValueError, "group_m is", a, b, "ieee", group_m)


def test_generated_code():
    half, single = meta(4096, 4096), meta(4096, 4096, dtype=torch.float32)
    assert "mma tf32" not in code(90, "cp.async wgmma", matmul, half, half, config=4).found
    code(90, "cp.async wgmma", matmul, single, single, spills=10**6, input_precision="tf32x3")
