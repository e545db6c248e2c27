"""studies/compiler/numerics: every setting is put back; TF32."""

import pytest
import torch

from studies.compiler.numerics import PRECISIONS, matmul_precision, show_precision


def readings():
    matmuls = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    return [torch.get_float32_matmul_precision(), *(matmul.fp32_precision for matmul in matmuls)]


def test_precision_is_put_back():
    before = readings()
    for precision in PRECISIONS:
        with matmul_precision(precision):
            assert torch.get_float32_matmul_precision() == precision
            outer = readings()
            with pytest.raises(KeyError), matmul_precision("high"):
                raise KeyError
            assert readings() == outer
        assert readings() == before


@pytest.mark.gpu
def test_tf32_on_the_gpu(h):
    if h.machine.capability < (8, 0):
        pytest.skip("no TF32 before sm_80")
    show_precision(h)
    product = h.record.facts["float32 product"]
    assert [product[precision]["compilations"] for precision in PRECISIONS] == [1, 1, 0]
    for name in ("high", "medium"):
        assert product[name]["compiled error"] > 20 * product["highest"]["compiled error"]
