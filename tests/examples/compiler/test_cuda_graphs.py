"""cuda_graphs: the chain, its graph, what refill refuses, and on a GPU the rules of a replay."""

import pytest
import torch

from examples.compiler.cuda_graphs import (
    BY_HAND,
    EAGER,
    NO_FUSION,
    STEPS,
    WIDTH,
    Captured,
    Chain,
    demo,
    make_chain,
    refill,
    which,
)  # fmt: skip
from tests.quiet import ran


def test_the_chain(h):
    chain, x = make_chain(h), h.randn(WIDTH)
    h.check(chain, chain.float64, x, terms=STEPS, what="eager", poison=False)
    operations = torch.fx.symbolic_trace(chain).graph.nodes
    assert sum(node.op == "call_function" for node in operations) == STEPS
    assert not torch.allclose(chain(x), chain(h.randn(WIDTH)))  # the input still matters after all the steps
    one, two = torch.ones(2), torch.zeros(2)
    assert [which(got, {"one": one, "two": two}) for got in (one, two, one + 3)] == ["one", "two", "none of them"]


def test_without_fusion_each_operation_is_a_kernel(h, monkeypatch):
    """On a CPU these are loops in one file; the rule by which they are stored is the same."""
    from torch._inductor import metrics

    monkeypatch.setattr("examples.compiler.cuda_graphs.STEPS", 10)
    chain, x = make_chain(h, 64), h.randn(64)
    counts = []
    for options in (None, NO_FUSION):
        before = metrics.generated_kernel_count
        fn = h.compiled(chain, fullgraph=True, options=options)
        h.check(fn, chain.float64, x, terms=STEPS, what="", poison=False)
        counts.append(metrics.generated_kernel_count - before)
    assert counts == [1, 10]


def test_refill(h):
    held, given = [torch.zeros(3), torch.zeros(2, 2)], [h.randn(3).cpu(), h.randn(2, 2).cpu()]
    refill(held, given)
    assert all(map(torch.equal, held, given))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], ValueError, "0 inputs, but 1 were captured"),
        ([torch.zeros(4), torch.zeros(4)], ValueError, "2 inputs, but 1 were captured"),
        ([torch.zeros(1)], ValueError, r"input 0 is \(1,\) on cpu, captured as \(4,\) on cpu; pad or move it"),
        ([torch.zeros(2, 4)], ValueError, r"input 0 is \(2, 4\)"),
        ([torch.zeros(4, device="meta")], ValueError, r"input 0 is \(4,\) on meta"),
        ([torch.zeros(4).double()], TypeError, "input 0 is torch.float64, captured as torch.float32; cast it"),
    ],
)
def test_refill_refuses_what_copy_would_accept(given, error, message):
    held = [torch.ones(4)]
    with pytest.raises(error, match=f"^refill: {message}"):
        refill(held, given)
    assert torch.equal(held[0], torch.ones(4))


def test_captured_needs_inputs_on_a_gpu():
    with pytest.raises(ValueError, match="Captured: no inputs; pass an example of each"):
        Captured(torch.sin)
    with pytest.raises(ValueError, match="Captured: input 0 is on cpu; a CUDA graph holds the GPU's work only"):
        Captured(torch.sin, torch.ones(3))


@pytest.mark.gpu
def test_captured(h):
    weight = h.randn(64)
    captured = Captured(lambda x, y: x * weight + y, h.randn(64), h.randn(64))
    for _ in range(3):
        x, y = h.randn(64), h.randn(64)
        assert torch.equal(captured(x, y), x * weight + y)
    with pytest.raises(ValueError, match="refill: input 1 is"):
        captured(x, y[:1])
    chain = Chain(1 + h.randn(32, scale=0.01), h.randn(32))
    captured, x = Captured(torch.nn.Sequential(chain, torch.nn.GELU()), h.randn(32)), h.randn(32)
    torch.testing.assert_close(captured(x), torch.nn.functional.gelu(chain(x)))


@pytest.mark.gpu
def test_the_demo_on_a_gpu():
    """A graph of 100 tiny kernels, replayed: at least 5 times as fast as launching them."""
    h = ran(demo, timing=True, full=True)
    (table,) = h.tables
    assert table.over(EAGER, BY_HAND) >= 5
    assert {what: row["result"] for what, row in h.record.facts["after a capture"].items()} == {
        "the input in a new tensor": "stale", "the input copied in": "right",
        "a result read after the next call": "overwritten", "a weight replaced": "stale",
        "a weight changed in place": "right",
    }  # fmt: skip
    assert "Wrong after a capture: the input in a new tensor, a result read after" in h.record.answer
