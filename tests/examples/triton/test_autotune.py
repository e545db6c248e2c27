"""autotune: every edge of a tile, every configuration on a GPU, what pruning keeps, bad input, the code."""

import functools
from collections import Counter
from unittest.mock import MagicMock

import pytest

from examples.common.device import SHARED_LIMIT
from examples.triton import autotune_pruned as pruned
from examples.triton.autotune import FIXED, launch, matmul_config, matmul_tuned, tuned_kernel
from examples.triton.autotune_pruned import LARGE, candidates, configuration, numbers, shared_bytes
from tests.examples.triton.helpers import any_product, check_product, code, matrices, meta, products, refused

THIN = configuration(16, 64, 128, 4, 5)
small = functools.partial(matmul_config, block_m=64, block_n=32, block_k=64, num_warps=4, num_stages=3)


def test_edges_layouts_and_extremes(h):
    for a, b in products(h, tma=True):
        check_product(h, small, a, b)
    a, b = matrices(h, 96, 320, 160)
    # Starts that are not aligned, one column, ragged sizes.
    for left, right in ((a[::2, 1:], b[1:, 3:50]), (a[:, :1], b[:1]), (a[:37, :61], b[:61, :53])):
        check_product(h, small, left, right)
    # 64 columns of a and rows of b, with more behind them: steps of 128 must not read these, though 64 divides K.
    check_product(h, matmul_config, a[:, :64], b[:64], *numbers(THIN))
    # In the interpreter a space of one; on a GPU the whole search, on poisoned outputs.
    check_product(h, matmul_tuned, *matrices(h, 130, 200, 70))


test_any_shape = any_product(small, 150, 150, 150)


@pytest.mark.gpu
def test_every_configuration_that_a_search_times(h):
    for shape in [(16, 2048, 1024), (300, 520, 777), (2048, 2048, 512)]:
        for config in candidates(LARGE, *shape[:2], 2, h.machine.sm, h.machine.sms, h.machine.shared_bytes):
            check_product(h, matmul_config, *matrices(h, *shape), *numbers(config))


@pytest.mark.parametrize("shape", [(1, 1), (16, 8192), (4096, 8192), (100_000, 3)])
def test_pruning_keeps_a_few_that_fit_and_load_least(shape):
    for sm, limit in SHARED_LIMIT.items():
        kept = candidates(LARGE, *shape, 2, sm, 132, limit)
        assert 0 < len(kept) == len(set(kept)) <= pruned.CANDIDATES
        assert all(shared_bytes(config, 2, sm) <= limit for config in kept)
        assert max(Counter(numbers(config)[:2] for config in kept).values()) <= pruned.PER_TILE
        loads = [pruned.loaded_per_sm(config, *shape, 132) for config in kept]
        assert loads == sorted(loads)


def test_pruning_follows_the_shape():
    few, many = (candidates(LARGE, M, 8192, 2, 90, 132, SHARED_LIMIT[90]) for M in (16, 4096))
    assert numbers(few[0])[:2] == (16, 64)  # 128 programs for 132 SMs
    assert FIXED in many
    assert not set(few) & set(many)
    assert list(tuned_kernel.keys) == ["M_BUCKET", "N", "K"]


@pytest.mark.parametrize(
    ("sm", "config", "mma"), [(80, FIXED, "mma.sync"), (90, FIXED, "wgmma"), (90, THIN, "mma.sync")]
)
def test_shared_memory_is_what_the_compiler_takes(sm, config, mma):
    spills = 0 if sm == 90 else 10**6
    kernel = code(sm, f"cp.async {mma}", matmul_config, *[meta(4096, 4096)] * 2, *numbers(config), spills=spills)
    assert 0 <= shared_bytes(config, 2, sm) - kernel.shared <= 1024


def test_bad_input(h):
    a, b = matrices(h, 4, 5, 8)
    for tile in [(32, 64, 64, 4, 3), (64, 64, 64, 4, 1), (64, 64, 64, 3, 3), ("64", 64, 64, 4, 3)]:
        refused(matmul_config, ValueError, r"no configuration \(.*choose one of", a, b, *tile)
    refused(matmul_config, ValueError, r"needs \d+ bytes.*fewer stages", a, b, 256, 128, 128, 8, 4)


def test_a_new_key_comes_once_per_power_of_two(h):
    """And not with every batch size."""
    buckets, b = [], h.randn(8, 5, dtype=h.half)
    kernel = MagicMock()
    kernel.__getitem__.return_value = lambda a, b, c, M, N, K, bucket, *_, **__: buckets.append(bucket)
    for M in (1, 13, 16, 17, 32, 64, 65):
        launch(kernel, h.randn(M, 8, dtype=h.half), b)
    assert buckets == [16, 16, 16, 32, 32, 64, 128]
