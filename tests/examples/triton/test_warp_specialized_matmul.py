"""warp_specialized_matmul: every loop right whatever the compiler makes of it, what it makes of it, bad input."""

import pytest
import torch
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, Limits
from examples.triton import warp_specialized_matmul as lesson
from examples.triton.warp_specialized_matmul import LOOPS, matmul_specialized, outcome, runs
from tests.examples.triton.helpers import any_product, check_product, code, matrices, meta, products, refused

by_loop = pytest.mark.parametrize("loop", LOOPS)


def specialized(a, b, loop="k", warp_specialize=True, block_m=64, num_warps=4, descriptors="kernel"):
    form = loop, warp_specialize, block_m, num_warps, descriptors
    small = torch.zeros(16, 16, dtype=a.dtype, device=a.device)
    if not runs(lambda *operands: matmul_specialized(*operands, *form), small, small):
        pytest.skip(f"this GPU's compiler does not take {form}")
    return matmul_specialized(a, b, *form)


@by_loop
def test_edges_layouts_and_extremes(h, loop):
    for a, b in products(h, (1, 136, 72), ((lesson.GROUP_M + 1) * 64 + 1, 136, 8), tma=True):
        check_product(h, specialized, a, b, loop)


options = {"loop": st.sampled_from(LOOPS), "warp_specialize": st.booleans()}
test_any_shape = any_product(specialized, 200, 320, 160, tma=True, **options)


def test_forms(h):
    for form in [("k", True, 64, 8, "host"), ("k", False, 128, 4, "host"), ("tiles", True, 128, 8),
                 ("tiles", False, 64, 4, "host"), ("flattened tiles", False, None, None)]:  # fmt: skip
        check_product(h, specialized, *matrices(h, 140, 264, 72), *form)


def test_every_tile_is_taken_once(h, monkeypatch):
    if not h.interpreted:
        pytest.skip("the number of SMs is real here")
    for loop, sms in (("tiles", 1), ("tiles", 1000), ("flattened tiles", 3)):
        monkeypatch.setattr(lesson, "device_limits", lambda device, sms=sms: Limits(sms, SHARED_LIMIT[90]))
        check_product(h, specialized, *matrices(h, 130, 264, 8), loop)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", lesson.BLOCKS)
@by_loop
def test_partitions_meet_many_times_over(h, loop, rows):
    """Producer and consumers wait for each other: many launches, few and many steps, tiles fewer and more than SMs."""
    shapes = ((8, 8, 8), (64, 128, 8192), (2048, 2048, 64), (1000, 5208, 776), (16, 8192, 4096), (4096, 4096, 4096))
    for i, shape in enumerate(shapes):
        a, b = matrices(h, *shape, lesson.DTYPES[i % 2])
        check_product(h, specialized, a, b, loop, True, rows, None)
        want = matmul_specialized(a, b, loop, True, rows)
        assert all(torch.equal(matmul_specialized(a, b, loop, True, rows), want) for _ in range(20))


def test_what_becomes_of_the_request():
    """On Hopper the flattened loop is not specialized, and the kernel takes the warps that it needs without."""
    kernel = code(90, "wgmma", matmul_specialized, *[meta(4096, 4096)] * 2, "flattened tiles")
    assert outcome(kernel).startswith("ignored, 8 warps")


def test_bad_input(h):
    a, b = matrices(h, 4, 8, 16)
    for option, value in (("loop", "m"), ("block_m", 64.0), ("descriptors", "device")):
        refused(matmul_specialized, ValueError, f"{option} .* is not one of", a, b, **{option: value})
    refused(matmul_specialized, ValueError, "K is 12 and N 8", a[:, :12], b[:12])
