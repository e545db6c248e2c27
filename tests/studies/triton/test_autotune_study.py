"""The study of autotune: what a search keeps, and what a later process repeats of it."""

import pytest
import torch

from examples.triton.autotune import matmul_tuned_kernel
from examples.triton.autotune_pruned import CANDIDATES, LARGE, SPILLS, candidates, numbers
from studies.triton.autotune import ask_second_process, new_cache, tune

pytestmark = pytest.mark.gpu


def test_a_second_process_does_not_tune_again(h):
    M, N, K = 16, 1024, 512
    a, b = h.randn(M, K, dtype=torch.bfloat16), h.randn(K, N, dtype=torch.bfloat16)
    with new_cache() as cache:
        _, first = tune(LARGE, a, b)
        later = ask_second_process(cache, M, N, K)
    assert 0 < first["timed"] <= first["compiled"] <= CANDIDATES
    assert (later["compiled"], later["timed"], tuple(later["chosen"])) == (0, 0, first["chosen"])


def test_a_search_keeps_nothing_that_spills(h):
    M = N = K = 4096
    a, b = h.randn(M, K, dtype=torch.bfloat16), h.randn(K, N, dtype=torch.bfloat16)
    kernel, _ = tune(LARGE, a, b, cache_results=False)
    for config in candidates(LARGE, M, N, 2, h.machine.sm, h.machine.sms, h.machine.shared_bytes):
        compiled = matmul_tuned_kernel.warmup(
            a, b, a, M, N, K, M, K, N, N, EVEN_K=True, grid=(1,), **config.all_kwargs()
        )
        compiled[(1,)]
        assert (compiled.n_spills <= SPILLS) == (config in kernel.configs_timings), numbers(config)
    assert all(time != float("inf") for times in kernel.configs_timings.values() for time in times)
