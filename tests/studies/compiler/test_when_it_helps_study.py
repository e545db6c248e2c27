"""studies/compiler/when_it_helps: one operation by itself, and after how many calls compiling is paid for."""

from harness.bench import Row, Table
from harness.catalog import Needs
from harness.session import Harness

import pytest
import torch
from rich.console import Console

from examples.compiler.when_it_helps import EAGER
from studies.compiler.when_it_helps import one_operation, scaled, study


def lesson(**ms):
    rows = [Row(name, False, 2.0, 0.0, ms=t, speedup=4.0 / t) for name, t in ({EAGER: 4.0} | ms).items()]
    return Table("when_it_helps", "1x1 tokens", EAGER, rows)


def test_study():
    tables = [lesson(fast=2.0, faster=1.0), lesson(slow=5.0)]
    tables[1].case = "8x2048 tokens"
    h = Harness("when_it_helps", Needs.parse("torch"), console=Console(quiet=True), timing=False, lesson=tables)
    study(h)
    paid = h.record.facts["the first call has paid for itself after"]
    assert paid == {"1x1 tokens": "faster: 667 calls", "8x2048 tokens": "never"}
    (table,) = h.record.tables
    assert len(table["rows"]) == 2
    assert torch.equal(scaled(torch.ones(2)), torch.full((2,), 1.5))


@pytest.mark.gpu
def test_one_operation_loses_when_compiled():
    h = Harness("when_it_helps", Needs.parse("torch"), console=Console(quiet=True))
    one_operation(h)
    assert h.record.tables[0]["rows"][1]["speedup"] < 0.9
