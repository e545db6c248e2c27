"""autotune: every configuration on poisoned outputs, every edge of a tile, what pruning keeps, bad input, the code."""

from harness.catalog import Needs
from harness.codegen import compile_for
from harness.session import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common.device import SHARED_LIMIT, device_limits
from examples.triton.autotune import FIXED, matmul_config, matmul_tuned, reference, tuned_kernel
from examples.triton.autotune_pruned import (
    CANDIDATES,
    LARGE,
    PER_TILE,
    candidates,
    configuration,
    loaded_per_sm,
    numbers,
    shared_bytes,
)

TILE = (64, 32, 64, 4, 3)
SHAPES = [(1, 1, 1), (37, 53, 61), (65, 33, 64), (64, 32, 65), (1, 300, 40), (300, 1, 40), (5, 7, 0), (0, 5, 3)]
PREDICTED = [FIXED, configuration(16, 64, 128, 4, 5), configuration(64, 32, 128, 4, 5)]


def small(a, b):
    return matmul_config(a, b, *TILE)


def check(h, M, N, K, fn=small):
    a, b = h.randn(M, K, dtype=h.half), h.randn(K, N, dtype=h.half)
    h.check(fn, reference, a, b, terms=K, what=f"{M}x{N}x{K}")


def test_shapes(h):
    for shape in SHAPES:
        check(h, *shape)


@given(M=st.integers(0, 150), N=st.integers(0, 150), K=st.integers(0, 150))
def test_any_shape(M, N, K):
    check(Harness("test", Needs.parse("triton")), M, N, K)


def test_the_tuned_wrapper(h):
    """In the interpreter a space of one; on a GPU the whole search, on poisoned outputs."""
    check(h, 130, 200, 70, matmul_tuned)


# Warps and stages mean nothing to the interpreter: there each tile is checked once.
TILES = sorted({numbers(config)[:3] for config in LARGE})


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_every_tile(h, tile):
    if shared_bytes(configuration(*tile, 8, 3), 2, h.machine.sm or 90) > device_limits(h.device).shared_bytes:
        pytest.skip("does not fit shared memory")
    check(h, 70, 130, 140, lambda a, b: matmul_config(a, b, *tile, 8, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 2048, 1024), (300, 520, 777), (2048, 2048, 512)])
def test_every_configuration_that_a_search_times(h, shape):
    for config in candidates(LARGE, *shape[:2], 2, h.machine.sm, h.machine.sms, h.machine.shared_bytes):
        check(h, *shape, lambda a, b, config=config: matmul_config(a, b, *numbers(config)))


def test_strides(h):
    a, b = h.randn(96, 160, dtype=h.half), h.randn(160, 320, dtype=h.half)
    for left, right in (
        (a[:, :150], b[:150, :100]),  # padded rows
        (a[::2, 1:], b[1:, 3:50]),  # every second row, starts that are not aligned
        (a[:1].expand(70, 160), b),  # a row stride of 0
        (a[:, :1], b[:1]),  # one column
    ):
        h.check(small, reference, left, right, terms=left.shape[1], what=f"{left.stride()} {right.stride()}")


def test_extremes(h):
    """Large and tiny values keep their scale; NaN and infinity reach what torch says they reach, and nothing else."""
    a, b = h.randn(40, 70, dtype=h.half), h.randn(70, 50, dtype=h.half)
    h.check(small, reference, a * 64, b * 4, terms=70, what="large")
    h.check(small, reference, a * 2.0**-6, b * 2.0**-4, terms=70, what="tiny")
    h.check(small, reference, a * 2000, b * 2000, terms=70, what="beyond float16: infinite as the reference rounded")
    a[3, 5], a[7, 11], b[2, 9] = float("nan"), float("inf"), float("-inf")
    h.check(small, reference, a, b, terms=70, what="NaN and infinities")


@pytest.mark.parametrize("shape", [(1, 1), (16, 8192), (512, 512), (4096, 8192), (100_000, 3)])
def test_pruning_keeps_a_few_that_fit(shape):
    for sm, limit in SHARED_LIMIT.items():
        for configs in (LARGE, PREDICTED, [FIXED]):
            kept = candidates(configs, *shape, 2, sm, 132, limit)
            assert bool(kept) == any(shared_bytes(c, 2, sm) <= limit for c in configs)
            assert len(kept) == len(set(kept)) <= CANDIDATES
            assert all(shared_bytes(config, 2, sm) <= limit for config in kept)
            tiles = [numbers(config)[:2] for config in kept]
            assert all(tiles.count(tile) <= PER_TILE for tile in tiles)
            loads = [loaded_per_sm(config, *shape, 132) for config in kept]
            assert loads == sorted(loads)


def test_pruning_follows_the_shape():
    kept = {M: candidates(LARGE, M, 8192, 2, 90, 132, SHARED_LIMIT[90]) for M in (16, 4096)}
    assert numbers(kept[16][0])[:2] == (16, 64)  # 128 programs for 132 SMs
    assert FIXED in kept[4096]
    assert not set(kept[16]) & set(kept[4096])


def test_the_space_is_what_it_says():
    assert len(LARGE) == len(set(LARGE)) == 4 * 4 * 2 * 2 * 3
    assert set(PREDICTED) <= set(LARGE)
    assert tuned_kernel.configs[0] == LARGE[0]
    assert list(tuned_kernel.keys) == ["M_BUCKET", "N", "K"]


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_shared_memory_is_what_the_compiler_takes(sm):
    meta = [torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")] * 2
    for config in PREDICTED:
        (kernel,) = compile_for(matmul_config, (*meta, *numbers(config)), sms=(sm,))
        assert kernel.error is None
        assert 0 <= shared_bytes(config, 2, sm) - kernel.shared <= 1024
        assert kernel.found["cp.async"]
        rows = config.kwargs["BLOCK_M"]
        assert kernel.found["mma.sync" if rows < 64 or sm in (80, 120) else "wgmma" if sm == 90 else "tcgen05.mma"]
        assert kernel.spills == 0 or sm != 90


def test_a_spilling_configuration_spills_where_the_accumulator_is_in_registers():
    meta = [torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")] * 2
    on_90, on_100 = compile_for(matmul_config, (*meta, 128, 256, 64, 4, 3), sms=(90, 100))
    assert on_90.spills > 500
    assert on_100.spills == 0


def test_bad_input(h):
    a, b = h.randn(4, 8, dtype=torch.float16), h.randn(8, 5, dtype=torch.float16)
    for args, error, message in [
        (([1.0], b), TypeError, r"expected a torch\.Tensor, got list"),
        ((a.float(), b.float()), TypeError, r"torch\.float32"),
        ((a, b.float()), TypeError, r"torch\.float16 and torch\.float32"),
        ((a, b[:, 0]), ValueError, r"shapes \(4, 8\) and \(8,\); need \[M, K\] and \[K, N\]"),
        ((a, b.t().contiguous()), ValueError, r"shapes \(4, 8\) and \(5, 8\)"),
        ((a[:, ::2], b[:4]), ValueError, r"strides \(8, 2\) and \(5, 1\).*contiguous\(\) first"),
        ((a, h.randn(5, 8, dtype=torch.float16).t()), ValueError, r"contiguous\(\) first"),
        ((a.clone().requires_grad_(), b), RuntimeError, "no backward"),
        ((a, b.to("meta")), ValueError, "move them to one device"),
    ]:
        with pytest.raises(error, match=f"matmul_config: .*{message}"):
            small(*args)
        with pytest.raises(error, match=f"matmul_tuned: .*{message}"):
            matmul_tuned(*args)


def test_a_configuration_that_is_unknown_or_does_not_fit(h):
    a, b = h.randn(4, 8, dtype=h.half), h.randn(8, 5, dtype=h.half)
    for tile in [
        (32, 64, 64, 4, 3),
        (64, 64, 64, 4, 1),
        (64, 64, 64, 3, 3),
        ("64", 64, 64, 4, 3),
        (None, 64, 64, 4, 3),
    ]:
        with pytest.raises(ValueError, match=r"matmul_config: no configuration \(.*choose from BLOCK_M 16, 64"):
            matmul_config(a, b, *tile)
    with pytest.raises(ValueError, match=r"matmul_config: 256x256x128, 8 warps, 5 stages need \d+ bytes.*fewer stages"):
        matmul_config(a, b, 256, 256, 128, 8, 5)
