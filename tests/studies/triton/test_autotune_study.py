"""The study of autotune: what a search leaves on disk for the next."""

import pytest
import torch

from examples.triton.autotune_pruned import CANDIDATES, LARGE
from studies.triton.autotune import new_cache, tune


@pytest.mark.gpu
def test_a_second_search_finds_the_results_of_the_first(h):
    a, b = h.randn(16, 512, dtype=torch.bfloat16), h.randn(512, 1024, dtype=torch.bfloat16)
    with new_cache():
        first, later = (tune(LARGE, a, b)[1] for _ in range(2))
    assert 0 < first["timed"] <= first["compiled"] <= CANDIDATES
    assert (later["compiled"], later["timed"], later["chosen"]) == (0, 0, first["chosen"])
