"""studies/compiler/numerics: every setting reads as it should and is put back; TF32, batches, random numbers."""

from harness.settings import settings_kept

import pytest
import torch

from studies.compiler.numerics import (
    PRECISIONS,
    matmul_precision,
    precision_kept,
    readings,
    show_precision,
    study,
    ways_to_set,
)  # fmt: skip
from tests.quiet import ran


@pytest.mark.slow
def test_study():
    h = ran(study, lesson=[])
    facts = h.record.facts
    product = facts["float32 product"]
    assert [each["compilations"] for each in product.values()] == [1, 1, 0]
    assert product["high"]["guards that failed"] == ["GLOBAL_STATE changed: allow_tf32"]
    assert all(each["compiled differs"] == 0 for each in product.values())
    assert product["highest"]["compiled error"] < 1e-6
    errors = facts["float32: rms error from float64, share of bits that differ from eager's"]
    assert all(row["compiled error"] < 1e-5 for row in errors.values())
    dropout = facts["dropout from one seed"]
    assert dropout["fallback_random False"]["same as eager"] < 0.8
    assert dropout["fallback_random True"]["same as eager"] == 1
    assert all(each["same again"] for each in dropout.values())
    if h.device.type == "cpu":
        assert errors["multiply-add"]["compiled differs"] == 0


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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_is_put_back(precision):
    before = readings()
    with matmul_precision(precision):
        assert torch.get_float32_matmul_precision() == precision
    assert readings() == before
    with matmul_precision("high"):
        outer = readings()
        with pytest.raises(KeyError), matmul_precision(precision):
            raise KeyError
        assert readings() == outer
    with precision_kept():
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert readings() == before
    with pytest.raises(ValueError, match=r"matmul_precision: 'higher' is not one of \('highest', 'high', 'medium'\)"):
        matmul_precision("higher").__enter__()
    assert readings() == before


@pytest.mark.gpu
def test_tf32_on_the_gpu(h):
    if h.machine.capability < (8, 0):
        pytest.skip("no TF32 before sm_80")
    show_precision(h)
    product = h.record.facts["float32 product"]
    for name in ("high", "medium"):
        assert product[name]["compiled error"] > 20 * product["highest"]["compiled error"]
