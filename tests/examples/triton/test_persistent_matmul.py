"""persistent_matmul: every step at every edge, few and many tiles, layouts, bad input, shared memory, the code."""

import functools

import pytest
import torch
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits
from examples.triton import persistent_matmul as lesson
from examples.triton.persistent_matmul import VARIANTS, fitting_tile, matmul_persistent
from tests.examples.triton import helpers
from tests.examples.triton.helpers import check_product, code, matrices, meta, products, refused


@pytest.mark.parametrize("variant", VARIANTS)
def test_edges_layouts_and_extremes(h, variant):
    """Half a tile of columns and 8 more too, and more rows of tiles than a group has, in two columns of tiles."""
    groups = [((lesson.GROUP_M + 1) * lesson.BLOCK_M + 1, 264, 8)] * (variant == "split")
    for a, b in products(h, (1, 264, 72), (5, 128, 8), (5, 136, 8), (129, 264, 8), *groups, tma=True):
        check_product(h, matmul_persistent, a, b, variant)


test_any_shape = helpers.any_product(matmul_persistent, 300, 560, 240, tma=True, variant=st.sampled_from(VARIANTS))


def test_other_gpus(h, monkeypatch):
    """One program for all tiles, programs with more and fewer tiles than others, more SMs than tiles; less memory."""
    if not h.interpreted:
        pytest.skip("SMs and shared memory are real here")
    for sms, shared in ((1, SHARED_LIMIT[90]), (3, SHARED_LIMIT[120]), (1000, SHARED_LIMIT[90])):
        monkeypatch.setattr(lesson, "device_limits", lambda device, two=(sms, shared): Limits(*two))
        for variant in VARIANTS[1:]:
            check_product(h, matmul_persistent, *matrices(h, 300, 520, 8), variant)
    monkeypatch.setattr(lesson, "device_limits", lambda device: Limits(40, 64 * 1024))
    refused(matmul_persistent, RuntimeError, "no tile fits the 65536 bytes of shared memory of", *matrices(h, 8, 8, 8))


@pytest.mark.gpu
def test_real_sizes_and_more_elements_than_an_int32_counts(h, gpu_gib):
    """The same tile and the same order of sums: only when things happen differs, so not a bit of the result may."""
    for i, shape in enumerate([(4096, 4096, 4096), (1000, 5208, 776), (16, 8192, 4096), (8191, 264, 512)]):
        a, b = matrices(h, *shape, lesson.DTYPES[i % 2])
        for variant in VARIANTS:
            check_product(h, matmul_persistent, a, b, variant)
            assert torch.equal(matmul_persistent(a, b, variant), matmul_persistent(a, b, VARIANTS[0]))
    for variant in ("tile", "split"):
        helpers.check_beyond_int32(h, gpu_gib, functools.partial(matmul_persistent, variant=variant), transposed=False)


def tile_for(sm, variant):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson, "device_limits", lambda device: Limits(1, SHARED_LIMIT[sm]))
        return fitting_tile(torch.device("cpu"), variant == "split")


@pytest.mark.parametrize(
    ("sm", "variant", "mma", "tile"),
    [(90, "split", "wgmma", (256, 4)), (90, "persistent", "wgmma", (256, 3)), (120, "split", "mma.sync", (128, 2))],
)
def test_the_tile_that_fits_takes_what_is_reckoned(sm, variant, mma, tile):
    """On sm_90 half the tile pays for a fourth stage. There the kernel uses all of it but a few barriers."""
    assert tile_for(sm, variant) == tile
    kernel = code(sm, f"cp.async.bulk.tensor mbarrier {mma}", matmul_persistent, *[meta(4096, 4096)] * 2, variant)
    reckoned = lesson.shared_bytes(*tile, variant == "split")
    assert reckoned - (256 if sm == 90 else reckoned) < kernel.shared <= reckoned <= SHARED_LIMIT[sm]


def test_bad_input(h):
    a, b = matrices(h, 4, 8, 16)
    refused(matmul_persistent, ValueError, "variant 'faster' is not one of", a, b, "faster")
    refused(matmul_persistent, ValueError, "K is 12 and N 8", a[:, :12], b[:12])
