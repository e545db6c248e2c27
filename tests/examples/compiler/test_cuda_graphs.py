import re

from harness import Harness
from harness.catalog import Needs
from harness.settings import settings_kept

import pytest
import torch
from rich.console import Console

from examples.compiler.cuda_graphs import (
    BY_HAND,
    EAGER,
    FUSED,
    NO_FUSION,
    REDUCED,
    STEPS,
    UNFUSED,
    WIDTH,
    Captured,
    Chain,
    demo,
    explain,
    first_line,
    forbidden,
    idle,
    make_chain,
    refill,
    which,
)


@pytest.fixture
def h() -> Harness:
    return Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False)


@pytest.fixture(autouse=True)
def _forget():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")


@on_cpu
def test_demo_on_a_cpu(h):
    with settings_kept("demo", 0):
        demo(h)
    skips = h.record.facts["CUDA graphs skipped"]
    assert {name: told["skips counted"] for name, told in skips.items()} == {
        "mode reduce-overhead": 1, "backend cudagraphs": 1,
    }  # fmt: skip
    assert "cpu device" in skips["backend cudagraphs"]["says"]
    (table,) = h.record.comparisons
    assert [row["variant"] for row in table["rows"]] == [EAGER, FUSED]
    assert all(check["passed"] for check in h.record.checks)


@on_cpu
def test_profiling_calls_the_variants_and_nothing_else():
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True), profile=True)
    demo(h)
    assert not h.record.facts
    assert not h.record.checks


def test_the_chain(h):
    chain, x = make_chain(h), h.randn(WIDTH)
    h.check(chain, chain.float64, x, terms=STEPS, what="eager", poison=False)
    operations = torch.fx.symbolic_trace(chain).graph.nodes
    assert sum(node.op == "call_function" for node in operations) == STEPS
    assert not torch.allclose(chain(x), chain(h.randn(WIDTH)))  # the input still matters after all the steps


def test_without_fusion_each_operation_is_a_kernel(h, monkeypatch):
    """On a CPU these are loops in one file; the rule by which they are stored is the same."""
    from torch._inductor import metrics

    monkeypatch.setattr("examples.compiler.cuda_graphs.STEPS", 10)
    chain, x = make_chain(h, 64), h.randn(64)
    counts = []
    for options in (None, NO_FUSION):
        torch.compiler.reset()
        before = metrics.generated_kernel_count
        h.check(
            torch.compile(chain, fullgraph=True, options=options), chain.float64, x, terms=STEPS, what="", poison=False
        )
        counts.append(metrics.generated_kernel_count - before)
    assert counts == [1, 10]


def test_refill(h):
    held, given = [torch.zeros(3), torch.zeros(2, 2)], [h.randn(3).cpu(), h.randn(2, 2).cpu()]
    refill(held, given)
    assert all(map(torch.equal, held, given))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], ValueError, "refill: 0 inputs, but 1 were captured"),
        ([torch.zeros(4), torch.zeros(4)], ValueError, "refill: 2 inputs, but 1 were captured"),
        ([torch.zeros(1)], ValueError, r"refill: input 0 is \(1,\) on cpu, captured as \(4,\) on cpu; pad or move it"),
        ([torch.zeros(2, 4)], ValueError, r"refill: input 0 is \(2, 4\)"),
        ([torch.zeros(4, device="meta")], ValueError, r"refill: input 0 is \(4,\) on meta"),
        ([torch.zeros(4).double()], TypeError, "refill: input 0 is torch.float64, captured as torch.float32; cast it"),
    ],
    ids=["none", "too many", "broadcastable", "rank", "device", "dtype"],
)
def test_refill_refuses_what_copy_would_accept(given, error, message):
    held = [torch.ones(4)]
    with pytest.raises(error, match=message):
        refill(held, given)
    assert torch.equal(held[0], torch.ones(4))


def test_captured_needs_inputs_on_a_gpu():
    with pytest.raises(ValueError, match="Captured: no inputs; pass an example of each"):
        Captured(torch.sin)
    with pytest.raises(ValueError, match="Captured: input 0 is on cpu; a CUDA graph holds the GPU's work only"):
        Captured(torch.sin, torch.ones(3))


def test_small_helpers():
    assert idle(200, 50) == 0.75
    assert idle(50, 60) == 0  # a profile and a timing are two measurements
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert first_line("skipping. Found from : \n x") == "skipping"
    one, two = torch.ones(2), torch.zeros(2)
    assert [which(got, {"one": one, "two": two}) for got in (one, two, one + 3)] == ["one", "two", "none of them"]
    assert list(forbidden())


class Row:
    def __init__(self, ms: float, speedup: float) -> None:
        self.ms, self.speedup, self.enqueue_us = ms, speedup, 900 * ms


@pytest.mark.parametrize(("replayed_us", "verdict"), [(100, "confirmed"), (600, "not here")])
def test_the_verdict_follows_the_numbers(h, monkeypatch, replayed_us, verdict):
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
def test_the_bar():
    """A graph of 100 tiny kernels, replayed: at least 5 times as fast as launching them."""
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True), full=True)
    with settings_kept("demo", 0):
        demo(h)
    rows = {row["variant"]: row for row in h.record.comparisons[0]["rows"]}
    assert rows[BY_HAND]["speedup"] >= 5
    shown = h.record.facts["where the time goes"]
    if "kernels and copies" not in shown[EAGER]:
        pytest.skip("torch.profiler sees no kernels here")
    assert shown[EAGER]["kernels and copies"] == STEPS
    assert shown[UNFUSED]["kernels and copies"] == STEPS
    assert shown[BY_HAND]["kernels and copies"] == STEPS + 1
    assert shown[FUSED]["kernels and copies"] == 1
    assert shown[BY_HAND]["GPU waits, %"] < shown[EAGER]["GPU waits, %"]


@pytest.fixture(scope="module")
def facts() -> dict:
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False)
    with settings_kept("demo", 0):
        demo(h)
    return h.record.facts


@pytest.mark.gpu
def test_static_inputs(facts):
    told = facts["static inputs, the result is"]
    assert told["another input, not copied in"] == "first"
    assert told["the same, copied in"] == "second"
    assert told["Python of the function ran"].startswith("4 times")
    assert told["and after more replays"] == "4 times"
    assert told["a weight replaced"] == "old weight's"
    assert told["a weight changed in place"] == "new weight's"


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
    told = facts["inside a capture"]
    assert set(told) == set(forbidden())
    assert re.search("captur", told["x.sum().item()"]["raises"])


@pytest.mark.gpu
def test_memory_of_pools(facts):
    held = facts["bytes held by graphs of 3 sizes"]
    assert held["own pools"] > held["one pool"] > 0
    assert held["own pools, graphs deleted"] <= 4 << 20
    assert held["one pool, graphs deleted"] <= 4 << 20


@pytest.mark.gpu
def test_skipped(facts):
    told = facts["reduce-overhead, graphs skipped"]
    assert told["all on the GPU"]["skips"] == 0
    assert told["an input changed in place"]["skips"] >= 1
    assert "mutated inputs" in told["an input changed in place"]["says"]
    cpu = told["a tensor on the CPU"]
    assert cpu["skips"] or cpu["partitions"]


@pytest.mark.gpu
def test_captured(h):
    weight = h.randn(64)
    captured = Captured(lambda x, y: x * weight + y, h.randn(64), h.randn(64))
    for _ in range(3):
        x, y = h.randn(64), h.randn(64)
        assert torch.equal(captured(x, y), x * weight + y)
    with pytest.raises(ValueError, match="refill: input 1 is"):
        captured(x, y[:1])
    with pytest.raises(TypeError, match=r"refill: input 0 is torch\.float64"):
        captured(x.double(), y)


@pytest.mark.gpu
def test_captured_of_a_module_that_is_not_a_chain(h):
    chain = Chain(1 + h.randn(32, scale=0.01), h.randn(32))
    captured = Captured(torch.nn.Sequential(chain, torch.nn.GELU()), h.randn(32))
    x = h.randn(32)
    torch.testing.assert_close(captured(x), torch.nn.functional.gelu(chain(x)))
