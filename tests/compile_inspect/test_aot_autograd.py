"""The phase aot_autograd: joint graphs, saved activations and levels of operators of models whose sums are known."""

import pytest
import torch
from torch import nn

from compile_inspect import aot_autograd
from compile_inspect.inspecting import run_phase
from compile_inspect.models import BUNDLED
from compile_inspect.partition import splits
from compile_inspect.subject import Subject

PARTS = ("joint", "forward", "backward")


def look(model, *inputs, train=False):
    phase = run_phase("aot_autograd", Subject(model, inputs, train=train))
    assert phase.status == "passed", phase.reason
    return phase


@pytest.fixture(scope="module")
def mlp():
    model, inputs = BUNDLED["mlp"]()
    return look(model, *inputs)


def test_joint_graph_and_what_is_saved(mlp):
    model, inputs = BUNDLED["mlp"]()
    cases = splits(model, *inputs, cases={"min-cut": ("min-cut", 1.0), "default": ("default", 1.0)})
    torch.compiler.reset()
    (graph,) = mlp.facts["graphs"]
    assert graph == {part: getattr(cases["min-cut"], part) for part in PARTS}
    assert mlp.facts["saved_bytes"] == {name: case.saved_bytes for name, case in cases.items()}
    assert sum(tensor["bytes"] for tensor in mlp.facts["saved"]) == cases["min-cut"].saved_bytes
    assert len(mlp.facts["saved"]) == cases["min-cut"].saved
    products = [tensor for tensor in mlp.facts["saved"] if tensor["operation"] == "addmm"]
    assert [tensor["shape"] for tensor in products] == [[32, 256]], "the first product, which GELU's backward needs"
    assert not mlp.findings


def test_levels(mlp):
    ladder = mlp.facts["ladder"]
    used = ladder["model"]
    assert used["torch"] == 5
    assert used["torch"] < used["aten"] <= used["core_aten"] < used["prims"]
    assert used["loops"] < used["loop_ir"]
    sets = ladder["sets"]
    assert sets["aten"] > sets["lowerings"] > sets["core_aten"] > 100
    assert sets["prims"] > 100
    assert sets["loop_ir"] > 90
    assert ladder["distinct"]["prims"] <= used["prims"]


def test_autograd_is_timed_and_walks_one_node_for_a_compiled_graph(mlp):
    times = mlp.facts["autograd_ms"]
    assert times["aot"]["nodes"] == 1
    assert times["eager"]["nodes"] == 7  # two addmm, two transposes of weights, LayerNorm, GELU, softmax
    assert all(times[name][key] > 0 for name in times for key in ("no_grad", "forward", "backward"))


def test_nothing_requires_a_gradient():
    model, inputs = BUNDLED["pointwise"]()
    phase = look(model, *inputs)
    assert phase.facts["graphs"] == [{"joint": 0, "forward": 3, "backward": 0}]
    assert phase.facts["saved"] == []
    assert phase.facts["autograd_ms"] == {}
    assert phase.facts["ladder"]["model"]["aten"] == 3
    assert not phase.findings


def test_an_input_that_requires_a_gradient_has_a_joint_graph(monkeypatch):
    monkeypatch.setattr(aot_autograd, "ladder", lambda *_: None)
    monkeypatch.setattr(aot_autograd, "time_autograd", lambda *_: {})
    model, (x, y) = BUNDLED["pointwise"]()
    phase = look(model, x.requires_grad_(), y)
    assert phase.facts["graphs"][0]["backward"] > 0
    assert phase.facts["saved"] == [], "backward needs x and y alone, which are inputs"


def test_each_graph_of_a_broken_model(monkeypatch):
    monkeypatch.setattr(aot_autograd, "ladder", lambda *_: None)
    linear = nn.Linear(8, 8)

    def breaks(x):
        y = torch.tanh(linear(x))
        torch._dynamo.graph_break()
        return torch.exp(y)

    phase = look(breaks, torch.randn(4, 8))
    first, second = phase.facts["graphs"]
    assert first["joint"] > second["joint"] > 0
    assert [tensor["operation"] for tensor in phase.facts["saved"]] == ["tanh", "exp"]
    assert phase.facts["autograd_ms"]["aot"]["nodes"] == 2


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"out": x}


@pytest.mark.parametrize("train", [True, False])
def test_large_activations_are_a_finding_in_training_alone(train, monkeypatch):
    monkeypatch.setattr(aot_autograd, "LEAST", 0)
    monkeypatch.setattr(aot_autograd, "ladder", lambda *_: None)
    monkeypatch.setattr(aot_autograd, "time_autograd", lambda *_: {})
    phase = look(Deep(), torch.randn(256, 16), train=train)
    sizes = phase.facts["saved_bytes"]
    assert sizes["min-cut, budget 0.5"] < sizes["min-cut"]
    assert {tensor["bytes"] for tensor in phase.facts["saved"]} == {256 * 16 * 4}
    assert [bool(finding.tried) for finding in phase.findings] == [True] * train


def test_the_model_of_the_user_is_not_changed():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    look(model, torch.randn(16, 8))
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_to_capture_is_skipped():
    assert run_phase("aot_autograd", Subject(lambda x: x.tolist(), (torch.ones(3),))).status == "skipped"
