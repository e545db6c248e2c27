"""studies/compiler/training_step: the joint graph's cuts, and losses after steps."""

from dataclasses import replace

from harness.bench import Row, Table
from harness.check import CheckError, VacuousCheck

import pytest

from compile_inspect import splits
from examples.common.transformer import TINY
from examples.compiler.training_step import LanguageModel, Trainer, saved_by_autograd
from studies.compiler.training_step import COMPILED, EAGER, FUSED, show_share, show_training

MINI = replace(TINY, width=64, layers=2, heads=2, kv_heads=1, hidden=96, vocab=128, max_tokens=32)


@pytest.fixture
def model(h) -> LanguageModel:
    return LanguageModel(MINI, h.device, mixed=False)


def test_min_cut_saves_less_and_recomputes_no_product(h, model):
    tokens = h.randint(MINI.vocab, 2, 17)
    default, cut = splits(model, tokens, cases={name: (name, 1.0) for name in ("default", "min-cut")}).values()
    number, size = saved_by_autograd(model, tokens)
    assert default.saved <= number
    assert default.saved_bytes == pytest.approx(size, rel=0.1)  # as eager's autograd does
    assert default.joint == default.forward + default.backward
    assert 0 < cut.saved_bytes < default.saved_bytes
    assert cut.backward_matmuls == default.backward_matmuls


def test_adamws_share_of_a_step(h):
    def table(**ms):
        return Table("", "1x128 tokens", "", [Row(n, False, None, 0.0, ms=t, speedup=1 / t) for n, t in ms.items()])

    h.lesson = [table(**{EAGER: 10.0})]
    show_share(h, table(**{FUSED: 1.0, COMPILED: 0.8}))
    assert h.record.conclusions == [
        "1x128 tokens: AdamW, fused, is 10.0% of eager's step (1.00 ms of 10.00); compiled, 1.25x as fast, it would "
        "save at most 2.0%"
    ]


def test_training_that_goes_elsewhere_is_an_error(h, model):
    def trainer(model):
        return Trainer(model, model, "foreach")

    exact = trainer(model.float64())
    tokens, right = h.randint(MINI.vocab, 2, 17), {"torch eager, fused AdamW": trainer(model)}
    show_training(h, right, exact, tokens)
    slower = trainer(LanguageModel(MINI, h.device, mixed=False))
    slower.optimizer.param_groups[0]["lr"] /= 2
    with pytest.raises(CheckError, match="slower is off"):
        show_training(h, right | {"slower": slower}, exact, tokens)
    with pytest.raises(VacuousCheck):
        show_training(h, {"torch eager, fused AdamW": slower}, exact, tokens)
