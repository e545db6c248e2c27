"""cuda_graphs: the chain, its graph, what refill refuses, and on a GPU the rules of a replay."""

import pytest
import torch

from examples.compiler.cuda_graphs import BY_HAND, EAGER, STEPS, WIDTH, Captured, demo, make_chain, refill, which
from tests.quiet import ran


def test_the_chain(h):
    chain, x = make_chain(h), h.randn(WIDTH)
    h.check(chain, chain.float64, x, terms=STEPS, what="eager", poison=False)
    assert not torch.allclose(chain(x), chain(h.randn(WIDTH)))  # the input still matters after all the steps
    one, two = torch.ones(2), torch.zeros(2)
    assert [which(got, {"one": one, "two": two}) for got in (one, two, one + 3)] == ["one", "two", "none of them"]


def test_refill_copies_and_refuses_what_copy_would_accept(h):
    held, given = [torch.zeros(4), torch.zeros(2, 2)], [h.randn(4).cpu(), h.randn(2, 2).cpu()]
    refill(held, given)
    assert all(map(torch.equal, held, given))
    for other in ([torch.zeros(1)], [torch.zeros(2, 4)], [given[0].double()], [given[0].to("meta")], given):
        with pytest.raises(ValueError, match=r"^refill: got .*, captured \['\(4,\) torch.float32 cpu'\]; pad, cast or"):
            refill(held[:1], other)
    assert all(map(torch.equal, held, given))
    with pytest.raises(ValueError, match="Captured: an input is not on a GPU"):
        Captured(torch.sin, torch.ones(3))


@pytest.mark.gpu
def test_the_demo_and_a_graph_of_two_inputs_on_a_gpu(h):
    """A graph of 100 tiny kernels, replayed: at least 5 times as fast as launching them."""
    weight = h.randn(64)
    captured = Captured(lambda x, y: x * weight + y, h.randn(64), h.randn(64))
    for _ in range(3):
        x, y = h.randn(64), h.randn(64)
        assert torch.equal(captured(x, y), x * weight + y)
    h = ran(demo, timing=True, full=True)
    (table,) = h.tables
    assert table.over(EAGER, BY_HAND) >= 5
    assert {what: row["result"] for what, row in h.record.facts["after a capture"].items()} == {
        "a new input tensor": "of the old input", "an input copied in": "right",
        "a late read": "overwritten", "a weight replaced": "of the old weight",
        "a weight changed in place": "right",
    }  # fmt: skip
    assert "Wrong after a capture: a new input tensor, a late read, a weight replaced." in h.record.answer
