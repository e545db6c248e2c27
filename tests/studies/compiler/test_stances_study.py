"""studies/compiler/stances: force_backend, a misspelt name, two shapes before compiling, and another thread."""

from studies.compiler.stances import study
from tests.quiet import ran


def test_study():
    facts = ran(study, lesson=[]).record.facts
    assert facts["calls with 4, 5 and 6 rows"]["default"] == "compiles, compiles, graph"
    assert facts["calls with 4, 5 and 6 rows"]["eager_then_compile"] == "eager, compiles, graph"
    forced = facts["graphs under force_backend"]
    assert forced["within"] == {"own": 0, "forced": 1}
    assert forced["after"] == {"own": 1, "forced": 1}
    assert "invalid torch.compile stance" in facts["a stance misspelt"]["first call"]
    assert facts["a call while another thread is within force_eager"] == "runs in eager"
