"""studies/compiler/backends: what torch lists is not what runs, and what an unknown name is answered."""

from importlib.util import find_spec

from harness.catalog import Needs
from harness.session import Harness
from harness.settings import settings_kept

from rich.console import Console

from studies.compiler.backends import study


def test_study():
    h = Harness("backends", Needs.parse("torch"), console=Console(quiet=True), timing=False, lesson=[])
    with settings_kept("backends", 0):
        study(h)
    facts = h.record.facts
    assert {"inductor", "cudagraphs", "openxla", "tvm"} <= set(facts["torch.compiler.list_backends()"])
    dead = facts["listed, but does not run by that name"]
    assert "openxla" in dead or find_spec("torch_xla")
    assert not {"inductor", "cudagraphs"} & set(dead)
    assert facts["a backend of two lines saw"] == ["linear", "gelu", "layer_norm", "linear"]
    assert facts["asked for 'inducter'"]["torch"].startswith("InvalidBackend: Invalid backend: 'inducter'")
    assert "did you mean inductor?" in facts["asked for 'inducter'"]["backend()"]
