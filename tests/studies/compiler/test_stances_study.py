"""studies/compiler/stances: force_backend, a misspelt name, two shapes before compiling, and another thread."""

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

import torch
from rich.console import Console

from studies.compiler.stances import study


def test_study():
    h = Harness("stances", Needs.parse("torch"), console=Console(quiet=True), timing=False, lesson=[])
    with settings_kept("stances", seed=0):
        study(h)
    torch.compiler.reset()
    facts = h.record.facts
    assert facts["calls with 4, 5 and 6 rows"]["default"] == "compiles, compiles, graph"
    assert facts["calls with 4, 5 and 6 rows"]["eager_then_compile"] == "eager, compiles, graph"
    forced = facts["graphs under force_backend"]
    assert forced["within"] == {"own": 0, "forced": 1}
    assert forced["after"] == {"own": 1, "forced": 1}
    assert "cannot have force_backend" in forced["with force_eager"]
    assert "invalid torch.compile stance" in facts["a stance misspelt"]["first call"]
    assert facts["a call while another thread is within force_eager"] == "runs in eager"
