"""The phase dynamo_capture: graphs, inputs, source lines, and the breaks that explain() misses."""

import inspect

import torch
from torch import nn

from compile_inspect.inspecting import run_phase
from compile_inspect.subject import Subject


def scales(x):
    columns = x.shape[1]
    y = (x.sin() + x.cos()) * columns
    z = y.relu()
    scale = z.max().item()
    return z / scale


def breaks_in_a_loop(x):
    x = x.sin()
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        return {"x": torch.relu(self.layer(self.layer(inputs["x"]))), "name": "twice"}


def look(fn, *args, **options):
    return run_phase("dynamo_capture", Subject(fn, args, **options))


def line(fn, text):
    """file:line of the line of fn that has this text."""
    lines, first = inspect.getsourcelines(fn)
    return f"test_dynamo_capture.py:{first + next(i for i, each in enumerate(lines) if text in each)}"


def test_lines_and_their_nodes():
    phase = look(scales, torch.rand(3, 4))
    assert phase.status == "passed", phase.reason
    facts = phase.facts
    assert [graph["operations"] for graph in facts["graphs"]] == [6, 1]
    nodes = {each["at"]: each["nodes"] for each in facts["lines"]}
    assert nodes[line(scales, "x.shape")] == []
    assert nodes[line(scales, "relu")] == ["z"]
    assert len(nodes[line(scales, "cos()")]) == 4
    assert nodes[line(scales, "return")] == ["truediv"]
    assert line(scales, "def ") not in nodes
    assert facts["nodes_per_line"] == {"0": 1, "1": 3, "4": 1}
    assert sum(facts["operations_by_target"].values()) == 7
    assert facts["operations_by_target"]["operator.truediv"] == 1
    assert facts["operations_by_target"]["Tensor.relu"] == 1
    assert (facts["explain"]["graphs"], facts["explain"]["breaks"], facts["missed_by_explain"]) == (2, 1, [])


def test_inputs_are_real_and_tell_parameters():
    for train in (False, True):
        (graph,) = look(Twice(), {"x": torch.ones(2, 4)}, train=train).facts["graphs"]
        by_name = {each["name"]: each for each in graph["inputs"]}
        assert sorted(each["shape"] for each in by_name.values() if each["parameter"]) == [[4], [4, 4]]
        (given,) = (each for each in by_name.values() if not each["parameter"])
        assert (given["type"], given["dtype"], given["shape"]) == ("Tensor", "float32", [2, 4])
        assert (graph["operations"], graph["nodes"]) == (3, 7)


def test_a_line_that_is_run_twice_has_the_nodes_of_both():
    (found,) = look(Twice(), {"x": torch.ones(2, 4)}).facts["lines"]
    assert (found["at"], len(found["nodes"])) == (line(Twice, "self.layer(self.layer"), 3)


def test_explain_misses_a_break_in_a_loop():
    phase = look(breaks_in_a_loop, torch.ones(3))
    assert phase.status == "passed", phase.reason
    assert phase.facts["graphs"] == []
    assert phase.facts["missed_by_explain"] == [line(breaks_in_a_loop, "graph_break()")]
    assert phase.facts["explain"]["breaks"] < 1


def test_what_has_no_graph_is_skipped():
    phase = look(lambda x: 3, torch.ones(3))
    assert (phase.status, "no graph" in phase.reason) == ("skipped", True)
