"""Scan over layers: how graphs grow, right results, what Stacked refuses, and what torch_xla's scan_layers does not."""

import copy
import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from examples.common import xla
from examples.xla import scan_layers as example
from examples.xla.scan_layers import SCANNED, STACKED, UNROLLED, Stacked
from examples.xla.scan_layers_checks import require_equal
from examples.xla.scan_layers_model import Layer, unrolled
from studies.xla import scan_layers as study
from tests.quiet import ran


@pytest.fixture(scope="module")
def facts():
    h = ran(example.demo, needs="torch_xla>=2.9")
    studied = ran(study.study, needs="torch_xla>=2.9", lesson=[])
    assert len(h.record.checks) == 5 + 2  # depths, and depths with backward
    assert [len(table["rows"]) for table in h.record.tables] == [5, 5]
    return h.record.facts | studied.record.facts


def test_how_graphs_grow(facts):
    for what, loops in {"forward": 1, "forward and backward": 2}.items():
        each = {}
        for form, counts in facts[f"{what}: operations by layers"].items():
            found = [(int(depth), count) for depth, count in counts.items()]
            (each[form],) = {(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(found)}
        assert each[STACKED] == 0 < each[SCANNED] < each[UNROLLED] / 5
        for form, expected in {UNROLLED: 0, SCANNED: loops, STACKED: loops}.items():
            assert set(facts[f"{what}: loops by layers"][form].values()) == {expected}
            assert set(facts[f"{what}: compiles by layers"][form].values()) == {1}


REFUSED = {
    "another dtype": r"layer 1 has tensor norm\.weight \(14,\) torch\.bfloat16 on",
    "another setting": r"layer 1 has setting scale 3\.0, layer 0 has 1\.0; scan computes all layers with the first",
    "another activation": r"layer 1 has module 1 <class .*Tanh",
    "a hook on the second": r"layer 1 has hooks on itself; scan drops them: remove them",
    "a wider output": r"a layer makes \(4, 15\) torch\.float32 of \(4, 14\) torch\.float32",
    "batch norm, training": r"changes 1\.\w+.* in place",
    "input changed in place": r"changes its input in place",
    "dropout, training": r"layer 0 has active dropout",
}


def test_stacked_refuses_all_of_them(facts):
    """And what torch_xla's scan_layers does with them; and with a trace that is kept."""
    told, scanned = (
        {k: v[by] for k, v in facts["outcome by the kind of layers"].items()} for by in ("Stacked", "scan_layers")
    )
    assert told.pop("equal layers") == scanned["equal layers"] == scanned["another dtype"] == "right"
    assert {name for name, outcome in scanned.items() if outcome.startswith("WRONG, no error")} == {
        "another setting", "another activation", "a hook on the second", "input changed in place",
    }  # fmt: skip
    assert told.keys() == REFUSED.keys()
    for name, outcome in told.items():
        assert re.match(f"ValueError: require_equal: .*{REFUSED[name]}", outcome), outcome
    assert facts["a trace that is kept"] == {
        "scale 1, then 5": "the old result",
        "scan_layers, pure: no_grad, then backward": "0 of 6 gradients",
        "Stacked: no_grad, then backward": "3 of 3 gradients",
    }


def test_require_equal_says_what_is_no_list_of_layers():
    relu = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for bad, error, message in (
        ((Layer(4) for _ in range(2)), TypeError, "got generator; pass a list of modules"),
        (nn.Linear(4, 4), TypeError, "got Linear; pass a list"),
        ([nn.Linear(4, 4), torch.nn.functional.relu], TypeError, "layer 1 is a function, not a module"),
        ([], ValueError, "no layers; need at least one"),
        ([relu, relu[:1]], ValueError, r"layer 1 has module 1 \(none\), layer 0 has"),
        ([nn.Linear(4, 4), nn.Linear(4, 5)], ValueError, "layer 1 has setting out_features 5, layer 0 has 4"),
        ([Layer(4), Layer(4).requires_grad_(False)], ValueError, "not trained, layer 0 has"),
    ):
        with pytest.raises(error, match=message):
            require_equal(bad)
    for weights_on, x_on in ((xla.device(), "cpu"), ("cpu", xla.device())):
        layer, x = Layer(4).to(weights_on), torch.ones(2, 4, device=x_on)
        with pytest.raises(ValueError, match=r"x is on (cpu|xla:0), the weights on (xla:0|cpu); move both"):
            Stacked([layer])(x)


@settings(max_examples=4, deadline=None)
@given(depth=st.integers(1, 4), rows=st.integers(1, 5), width=st.integers(1, 6))
def test_stacked_is_the_layers_in_order(depth, rows, width):
    torch.manual_seed(depth)
    layers = [Layer(width) for _ in range(depth)]
    x = torch.randn(rows, width)
    stacked = Stacked(layers).to(xla.device())
    given = x.to(xla.device()).requires_grad_()
    out = stacked(given)
    out.square().sum().backward()
    exact, x = [copy.deepcopy(layer).double() for layer in layers], x.double().requires_grad_()
    want = unrolled(exact, x)
    want.square().sum().backward()
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given.grad.cpu().double(), x.grad, rtol=1e-4, atol=1e-4)
    for name, tensor in zip(stacked.names, stacked.stacked, strict=True):
        wanted = torch.stack([dict(layer.named_parameters())[name].grad for layer in exact])
        torch.testing.assert_close(tensor.grad.cpu().double(), wanted, rtol=1e-3, atol=1e-4)


def test_trained_and_written_back():
    torch.manual_seed(0)
    layers, x = [Layer(6) for _ in range(3)], torch.randn(5, 6)
    stacked, there = Stacked(layers).to(xla.device()), x.to(xla.device())
    stacked(there).square().mean().backward()
    torch.optim.SGD(stacked.parameters(), lr=0.1).step()
    after = stacked(there).detach().cpu()
    assert not torch.allclose(unrolled(layers, x), after)
    stacked.write_back(layers)
    torch.testing.assert_close(unrolled(layers, x), after, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"write_back: 2 layers; need 3"):
        stacked.write_back(layers[:2])


class Rotated(nn.Module):
    """A table that no state dict has, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(self.first(x * self.table)))


def test_written_back_into_layers_with_tied_weights_and_tables():
    layers, x = [Rotated() for _ in range(2)], torch.randn(3, 4)
    stacked = Stacked(layers).to(xla.device())
    with torch.no_grad():
        for tensor in stacked.stacked:
            tensor.mul_(0.5)
    after = stacked(x.to(xla.device())).detach().cpu()
    tables = [layer.table.clone() for layer in layers]
    stacked.write_back(layers)
    assert all(layer.first.weight is layer.second.weight for layer in layers)
    assert all(torch.equal(layer.table, table) for layer, table in zip(layers, tables, strict=True))
    for layer in layers:
        layer.table.mul_(0.5)
    torch.testing.assert_close(unrolled(layers, x), after, rtol=1e-4, atol=1e-5)


def test_settings_that_are_tensors_are_compared_to_the_last_bit():
    """They print alike: four decimals, and of a long one the ends."""
    for one, other in (([1.00001, 2.0], [1.00002, 2.0]), ([0.0] * 2000, [0.0] * 999 + [1.0] + [0.0] * 1000)):
        layers = [Layer(4), Layer(4)]
        for layer, values in zip(layers, (one, other), strict=True):
            layer.table = torch.tensor(values)
        with pytest.raises(ValueError, match="layer 1 has setting table"):
            require_equal(layers)
        layers[1].table = layers[0].table.clone()
        require_equal(layers)


def test_frozen_layers_stay_frozen_and_modes_are_followed():
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)).requires_grad_(False).eval() for _ in range(2)]
    stacked, x = Stacked(layers).to(xla.device()), torch.randn(3, 5)
    assert not any(tensor.requires_grad for tensor in stacked.parameters())
    with pytest.raises(ValueError, match="active dropout"):
        stacked.train()(x.to(xla.device()))
    out = stacked.eval()(x.to(xla.device())).cpu()
    torch.testing.assert_close(out, unrolled(layers, x), rtol=1e-4, atol=1e-5)
