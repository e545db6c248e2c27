"""torch.compile's openxla backend: programs counted, results right, tensors on the CPU, and what training compiles."""

import copy

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from examples.common import xla
from examples.xla import openxla_backend
from examples.xla.openxla_backend import LAZY, OPENXLA, STEPS, WAYS, Trainer, count_phases, through_openxla
from studies.xla import openxla_backend as study
from studies.xla import openxla_backend_training as training


def quiet(**options) -> Harness:
    return Harness("test", Needs.parse("torch_xla>=2.9"), console=Console(quiet=True), timing=False, **options)


@pytest.fixture(autouse=True)
def clean():
    xla.start_clean()
    yield
    torch.compiler.reset()
    xla.start_clean()


def ran(fn, **options):
    h = quiet(**options)
    with settings_kept("openxla_backend", seed=0):
        fn(h)
    assert all(check["passed"] for check in h.record.checks)
    assert all(row["ms"] is None for table in h.record.tables for row in table["rows"])  # nothing is timed here
    return h.record


def test_demo():
    record = ran(openxla_backend.demo)
    programs = record.facts["programs of a forward pass"]
    assert {name: {what: n for what, n in each.items() if what != "compile s"} for name, each in programs.items()} == {
        LAZY: {"compiled": 1, "run per call": 1, "recorded again": 1},
        OPENXLA: {"compiled": 1, "run per call": 1, "recorded again": 0},
    }
    assert record.facts["programs of 5 training steps"] == {
        name: {"compiled": str(compiled), "run in the last": run}
        for name, compiled, run in (
            (LAZY, [1, 0, 0, 0, 0], 1),
            ("openxla: model", [4, 2, 0, 0, 0], 4),
            ("openxla: model, cut before backward", [5, 0, 0, 0, 0], 5),
            ("openxla: model, loss", [3, 0, 0, 0, 0], 4),
            ("openxla: model, loss, update", [3, 0, 0, 0, 0], 3),
            ("openxla: whole step", [1, 0, 0, 0, 0], 1),
        )
    }
    assert len(record.checks) == len(WAYS)
    assert [len(table["rows"]) for table in record.tables] == [4]


def test_the_study_of_training():
    record = ran(training.study, lesson=[])
    facts = record.facts
    by_phase = facts["by phase, openxla: model"]
    assert by_phase["step 1, compiled"] == {"forward": 1, "loss": 0, "backward": 2, "update": 0, "sync": 1}
    assert by_phase["step 2, compiled"] == {"forward": 0, "loss": 0, "backward": 1, "update": 0, "sync": 1}
    assert by_phase["step 2, run"] == {"forward": 1, "loss": 0, "backward": 2, "update": 0, "sync": 1}
    assert facts["a snapshot on the device, after copy_() put it back and a step"] == {
        "lazy": "as it was",
        "lazy, a sync after copy_()": "gone: RuntimeError",
        "openxla": "gone: RuntimeError",
        "openxla, copy_() of a clone": "gone: RuntimeError",
        "openxla, copy_() from the CPU": "as it was",
    }
    assert len(record.checks) == 4
    assert [len(table["rows"]) for table in record.tables] == [4]


def test_the_study_of_tensors_on_the_cpu():
    record = ran(study.study, lesson=[])
    on_cpu = record.facts["tensors on the CPU, given to openxla"]
    right = {
        "warnings": 0,
        "at the second call": 0,
        "programs per call": 1,
        "transfers per call": 0,
        "result on": "xla",
    }
    assert on_cpu["all on the XLA device"] == right
    assert on_cpu["all on the CPU"] == right | {"warnings": 2, "programs per call": 0, "result on": "cpu"}
    assert on_cpu["x on the CPU"] == {"raises": "TorchRuntimeError"}
    assert on_cpu["x on the CPU, moved in the graph"] == right | {"warnings": 1, "transfers per call": 1}
    scalar = {"warnings": 1, "programs per call": 2, "transfers per call": 1}
    assert on_cpu["a scalar tensor on the CPU"] == right | scalar
    assert len(record.checks) == 4


@given(rows=st.integers(1, 4), width=st.sampled_from((3, 5)))
@settings(max_examples=8, deadline=None)
def test_through_openxla_any_rows(rows, width):
    """Each size is a graph of its own, and right."""
    w, x = torch.randn(width, 7), torch.randn(rows, width)
    torch.compiler.reset()
    compiled = through_openxla(lambda x, w: torch.tanh(x @ w))
    for rows_of_x in (x, torch.cat((x, x))):
        got = compiled(rows_of_x.to(xla.device()), w.to(xla.device()))
        assert got.device.type == "xla"
        torch.testing.assert_close(got.cpu(), torch.tanh(rows_of_x @ w), rtol=1e-5, atol=1e-5)


def test_through_openxla_says_what_is_not_there():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"0\.weight and 6 more tensors .* not on the XLA device; use model\.to"):
        through_openxla(model)
    with pytest.raises(ValueError, match=r"through_openxla: weight is not on the XLA device"):
        through_openxla(nn.Linear(3, 3, bias=False))
    with pytest.raises(TypeError, match=r"through_openxla: got Tensor; need a module or a function"):
        through_openxla(torch.ones(3))
    compiled = through_openxla(lambda x, y: x + y)
    with pytest.raises(
        ValueError, match=r"through_openxla: argument 1 is on cpu; move it with \.to\(xla\.device\(\)\)"
    ):
        compiled(torch.ones(3, device=xla.device()), torch.ones(3))


def test_what_is_no_tensor_passes():
    compiled = through_openxla(lambda x, by, plus: x * by + plus)
    assert compiled(torch.ones(3, device=xla.device()), 2.5, 1).tolist() == [3.5] * 3


def test_trainer_knows_its_ways():
    with pytest.raises(ValueError, match=r"Trainer: 'model, backward' is none of the ways"):
        Trainer(nn.Linear(3, 3), "model, backward")


@pytest.mark.parametrize("how", [how for how in WAYS.values() if how])
def test_a_step_is_that_of_eager(how):
    """Losses of the steps and the weights after them; reset() starts over."""
    model = nn.Linear(6, 5)
    x, y = torch.randn(8, 6), torch.randint(5, (8,))
    eager = Trainer(copy.deepcopy(model).double(), None)
    trainer = Trainer(model.to(xla.device()), how)
    want = [eager(x.double(), y).item() for _ in range(STEPS)]
    for _ in range(2):
        got = [trainer(x.to(xla.device()), y.to(xla.device())).item() for _ in range(STEPS)]
        assert got == pytest.approx(want, rel=1e-5)
        for weight, exact in zip(trainer.model.parameters(), eager.model.parameters(), strict=True):
            torch.testing.assert_close(weight.detach().cpu().double(), exact.detach(), rtol=1e-5, atol=1e-6)
        trainer.reset()


def test_phases_of_eager_do_nothing_in_xla():
    counts = count_phases(Trainer(nn.Linear(3, 4), None), torch.randn(2, 3), torch.tensor([1, 2]))
    assert list(counts) == ["forward and loss", "backward", "update", "sync"]
    assert not any(ran.compiles or ran.executions for ran in counts.values())


def test_profile_runs_the_tables_only(monkeypatch):
    """Each table by itself: compiling for them is the demo's business."""
    tables = []
    for module, name in ((openxla_backend, "wake"), (openxla_backend, "inference"), (training, "training")):
        monkeypatch.setattr(module, name, lambda *_, name=name: tables.append(name))
    monkeypatch.setattr(training, "wake", lambda device: None)
    h = quiet(profile=True)
    openxla_backend.demo(h)
    training.study(h)
    study.study(h)
    assert tables == ["wake", "inference", "training"]
    assert not any(h.record.facts.values())
    assert not h.record.checks
