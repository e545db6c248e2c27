"""studies/compiler/caching: a switch that does not do what it should fails the run."""

import pytest
import torch

from examples.common.shown import NotShown
from examples.compiler.caching_key import CACHES
from studies.compiler import caching
from studies.compiler.caching import NOT_A_VARIABLE
from tests.quiet import ran

HIT, MISS, SILENT = (dict.fromkeys(CACHES, answer) for answer in ("hit", "miss", "not asked"))


@pytest.mark.parametrize(
    ("complaint", "where", "change"),
    [
        (None, None, None),
        (f"{NOT_A_VARIABLE} kept 1 files", "kept/entry", b""),
        ("nothing was kept in the temporary", "tmp/entry", None),
        (f"{NOT_A_VARIABLE} kept 0 files: .*hit", NOT_A_VARIABLE, {"found": HIT}),
        ("FORCE_DISABLE_CACHES=1: .*hit", "caches off", {"found": HIT}),
        ("FX_GRAPH_CACHE=0", "FX graph cache off", {"found": MISS}),
        ("images of machine code", "artifacts", b"..\x7fELF.."),
        ("below a file was taken", "no folder", {"calls": [None, None]}),
        ("without a compiler", "no compiler", {"calls": [None, None]}),
    ],
)
def test_a_switch_that_does_not_do_what_it_should_fails(h, tmp_path, complaint, where, change):
    """What the processes of a run say on a CPU, and each thing that would be wrong with it."""
    h.device = torch.device("cpu")
    results = {NOT_A_VARIABLE: {"found": MISS}}
    results |= {"caches off": {"found": SILENT}, "FX graph cache off": {"found": SILENT}}
    results |= {name: {"calls": ["NotADirectoryError: no", None]} for name in ("no folder", "no compiler")}
    for name in ("kept", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "tmp" / "entry").touch()
    (tmp_path / "artifacts").write_bytes(b"a graph")
    if where in results:
        results[where].update(change)
    elif where:
        (tmp_path / where).unlink() if change is None else (tmp_path / where).write_bytes(change)
    built = {name: set() for name in ("cold", "mega", "caches off")}

    def conclude():
        caching.the_bytes(h, tmp_path, {"cold": {"saved": {"inductor": 2}}}, built)
        caching.variables(h, tmp_path, results, built)
        caching.faults(h, tmp_path, results)

    if complaint:
        with pytest.raises(NotShown, match=complaint):
            conclude()
    else:
        conclude()
        assert h.record.facts["variables"][NOT_A_VARIABLE].startswith("0 files")


@pytest.mark.slow
def test_the_study():
    """In processes, for real: what torch says of each fault."""
    facts = ran(caching.study, lesson=[]).record.facts
    assert facts["variables"][NOT_A_VARIABLE].startswith("0 files")
    assert facts["a cache folder that cannot be"].startswith("NotADirectoryError: ")
    if torch.cuda.is_available():  # Triton's kernels are in the bytes
        built = facts["cubins built"]
        assert built["cold"] > built["mega-cache"] == 0
        assert facts["mega-cache"]["images of machine code"] >= built["cold"]
    else:
        assert "no-such-compiler" in facts["no compiler"]
