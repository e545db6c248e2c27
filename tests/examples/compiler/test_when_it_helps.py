"""when_it_helps: the counted work against the model's own, the prediction's arithmetic, and the ends of the range."""

from harness.bench import Row, Table

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from examples.common.transformer import ONE_BILLION, TINY, WIDE, Transformer
from examples.compiler.when_it_helps import DEFAULT, EAGER, REDUCE, answer, bound_of, costs_of, demo, predict
from examples.compiler.when_it_helps_work import eager_steps, fused_steps, twin
from tests.quiet import ran


@pytest.mark.slow
def test_the_demo_checks_each_size():
    record = ran(demo, finish=False).record
    assert len(record.tables) == 2 + 2 + 2  # rates, twins, sizes
    assert all(row["error"] <= 1 for table in record.tables for row in table["rows"])


@given(batch=st.integers(1, 4), tokens=st.integers(1, 40))
def test_counted_flops_are_those_of_the_model(batch, tokens):
    steps = eager_steps(TINY, batch, tokens, torch.float32)
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        Transformer.random(TINY, torch.device("cpu"), torch.float32)(ids)
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    attention = TINY.layers * 2 * batch * tokens * (tokens + 1) * TINY.width
    assert sum(flops for _, flops in steps) == products + attention
    assert sum(flops for _, flops in fused_steps(TINY, batch, tokens, torch.float32)) == products + attention


@pytest.mark.parametrize(("config", "size"), [(TINY, (1, 1)), (WIDE, (1, 128)), (ONE_BILLION, (8, 2048))])
def test_fusion_never_moves_more_than_eager(config, size):
    eager, fused = (sum(b for b, _ in f(config, *size, torch.bfloat16)) for f in (eager_steps, fused_steps))
    weights = 2 * config.parameters
    assert weights < fused < eager
    if size == (1, 1):
        assert eager < 1.05 * weights  # nothing but weights to speak of
    if size == (8, 2048):
        assert eager > 1.5 * fused
    if config is WIDE:
        assert len(eager_steps(twin(config), *size, torch.bfloat16)) == len(eager_steps(config, *size, torch.bfloat16))


def test_a_call_takes_the_slower_of_host_and_gpu():
    steps = [(100, 0), (100, 4000)]
    assert predict(steps, 100.0, 1000.0, 0.0, 0.0) == pytest.approx(1 + 4)
    assert predict(steps, 100.0, 1000.0, 0.0, 2.0) == pytest.approx(7)
    assert predict(steps, 100.0, 1000.0, 30.0, 2.0) == 30
    assert bound_of(steps, 100.0, 1000.0, 30.0) == "launch-bound"
    assert bound_of(steps, 100.0, 1000.0, 1.0) == "compute-bound"
    assert bound_of(steps, 100.0, 1e6, 1.0) == "bandwidth-bound"
    for rates in ((0.0, 1.0), (1.0, -1.0)):
        with pytest.raises(ValueError, match=r"predict: .* pass measured, positive rates"):
            predict(steps, *rates, 0.0, 0.0)


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
    said = answer(rows)
    assert said.startswith("2.00x at a (launch-bound) to 1.10x at c (other). The prediction is off by at most 20%")
    assert said.endswith("None of these sizes is slower than eager.")
    assert answer(rows | {"d, default": row(0.9)}).endswith("Slower than eager: d, default.")
