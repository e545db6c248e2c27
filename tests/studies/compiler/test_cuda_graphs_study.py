"""studies/compiler/cuda_graphs: what a late read of a result gives, on a GPU."""

import pytest

from studies.compiler.cuda_graphs import study
from tests.quiet import ran


@pytest.mark.gpu
def test_late_reads():
    facts = ran(study, lesson=[]).record.facts
    kept = facts["reduce-overhead, a result read after the next call"]
    assert kept["call 1"] == "RuntimeError"
    assert "right" not in kept.values()
    assert set(facts["the same, cloned before that call"].values()) == {"right"}
