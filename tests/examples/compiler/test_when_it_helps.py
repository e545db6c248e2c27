"""when_it_helps: the counted work against the model's own, the prediction's arithmetic, and the ends of the range."""

from dataclasses import replace

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept
from harness.transformer import ONE_BILLION, TINY, WIDE

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from examples.compiler.when_it_helps import (
    DEFAULT,
    EAGER,
    REDUCE,
    Rates,
    demo,
    eager_steps,
    fused_steps,
    predict,
    scaled,
    twin,
)

NONE = {False: dict.fromkeys((EAGER, DEFAULT, REDUCE), 0.0), True: dict.fromkeys((EAGER, DEFAULT, REDUCE), 0.0)}


def test_the_demo_checks_each_size_and_keeps_the_settings():
    h = Harness("when_it_helps", Needs.parse("torch"), console=Console(quiet=True), timing=False)
    with settings_kept("when_it_helps", h.seed):
        demo(h)
    assert len(h.record.comparisons) == 3
    assert all(row["error"] <= 1 for table in h.record.comparisons for row in table["rows"])


@given(batch=st.integers(1, 4), tokens=st.integers(1, 40))
def test_counted_flops_are_those_of_the_model(batch, tokens):
    from harness.transformer import Transformer

    steps = eager_steps(TINY, batch, tokens, torch.float32)
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        Transformer.random(TINY, torch.device("cpu"), torch.float32)(ids)
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    attention = TINY.layers * 2 * batch * tokens * (tokens + 1) * TINY.width
    assert sum(flops for _, flops in steps) == products + attention
    assert sum(flops for _, flops in fused_steps(TINY, batch, tokens, torch.float32)) == products + attention


@pytest.mark.parametrize("config", [TINY, WIDE, ONE_BILLION], ids=["tiny", "wide", "1B"])
@pytest.mark.parametrize("size", [(1, 1), (1, 128), (8, 2048)], ids=str)
def test_fusion_never_moves_more_than_eager(config, size):
    eager, fused = (sum(b for b, _ in f(config, *size, torch.bfloat16)) for f in (eager_steps, fused_steps))
    weights = 2 * config.parameters
    assert weights < fused < eager
    if size == (1, 1):
        assert eager < 1.05 * weights  # nothing but weights to speak of
    if size == (8, 2048):
        assert eager > 1.5 * fused


def test_a_call_takes_the_slower_of_host_and_gpu():
    steps = [(100, 0), (100, 4000)]
    rates = Rates(100.0, 1000.0, NONE, NONE)
    assert predict(EAGER, steps, rates, False) == pytest.approx(1 + 4)
    fixed = {several: dict.fromkeys(NONE[several], 2.0) for several in (False, True)}
    assert predict(EAGER, steps, replace(rates, fixed=fixed), True) == pytest.approx(7)
    host = {several: dict.fromkeys(NONE[several], 30.0) for several in (False, True)}
    assert predict(EAGER, steps, replace(rates, fixed=fixed, host=host), True) == 30


@pytest.mark.parametrize("rates", [Rates(0.0, 1.0, NONE, NONE), Rates(1.0, -1.0, NONE, NONE)])
def test_rates_must_be_positive(rates):
    with pytest.raises(ValueError, match=r"predict: .* pass measured, positive rates"):
        predict(EAGER, [(1, 1)], rates, False)


def test_the_twin_has_the_same_operations():
    for size in ((1, 1), (1, 16)):
        assert len(eager_steps(twin(WIDE), *size, torch.bfloat16)) == len(eager_steps(WIDE, *size, torch.bfloat16))


@pytest.mark.gpu
def test_one_operation_loses_when_compiled():
    h = Harness("when_it_helps", Needs.parse("torch"), console=Console(quiet=True))
    from examples.compiler import when_it_helps

    when_it_helps.one_operation(h)
    assert h.record.comparisons[0]["rows"][1]["speedup"] < 0.9
    assert torch.equal(scaled(torch.ones(2)), torch.full((2,), 1.5))
