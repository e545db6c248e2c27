"""studies/compiler/cuda_graphs: what a late read of a result gives, on a GPU."""

import pytest

from examples.common.shown import NotShown
from studies.compiler.cuda_graphs import conclude, study
from tests.quiet import ran


def test_results_that_are_not_what_is_said_fail(h):
    kept, right = {"call 1": "RuntimeError", "call 2": "overwritten, no error"}, {"call 1": "right"}
    steps = {"step 1": ["right", "right"]}
    conclude(h, kept, right, steps)
    assert h.record.conclusions[0].startswith("of 2 results read after the next call 1 are wrong without")
    for args in ((right, right, steps), (kept, kept, steps), (kept, right, {"step 1": ["right", "none of them"]})):
        with pytest.raises(NotShown):
            conclude(h, *args)


@pytest.mark.gpu
def test_late_reads():
    facts = ran(study, lesson=[]).record.facts
    kept = facts["reduce-overhead, a result read after the next call"]
    assert kept["call 1"] == "RuntimeError"
    assert "right" not in kept.values()
    assert set(facts["the same, cloned before that call"].values()) == {"right"}
