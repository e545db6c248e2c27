"""The study of autotune: what a later process repeats of a search."""

import pytest
import torch

from examples.triton.autotune_pruned import CANDIDATES, LARGE
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
