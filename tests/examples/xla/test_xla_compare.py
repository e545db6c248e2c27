"""The six ways: the JAX model held to float64, one model in two programs, and the arithmetic of what pays when."""

from dataclasses import replace

import pytest
import torch

from examples.common import xla
from examples.common.transformer import TINY, Transformer
from examples.xla import compare, compare_jax
from examples.xla.compare import least
from examples.xla.compare_jax import jax_forward
from studies.xla import compare as study
from tests.quiet import ran

SMALL = replace(TINY, width=48, layers=2, hidden=72, vocab=97, max_tokens=24)


@pytest.fixture(autouse=True)
def clean():
    xla.start_clean()
    yield
    torch.compiler.reset()
    xla.start_clean()


def small_model(**changes) -> Transformer:
    return Transformer.random(replace(SMALL, **changes), torch.device("cpu"), torch.float32)


@pytest.mark.skipif(not compare.have_jax(), reason="JAX is not installed")
def test_jax_computes_the_model_and_gets_the_same_products():
    for shape, changes in ((1, 1), {}), ((3, 7), {"kv_heads": 1}), ((2, 24), {"layers": 1, "kv_heads": 4}):
        config, model, tokens = replace(SMALL, **changes), small_model(**changes), torch.randint(SMALL.vocab, shape)
        got = compare_jax.to_torch(jax_forward(config)(compare_jax.weights_for_jax(model), tokens.int().numpy()))
        torch.testing.assert_close(got.double(), model.float64(tokens), rtol=1e-4, atol=1e-4)

    (counts,) = ran(study.study, needs="torch_xla>=2.9", lesson=[]).record.facts.values()
    assert counts["torch_xla"]["matrix products"] == counts["JAX"]["matrix products"] > 0


def test_another_program_is_the_same_model():
    model, tokens = small_model(), torch.randint(SMALL.vocab, (2, 5))
    longer = compare.another_program(model)
    assert longer.cos.shape == (SMALL.max_tokens + 1, model.cos.shape[1])
    torch.testing.assert_close(longer(tokens.to(xla.device())).cpu(), model(tokens), rtol=1e-4, atol=1e-4)


def test_what_is_within_five_percent_is_no_less():
    assert least({"torch eager": 1.04, "torch.compile inductor": 1.2, "JAX": 1.0}) == "eager"
    assert least({"torch eager": 1.06, "torch.compile inductor": 1.2, "JAX": 1.0}) == "JAX"
