"""The phase triage: wrong results are found, to the operation, with planted faults; right ones are not."""

import math

import pytest
import torch
from torch import nn

from compile_inspect import triage
from compile_inspect.inspecting import run_phase
from compile_inspect.subject import Subject
from compile_inspect.triage import error_ratio, results


def layered() -> Subject:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    return Subject(model, (torch.randn(4, 8),))


def test_a_fault_of_inductor_is_found_to_the_operation(monkeypatch):
    monkeypatch.setattr(triage, "MINIFYING", 120.0)
    with torch._inductor.config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        phase = run_phase("triage", layered())
    assert phase.status == "passed", phase.reason
    assert phase.facts["stage"] == "inductor"
    assert phase.facts["first_wrong"]["operation"] == "relu"
    assert phase.facts["minified"] == 1
    assert phase.findings[0].urgent


def test_a_compiler_that_fails_is_told_with_its_reason(monkeypatch):
    def fails(graph, inputs):
        raise ValueError("no such kernel")

    monkeypatch.setattr(triage, "compiled_by", lambda stage: lambda fn: torch.compile(fn, backend=fails))
    ratio, said = triage.outcome(lambda: results(layered(), triage.compiled_by("x")), [], None)
    assert ratio == math.inf
    assert "no such kernel" in said


def test_what_is_right_is_not_bisected():
    phase = run_phase("triage", Subject(lambda x: x.sin() + 1, (torch.randn(64),)))
    assert (phase.status, phase.facts["stage"], phase.findings) == ("passed", None, [])
    assert max(phase.facts["errors"].values()) <= 1


def test_a_model_that_differs_by_itself_is_skipped():
    calls = []

    def unsteady(x):
        calls.append(1)
        return x * len(calls)

    phase = run_phase("triage", Subject(unsteady, (torch.randn(8),)))
    assert phase.status == "skipped"


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        (lambda y: y, False), (lambda y: y * 1.001, True), (torch.zeros_like, True), (lambda y: y[:-1], True),
        (lambda y: y.double(), True), (lambda y: y.where(y < y.max(), torch.nan), True),
        (lambda y: y * (1 + 1e-7), False), (lambda y: y.mean().expand_as(y), True),
    ],
)  # fmt: skip
def test_the_allowed_error_lets_rounding_pass_and_nothing_else(spoil, wrong):
    exact = torch.randn(64, dtype=torch.float64) * 1e-6 - 2e-6
    eager = exact.float()
    assert (error_ratio([spoil(eager)], [eager], [exact]) > 1) == wrong


def test_integers_must_be_equal_and_nothing_may_be_missing():
    counts = torch.arange(4)
    assert error_ratio([counts], [counts], [counts]) == 0
    assert error_ratio([counts + 1], [counts], [counts]) == math.inf
    assert error_ratio([], [counts], [counts]) == math.inf
