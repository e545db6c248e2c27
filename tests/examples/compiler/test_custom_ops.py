"""custom_ops: what the demo finds of each way, the operators against float64, bad input."""

from harness import Harness

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.compiler import custom_ops
from examples.compiler.custom_ops import decisions, demo
from examples.compiler.custom_ops_isotonic import (
    DTYPES,
    isotonic,
    isotonic_with_blocks,
    pool,
    reference,
)  # fmt: skip
from tests.quiet import ran


def test_five_ways(monkeypatch):
    monkeypatch.setattr(Harness, "compare", lambda *_, **__: None)  # five compilations, which every run of it checks
    record, factor = ran(demo, finish=False).record, custom_ops.FACTOR[0]
    found = record.facts["the same function, five ways"]
    assert {name: answers["graph"] for name, answers in found.items()} == {
        "untouched": "add | sin | mul | mul", "allow_in_graph": "add sin mul mul",
        "nonstrict_trace": "add sin mul mul", "disable": "add | mul", "custom_op": "add wave mul",
    }  # fmt: skip
    for name, answers in found.items():
        seen_through = name in ("allow_in_graph", "nonstrict_trace")
        assert answers["gradient"] == "right"
        assert answers["runs at a call"] == (0 if seen_through else 1)
        assert answers["sees a setting changed later"] == ("no" if seen_through else "yes")
    assert decisions(found) == {
        "the compiler sees its operations": "allow_in_graph, nonstrict_trace",
        "it runs at every call, in one graph": "custom_op",
        "it reads data, in one graph": "custom_op",
    }
    assert custom_ops.FACTOR[0] == factor


# --- the operators


def gradient(fit):
    def backward(x, grad):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(fit(x), x, grad)[0]

    return backward


def gradient_reference(x, grad):
    return gradient(reference)(x.double(), grad.double())


def test_shapes_and_dtypes(h):
    for shape, dtype in zip([(1,), (3, 4, 17), (2, 300), (3, 0)], DTYPES, strict=True):
        x, grad = h.randn(*shape).to(dtype), h.randn(*shape).to(dtype)
        h.check(isotonic, reference, x, what=f"{shape} {dtype}", roundings=8)
        if x.numel():
            h.check(gradient(isotonic), gradient_reference, x, grad, what="gradient", terms=shape[-1], roundings=4)
    fn = gradient(h.compiled(isotonic, backend="aot_eager", fullgraph=True))
    h.check(fn, gradient_reference, h.randn(5, 37), h.randn(5, 37), what="aot_eager", poison=False, terms=37)


@given(st.lists(st.lists(st.floats(-100, 100, width=16), min_size=6, max_size=6), min_size=1, max_size=4))
def test_any_row_becomes_the_nearest_that_does_not_fall(rows):
    x = torch.tensor(rows, dtype=torch.float64)
    fit, blocks = isotonic_with_blocks(x)
    assert (fit.diff() >= 0).all()
    torch.testing.assert_close(fit, reference(x))
    assert set(blocks.diff().flatten().tolist()) <= {0, 1}


def test_blocks_of_equal_values_and_around_nan():
    assert pool([1.0, 1.0]) == ([1.0, 1.0], [0, 0])
    nan = isotonic(torch.tensor([2.0, float("nan"), 1.0, 0.0]))
    assert nan[1].isnan()
    assert nan[[0, 2, 3]].tolist() == [2.0, 0.5, 0.5]
    # Two blocks whose means round to one number stay two: bfloat16 makes many of those.
    x, grad = torch.tensor([[1.0, 1.0 + 2**-12], [3.0, 5.0]], dtype=torch.float64)
    assert gradient(isotonic)(x, grad).tolist() == [3.0, 5.0]


def test_gradcheck_and_opcheck():
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(isotonic, (x,))
    for case in (x.detach().t(), torch.randn(2, 0)):
        assert set(torch.library.opcheck(isotonic_with_blocks, (case,)).values()) == {"SUCCESS"}


def test_bad_input(h):
    x, compiled = torch.ones(3), h.compiled(isotonic, backend="aot_eager", fullgraph=True)
    for bad, error, message in (
        (x.long(), TypeError, r"isotonic: dtypes \[torch\.int64\]; all must be the same one of"),
        (torch.tensor(1.0), ValueError, r"isotonic: shapes \[\(\)\]; all must be the same \[\.\.\., n\]"),
    ):
        with pytest.raises(error, match=message):
            isotonic(bad)
        with pytest.raises(Exception, match=message):  # torch wraps what a rule for shapes raises
            compiled(bad)


@pytest.mark.gpu
def test_on_a_gpu_the_values_go_to_the_host_and_back(h):
    x = h.randn(64, 256)
    out = isotonic(x)
    assert out.is_cuda
    h.check(gradient(isotonic), gradient_reference, x, h.randn(64, 256), what="gradient", terms=256)
