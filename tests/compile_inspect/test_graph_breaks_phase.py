"""The phase graph_breaks: the line, what it costs, and the fix that it tries."""

import pytest
import torch

from compile_inspect import graph_breaks
from compile_inspect.breaks import Break
from compile_inspect.graph_breaks import fix_of
from compile_inspect.inspecting import run_phase
from compile_inspect.subject import Subject
from tests.compile_inspect import models_of_users as users


def test_an_item_is_found_priced_and_mended():
    phase = run_phase("graph_breaks", Subject(users.step, (torch.randn(64, 64), 2.0)))
    assert phase.status == "passed", phase.reason
    (found,) = phase.facts["breaks"]
    assert found["source"] == "y = y / x.abs().max().item()"
    assert found["at"].startswith("models_of_users.py:")
    assert phase.facts["graphs"] == 2
    assert 0 < phase.facts["outside_ms"] < phase.facts["compiled_ms"]
    assert phase.facts["tried"]["settings"] == ["capture_scalar_outputs"]
    assert phase.facts["tried"]["breaks"] == 0
    saved = max(phase.facts["tried"]["before_ms"] - phase.facts["tried"]["ms"], 0)
    assert (phase.findings[0].ms, phase.findings[0].at_most) == (saved, False)
    assert not torch._dynamo.config.capture_scalar_outputs


def test_breaks_whose_time_cannot_be_had_are_findings_with_their_fix(monkeypatch):
    monkeypatch.setattr(graph_breaks, "time_outside", lambda subject: 1 / 0)
    phase = run_phase("graph_breaks", Subject(users.step, (torch.randn(64, 64), 2.0)))
    (finding,) = phase.findings
    assert (phase.status, finding.cost) == ("failed", "not measured")
    assert "capture_scalar_outputs" in finding.fix


def test_a_whole_graph_has_no_finding():
    phase = run_phase("graph_breaks", Subject(torch.tanh, (torch.ones(4),)))
    assert (phase.status, phase.findings, phase.facts["breaks"]) == ("passed", [], [])


@pytest.mark.parametrize(
    ("source", "reason", "word"),
    [
        ("y = y / t.item()", "Unsupported Tensor.item() call", "capture_scalar_outputs"),
        ("if x.sum() > 0:", "Data-dependent branching", "torch.where"),
        ('print("x", x)', "Failed to trace builtin operator", "is_compiling"),
        ("x = x[x > 0]", "Dynamic shape operator (no meta kernel): aten.nonzero.default", "torch.where"),
        ("x = helper(x)", "Attempted to call function marked as skipped", "custom_op"),
        ("for d in divisors:", "generator", "list"),
        ("z = strange(x)", "Something new. ", "Something new"),
    ],
)
def test_each_cause_has_its_fix(source, reason, word, monkeypatch):
    monkeypatch.setattr(Break, "source", property(lambda self: source))
    assert word in fix_of(Break("f.py", 1, reason, ""))[0]


def test_of_a_package_s_line_the_setting_is_proposed_and_whose_it_is(monkeypatch):
    monkeypatch.setattr(Break, "source", "y = y / t.item()")
    file = "/venv/lib/python3.12/site-packages/package/utils/loop.py"
    said = "set torch._dynamo.config.capture_scalar_outputs = True (the line is one of package)"
    assert fix_of(Break(file, 1, "", ""))[0] == said
