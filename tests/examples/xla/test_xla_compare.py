"""The six ways: their programs counted, the JAX model held to float64, and the arithmetic of what pays when."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.common import xla
from examples.common.transformer import TINY, Config, Transformer
from examples.xla import compare, compare_jax
from examples.xla.compare import COMPILE, EAGER, INDUCTOR, LAZY, OPENXLA, least
from examples.xla.compare_jax import jax_forward
from studies.xla.compare import break_even

SMALL = replace(TINY, width=48, layers=2, hidden=72, vocab=97, max_tokens=24)
needs_jax = pytest.mark.skipif(not compare.have_jax(), reason="JAX is not installed")


@pytest.fixture(autouse=True)
def clean():
    xla.start_clean()
    yield
    torch.compiler.reset()
    xla.start_clean()


def small_model(config: Config = SMALL) -> Transformer:
    return Transformer.random(config, torch.device("cpu"), torch.float32)


@needs_jax
@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (SMALL, (1, 1)),
        (SMALL, (3, 7)),
        (replace(SMALL, kv_heads=1), (2, 5)),
        (replace(SMALL, kv_heads=4), (2, 24)),
        (replace(SMALL, layers=1, heads=2, kv_heads=2), (2, 5)),
    ],
)
def test_jax_computes_the_model(config, shape):
    model, tokens = small_model(config), torch.randint(config.vocab, shape)
    got = compare_jax.to_torch(jax_forward(config)(compare_jax.weights_for_jax(model), tokens.int().numpy()))
    torch.testing.assert_close(got.double(), model.float64(tokens), rtol=1e-4, atol=1e-4)


def test_another_program_is_the_same_model():
    model, tokens = small_model(), torch.randint(SMALL.vocab, (2, 5))
    longer = compare.another_program(model)
    assert longer.cos.shape == (SMALL.max_tokens + 1, model.cos.shape[1])
    torch.testing.assert_close(longer(tokens.to(xla.device())).cpu(), model(tokens), rtol=1e-4, atol=1e-4)


def test_without_jax_there_are_five_ways(monkeypatch):
    monkeypatch.setattr(compare, "have_jax", lambda: False)
    assert list(compare.forwards(small_model(), torch.randint(SMALL.vocab, (1, 3)))) == [
        EAGER, INDUCTOR, OPENXLA, LAZY, COMPILE,
    ]  # fmt: skip


def seconds_of(first_s: float, ms: float, calls: int) -> float:
    return first_s + (calls - 1) * ms / 1000


times = st.floats(0, 1e3, allow_nan=False)


@given(first=times, ms=times, than_first=times, than_ms=times)
def test_break_even_is_where_the_totals_meet(first, ms, than_first, than_ms):
    calls = break_even(first, ms, than_first, than_ms)
    if calls is None:
        assert ms > than_ms or first > than_first
        return
    assert calls >= 1
    ours, others = seconds_of(first, ms, calls), seconds_of(than_first, than_ms, calls)
    assert ours <= others or math.isclose(ours, others, rel_tol=1e-9, abs_tol=1e-9)
    if calls > 2:
        assert seconds_of(first, ms, calls - 2) > seconds_of(than_first, than_ms, calls - 2) - 1e-9


def test_break_even_of_known_times():
    assert break_even(5.0, 1.0, 0.0, 2.0) == 5001  # the first call counts for both
    assert break_even(0.1, 1.0, 0.2, 2.0) == 1
    assert break_even(5.0, 2.0, 0.0, 1.0) is None
    assert break_even(0.1, 2.0, 5.0, 1.0) is None  # ahead for a while only
    assert break_even(0.1, 1.0, 0.1, 1.0) == 1
    assert break_even(5.0, 1.0, 0.0, 1.0) is None


def test_what_is_within_five_percent_is_no_less():
    assert least({"torch eager": 1.04, "torch.compile inductor": 1.2, "JAX": 1.0}) == "eager"
    assert least({"torch eager": 1.06, "torch.compile inductor": 1.2, "JAX": 1.0}) == "JAX"
