"""studies/compiler/backends: what torch lists is not what runs, and what an unknown name is answered."""

from importlib.util import find_spec

from studies.compiler.backends import study
from tests.quiet import ran


def test_study():
    facts = ran(study, lesson=[]).record.facts
    assert {"inductor", "cudagraphs", "openxla", "tvm"} <= set(facts["torch.compiler.list_backends()"])
    dead = facts["listed, but does not run by that name"]
    assert "openxla" in dead or find_spec("torch_xla")
    assert not {"inductor", "cudagraphs"} & set(dead)
