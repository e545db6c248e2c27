"""The phase frame_evaluation: when frames are compiled, their bytecode, trackers of locals, kinds of functions."""

import inspect

import torch
from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from compile_inspect.frame_evaluation import converted, entries_of, tracked
from compile_inspect.inspecting import run_phase
from compile_inspect.subject import Subject


def doubles(y):
    doubled = y * 2
    return doubled


def prints(x, factor):
    times = factor
    z = doubles(x.sin()) * times
    torch._dynamo.graph_break()
    return z + 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        linear = self.linear
        return linear(x)


def look(fn, *args, **options):
    phase = run_phase("frame_evaluation", Subject(fn, args, **options))
    assert phase.status == "passed", phase.reason
    return phase.facts


def test_the_first_call_compiles_and_a_break_resumes():
    facts = look(prints, torch.ones(3), 3)
    assert facts["compiled_at"] == {
        "entries_before_call": 0, "entries_after_call": 2, "frames_before_call": 0, "frames_after_call": 2,
    }  # fmt: skip
    first, second = facts["frames"]
    assert first["name"] == "prints"
    assert [name.startswith(("__compiled_fn_", "__resume_at_")) for name in first["calls"]] == [True, True]
    assert [name.startswith("__compiled_fn_") for name in second["calls"]] == [True]
    assert all(frame["before"] > 5 and frame["after"] > 5 for frame in (first, second))
    (resumed,) = facts["resumes"]
    lines, start = inspect.getsourcelines(prints)
    at = start + next(i for i, line in enumerate(lines) if "graph_break" in line)
    assert (resumed["at"], resumed["source"]) == (f"test_frame_evaluation.py:{at}", "torch._dynamo.graph_break()")
    assert resumed["name"] == second["name"]


def test_entries_before_the_call_are_counted_where_they_are():
    """The same count on a function that was called before is not 0."""

    def fn(x):
        return x + 1

    with converted() as frames:
        torch.compile(fn, backend="eager")(torch.ones(3))
    assert [old for old, _ in frames] == [fn.__code__]
    assert len(entries_of(fn.__code__)) == 1
    assert look(fn, torch.ones(3))["compiled_at"]["entries_before_call"] == 0  # it starts from nothing


def test_trackers_by_name_of_inlined_functions_too():
    step = InstructionTranslatorBase.step
    trackers = look(prints, torch.ones(3), 3)["trackers"]
    assert trackers["prints"] == {
        "x": "TensorVariable", "factor": "ConstantVariable", "times": "ConstantVariable", "z": "TensorVariable",
    }  # fmt: skip
    assert trackers["doubles"] == {"y": "TensorVariable", "doubled": "TensorVariable"}
    with tracked() as found:
        assert InstructionTranslatorBase.step is not step
    assert InstructionTranslatorBase.step is step
    assert found == {}
    held = look(Layer(), torch.ones(2, 4), train=True)["trackers"]
    (held,) = (known for function, known in held.items() if function.endswith("forward"))
    assert held["x"] == "TensorVariable"
    assert "NNModuleVariable" in held["linear"]


def test_kinds_are_counted():
    kinds = look(lambda x: 3, torch.ones(3))["kinds"]
    assert kinds["generator"] == kinds["async generator"] == kinds["coroutine that awaits"] == "eager"
    assert kinds["function over a generator"] == "compiled"
    assert kinds["coroutine"] == ("compiled" if torch.__version__ >= "2.15" else "not tried")


def test_a_function_without_a_frame():
    facts = look(len, [1, 2])
    assert (facts["frames"], facts["resumes"], facts["compiled_at"]["entries_after_call"]) == ([], [], 0)
