"""studies/compiler/caching: a switch that does not do what it should fails the run."""

from copy import deepcopy

import pytest
import torch

from examples.common.shown import NotShown
from examples.compiler.caching_key import CACHES
from studies.compiler import caching
from studies.compiler.caching import NOT_A_VARIABLE

HIT, MISS, SILENT = (dict.fromkeys(CACHES, answer) for answer in ("hit", "miss", "not asked"))
# What the processes of a run say on a CPU.
RESULTS = {
    NOT_A_VARIABLE: {"found": MISS}, "caches off": {"found": SILENT}, "FX graph cache off": {"found": SILENT},
    "no folder": {"calls": ["NotADirectoryError: no", None]}, "no compiler": {"calls": ["InductorError: no", None]},
}  # fmt: skip
WRONG = [
    (f"{NOT_A_VARIABLE} kept 1 files", "kept/entry", b""),
    ("nothing was kept in the temporary", "tmp/entry", None),
    (f"{NOT_A_VARIABLE} kept 0 files: .*hit", NOT_A_VARIABLE, {"found": HIT}),
    ("FORCE_DISABLE_CACHES=1: .*hit", "caches off", {"found": HIT}),
    ("FX_GRAPH_CACHE=0", "FX graph cache off", {"found": MISS}),
    ("images of machine code", "artifacts", b"..\x7fELF.."),
    ("below a file was taken", "no folder", {"calls": [None, None]}),
    ("without a compiler", "no compiler", {"calls": [None, None]}),
]


def conclude(h, folder, results):
    h.device, built = torch.device("cpu"), {name: set() for name in ("cold", "mega", "caches off")}
    caching.the_bytes(h, folder, {"cold": {"saved": {"inductor": 2}}}, built)
    caching.variables(h, folder, results, built)
    caching.faults(h, folder, results)


@pytest.fixture
def folder(tmp_path):
    for name in ("kept", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "tmp" / "entry").touch()
    (tmp_path / "artifacts").write_bytes(b"a graph")
    return tmp_path


def test_a_run_where_all_is_well(h, folder):
    conclude(h, folder, RESULTS)
    assert h.record.facts["variables"][NOT_A_VARIABLE].startswith("0 files")


@pytest.mark.parametrize(("complaint", "where", "change"), WRONG, ids=[where for _, where, _ in WRONG])
def test_a_switch_that_does_not_do_what_it_should_fails(h, folder, complaint, where, change):
    results = deepcopy(RESULTS)
    if where in results:
        results[where].update(change)
    elif change is None:
        (folder / where).unlink()
    else:
        (folder / where).write_bytes(change)
    with pytest.raises(NotShown, match=complaint):
        conclude(h, folder, results)
