"""The phase basics: results of each backend, the parts of the first call, and repeated blocks."""

import time
from statistics import median

import pytest
import torch
from torch import nn
from torch._dynamo.utils import dynamo_timed

from compile_inspect import basics
from compile_inspect.basics import PARTS, blocks_of, seconds_by_part
from compile_inspect.inspecting import run_phase
from compile_inspect.subject import Subject, Timed
from compile_inspect.triage import Results, error_ratio


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x)) + x


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return {"x": x, "name": "stack"}


def test_results_parts_and_blocks():
    phase = run_phase("basics", Subject(Stack(), (torch.randn(16, 8),)))
    assert phase.status == "passed", phase.reason
    facts = phase.facts
    assert set(facts["errors"]) == {"none", "eager", "aot_eager", "inductor"}
    assert max(facts["errors"].values()) <= 1
    assert facts["float64"]
    assert facts["wrong"] is None
    assert sum(facts["parts"].values()) == pytest.approx(facts["first_call_s"])
    assert all(facts["parts"][part] > 0 for part in PARTS)
    assert 0 <= facts["parts"]["everything else"] < 0.5 * facts["first_call_s"]
    assert (facts["break_even_calls"] is None) == (facts["speedup"] <= 1)
    assert (facts["regional"]["blocks"], facts["regional"]["path"]) == (3, "layers")
    assert not any(finding.urgent for finding in phase.findings)


def test_backends_are_timed_in_turns_with_eager(monkeypatch):
    """Of made-up times the speed-up is the median of ratios; of one that is slower, no call has paid."""

    def in_turns(self, calls):
        columns = [[2.0, 1.0, 5.0], [slower * 4, slower * 4, slower * 20]][-len(calls) :]
        return [Timed(median(each), 0.0, each) for each in columns]

    monkeypatch.setattr(Subject, "in_turns", in_turns)
    for slower, ratio in [(1.0, 4.0), (0.25, 1.0)]:
        facts = run_phase("basics", Subject(nn.Linear(8, 8), (torch.randn(16, 8),))).facts
        assert (facts["compiled_ms"], facts["eager_ms"], facts["speedup"]) == (2.0, 4 * slower, ratio)
        paid = facts["break_even_calls"]
        assert paid is None if ratio == 1 else paid == pytest.approx(1e3 * facts["first_call_s"] / 6, rel=0.1)


def test_a_model_that_returns_no_tensor_is_timed_beside_eager_too(monkeypatch):
    sizes, in_turns = [], Subject.in_turns
    monkeypatch.setattr(Subject, "in_turns", lambda self, calls: sizes.append(len(calls)) or in_turns(self, calls))
    basics.run(subject := Subject(lambda x: x.shape[0], (torch.randn(16, 8),)), "inductor", basics.run(subject, "none"))
    assert sizes == [1, 2]


def test_a_wrong_result_is_urgent():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with torch._inductor.config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        phase = run_phase("basics", Subject(model, (torch.randn(16, 8),)))
    assert phase.facts["wrong"] == "inductor"
    assert phase.facts["errors"]["aot_eager"] <= 1
    assert phase.findings[0].urgent


def test_what_is_new_at_each_call_is_not_compared():
    phase = run_phase("basics", Subject(count_calls, (torch.ones(4),)))
    assert phase.status == "passed", phase.reason
    assert not phase.facts["steady"]
    assert phase.facts["wrong"] is None


calls = torch.zeros(())


def count_calls(x):
    calls.add_(1)
    return x * calls


def test_a_gradient_that_is_only_rounding_is_not_wrong():
    """That of a bias before a norm, which takes the mean off: eager may return zeros where compiled code does not."""
    gradients = [torch.randn(64), torch.randn(16, 16), torch.zeros(16)]

    def ratio(*rest):
        got, eager = Results([*gradients[:2], *rest]), Results(gradients)
        eager.outputs = 1
        return error_ratio(got, eager, [each.double() for each in eager])

    assert ratio(1e-7 * torch.randn(16)) < 1
    assert ratio(1e-4 * torch.randn(16)) > 1
    eager = Results([torch.zeros(64), *gradients[1:]])
    eager.outputs = 1
    assert error_ratio(Results([torch.full((64,), 1e-7), *gradients[1:]]), eager, None) > 1


def test_a_step_has_a_gradient_behind_a_softmax():
    x = torch.randn(4, 8, requires_grad=True)
    Subject(torch.tanh, (x,), train=True).caller(lambda x: torch.softmax(x, -1), (x,), {})()
    assert x.grad.abs().max() > 1e-3


def test_a_model_that_dynamo_leaves_to_eager():
    phase = run_phase("basics", Subject(lambda x: x.tolist(), (torch.ones(4),)))
    assert (phase.status, phase.facts["graphs"]) == ("passed", 0)


def test_a_part_does_not_hold_the_parts_in_it():
    with seconds_by_part() as spent, dynamo_timed("dynamo"):
        time.sleep(0.05)
        with dynamo_timed("create_aot_dispatcher_function"):
            time.sleep(0.1)
            with dynamo_timed("an event that has no part"):
                time.sleep(0.1)
    assert spent["AOTAutograd"] >= 0.2
    assert 0.05 <= spent["Dynamo"] < 0.2
    assert sum(spent.values()) == spent["Dynamo"] + spent["AOTAutograd"]


def test_blocks_are_modules_with_layers_of_their_own():
    assert blocks_of(Stack())[0] == "layers"
    assert blocks_of(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))) == ("", [])
    assert blocks_of(torch.tanh) == ("", [])
