"""when_it_helps: the counted work against the model's own, the prediction's arithmetic, and the ends of the range."""

from harness.bench import Row, Table
from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from examples.common.transformer import ONE_BILLION, TINY, WIDE
from examples.compiler.when_it_helps import DEFAULT, EAGER, REDUCE, answer, bound_of, costs_of, demo, predict
from examples.compiler.when_it_helps_work import eager_steps, fused_steps, twin


def test_the_demo_checks_each_size_and_keeps_the_settings():
    h = Harness("when_it_helps", Needs.parse("torch"), console=Console(quiet=True), timing=False)
    with settings_kept("when_it_helps", h.seed):
        demo(h)
    assert len(h.record.tables) == 2 + 2 + 2  # rates, twins, sizes
    assert all(row["error"] <= 1 for table in h.record.tables for row in table["rows"])


@given(batch=st.integers(1, 4), tokens=st.integers(1, 40))
def test_counted_flops_are_those_of_the_model(batch, tokens):
    from examples.common.transformer import Transformer

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
    assert predict(steps, 100.0, 1000.0, 0.0, 0.0) == pytest.approx(1 + 4)
    assert predict(steps, 100.0, 1000.0, 0.0, 2.0) == pytest.approx(7)
    assert predict(steps, 100.0, 1000.0, 30.0, 2.0) == 30
    assert bound_of(steps, 100.0, 1000.0, 30.0) == "launch-bound"
    assert bound_of(steps, 100.0, 1000.0, 1.0) == "compute-bound"
    assert bound_of(steps, 100.0, 1e6, 1.0) == "bandwidth-bound"


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, -1.0)])
def test_rates_must_be_positive(rates):
    with pytest.raises(ValueError, match=r"predict: .* pass measured, positive rates"):
        predict([(1, 1)], *rates, 0.0, 0.0)


def test_costs_of_a_twin():
    def table(**ms):
        return Table("twin", "1x1", EAGER, [Row(name, False, None, 0.0, ms=t) for name, t in ms.items()])

    found = costs_of(table(**{EAGER: 3.0, DEFAULT: 2.0, REDUCE: 1.0}), 40, 20)
    assert found.host == {EAGER: 3.0, DEFAULT: 2.0, REDUCE: 1.0}
    assert found.kernels == {EAGER: 2.0, DEFAULT: 1.0, REDUCE: 1.0}
    found = costs_of(table(**{EAGER: 3.0, DEFAULT: 2.0}), 40, 20)  # a CPU
    assert found.host == {EAGER: 0.0, DEFAULT: 0.0}
    assert found.kernels == {EAGER: 3.0, DEFAULT: 2.0}


def test_the_answer_takes_the_best_of_each_size():
    def row(x, ms=1.0, bound="launch-bound"):
        return {"bound": bound, "predicted ms": 1.0, "ms": ms, "predicted x": 1.0, "x eager": x}

    rows = {"a, default": row(1.5), "a, reduce": row(2.0), "b, default": row(1.0), "c, default": row(1.1, 1.2, "other")}
    assert answer(rows).startswith(
        "2.00x at a (launch-bound) to 1.10x at c (other). The prediction is off by at most 20%"
    )
    assert answer(rows).endswith("None of these sizes is slower than eager.")
    assert answer(rows | {"d, default": row(0.9)}).endswith("Slower than eager: d, default.")


def test_the_twin_has_the_same_operations():
    for size in ((1, 1), (1, 16)):
        assert len(eager_steps(twin(WIDE), *size, torch.bfloat16)) == len(eager_steps(WIDE, *size, torch.bfloat16))
