"""studies/compiler/custom_ops: the operators are sound, and what comes of each wrong rule."""

import re

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from rich.console import Console

from studies.compiler.custom_ops import LIES, found_by_opcheck, study

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def record():
    h = Harness("custom_ops", Needs.parse("torch"), console=Console(quiet=True), timing=False, lesson=[])
    with settings_kept("custom_ops", 0):
        study(h)
    return h.record


def test_the_operators_are_found_sound(record):
    for name in ("opcheck", "opcheck of the one that writes into `out`"):
        assert len(record.facts[name]) == 4
        assert set(record.facts[name].values()) == {"SUCCESS"}
    assert record.facts["the operator, compiled"] == [
        ["aten.mul.Tensor", "companion_ops.isotonic.default", "aten.add.Tensor"]
    ]
    (graph,) = record.facts["the one that writes into `out`, compiled"]
    assert any("auto_functionalized" in name for name in graph)
    assert record.facts["graphs for 3 batch sizes"] == 1


def test_the_plain_function_breaks_and_is_compiled_for_its_data(record):
    found = record.facts["the plain function, compiled"]
    assert found["graphs"] > 1
    assert any("tolist" in text for text in found["breaks"])
    assert found["compilations for 3 more inputs"] >= 3


def test_what_comes_of_each_lie(record):
    found = record.facts["what the rule says, and what comes of it"]
    assert list(found) == list(LIES)
    assert found["none"] == {"eager": "runs", "aot_eager": "as eager", "inductor": "as eager", "opcheck": "passes"}
    shape = found["a row too many"]
    assert shape["aot_eager"].startswith("WRONG, by ")
    assert shape["inductor"] == "AssertionError"
    assert found["contiguous, but it is transposed"]["inductor"] == "AssertionError"
    assert found["no rule at all"]["inductor"] == "TorchRuntimeError"
    assert set(list(found["new memory, but it is the input's"].values())[:3]) == {"RuntimeError"}
    if not torch.cuda.is_available():  # what a wrong rule does in silence is for each code generator to say
        for lie in ("float32, but it is float64", "the input is left alone, but it is doubled"):
            assert found[lie]["inductor"].startswith("WRONG, by ")
    for lie, answers in found.items():
        if lie != "none" and not (lie.startswith("contiguous") and TORCH < (2, 13)):
            assert re.search(r"test_\w+ \(\w+Error\)", answers["opcheck"]), lie


def test_opcheck_finds_what_it_is_there_for():
    assert found_by_opcheck(LIES["none"], torch.randn(4, 6)) == "passes"
    assert "test_schema" in found_by_opcheck(LIES["the input is left alone, but it is doubled"], torch.randn(4, 6))
