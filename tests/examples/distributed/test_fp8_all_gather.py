"""all_gather_fp8 on ranks that are processes: what comes back, by the scale of a row or of a rank; and bad input."""

import pytest
import torch

from tests.examples.distributed.ranks import on_ranks


def gathered(rank: int) -> str:
    from examples.distributed.fp8_all_gather import EACH, all_gather_bf16, all_gather_fp8, quantized_before, sent_by

    world = torch.distributed.get_world_size()
    w = torch.randn(3 * world, 45, generator=torch.Generator().manual_seed(1))
    w[::3] *= 2.0**-24  # the first row of each rank
    own, small = w[3 * rank : 3 * rank + 3], slice(None, None, 3)
    for each in EACH:
        y = all_gather_fp8(own, each)
        assert y.shape == w.shape
        assert y.dtype is torch.bfloat16
        near = (y.float() - w).abs() <= w.abs() * (2.0**-4 + 2.0**-8) + w.abs().amax(dim=1, keepdim=True) * 2.0**-17
        assert bool(near[small].all()) == (each == "row"), each
        near[small] = True
        assert near.all(), each
    assert torch.equal(all_gather_bf16(own), w.bfloat16())
    assert quantized_before(own).float().abs().amax(dim=1).tolist() == [448] * len(w)
    assert not all_gather_fp8(torch.zeros(2, 8)).any()
    with pytest.raises(AssertionError, match=r"^e4m3 by rank: 147 bytes were gathered, 139 by theory"):
        sent_by("e4m3 by rank", all_gather_fp8, own)
    with pytest.raises(ValueError, match=r"^all_gather_fp8: \(3, 45\), each='column'; pass a matrix, and 'rank' or"):
        all_gather_fp8(own, "column")
    return "right"


def test_each_row_keeps_its_precision_where_it_has_its_scale():
    assert on_ranks(gathered) == ["right"] * 2
