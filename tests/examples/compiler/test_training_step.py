"""training_step: losses and updates against float64, what waits for backward, and bad input."""

from dataclasses import replace

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from rich.console import Console

from compile_inspect import splits
from examples.common.transformer import TINY
from examples.compiler.training_step import LanguageModel, Trainer, adamw, demo, saved_by_autograd

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
    (waiting,) = h.record.facts.values()
    assert 0 < waiting["min-cut"] < waiting["eager autograd"]
    assert all(row["error"] <= 1 for table in h.record.tables for row in table["rows"])


def test_the_default_partitioner_saves_what_autograd_does(h, model):
    tokens = tokens_of(h)
    cut = splits(model, tokens, cases={"default": ("default", 1.0)})["default"]
    number, size = saved_by_autograd(model, tokens)
    assert cut.saved <= number
    assert cut.saved_bytes == pytest.approx(size, rel=0.1)


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
