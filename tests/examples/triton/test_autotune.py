"""autotune: every configuration on poisoned outputs, every edge of a tile, what pruning keeps, bad input, the code."""

import itertools
from collections import Counter
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import triton

from examples.common.device import SHARED_LIMIT, Limits, device_limits
from examples.triton import autotune_pruned as pruned
from examples.triton.autotune import FIXED, launch, matmul_config, matmul_tuned, reference, tuned_kernel
from examples.triton.autotune_pruned import LARGE, candidates, configuration, numbers, shared_bytes
from tests.examples.triton.helpers import any_product, code, matrices, meta, products, refused

PREDICTED = [FIXED, configuration(16, 64, 128, 4, 5), configuration(64, 32, 128, 4, 5)]
# Warps and stages mean nothing to the interpreter: there each tile is checked once.
TILES = sorted({numbers(config)[:3] for config in LARGE})


def small(a, b):
    return matmul_config(a, b, 64, 32, 64, 4, 3)


def check(h, a, b, fn=small):
    h.check(fn, reference, a, b, terms=a.shape[1], what=f"{tuple(a.shape)} {a.stride()} {tuple(b.shape)} {b.stride()}")


def test_edges_layouts_and_extremes(h):
    for a, b in products(h, tma=True):
        check(h, a, b)
    a, b = matrices(h, 96, 320, 160)
    # Starts that are not aligned, one column, ragged sizes.
    for left, right in ((a[::2, 1:], b[1:, 3:50]), (a[:, :1], b[:1]), (a[:37, :61], b[:61, :53])):
        check(h, left, right)
    # In the interpreter a space of one; on a GPU the whole search, on poisoned outputs.
    check(h, *matrices(h, 130, 200, 70), matmul_tuned)


test_any_shape = any_product(check, 150, 150, 150)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_every_tile(h, tile):
    if shared_bytes(configuration(*tile, 8, 3), 2, h.machine.sm or 90) > device_limits(h.device).shared_bytes:
        pytest.skip("does not fit shared memory")
    check(h, *matrices(h, 70, 130, 192), lambda a, b: matmul_config(a, b, *tile, 8, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 2048, 1024), (300, 520, 777), (2048, 2048, 512)])
def test_every_configuration_that_a_search_times(h, shape):
    for config in candidates(LARGE, *shape[:2], 2, h.machine.sm, h.machine.sms, h.machine.shared_bytes):
        check(h, *matrices(h, *shape), lambda a, b, config=config: matmul_config(a, b, *numbers(config)))


@pytest.mark.parametrize("shape", [(1, 1), (16, 8192), (4096, 8192), (100_000, 3)])
def test_pruning_keeps_a_few_that_fit_and_load_least(shape):
    for (sm, limit), configs in itertools.product(SHARED_LIMIT.items(), (LARGE, [FIXED])):
        kept = candidates(configs, *shape, 2, sm, 132, limit)
        assert bool(kept) == any(shared_bytes(c, 2, sm) <= limit for c in configs)
        assert len(kept) == len(set(kept)) <= pruned.CANDIDATES
        assert all(shared_bytes(config, 2, sm) <= limit for config in kept)
        assert max(Counter(numbers(config)[:2] for config in kept).values(), default=0) <= pruned.PER_TILE
        loads = [pruned.loaded_per_sm(config, *shape, 132) for config in kept]
        assert loads == sorted(loads)


def test_pruning_follows_the_shape():
    few, many = (candidates(LARGE, M, 8192, 2, 90, 132, SHARED_LIMIT[90]) for M in (16, 4096))
    assert numbers(few[0])[:2] == (16, 64)  # 128 programs for 132 SMs
    assert FIXED in many
    assert not set(few) & set(many)
    assert list(tuned_kernel.keys) == ["M_BUCKET", "N", "K"]


@pytest.mark.parametrize(
    ("sm", "config", "mma"),
    [(80, FIXED, "mma.sync"), (90, FIXED, "wgmma"), (90, PREDICTED[1], "mma.sync"), (100, PREDICTED[2], "tcgen05.mma")],
)
def test_shared_memory_is_what_the_compiler_takes(sm, config, mma):
    spills = 0 if sm == 90 else 10**6
    kernel = code(sm, f"cp.async {mma}", matmul_config, *[meta(4096, 4096)] * 2, *numbers(config), spills=spills)
    assert 0 <= shared_bytes(config, 2, sm) - kernel.shared <= 1024


def test_bad_input(h):
    a, b = matrices(h, 4, 5, 8)
    refused(matmul_tuned, ValueError, r"contiguous\(\) first", a[:, ::2], b[:4])
    refused(matmul_config, ValueError, r"contiguous\(\) first", a, h.randn(5, 8, dtype=h.half).t(), *numbers(FIXED))
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


def test_a_search_drops_what_spills_or_cannot_run(monkeypatch):
    """By a driver that is made up; where everything spills, the least is kept."""
    monkeypatch.setattr(pruned, "device_limits", lambda _: Limits(132, SHARED_LIMIT[90]))
    monkeypatch.setattr(pruned, "architecture", lambda _: 90)
    a = SimpleNamespace(element_size=lambda: 2, device=None, is_cuda=True)

    def kept(spills):
        def compiled(*_, BLOCK_M, **__):
            loaded = MagicMock(n_spills=spills[BLOCK_M])
            if spills[BLOCK_M] is None:
                loaded.__getitem__.side_effect = triton.OutOfResources(2, 1, "shared memory")
            return loaded

        space, named = [configuration(m, 64, 64, 4, 3) for m in spills], {"a_ptr": a, "M": 4096, "N": 4096}
        left = pruned.worth_timing(SimpleNamespace(warmup=compiled), space, named, grid=None)
        return sorted(numbers(config)[0] for config in left)

    assert kept({16: 0, 64: pruned.SPILLS, 128: pruned.SPILLS + 1, 256: None}) == [16, 64]
    assert kept({16: 900, 64: 800, 256: None}) == [64]
