"""The phase guards: kinds of guards, symbols, duck shaping, the recompilation of another batch size."""

import pytest
import torch
from torch import nn

from compile_inspect import guards
from compile_inspect.inspecting import run_phase
from compile_inspect.report import Phase
from compile_inspect.subject import Subject


def adds(x, y, factor):
    return x + y if x.shape[0] > 3 else x - y * factor


def needs_four(x):
    return x + torch.ones(4, 1)


class Wide(nn.Module):
    """Many modules, and little work."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, inputs):
        x = inputs["x"]
        for layer in self.layers:
            x = layer(x)
        return {"x": x, "name": "wide"}


def look(fn, *args, **options):
    phase = run_phase("guards", Subject(fn, args, **options))
    assert phase.status == "passed", phase.reason
    return phase


@pytest.fixture(scope="module")
def added():
    return look(adds, torch.ones(10, 4), torch.ones(10, 4), 2)


def test_guards_by_kind(added):
    (entry,) = added.facts["entries"]
    assert entry["frame"] == "adds"
    assert entry["kinds"]["TENSOR_MATCH"] == 2
    assert sum(entry["kinds"].values()) == entry["guards"]
    table = next(block for block in added.blocks if block.title == "guards by kind")
    words = {row[0]: row[2] for row in table.rows}
    assert words["TENSOR_MATCH"] == "x is a float32 Tensor on cpu, size [10, 4], stride [4, 1], requires_grad False"
    assert added.facts["guard_us"] < 1e4


def test_symbols_and_duck_shaping(added):
    facts = added.facts
    assert sorted(each["now"] for each in facts["symbols"].values()) == [4, 10]
    assert facts["duck"] == [["x.size(0)", "y.size(0)"], ["x.size(1)", "y.size(1)"]]
    (raw,) = facts["shape_guards"]["raw"]
    assert raw in [f"{symbol} > 3" for symbol in facts["symbols"]]
    assert "4 <= x.size()[0]" in facts["shape_guards"]["installed"]
    assert "y.size()[0] == x.size()[0]" in facts["shape_guards"]["installed"]
    ten = next(each for each in facts["symbols"].values() if each["now"] == 10)
    assert ten["range"].startswith("4 to ")


def test_inputs_of_different_sizes_share_no_symbol():
    facts = look(lambda x, y: (x + 1, y + 1), torch.ones(10), torch.ones(11)).facts
    assert (len(facts["symbols"]), facts["duck"]) == (2, [])


def test_the_example(added):
    example = added.facts["example"]
    assert example["raw"].startswith("2*s")
    assert example["raw"].endswith(" >= 16")
    assert example["installed"] == "8 <= a.size()[0]"


def test_another_batch_size_recompiles_once(added):
    found = added.facts["recompilation"]
    assert "size mismatch at index 0. expected 10, actual 11" in found["reason"]
    assert found["dynamic"]
    assert found["seconds"] > 0
    assert found["counts"] == {"as it is": [1, 1, 0], "mark_dynamic": [1, 0, 0], "dynamic=True": [1, 0, 0]}
    (finding,) = (each for each in added.findings if "batch size" in each.what)
    assert finding.seconds == found["seconds"]
    assert "three sizes: 1 instead of 2" in finding.tried


def test_where_the_batch_cannot_change():
    phase = look(needs_four, torch.ones(4, 2))
    assert phase.facts["recompilation"] is None
    assert not any("batch size" in each.what for each in phase.findings)
    facts = look(lambda number: torch.ones(3) + number, 3).facts  # torch's stance refuses a model without tensors
    assert (facts["recompilation"], facts["guard_us"], facts["entries"][0]["kinds"].get("TENSOR_MATCH")) == (
        None,
        None,
        None,
    )


def test_dear_guards_are_a_finding_if_fewer_cost_less(monkeypatch):
    for left, findings in ((100.0, 1), (900.0, 0)):
        monkeypatch.setattr(guards, "guard_us", lambda subject, left=left, **options: left if options else 1000.0)
        phase, subject = Phase("guards"), Subject(Wide(), ({"x": torch.ones(2, 2)},))
        guards.look_at_time(subject, phase, 10.0)
        assert (phase.facts["guard_us"], phase.facts["share"]) == (1000.0, pytest.approx(0.1))
        assert [(each.ms, each.tried) for each in phase.findings] == [(1.0, "100 us are left.")] * findings
        guards.look_at_time(subject, phase, 100.0)  # of a longer call they are too small a share
        assert len(phase.findings) == findings


def test_nested_inputs_and_training():
    facts = look(Wide(), {"x": torch.ones(2, 2)}, train=True).facts
    assert facts["entries"][0]["kinds"]["TENSOR_MATCH"] == 5
    assert facts["recompilation"]["counts"]["as it is"] == [1, 1, 0]


def test_the_time_is_that_of_guards():
    """Work in the graph adds nothing; guards that are left out are not in it."""
    matrix = torch.ones(600, 600)
    assert guards.guard_us(Subject(lambda x: x @ x @ x @ x, (matrix,))) < 500  # far below the milliseconds of a product


def test_nothing_compiled_is_skipped():
    phase = run_phase("guards", Subject(len, ([1, 2],)))
    assert (phase.status, "compiles no frame" in phase.reason) == ("skipped", True)
