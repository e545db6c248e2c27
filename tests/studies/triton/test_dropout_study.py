"""The study of dropout: statistics that find what they look for, and masks that pass them."""

import pytest
import torch

from examples.triton.dropout import BLOCK, PER_CALL, dropout, keep_mask
from studies.triton.dropout import SIGMAS, correlation, deviation, saved_bytes


def mask(h, n, seed, p=0.5, **options):
    return dropout(torch.ones(n, device=h.device), p, torch.tensor([seed], device=h.device), **options)


def test_the_statistics_find_what_they_look_for(h):
    one, other = (keep_mask(1 << 15, p, torch.tensor([s], device=h.device)).float() for p, s in ((0.5, 1), (0.05, 2)))
    clumped = one.clone()
    clumped[:512], clumped[512:1024] = 1, 0  # right on the whole, wrong in two chunks
    for wrong in (one * other, clumped):
        with pytest.raises(AssertionError, match=r"standard deviations away from 0\.5"):
            deviation(wrong, 0.5)
    assert correlation(one, one) == pytest.approx(2**7.5, rel=1e-6)
    x, seed = h.randn(10_000), torch.tensor([1], device=h.device)
    assert saved_bytes(lambda x: dropout(x, 0.1, seed), x) == 8


@pytest.mark.parametrize("per_call", PER_CALL)
def test_masks_keep_their_share_and_are_uncorrelated_across_seeds_and_within_themselves(h, per_call):
    for p, seed in ((0.001, 0), (0.5, 2**40), (0.9, -5)):
        # Few chunks where few are kept or few are dropped: a rare event is not normal in a small one.
        deviation(mask(h, 1 << 16, seed, p, per_call=per_call), p, chunks=64 if 0.05 < p < 0.95 else 4)
    masks = [mask(h, 1 << 15, seed, per_call=per_call) for seed in (0, 1, 2**32)]
    masks.append(mask(h, 1 << 15, 0, per_call=per_call, start=2**32 * 8))
    assert all(abs(correlation(a, b)) < SIGMAS for i, a in enumerate(masks) for b in masks[:i])
    for lag in (1, 2, 3, 4, 7, 8, 16, 1024, BLOCK):  # neighbours, numbers of a call, threads, programs
        assert abs(correlation(masks[0][lag:], masks[0][:-lag])) < SIGMAS
