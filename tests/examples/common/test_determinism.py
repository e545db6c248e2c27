"""Deterministic algorithms are put back as they were, whatever happens within."""

import pytest
import torch

from examples.common.determinism import deterministic


def test_determinism_is_put_back():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(ZeroDivisionError), deterministic(warn_only=True):
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()
