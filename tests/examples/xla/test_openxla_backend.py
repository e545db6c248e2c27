"""torch.compile's openxla backend: programs counted, results right, tensors on the CPU, and what training compiles."""

import pytest
import torch
from torch import nn

from examples.common import xla
from examples.xla import openxla_backend
from examples.xla.openxla_backend import LAZY, OPENXLA, WAYS, through_openxla
from tests.quiet import ran


@pytest.fixture(autouse=True)
def clean():
    xla.start_clean()
    yield
    torch.compiler.reset()
    xla.start_clean()


def test_demo():
    record = ran(openxla_backend.demo, needs="torch_xla>=2.9").record
    assert record.facts["programs of a forward pass"] == {
        LAZY: {"compiled": 1, "run per call": 1, "recorded again": 1},
        OPENXLA: {"compiled": 1, "run per call": 1, "recorded again": 0},
    }
    assert record.facts["programs of 5 training steps"] == {
        name: {"compiled": str(compiled), "run in the last": run}
        for name, compiled, run in (
            (LAZY, [1, 0, 0, 0, 0], 1),
            ("openxla: model", [4, 1, 0, 0, 0], 4),
            ("openxla: model, loss", [3, 0, 0, 0, 0], 4),
            ("openxla: model, loss, update", [3, 0, 0, 0, 0], 3),
            ("openxla: whole step", [1, 0, 0, 0, 0], 1),
        )
    }
    assert len(record.checks) == len(WAYS)
    assert [len(table["rows"]) for table in record.tables] == [4]


def test_through_openxla_says_what_is_not_there():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"0\.weight and 6 more tensors are not on the XLA device; use model\.to"):
        through_openxla(model)
    with pytest.raises(TypeError, match=r"through_openxla: got Tensor; need a module or a function"):
        through_openxla(torch.ones(3))
    compiled = through_openxla(lambda x, y: x + y)
    with pytest.raises(ValueError, match=r"argument 1 is on cpu; move it with \.to\(xla\.device\(\)\)"):
        compiled(torch.ones(3, device=xla.device()), torch.ones(3))
