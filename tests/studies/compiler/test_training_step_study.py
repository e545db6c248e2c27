"""studies/compiler/training_step: memory budgets, and losses after steps."""

from dataclasses import replace

from harness.check import CheckError, VacuousCheck

import pytest

from compile_inspect import splits
from examples.common.transformer import TINY
from examples.compiler.training_step import LARGE, LanguageModel, Trainer, saved_by_autograd
from studies.compiler.training_step import BUDGETS, peak_bytes, within
from studies.compiler.training_step_parts import show_training

MINI = replace(TINY, width=64, layers=2, heads=2, kv_heads=1, hidden=96, vocab=128, max_tokens=32)


@pytest.fixture
def model(h) -> LanguageModel:
    return LanguageModel(MINI, h.device, mixed=False)


def test_a_smaller_budget_saves_less_and_recomputes_more(h, model):
    cases = {"default": ("default", 1.0)} | {str(budget): ("min-cut", budget) for budget in BUDGETS}
    tokens = h.randint(MINI.vocab, 2, 17)
    default, *cuts = splits(model, tokens, cases=cases).values()
    number, size = saved_by_autograd(model, tokens)
    assert default.saved <= number
    assert default.saved_bytes == pytest.approx(size, rel=0.1)  # as eager's autograd does
    assert default.joint == default.forward + default.backward
    assert cuts[0].saved_bytes < default.saved_bytes
    assert cuts[0].backward_matmuls == default.backward_matmuls < cuts[-1].backward_matmuls
    saved, matmuls = [cut.saved_bytes for cut in cuts], [cut.backward_matmuls for cut in cuts]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] == 0 < saved[0]
    assert matmuls == sorted(matmuls)


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


@pytest.mark.gpu
def test_a_smaller_budget_needs_less_memory(h):
    """Really, at the peak of forward and backward, when activations are what memory is filled with."""
    model = LanguageModel(replace(LARGE, width=1024, hidden=2816, heads=8), h.device, mixed=True)
    tokens = h.randint(LARGE.vocab, 8, 1025)
    peaks = {}
    for budget in (1.0, 0.2):
        step = within(budget, model)
        step(tokens)
        peaks[budget] = peak_bytes(step, tokens)
    assert peaks[0.2] < 0.9 * peaks[1.0]
