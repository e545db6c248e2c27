"""What the attention lessons share: the reference is torch's in float64, and counts its operations."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from examples.common.attention import attention_flops, attention_reference, sdpa


@pytest.mark.parametrize(("causal", "scale"), [(False, None), (True, 0.3)])
def test_the_reference_is_torchs_in_float64(causal, scale):
    q, k, v = (torch.randn(2, heads, 40, 64).double() for heads in (6, 2, 2))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    torch.testing.assert_close(attention_reference(q, k, v, causal, scale), want, rtol=1e-12, atol=1e-13)
    if scale is None:
        k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
        torch.testing.assert_close(sdpa(SDPBackend.MATH, causal)(q, k, v), want, rtol=1e-12, atol=1e-13)


def test_operations():
    q, k = torch.empty(2, 3, 50, 64, device="meta"), torch.empty(2, 3, 20, 64, device="meta")
    assert attention_flops(q, k, False) == 2 * (2 * 50 * 20 * 64) * 2 * 3
    assert attention_flops(q, q, True) == 2 * (2 * 50 * 50 * 64) * 2 * 3 // 2
