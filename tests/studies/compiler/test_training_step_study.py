"""studies/compiler/training_step: gradients of any size, memory budgets, losses after steps, and recompiles by lr."""

from dataclasses import replace

import pytest
import torch

from compile_inspect import splits
from examples.common.transformer import TINY
from examples.compiler.training_step import EAGER, LARGE, MODEL, WHOLE, LanguageModel
from studies.compiler import training_step, training_step_parts
from studies.compiler.training_step import BUDGETS, compiled, gradients, peak_bytes
from studies.compiler.training_step_parts import STEPS, graphs_with_a_scheduler
from tests.quiet import ran

MINI = replace(TINY, width=64, layers=2, heads=2, kv_heads=1, hidden=96, vocab=128, max_tokens=32)


@pytest.fixture
def model(h) -> LanguageModel:
    return LanguageModel(MINI, h.device, mixed=False)


@pytest.mark.slow
def test_study():
    record = ran(training_step.study, training_step_parts.study, lesson=[]).record
    assert record.facts["graphs of AdamW.step in 4 steps of a scheduler"] == {"float": 2, "tensor": 1}
    losses = record.facts[f"mean loss, and after {STEPS} steps"]
    assert set(losses) == {EAGER, MODEL, WHOLE, "float64"}
    assert all(each["last"] < each["first"] for each in losses.values())
    assert all(check["passed"] for check in record.checks)
    assert len(record.tables) == 2


def test_a_smaller_budget_saves_less_and_recomputes_more(h, model):
    tokens = h.randint(MINI.vocab, 2, 17)
    cases = {"default": ("default", 1.0)} | {str(budget): ("min-cut", budget) for budget in BUDGETS}
    default, *cuts = splits(model, tokens, cases=cases).values()
    full = cuts[0]
    assert default.joint == default.forward + default.backward
    assert full.saved_bytes < default.saved_bytes
    assert full.backward > default.backward
    assert full.backward_matmuls == default.backward_matmuls < cuts[-1].backward_matmuls
    saved, matmuls = [cut.saved_bytes for cut in cuts], [cut.backward_matmuls for cut in cuts]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] == 0 < saved[0]
    assert matmuls == sorted(matmuls)
    assert len({cut.joint for cut in cuts}) == 1
    with pytest.raises(ValueError, match="partitioner 'max-cut' is not one of"):
        splits(model, tokens, cases={"x": ("max-cut", 1.0)})
    with pytest.raises(ValueError, match="has no gradient"), torch.no_grad():
        splits(model, tokens, cases={"x": ("default", 1.0)})
    for budget in (-0.1, 1.5):
        with pytest.raises(ValueError, match="a share, from 0 to 1"):
            compiled(model, budget)


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (2, 33)])
def test_gradients_of_any_size(h, model, rows, columns):
    """By the traced graphs, run as they are: what the partitioner made of them is right."""
    losses = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    exact = model.float64()
    h.check(
        gradients(model, losses), gradients(exact, exact), h.randint(MINI.vocab, rows, columns), what="gradients",
        poison=False, dtype=torch.float32, acc=2**-17,
    )  # fmt: skip


def test_graphs_of_the_optimizer(h):
    graphs, reasons = graphs_with_a_scheduler(h.device, 1e-3)
    assert graphs == 2
    assert len(reasons) == 1
    assert "['lr'] == 0.001" in reasons[0]
    assert graphs_with_a_scheduler(h.device, torch.tensor(1e-3, device=h.device)) == (1, [])


@pytest.mark.gpu
def test_a_smaller_budget_needs_less_memory(h):
    """Really, at the peak of forward and backward, when activations are what memory is filled with."""
    model = LanguageModel(replace(LARGE, width=1024, hidden=2816, heads=8), h.device, mixed=True)
    tokens = h.randint(LARGE.vocab, 8, 1025)
    peaks = {}
    for budget in (1.0, 0.2):
        step = gradients(model, compiled(model, budget))
        step(tokens)
        peaks[budget] = peak_bytes(step, tokens)
    assert peaks[0.2] < 0.9 * peaks[1.0]
