"""studies/compiler/cuda_graphs: why there is none on a CPU, the verdict on the gaps, and on a GPU what is recorded."""

import re

from harness import Harness
from harness.catalog import Needs
from harness.settings import settings_kept

import pytest
import torch
from rich.console import Console

from examples.compiler import cuda_graphs as lesson
from examples.compiler.cuda_graphs import BY_HAND, EAGER, FUSED, REDUCED, STEPS, UNFUSED
from studies.compiler import cuda_graphs, cuda_graphs_replay
from studies.compiler.cuda_graphs import explain, first_line, idle
from studies.compiler.cuda_graphs_replay import forbidden


@pytest.fixture(scope="module")
def ran() -> Harness:
    """The lesson, then both parts of its study."""
    first = Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=torch.cuda.is_available())
    with settings_kept("demo", 0):
        lesson.demo(first)
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=first.timing, lesson=first.tables)
    with settings_kept("study", 0):
        cuda_graphs.study(h)
        cuda_graphs_replay.study(h)
    return h


@pytest.fixture
def facts(ran) -> dict:
    return ran.record.facts


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is recorded where there is no GPU")
def test_on_a_cpu(ran, facts):
    skips = facts["CUDA graphs skipped"]
    assert {name: row["skips counted"] for name, row in skips.items()} == {
        "mode reduce-overhead": 1, "backend cudagraphs": 1,
    }  # fmt: skip
    assert "cpu device" in skips["backend cudagraphs"]["message"]
    assert [row.variant for row in ran.lesson[0].rows] == [EAGER, FUSED]
    assert all(check["passed"] for check in ran.record.checks)


def test_small_helpers():
    assert idle(200, 50) == 0.75
    assert idle(50, 60) == 0  # a profile and a timing are two measurements
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert first_line("skipping. Found from : \n x") == "skipping"
    assert list(forbidden())


class Row:
    def __init__(self, ms: float, speedup: float) -> None:
        self.ms, self.speedup, self.enqueue_us = ms, speedup, 900 * ms


@pytest.mark.parametrize(("replayed_us", "verdict"), [(100, "confirmed"), (600, "not here")])
def test_the_verdict_follows_the_numbers(monkeypatch, replayed_us, verdict):
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True))
    said = []
    monkeypatch.setattr(h, "say", said.append)
    times = {EAGER: 500, BY_HAND: replayed_us, UNFUSED: 300, FUSED: 20, REDUCED: 30}
    rows = {name: Row(us / 1000, 500 / us) for name, us in times.items()}
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
    assert shown[EAGER]["kernels and copies"] == STEPS
    assert shown[UNFUSED]["kernels and copies"] == STEPS
    assert shown[BY_HAND]["kernels and copies"] == STEPS + 1
    assert shown[FUSED]["kernels and copies"] == 1
    assert shown[BY_HAND]["GPU waits, %"] < shown[EAGER]["GPU waits, %"]


@pytest.mark.gpu
def test_python_runs_up_to_the_capture(facts):
    assert facts["calls of the captured function"] == {"up to the capture": 4, "and after 5 replays": 4}


@pytest.mark.gpu
def test_overwritten_outputs(facts):
    kept = facts["reduce-overhead, a result read after the next call"]
    assert kept["call 1"] == "RuntimeError"
    assert "right" not in kept.values()
    assert set(facts["the same, cloned before that call"].values()) == {"right"}
    steps = facts["two calls in a step that cudagraph_mark_step_begin() began, both read at its end"]
    assert steps["step 3"] == ["right", "right"]


@pytest.mark.gpu
def test_forbidden_in_a_capture(facts):
    found = facts["inside a capture"]
    assert set(found) == set(forbidden())
    assert re.search("captur", found["x.sum().item()"]["raises"])


@pytest.mark.gpu
def test_memory_of_pools(facts):
    held = facts["bytes held by graphs of 3 sizes"]
    assert held["own pools"] > held["one pool"] > 0
    assert held["own pools, graphs deleted"] <= 4 << 20
    assert held["one pool, graphs deleted"] <= 4 << 20


@pytest.mark.gpu
def test_skipped(facts):
    found = facts["reduce-overhead, graphs skipped"]
    assert found["all on the GPU"]["skips"] == 0
    assert found["an input changed in place"]["skips"] >= 1
    assert "mutated inputs" in found["an input changed in place"]["message"]
    cpu = found["a tensor on the CPU"]
    assert cpu["skips"] or cpu["partitions"]
