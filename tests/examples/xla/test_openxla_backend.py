"""torch.compile's openxla backend: programs counted, results right, tensors on the CPU, and what training compiles."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from examples.common import xla
from examples.xla import openxla_backend
from examples.xla.openxla_backend import LAZY, OPENXLA, STEPS, WAYS, Trainer, through_openxla
from tests.quiet import ran


@pytest.fixture(autouse=True)
def clean():
    xla.start_clean()
    yield
    torch.compiler.reset()
    xla.start_clean()


def test_demo():
    record = ran(openxla_backend.demo, needs="torch_xla>=2.9").record
    programs = record.facts["programs of a forward pass"]
    assert programs == {
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
    with pytest.raises(ValueError, match=r"0\.weight and 6 more tensors are not on the XLA device; use model\.to"):
        through_openxla(model)
    with pytest.raises(TypeError, match=r"through_openxla: got Tensor; need a module or a function"):
        through_openxla(torch.ones(3))
    compiled = through_openxla(lambda x, y: x + y)
    with pytest.raises(
        ValueError, match=r"through_openxla: argument 1 is on cpu; move it with \.to\(xla\.device\(\)\)"
    ):
        compiled(torch.ones(3, device=xla.device()), torch.ones(3))


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
