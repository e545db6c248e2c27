"""studies/compiler/cuda_graphs: the verdict on the gaps, and on a GPU what is recorded."""

from types import SimpleNamespace

import pytest

from examples.compiler import cuda_graphs as lesson
from examples.compiler.cuda_graphs import BY_HAND, EAGER, FUSED, REDUCED, UNFUSED
from studies.compiler import cuda_graphs, cuda_graphs_replay
from studies.compiler.cuda_graphs import explain, idle
from tests.quiet import ran


@pytest.mark.parametrize(("replayed_us", "verdict"), [(100, "confirmed"), (600, "not here")])
def test_the_verdict_follows_the_numbers(h, replayed_us, verdict):
    assert (idle(200, 50), idle(50, 60)) == (0.75, 0)
    times = {EAGER: 500, BY_HAND: replayed_us, UNFUSED: 300, FUSED: 20, REDUCED: 30}
    rows = {name: SimpleNamespace(ms=us / 1000, speedup=500 / us, enqueue_us=0.9 * us) for name, us in times.items()}
    work = {EAGER: (100, 90.0), BY_HAND: (101, 90.0), UNFUSED: (100, 90.0), FUSED: (1, 3.0), REDUCED: (2, 4.0)}
    explain(h, rows, work)
    gaps, fused = h.record.conclusions
    assert f"launch gaps: {verdict}." in gaps
    assert f"500 us launched one by one, {replayed_us} us replayed ({500 / replayed_us:.1f}x)" in gaps
    assert "reduce-overhead loses" in fused


@pytest.mark.gpu
def test_on_a_gpu():
    tables = ran(lesson.demo, finish=False).tables
    record = ran(cuda_graphs.study, cuda_graphs_replay.study, timing=True, lesson=tables).record
    assert all(check["passed"] for check in record.checks)
    kept = record.facts["reduce-overhead, a result read after the next call"]
    assert kept["call 1"] == "RuntimeError"
    assert "right" not in kept.values()
    assert set(record.facts["the same, cloned before that call"].values()) == {"right"}
    held = record.facts["bytes held by graphs of 3 sizes"]
    assert held["own pools"] > held["one pool"] > 0
    assert max(held[f"{pools}, graphs deleted"] for pools in ("own pools", "one pool")) <= 4 << 20
    assert record.facts["reduce-overhead, graphs skipped"]["all on the cuda"]["skips"] == 0
