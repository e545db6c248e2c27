"""Models and inputs as a command line names them, and a model that stays as its owner had it."""

import functools
import threading
import time
import warnings

import pytest
import torch
from torch import nn

from compile_inspect.inspecting import inspect, run_phase, state_kept
from compile_inspect.report import page
from compile_inspect.subject import Subject, SubjectError, make_inputs, make_model, make_subject, modules_of, tensors_of
from tests.compile_inspect import models_of_users as users

FILE, CPU = users.__file__, torch.device("cpu")


def test_a_model_is_named_by_module_or_by_path():
    assert make_model("tests.compile_inspect.models_of_users:step") is users.step
    assert isinstance(make_model(f"{FILE}:make_model"), nn.Sequential)
    assert isinstance(make_model(f"{FILE}:Counts"), nn.Module)  # a class is made
    assert isinstance(make_model(f"{FILE}:made"), nn.Linear)
    assert make_model(f"{FILE}:step").__name__ == "step"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere.at_all:f", "importing it raises ModuleNotFoundError"),
        ("nowhere.py:f", "no such file"),
        (f"{FILE}:gone", "it has step, Counts"),
        (FILE, "name one of"),
        (f"{FILE}:number", "is int; name a function"),
        (f"{FILE}:needs_arguments", "the class needs arguments"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_sentence(spec, says):
    with pytest.raises(SubjectError, match=says):
        make_model(spec)


def test_a_file_that_fails_or_exits_is_one_sentence(tmp_path):
    for text, says in (
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("def f(:", "SyntaxError"),
    ):
        path = tmp_path / "broken.py"
        path.write_text(text)
        with pytest.raises(SubjectError, match=says):
            make_model(f"{path}:f")


def test_inputs_are_made_from_shapes():
    model = nn.Sequential(nn.Embedding(5, 4))
    (tokens, x, flags, scale), _ = make_inputs(
        ["8x128:int64", "2x3:bfloat16", "4:bool", "python:0.5"], None, model, CPU
    )
    assert (tokens.shape, tokens.dtype, int(tokens.max()) < 5) == ((8, 128), torch.int64, True)
    assert (x.shape, x.dtype, flags.dtype, scale) == ((2, 3), torch.bfloat16, torch.bool, 0.5)
    args, kwargs = make_inputs([], f"{FILE}:make_inputs", model, CPU)
    assert (args, kwargs["scale"], kwargs["x"].shape) == ((), 2.0, (4, 8))


@pytest.mark.parametrize("spec", ["8y3", "3x", "4:softmax", "python:f(", "x4", "-1x3"])
def test_an_input_that_cannot_be_had_is_one_sentence(spec):
    with pytest.raises(SubjectError, match="--input"):
        make_inputs([spec], None, nn.Identity(), CPU)


def test_what_cannot_be_inspected_is_refused():
    for model in (3, torch.compile(users.step), torch.compile(nn.Linear(2, 2))):
        with pytest.raises(SubjectError, match="inspect"):
            Subject(model)
    with pytest.raises(SubjectError, match=r"finds no GPU|cannot"):
        make_subject("mlp", [], None, "cuda:99", False)
    with pytest.raises(ValueError, match="the phases are basics"):
        inspect(users.step, torch.ones(2), phases=("basic",))


def test_the_model_and_torch_stay_as_they_were():
    model, x = users.Counts(), torch.ones(3)
    before = (torch._dynamo.config.capture_scalar_outputs, torch.is_grad_enabled(), torch.get_rng_state())
    report = inspect(model, x, phases=("graph_breaks",))
    assert report["graph_breaks"].status == "passed"
    assert (model.calls_made, float(model.calls), float(x.sum()), model.training) == (0, 0.0, 3.0, True)
    after = (torch._dynamo.config.capture_scalar_outputs, torch.is_grad_enabled(), torch.get_rng_state())
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, after, strict=True))


def test_settings_that_a_phase_leaves_behind_are_put_back():
    limit = torch._dynamo.config.recompile_limit
    with state_kept():
        torch._dynamo.config.recompile_limit = limit + 5
        torch._inductor.config.fallback_random = True
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
    assert torch._dynamo.config.recompile_limit == limit
    assert not torch._inductor.config.fallback_random
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_a_phase_that_raises_keeps_what_it_saw(monkeypatch):
    from compile_inspect import graph_breaks

    def fails(subject):
        raise MemoryError("can't allocate memory: you tried to allocate 100 GiB")

    monkeypatch.setattr(graph_breaks, "time_outside", fails)
    phase = run_phase("graph_breaks", Subject(users.step, (torch.ones(4), 2.0)))
    assert phase.status == "failed"
    assert "try smaller inputs" in phase.reason
    assert phase.facts["graphs"] == 2
    assert phase.blocks


def test_a_slow_call_is_made_a_few_times_only(monkeypatch):
    monkeypatch.setattr("compile_inspect.subject.BUDGET", 0.001)
    calls = []
    assert Subject(torch.sin).timed(lambda: calls.append(time.sleep(0.002))).ms >= 2
    assert len(calls) == 4


def test_tensors_are_found_in_what_models_return():
    class Output:
        def __init__(self):
            self.logits, self.name = torch.ones(2), "x"

    nested = {"a": [torch.ones(1), 3], "b": (Output(), None)}
    assert [tensor.numel() for tensor in tensors_of(nested)] == [1, 2]
    assert tensors_of("text") == []


def test_a_bound_method_a_partial_and_an_object_are_copied_with_their_modules():
    owner = users.Counts()
    for model in (owner.forward, functools.partial(owner, torch.ones(3)), Holds(owner)):
        subject = Subject(model, () if isinstance(model, functools.partial) else (torch.ones(3),))
        fn, args, kwargs = subject.fresh()
        subject.caller(fn, args, kwargs)()
        assert [module.training for module in modules_of(fn)] == [False]
    assert (owner.calls_made, float(owner.calls), owner.training) == (0, 0.0, True)


class Holds:
    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x)


def test_what_cannot_be_copied_gets_its_modes_and_gradients_back():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout()), torch.ones(2, 3)
    model.lock, model[0].weight.grad = threading.Lock(), torch.ones(3, 3)
    for each in (model, lambda x: model(x)):
        phase = inspect(each, x, phases=("triage",), train=True)["triage"]
        assert (phase.status, phase.facts["stage"], phase.facts["float64"]) == ("passed", None, False)
        inspect(each, x, phases=("dynamo_capture",))
    assert all(module.training for module in model.modules())
    assert (model[0].weight.grad.sum(), model[0].bias.grad, model[0].weight.dtype) == (9, None, torch.float32)


def test_what_torch_compile_cannot_take_is_one_sentence():
    async def coroutine(x):
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        script = torch.jit.script(nn.Linear(2, 2))
    for model, says in ((script, "TorchScript"), (coroutine, "coroutine"), (lambda x: (yield x), "generator")):
        with pytest.raises(SubjectError, match=says):
            Subject(model, (torch.ones(2),))


def test_what_the_model_compiles_inside_is_eager_where_eager_is_timed():
    ran = []

    def backend(graph, inputs):
        return lambda *values: ran.append(1) or graph.forward(*values)

    inner = torch.compile(torch.sin, backend=backend)
    report = inspect(lambda x: inner(x) + 1, torch.ones(4), phases=("basics",))
    assert report["basics"].facts["wrong"] is None
    assert len(ran) <= 1  # before the phases, in which eager runs it or the compiler that is asked for


def test_flags_that_a_model_sets_are_put_back():
    def sets(x):
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = True, True
        return x

    inspect(sets, torch.ones(2), phases=())
    assert torch.get_deterministic_debug_mode() == 0
    assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.deterministic


def test_that_phases_share_a_model_is_said():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    report = inspect(model, torch.ones(2), phases=())
    assert "cannot be copied (TypeError)" in report.shared
    assert "cannot be copied" in str(report)
    assert "cannot be copied" in page(report)
    assert inspect(nn.Linear(2, 2), torch.ones(2), phases=()).shared == ""
