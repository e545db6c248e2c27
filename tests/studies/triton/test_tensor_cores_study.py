"""What the study of tensor_cores predicts: the errors that follow from the bits of a mantissa, rounded and cut."""

import pytest

from examples.triton.tensor_cores import reference, rms_error
from studies.triton.tensor_cores import predicted


@pytest.mark.parametrize(("name", "expected"), [("float16", 2**-10), ("bfloat16", 2**-7), ("tf32", 2**-10)])
def test_what_rounding_predicts_follows_from_the_bits(h, name, expected):
    """Rounding to the nearest leaves a uniform error of 0.2 units of the last bit in each operand and in the result.

    Mantissas m of normal numbers are about log-uniform, E[m^2] = 3 / (2 ln 2), and eps / sqrt(12 E[m^2]) = 0.196 eps.
    """
    a, b = h.randn(256, 512), h.randn(512, 256)
    roundings = 2 if name == "tf32" else 3  # a float32 result is not rounded any further
    error = rms_error(predicted(a, b, name), reference(a, b))
    assert error == pytest.approx(0.196 * expected * roundings**0.5, rel=0.1)
    if name == "tf32":  # cutting leaves twice the error, and it is one-sided
        assert 2.3 * error < rms_error(predicted(a, b, name, cut=True), reference(a, b)) < 2.9 * error
        assert rms_error(predicted(a, b, "tf32x3"), reference(a, b)) < error / 1000
