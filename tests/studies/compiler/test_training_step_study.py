"""studies/compiler/training_step: gradients of any size, memory budgets, losses after steps, and recompiles by lr."""

from dataclasses import replace

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from rich.console import Console

from compile_inspect import splits
from examples.common.transformer import TINY
from examples.compiler.training_step import EAGER, MODEL, WHOLE, LanguageModel
from studies.compiler import training_step, training_step_parts
from studies.compiler.training_step import BUDGETS, compiled, gradients
from studies.compiler.training_step_parts import STEPS, graphs_with_a_scheduler

MINI = replace(TINY, width=64, layers=2, heads=2, kv_heads=1, hidden=96, vocab=128, max_tokens=32)


@pytest.fixture
def h():
    torch.compiler.reset()
    yield Harness("training_step", Needs.parse("torch"), console=Console(quiet=True), timing=False, lesson=[])
    torch.compiler.reset()


@pytest.fixture
def model(h) -> LanguageModel:
    return LanguageModel(MINI, h.device, mixed=False)


def tokens_of(h, rows: int = 2, columns: int = 17) -> torch.Tensor:
    return h.randint(MINI.vocab, rows, columns)


def test_study(h):
    with settings_kept("training_step", 0):
        training_step.study(h)
        training_step_parts.study(h)
    facts = h.record.facts
    cuts = facts["joint graph, cut by"]
    default, full = cuts["default partitioner"], cuts["min-cut, budget 1.0"]
    assert default["joint"] == default["forward"] + default["backward"]
    assert full["saved_bytes"] < default["saved_bytes"]
    assert full["backward"] > default["backward"]
    assert full["backward_matmuls"] == default["backward_matmuls"]
    assert cuts["min-cut, budget 0.0"]["backward_matmuls"] > full["backward_matmuls"]
    assert facts["graphs of AdamW.step in 4 steps of a scheduler"] == {"float": 2, "tensor": 1}
    losses = facts[f"mean loss, and after {STEPS} steps"]
    assert set(losses) == {EAGER, MODEL, WHOLE, "float64"}
    assert all(each["last"] < each["first"] for each in losses.values())
    assert all(check["passed"] for check in h.record.checks)
    assert len(h.record.tables) == 2


def test_a_smaller_budget_saves_less_and_recomputes_more(h, model):
    cuts = splits(model, tokens_of(h), cases={str(budget): ("min-cut", budget) for budget in BUDGETS})
    saved = [cut.saved_bytes for cut in cuts.values()]
    matmuls = [cut.backward_matmuls for cut in cuts.values()]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] == 0 < saved[0]
    assert matmuls == sorted(matmuls)
    assert len({cut.joint for cut in cuts.values()}) == 1


def test_what_splits_refuses(h, model):
    with pytest.raises(ValueError, match="partitioner 'max-cut' is not one of"):
        splits(model, tokens_of(h), cases={"x": ("max-cut", 1.0)})
    with pytest.raises(ValueError, match="has no gradient"), torch.no_grad():
        splits(model, tokens_of(h), cases={"x": ("default", 1.0)})


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (3, 8), (2, 33)])
def test_gradients_of_any_size(h, model, rows, columns):
    """By the traced graphs, run as they are: what the partitioner made of them is right."""
    losses = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    exact = model.float64()
    h.check(
        gradients(model, losses), gradients(exact, exact), tokens_of(h, rows, columns), what="gradients", poison=False,
        dtype=torch.float32, acc=2**-17,
    )  # fmt: skip


def test_graphs_of_the_optimizer(h):
    graphs, reasons = graphs_with_a_scheduler(h.device, 1e-3)
    assert graphs == 2
    assert len(reasons) == 1
    assert "['lr'] == 0.001" in reasons[0]
    assert graphs_with_a_scheduler(h.device, torch.tensor(1e-3, device=h.device)) == (1, [])


def test_a_budget_is_a_share(model):
    for budget in (-0.1, 1.5):
        with pytest.raises(ValueError, match="a share, from 0 to 1"):
            compiled(model, budget)


@pytest.mark.gpu
def test_a_smaller_budget_needs_less_memory(h):
    """Really, at the peak of forward and backward, when activations are what memory is filled with."""
    from examples.compiler.training_step import LARGE
    from studies.compiler.training_step import peak_bytes

    model = LanguageModel(replace(LARGE, width=1024, hidden=2816, heads=8), h.device, mixed=True)
    tokens = h.randint(LARGE.vocab, 8, 1025)
    peaks = {}
    for budget in (1.0, 0.2):
        step = gradients(model, compiled(model, budget))
        step(tokens)
        peaks[budget] = peak_bytes(step, tokens)
    assert peaks[0.2] < 0.9 * peaks[1.0]
