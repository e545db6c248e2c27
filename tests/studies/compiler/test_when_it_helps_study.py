"""studies/compiler/when_it_helps: one operation by itself, and after how many calls compiling is paid for."""

from harness.bench import Row, Table

import torch

from examples.compiler.when_it_helps import EAGER
from studies.compiler.when_it_helps import scaled, study
from tests.quiet import ran


def lesson(case, **ms):
    rows = [Row(name, False, 2.0, 0.0, ms=t, speedup=4.0 / t) for name, t in ({EAGER: 4.0} | ms).items()]
    return Table("when_it_helps", case, EAGER, rows)


def test_study():
    tables = [lesson("1x1 tokens", fast=2.0, faster=1.0), lesson("8x2048 tokens", slow=5.0)]
    record = ran(study, lesson=tables).record
    paid = record.facts["the first call has paid for itself after"]
    assert paid == {"1x1 tokens": "faster: 667 calls", "8x2048 tokens": "never"}
    (table,) = record.tables
    assert len(table["rows"]) == (3 if torch.cuda.is_available() else 2), "max-autotune needs a GPU"
    assert torch.equal(scaled(torch.ones(2)), torch.full((2,), 1.5))
