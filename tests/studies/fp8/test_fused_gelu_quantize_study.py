"""The study of fused_gelu_quantize: a scale that is too small costs accuracy, and amax tells by how much."""

import pytest

from studies.fp8.fused_gelu_quantize import saturation


def test_saturation(h):
    seen = saturation(h, h.randn(16, 512, dtype=h.half))
    errors = [each["error"] for each in seen.values()]
    assert errors == sorted(errors)
    assert errors[-1] > 5 * errors[0]  # a scale for a tenth of amax
    assert [each["amax / range"] for each in seen.values()] == pytest.approx([1, 2, 10], rel=0.01)
