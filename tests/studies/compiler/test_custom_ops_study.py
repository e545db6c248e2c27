"""studies/compiler/custom_ops: the operators are sound, and what comes of each wrong rule."""

import re

import pytest
import torch

from studies.compiler.custom_ops import LIES, study
from tests.quiet import ran

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def facts():
    return ran(study, lesson=[]).record.facts


def test_the_operators_are_sound(facts):
    for name in ("opcheck", "opcheck of the one that writes into `out`"):
        assert len(facts[name]) == 4
        assert set(facts[name].values()) == {"SUCCESS"}
    assert facts["the operator, compiled"] == [["aten.mul.Tensor", "companion_ops.isotonic.default", "aten.add.Tensor"]]
    (graph,) = facts["the one that writes into `out`, compiled"]
    assert any("auto_functionalized" in name for name in graph)


def test_what_comes_of_each_lie(facts):
    found = facts["what the rule says, and what comes of it"]
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
