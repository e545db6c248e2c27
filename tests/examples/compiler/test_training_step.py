"""A training step: gradients and updates against float64, what the partitioners save, and recompiles by lr."""

from dataclasses import replace

from harness.catalog import Needs
from harness.compiler import splits
from harness.session import Harness
from harness.settings import settings_kept
from harness.transformer import TINY

import pytest
import torch
from rich.console import Console

from examples.compiler.training_step import (
    BUDGETS,
    EAGER,
    STEPS,
    LanguageModel,
    Trainer,
    adamw,
    compiled,
    demo,
    gradients,
    graphs_with_a_scheduler,
    saved_by_autograd,
)

MINI = replace(TINY, width=64, layers=2, heads=2, kv_heads=1, hidden=96, vocab=128, max_tokens=32)


@pytest.fixture
def h():
    torch.compiler.reset()
    yield Harness("training_step", Needs.parse("torch"), console=Console(quiet=True), timing=False)
    torch.compiler.reset()


@pytest.fixture
def model(h) -> LanguageModel:
    return LanguageModel(MINI, h.device, mixed=False)


def tokens_of(h, rows: int = 2, columns: int = 17) -> torch.Tensor:
    return h.randint(MINI.vocab, rows, columns)


def test_demo(h):
    with settings_kept("training_step", 0):
        demo(h)
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
    assert set(losses) == {EAGER, "torch.compile, fused AdamW", "torch.compile, compiled AdamW", "float64"}
    assert all(each["last"] < each["first"] for each in losses.values())
    assert all(check["passed"] for check in h.record.checks)
    assert len(h.record.comparisons) == 3


def test_a_smaller_budget_saves_less_and_recomputes_more(h, model):
    cuts = splits(model, tokens_of(h), cases={str(budget): ("min-cut", budget) for budget in BUDGETS})
    saved = [cut.saved_bytes for cut in cuts.values()]
    matmuls = [cut.backward_matmuls for cut in cuts.values()]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] == 0 < saved[0]
    assert matmuls == sorted(matmuls)
    assert len({cut.joint for cut in cuts.values()}) == 1


def test_the_default_partitioner_saves_what_autograd_does(h, model):
    tokens = tokens_of(h)
    cut = splits(model, tokens, cases={"default": ("default", 1.0)})["default"]
    number, size = saved_by_autograd(model, tokens)
    assert cut.saved <= number
    assert cut.saved_bytes == pytest.approx(size, rel=0.1)


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


@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_a_trainer_starts_over(h, how):
    mine, exact = LanguageModel(MINI, h.device, mixed=False), LanguageModel(MINI, h.device, mixed=False).float64()
    trainer, tokens = Trainer(mine, mine, how), tokens_of(h)
    first = trainer.after(3, tokens)
    trainer(tokens)
    assert torch.equal(trainer.after(3, tokens), first) or h.device.type == "cuda"  # where atomics add
    want = Trainer(exact, exact, "foreach").after(3, tokens)
    h.check(lambda _: first, lambda _: want, tokens, what=how, poison=False, dtype=torch.float32, acc=2**-19)
    assert first.mean() < trainer.after(0, tokens).mean()


def test_graphs_of_the_optimizer(h):
    graphs, reasons = graphs_with_a_scheduler(h.device, 1e-3)
    assert graphs == 2
    assert len(reasons) == 1
    assert "['lr'] == 0.001" in reasons[0]
    assert graphs_with_a_scheduler(h.device, torch.tensor(1e-3, device=h.device)) == (1, [])


def test_bad_tokens(h, model):
    tokens = tokens_of(h)
    with pytest.raises(TypeError, match=r"LanguageModel: tokens are torch\.int32; pass tokens\.long\(\)"):
        model(tokens.int())
    for bad in (tokens[0], tokens[:, :1], h.randint(MINI.vocab, 1, 34)):
        with pytest.raises(ValueError, match=r"LanguageModel: tokens are \(.*pass \[batch, 2\.\.33\]"):
            model(bad)


def test_bad_ways(model):
    with pytest.raises(ValueError, match=r'adamw: \'faster\' is not one of "foreach", "fused" or "compiled"'):
        adamw(model.parameters(), "faster")
    with pytest.raises(ValueError, match="adamw: no parameters"):
        adamw([], "fused")
    for budget in (-0.1, 1.5):
        with pytest.raises(ValueError, match="a share, from 0 to 1"):
            compiled(model, budget)


@pytest.mark.gpu
def test_a_smaller_budget_needs_less_memory(h):
    """Really, at the peak of forward and backward, when activations are what memory is filled with."""
    from examples.compiler.training_step import LARGE, peak_bytes

    model = LanguageModel(replace(LARGE, width=1024, hidden=2816, heads=8), h.device, mixed=True)
    tokens = h.randint(LARGE.vocab, 8, 1025)
    peaks = {}
    for budget in (1.0, 0.2):
        step = gradients(model, compiled(model, budget))
        step(tokens)
        peaks[budget] = peak_bytes(step, tokens)
    assert peaks[0.2] < 0.9 * peaks[1.0]
