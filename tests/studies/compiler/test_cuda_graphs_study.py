"""studies/compiler/cuda_graphs: why there is none on a CPU, the verdict on the gaps, and on a GPU what is recorded."""

import re
from types import SimpleNamespace

import pytest
import torch

from examples.compiler import cuda_graphs as lesson
from examples.compiler.cuda_graphs import BY_HAND, EAGER, FUSED, REDUCED, STEPS, UNFUSED
from studies.compiler import cuda_graphs, cuda_graphs_replay
from studies.compiler.cuda_graphs import explain, first_line, idle
from studies.compiler.cuda_graphs_replay import forbidden
from tests.quiet import ran


@pytest.fixture(scope="module")
def facts() -> dict:
    """Of the lesson, then both parts of its study."""
    timing = torch.cuda.is_available()
    tables = ran(lesson.demo, timing=timing, finish=False).tables
    record = ran(cuda_graphs.study, cuda_graphs_replay.study, timing=timing, lesson=tables).record
    assert all(check["passed"] for check in record.checks)
    return record.facts


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is recorded where there is no GPU")
def test_on_a_cpu(facts):
    skips = facts["CUDA graphs skipped"]
    assert {name: row["skips counted"] for name, row in skips.items()} == {
        "mode reduce-overhead": 1, "backend cudagraphs": 1,
    }  # fmt: skip
    assert "cpu device" in skips["backend cudagraphs"]["message"]


@pytest.mark.parametrize(("replayed_us", "verdict"), [(100, "confirmed"), (600, "not here")])
def test_the_verdict_follows_the_numbers(h, monkeypatch, replayed_us, verdict):
    assert (idle(200, 50), idle(50, 60)) == (0.75, 0)  # a profile and a timing are two measurements
    assert [first_line(e) for e in (ValueError("one\ntwo"), ValueError())] == ["one", "ValueError"]
    assert first_line("skipping. Found from : \n x") == "skipping"
    said = []
    monkeypatch.setattr(h, "say", said.append)
    times = {EAGER: 500, BY_HAND: replayed_us, UNFUSED: 300, FUSED: 20, REDUCED: 30}
    rows = {name: SimpleNamespace(ms=us / 1000, speedup=500 / us, enqueue_us=0.9 * us) for name, us in times.items()}
    work = {EAGER: (100, 90.0), BY_HAND: (101, 90.0), UNFUSED: (100, 90.0), FUSED: (1, 3.0), REDUCED: (2, 4.0)}
    explain(h, rows, work)
    assert f"launch gaps: {verdict}." in said[0]
    assert f"500 us launched one by one, {replayed_us} us replayed ({500 / replayed_us:.1f}x)" in said[0]
    assert f"the graph is {300 / replayed_us:.1f}x" in said[1]
    assert "reduce-overhead loses" in said[-1]
    assert "it runs 1 more" in said[-1]


@pytest.mark.gpu
def test_where_the_time_goes(facts):
    shown = facts["where the time goes"]
    if "kernels and copies" not in shown[EAGER]:
        pytest.skip("torch.profiler sees no kernels here")
    counts = {name: row["kernels and copies"] for name, row in shown.items()}
    assert [counts[n] for n in (EAGER, UNFUSED, BY_HAND, FUSED)] == [STEPS, STEPS, STEPS + 1, 1]
    assert shown[BY_HAND]["GPU waits, %"] < shown[EAGER]["GPU waits, %"]


@pytest.mark.gpu
def test_the_rules_of_a_replay(facts):
    assert facts["calls of the captured function"] == {"up to the capture": 4, "and after 5 replays": 4}
    kept = facts["reduce-overhead, a result read after the next call"]
    assert kept["call 1"] == "RuntimeError"
    assert "right" not in kept.values()
    assert set(facts["the same, cloned before that call"].values()) == {"right"}
    steps = facts["two calls in a step that cudagraph_mark_step_begin() began, both read at its end"]
    assert steps["step 3"] == ["right", "right"]
    found = facts["inside a capture"]
    assert set(found) == set(forbidden())
    assert re.search("captur", found["x.sum().item()"]["raises"])
    held = facts["bytes held by graphs of 3 sizes"]
    assert held["own pools"] > held["one pool"] > 0
    assert held["own pools, graphs deleted"] <= 4 << 20
    assert held["one pool, graphs deleted"] <= 4 << 20
    found = facts["reduce-overhead, graphs skipped"]
    assert found["all on the GPU"]["skips"] == 0
    assert found["an input changed in place"]["skips"] >= 1
    assert "mutated inputs" in found["an input changed in place"]["message"]
    cpu = found["a tensor on the CPU"]
    assert cpu["skips"] or cpu["partitions"]
