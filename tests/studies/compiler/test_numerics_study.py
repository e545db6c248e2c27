"""studies/compiler/numerics: every setting reads as it should and is put back; TF32 and random numbers."""

from harness.settings import settings_kept

import pytest
import torch

from studies.compiler.numerics import PRECISIONS, matmul_precision, readings, show_precision, show_random, ways_to_set


def test_what_each_setting_reads_as():
    with settings_kept("ways_to_set", 0):
        said = ways_to_set()
    old, new = "torch.get_float32_matmul_precision()", "cuda.matmul.fp32_precision"
    assert said["as found"] == readings()
    for precision in PRECISIONS:
        assert said[f'set_float32_matmul_precision("{precision}")'][old] == precision
    assert said['set_float32_matmul_precision("high")'][new] == "tf32"
    assert said['set_float32_matmul_precision("medium")']["mkldnn.matmul.fp32_precision"] == "bf16"
    assert said["allow_tf32 = True"] | {"mkldnn.matmul.fp32_precision": ""} == {
        old: "high", "cuda.matmul.allow_tf32": "True", new: "tf32", "mkldnn.matmul.fp32_precision": "",
    }  # fmt: skip
    assert said['fp32_precision = "tf32"'][old] == "RuntimeError"


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


def test_fallback_random_drops_what_eager_drops(h):
    show_random(h)
    (facts,) = h.record.facts.values()
    assert facts["fallback_random False"]["same as eager"] < 0.8
    assert facts["fallback_random True"]["same as eager"] == 1
    assert all(each["same again"] for each in facts.values())


@pytest.mark.gpu
def test_tf32_on_the_gpu(h):
    if h.machine.capability < (8, 0):
        pytest.skip("no TF32 before sm_80")
    show_precision(h)
    product = h.record.facts["float32 product"]
    assert [product[precision]["compilations"] for precision in PRECISIONS] == [1, 1, 0]
    for name in ("high", "medium"):
        assert product[name]["compiled error"] > 20 * product["highest"]["compiled error"]
