"""training_step: losses and updates against float64, and bad input."""

from dataclasses import replace

import pytest
import torch

from examples.common.transformer import TINY
from examples.compiler.training_step import LanguageModel, Trainer, adamw
from studies.compiler.training_step import after

MINI = replace(TINY, width=64, layers=2, heads=2, kv_heads=1, hidden=96, vocab=128, max_tokens=32)


@pytest.fixture
def model(h) -> LanguageModel:
    return LanguageModel(MINI, h.device, mixed=False)


@pytest.fixture
def tokens(h) -> torch.Tensor:
    return h.randint(MINI.vocab, 2, 17)


@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_a_trainer_starts_over(h, model, tokens, how):
    exact = LanguageModel(MINI, h.device, mixed=False).float64()
    assert {p.dtype for p in exact.parameters()} == {torch.float64}
    trainer, exact = Trainer(model, model, how), Trainer(exact, exact, "foreach")
    first = after(3, trainer, tokens)
    trainer(tokens)
    assert torch.equal(after(3, trainer, tokens), first) or h.device.type == "cuda"  # where atomics add
    want = after(3, exact, tokens)
    h.check(lambda _: first, lambda _: want, tokens, what=how, poison=False, dtype=torch.float32, acc=2**-19)
    assert first.mean() < after(0, trainer, tokens).mean()


def test_bad_tokens_and_bad_ways(h, model, tokens):
    with pytest.raises(TypeError, match=r"LanguageModel: tokens are torch\.int32; pass tokens\.long\(\)"):
        model(tokens.int())
    for bad in (tokens[0], tokens[:, :1], h.randint(MINI.vocab, 1, 34)):
        with pytest.raises(ValueError, match=r"LanguageModel: tokens are \(.*pass \[batch, 2\.\.33\]"):
            model(bad)
    with pytest.raises(ValueError, match=r'adamw: \'faster\' is not one of "foreach", "fused" or "compiled"'):
        adamw(model.parameters(), "faster")
