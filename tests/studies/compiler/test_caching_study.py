"""studies/compiler/caching: faults with their messages; a switch that does not do what it should fails the run."""

import os

from harness.catalog import Needs
from harness.process import Child
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from rich.console import Console

from examples.compiler.caching import CACHES, NOT_A_VARIABLE, CannotCompile, NotShown
from studies.compiler import caching
from studies.compiler.caching import advice, usable_folder

HIT, MISS, SILENT = (dict.fromkeys(CACHES, answer) for answer in ("hit", "miss", "not asked"))


@pytest.fixture
def h():
    return Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False, lesson=[])


def test_a_usable_folder_is_made_and_left_empty(tmp_path):
    folder = tmp_path / "new" / "folder"
    for path in (folder, str(folder)):
        assert usable_folder(path) == folder
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("below", ["file", "file/cache"])
def test_a_folder_that_cannot_be(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"usable_folder: cannot write in .*file.* set TORCHINDUCTOR_CACHE_DIR to"
    ) as caught:
        usable_folder(tmp_path / below)
    assert isinstance(caught.value, (NotADirectoryError, FileExistsError))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(PermissionError, match="usable_folder: cannot write in"):
        usable_folder(tmp_path)


@pytest.mark.parametrize("bad", [None, 3, ["folder"]])
def test_what_is_no_path(bad):
    with pytest.raises(TypeError, match=r"usable_folder: got .*; pass the path of a folder"):
        usable_folder(bad)


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (RuntimeError("No working C++ compiler found in torch._inductor.config.cpp.cxx"), "install a C++ compiler"),
        (RuntimeError("Compiler: g++ is not found."), "install a C++ compiler"),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "install a C++ compiler"),
        (FileNotFoundError(2, "No such file or directory", "/chosen/cc"), "install a C++ compiler"),
        (PermissionError(13, "Permission denied"), "set TORCHINDUCTOR_CACHE_DIR"),
        (RuntimeError("PermissionError: [Errno 13] Permission denied: 'x'"), "set TORCHINDUCTOR_CACHE_DIR"),
        (OSError(30, "Read-only file system"), "set TORCHINDUCTOR_CACHE_DIR"),
        (AssertionError("Artifact of type=precompile already registered in"), "start it again"),
        (ValueError("something else"), None),
    ],
)
def test_advice(monkeypatch, error, fix):
    monkeypatch.setenv("CC", "/chosen/cc")
    fix_found = advice(error)
    assert fix_found is None if fix is None else fix in fix_found


def test_faults_in_processes(h, tmp_path):
    """The two that hold faults, for real: what torch says, what is advised, and that the mended one goes on."""
    (tmp_path / "file").touch()
    nobody = str(tmp_path / "no-such-compiler")
    bad = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "cache"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    bad["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    lacking = bad | {"CXX": nobody, "CC": nobody, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with (
        Child(caching.child_folder, str(tmp_path / "later"), env=bad, timeout=240) as impossible,
        Child(caching.child_repaired, str(tmp_path / "good"), env=lacking, timeout=240) as repaired,
    ):
        caching.faults(h, tmp_path, impossible.result(), repaired.result())
    facts = h.record.facts
    assert facts["a cache folder that cannot be"]["first call"].startswith("NotADirectoryError: ")
    assert "set TORCHINDUCTOR_CACHE_DIR" in facts["a cache folder that cannot be"]["fix"]
    assert ".../file/cache" in facts["asked before the first call"]
    assert "no-such-compiler" in facts["no compiler"]["first call"] or torch.cuda.is_available()
    assert str(tmp_path) not in str(facts)


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
    caching.the_bytes(h, folder, rows)
    caching.variables(h, folder, rows, results)
    caching.faults(h, folder, results["no folder"], results["no compiler"])


@pytest.fixture
def on_a_cpu(h):
    h.device = torch.device("cpu")
    return h


def test_a_run_as_it_should_be(on_a_cpu, tmp_path):
    conclude(on_a_cpu, tmp_path, *canned(tmp_path))
    facts = on_a_cpu.record.facts
    assert facts["variables"][NOT_A_VARIABLE].startswith("0 files")
    assert facts["mega-cache"] == {"bytes": 7, "inductor": 2, "images of machine code": 0}


def wrong(rows, results, folder):
    yield "g\\+\\+ built 0", lambda: rows["mega-cache"].update(built=0)
    yield "images of machine code", lambda: (folder / "artifacts").write_bytes(b"..\x7fELF..")
    yield f"{NOT_A_VARIABLE} kept 1 files", lambda: (folder / "kept" / "entry").touch()
    yield "second process: .*hit", lambda: results[NOT_A_VARIABLE].update(product=HIT)
    yield "nothing was kept in the temporary", lambda: (folder / "tmp" / "entry").unlink()
    yield "FORCE_DISABLE_CACHES=1: .*hit", lambda: results["caches off"].update(network=HIT)
    yield "FORCE_DISABLE_CACHES=1: 0 built", lambda: results["caches off"].update(built=0)
    yield "AUTOGRAD_CACHE=0", lambda: results["AOTAutogradCache off"].update(network=HIT)
    yield "FX_GRAPH_CACHE=0", lambda: results["no compiler"].update(answers=MISS)
    yield "below a file was taken", lambda: results["no folder"].update(calls=[{"error": None}, {"error": None}])
    yield "took a folder below a file", lambda: results["no compiler"].update(refusal=None)
    yield "without a compiler", lambda: results["no compiler"].update(missing=None)
    yield "no advice for", lambda: results["no compiler"].update(missing={"error": "odd", "advice": None})
    yield "is off by 1", lambda: results["no compiler"].update(off=1.0)


@pytest.mark.parametrize("index", range(14))
def test_a_switch_that_does_not_do_what_it_should_fails(on_a_cpu, tmp_path, index):
    run = canned(tmp_path)
    faults = list(wrong(*run, tmp_path))
    assert len(faults) == 14
    complaint, make = faults[index]
    make()
    with pytest.raises(NotShown, match=complaint):
        conclude(on_a_cpu, tmp_path, *run)


def test_a_process_that_cannot_compile_ends_the_run_with_advice(on_a_cpu, tmp_path):
    rows, results = canned(tmp_path)
    results["caches off"] = {"error": "InductorError: odd", "advice": None}
    with pytest.raises(CannotCompile, match="caches off: InductorError: odd"):
        conclude(on_a_cpu, tmp_path, rows, results)


@pytest.mark.slow
def test_the_study(h):
    with settings_kept("caching", 0):
        caching.study(h)
    assert h.record.facts["variables"][NOT_A_VARIABLE].startswith("0 files")


@pytest.mark.gpu
def test_a_gpu_builds_nothing_again(h):
    """Triton's kernels are in the bytes, so a process with an empty folder builds none of them; a warm one neither."""
    with settings_kept("caching", 0):
        caching.study(h)
    built = h.record.facts["cubins built"]
    assert built["cold"] > 0
    assert built["warm folder"] == built["mega-cache"] == 0
    assert h.record.facts["mega-cache"]["images of machine code"] >= built["cold"]
