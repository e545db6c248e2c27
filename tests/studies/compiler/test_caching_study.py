"""studies/compiler/caching: faults with their messages; a switch that does not do what it should fails the run."""

import os

import pytest
import torch

from examples.compiler.caching import CACHES, NOT_A_VARIABLE, CannotCompile, NotShown
from studies.compiler import caching
from studies.compiler.caching import advice, usable_folder
from tests.quiet import ran

HIT, MISS, SILENT = (dict.fromkeys(CACHES, answer) for answer in ("hit", "miss", "not asked"))


def test_a_folder_that_can_be_used_and_those_that_cannot(tmp_path):
    folder = tmp_path / "new" / "folder"
    for path in (folder, str(folder)):
        assert usable_folder(path) == folder
    assert list(folder.iterdir()) == []
    (tmp_path / "file").touch()
    for below, error in (("file", FileExistsError), ("file/cache", NotADirectoryError)):
        with pytest.raises(error, match=r"usable_folder: cannot write in .*file.* set TORCHINDUCTOR_CACHE_DIR to"):
            usable_folder(tmp_path / below)
    with pytest.raises(TypeError, match="usable_folder: got None; pass the path of a folder"):
        usable_folder(None)
    if os.geteuid():  # root may write everywhere
        folder.chmod(0o555)
        with pytest.raises(PermissionError, match="usable_folder: cannot write in"):
            usable_folder(folder)


COMPILER, FOLDER = "install a C++ compiler", "set TORCHINDUCTOR_CACHE_DIR"


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (RuntimeError("No working C++ compiler found in torch._inductor.config.cpp.cxx"), COMPILER),
        (RuntimeError("Compiler: g++ is not found."), COMPILER),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), COMPILER),
        (FileNotFoundError(2, "No such file or directory", "/chosen/cc"), COMPILER),
        (PermissionError(13, "Permission denied"), FOLDER),
        (RuntimeError("PermissionError: [Errno 13] Permission denied: 'x'"), FOLDER),
        (AssertionError("Artifact of type=precompile already registered in"), "start it again"),
        (ValueError("something else"), None),
    ],
)
def test_advice(monkeypatch, error, fix):
    monkeypatch.setenv("CC", "/chosen/cc")
    assert advice(error) is None if fix is None else fix in advice(error)


# What the processes of a run say, and each thing that would be wrong with it.


def canned(tmp_path):
    """A run's processes as they end on a CPU, and the files that they leave."""
    row = {"imports s": 1.5, "first call s": 0.5, "process s": 4.0}
    rows = {
        "cold": row | {"network": MISS, "product": MISS, "built": 2, "saved": {"inductor": 2}},
        "warm folder": row | {"network": HIT, "product": HIT, "built": 0},
        "mega-cache": row | {"network": HIT, "product": HIT, "built": 2, "load s": 0.1},
    }
    fault = {"error": "NotADirectoryError: no", "advice": "set it"}
    results = {
        NOT_A_VARIABLE: {"product": MISS},
        "caches off": row | {"network": SILENT, "product": SILENT, "built": 2},
        "AOTAutogradCache off": row | {"network": {"AOTAutograd": "not asked", "FX graph": "hit"}, "built": 0},
        "no folder": {"calls": [fault, fault]},
        "no compiler": {"refusal": "usable_folder: no", "missing": fault, "off": 0.0, "answers": SILENT},
    }
    for name in ("cache", "cache-triton", "kept", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "tmp" / "entry").touch()
    (tmp_path / "artifacts").write_bytes(b"a graph")
    return rows, results


def conclude(h, folder, rows, results):
    h.device = torch.device("cpu")
    caching.the_bytes(h, folder, rows)
    caching.variables(h, folder, rows, results)
    caching.faults(h, folder, results["no folder"], results["no compiler"])


def test_a_run_as_it_should_be(h, tmp_path):
    rows, results = canned(tmp_path)
    conclude(h, tmp_path, rows, results)
    assert h.record.facts["variables"][NOT_A_VARIABLE].startswith("0 files")
    assert h.record.facts["mega-cache"] == {"bytes": 7, "inductor": 2, "images of machine code": 0}
    results["caches off"] = {"error": "InductorError: odd", "advice": None}
    with pytest.raises(CannotCompile, match="caches off: InductorError: odd"):
        conclude(h, tmp_path, rows, results)


@pytest.mark.parametrize(
    ("complaint", "where", "change"),
    [
        ("g\\+\\+ built 0", "mega-cache", {"built": 0}),
        ("images of machine code", "artifacts", b"..\x7fELF.."),
        (f"{NOT_A_VARIABLE} kept 1 files", "kept/entry", b""),
        ("nothing was kept in the temporary", "tmp/entry", None),
        ("second process: .*hit", NOT_A_VARIABLE, {"product": HIT}),
        ("FORCE_DISABLE_CACHES=1: .*hit", "caches off", {"network": HIT}),
        ("FORCE_DISABLE_CACHES=1: 0 built", "caches off", {"built": 0}),
        ("AUTOGRAD_CACHE=0", "AOTAutogradCache off", {"network": HIT}),
        ("FX_GRAPH_CACHE=0", "no compiler", {"answers": MISS}),
        ("below a file was taken", "no folder", {"calls": [{"error": None}, {"error": None}]}),
        ("took a folder below a file", "no compiler", {"refusal": None}),
        ("without a compiler", "no compiler", {"missing": None}),
        ("no advice for", "no compiler", {"missing": {"error": "odd", "advice": None}}),
        ("is off by 1", "no compiler", {"off": 1.0}),
    ],
)
def test_a_switch_that_does_not_do_what_it_should_fails(h, tmp_path, complaint, where, change):
    rows, results = canned(tmp_path)
    if isinstance(change, dict):
        (rows if where in rows else results)[where].update(change)
    elif change is None:
        (tmp_path / where).unlink()
    else:
        (tmp_path / where).write_bytes(change)
    with pytest.raises(NotShown, match=complaint):
        conclude(h, tmp_path, rows, results)


@pytest.mark.slow
def test_the_study():
    """In processes, for real: what torch says, what is advised, and that the mended one goes on."""
    facts = ran(caching.study, lesson=[]).record.facts
    assert facts["variables"][NOT_A_VARIABLE].startswith("0 files")
    assert facts["a cache folder that cannot be"]["first call"].startswith("NotADirectoryError: ")
    assert FOLDER in facts["a cache folder that cannot be"]["fix"]
    assert ".../file/cache" in facts["asked before the first call"]
    if torch.cuda.is_available():  # Triton's kernels are in the bytes
        built = facts["cubins built"]
        assert built["cold"] > built["warm folder"] == built["mega-cache"] == 0
        assert facts["mega-cache"]["images of machine code"] >= built["cold"]
    else:
        assert "no-such-compiler" in facts["no compiler"]["first call"]
