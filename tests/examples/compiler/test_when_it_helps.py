"""when_it_helps: the counted work against the model's own, the prediction's arithmetic, and the ends of the range."""

from harness.bench import Row, Table

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from examples.common.transformer import ONE_BILLION, TINY, Transformer, steps
from examples.compiler.when_it_helps import DEFAULT, EAGER, REDUCE, answer, bound_of, fixed_costs, judge, predict
from examples.compiler.when_it_helps_work import eager_steps, twin


@given(batch=st.integers(1, 4), tokens=st.integers(1, 40))
def test_counted_flops_are_those_of_the_model(batch, tokens):
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        Transformer.random(TINY, torch.device("cpu"), torch.float32)(ids)
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    attention = TINY.layers * 2 * batch * tokens * (tokens + 1) * TINY.width
    for counted in (eager_steps(TINY, batch, tokens, torch.float32), steps(TINY, batch, tokens, 4)):
        assert sum(flops for _, flops in counted) == products + attention


def test_fusion_never_moves_more_than_eager():
    for config, size, least, most in (  # eager's bytes, in the weights' and in those of the fused steps
        (TINY, (1, 1), 1, 1.05),
        (ONE_BILLION, (8, 2048), 1.5, 99),
    ):
        operations = eager_steps(config, *size, torch.bfloat16)
        eager, fused = (sum(moved for moved, _ in each) for each in (operations, steps(config, *size, 2)))
        weights = 2 * config.parameters
        assert weights < fused
        assert least * fused < eager < most * weights
        assert len(eager_steps(twin(config), *size, torch.bfloat16)) == len(operations)


def test_a_call_takes_the_slower_of_host_and_gpu():
    work, rates = [(100, 0), (100, 4000)], (100.0, 1000.0)
    assert predict(work, rates, 0.0, 0.0) == pytest.approx(1 + 4)
    assert predict(work, rates, 0.0, 2.0) == pytest.approx(7)
    assert predict(work, rates, 30.0, 2.0) == 30
    assert bound_of(work, rates, 30.0) == "launch-bound"
    assert bound_of(work, rates, 1.0) == "compute-bound"
    assert bound_of(work, (100.0, 1e6), 1.0) == "bandwidth-bound"
    gpu = Table(
        "twin", "1x1", EAGER, [Row(n, False, None, 0.0, ms=t) for n, t in ((EAGER, 3.0), (DEFAULT, 2.0), (REDUCE, 1.0))]
    )
    assert fixed_costs(gpu, 40, 20) == {EAGER: (3.0, 2.0), DEFAULT: (2.0, 1.0), REDUCE: (1.0, 1.0)}
    cpu = Table("twin", "1x1", EAGER, gpu.rows[:2])
    assert fixed_costs(cpu, 40, 20) == {EAGER: (0.0, 3.0), DEFAULT: (0.0, 2.0)}


def test_a_launch_bound_ratio_has_the_hosts_share():
    times = {EAGER: (4.0, 1.0), DEFAULT: (2.0, 1.0), REDUCE: (1.0, 1.0)}
    rows = [Row(n, False, None, 0.0, ms=ms, speedup=4.0 / ms, gpu_ms=gpu) for n, (ms, gpu) in times.items()]
    judged = judge(
        Table("when_it_helps", "1x1", EAGER, rows), [(1, 1)], [(1, 1)], (1.0, 1.0), dict.fromkeys(times, (1, 1))
    )
    assert judged["1x1, reduce-overhead"]["by host"] == "4.00x (host twice as fast: 2.00x)"
    assert answer("2 layers", judged).startswith("2 layers, over eager: 4.00x (host twice as fast: 2.00x) at 1x1 (")


def test_the_answer_takes_the_best_of_each_size():
    def row(x, predicted=1.0, bound="launch-bound"):
        return {"bound": bound, "predicted x": predicted, "x eager": x, "by host": f"{x:.2f}x"}

    rows = {
        "a, default": row(1.5, 1.5), "a, reduce": row(2.0, 1.6), "b, default": row(1.0),
        "c, default": row(1.1, 1.1, "other"),
    }  # fmt: skip
    said = answer("M", rows)
    assert said.startswith("M, over eager: 2.00x at a (launch-bound) to 1.10x at c (other). Predicted ratios: ")
    assert said.endswith(": up to 25% off. No size is slower than eager.")
    assert answer("M", rows | {"d, default": row(0.9)}).endswith(". Slower: d, default.")
