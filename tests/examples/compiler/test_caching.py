"""caching: what the caches answer, the faults with their messages; a switch that does nothing fails the run."""

import os

from harness.catalog import Needs
from harness.compiler import watch
from harness.process import Child
from harness.session import Harness
from harness.settings import settings_kept

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from examples.compiler import caching
from examples.compiler.caching import (
    CACHES,
    HIDDEN,
    NOT_A_VARIABLE,
    WIDTH,
    CannotCompile,
    NotShown,
    advice,
    changes,
    network,
    reference,
    usable_folder,
)

HIT, MISS, SILENT = (dict.fromkeys(CACHES, answer) for answer in ("hit", "miss", "not asked"))


@pytest.fixture
def h():
    return Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False)


@given(rows=st.integers(1, 40), layers=st.integers(0, 3), seed=st.integers(0, 99))
def test_the_network_is_right(rows, layers, seed):
    h = Harness("test", Needs.parse("torch"), console=Console(quiet=True), timing=False, seed=seed)
    weights = [h.randn(*shape, scale=0.1) for shape in [(WIDTH, HIDDEN), (HIDDEN, WIDTH)] * layers]
    h.check(network, reference, h.randn(rows, WIDTH), *weights, terms=HIDDEN * (layers + 1), poison=False)


def test_what_changes_the_key(h):
    with settings_kept("caching", 0):
        said = changes(h)
    assert said.pop("nothing") == said.pop("values of the weights") == HIT
    assert said.pop("fx_graph_cache=False") == SILENT
    assert said.pop("enable_autograd_cache=False") == {"AOTAutograd": "not asked", "FX graph": "hit"}
    assert said.pop("names, a comment") == {"AOTAutograd": "miss", "FX graph": "hit"}
    assert len(said) == 7
    assert all(answers == MISS for answers in said.values()), said


def test_what_was_not_asked_is_neither_hit_nor_miss():
    with watch() as seen:
        pass
    assert caching.found(seen) == SILENT
    seen.counters = {"inductor": {"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 1}}
    assert caching.found(seen) == {"AOTAutograd": "not asked", "FX graph": "hit and miss"}


# Faults.


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
    said = advice(error)
    assert said is None if fix is None else fix in said


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


def test_a_machine_without_a_compiler_is_told_so(h, tmp_path, monkeypatch):
    if h.device.type == "cuda":
        pytest.skip("what a GPU runs needs no C++ compiler once Triton's driver is built")
    tensors = [h.randn(4, WIDTH), h.randn(WIDTH, HIDDEN), h.randn(HIDDEN, WIDTH)]
    torch.save(tensors, tmp_path / "inputs")
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(
        CannotCompile, match=r"cold: .*InvalidCxxCompiler.*; install a C\+\+ compiler \(apt-get install"
    ):
        caching.timed(h, tmp_path, tensors)


# What the processes of a run say, and each thing that would be wrong with it.


def canned(tmp_path):
    """A run's processes as they end on a CPU, and the files that they leave."""
    row = {"imports s": 1.5, "first call s": 0.5, "process s": 4.0, "files": {"cache": 3, "cache-triton": 0}}
    rows = {
        "cold": row | {"network": MISS, "product": MISS, "built": 2, "saved": {"inductor": 2}},
        "warm folder": row | {"network": HIT, "product": HIT, "built": 0},
        "mega-cache": row | {"network": HIT, "product": HIT, "built": 2, "load s": 0.1, "loaded": {"inductor": 2}},
    }
    fault = {"error": "NotADirectoryError: no", "advice": "set it"}
    said = {
        NOT_A_VARIABLE: {"product": MISS},
        "caches off": row | {"network": SILENT, "product": SILENT, "built": 2},
        "AOTAutogradCache off": row | {"network": {"AOTAutograd": "not asked", "FX graph": "hit"}, "built": 0},
        "no folder": {"said": [fault, fault]},
        "no compiler": {"told": "usable_folder: no", "missing": fault, "off": 0.0, "answers": SILENT},
    }
    changed = dict.fromkeys(("what fills them", "a constant", "a shape", "a dtype", "a setting of Inductor"), MISS)
    changed |= dict.fromkeys(("nothing", "values of the weights"), HIT)
    for name in ("cache", "cache-triton", "kept", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "tmp" / "entry").touch()
    (tmp_path / "artifacts").write_bytes(b"a graph")
    return rows, said, changed


@pytest.fixture
def on_a_cpu(h):
    h.device = torch.device("cpu")
    return h


def test_a_run_as_it_should_be(on_a_cpu, tmp_path):
    caching.lessons(on_a_cpu, tmp_path, *canned(tmp_path))
    facts = on_a_cpu.record.facts
    assert facts["variables"][NOT_A_VARIABLE].startswith("0 files")
    assert facts["mega-cache"] == {"bytes": 7, "inductor": 2, "images of machine code": 0}
    assert set(facts["processes"]) == {"cold", "warm folder", "mega-cache"}


def wrong(rows, said, changed, folder):
    yield "warm folder", lambda: rows["warm folder"].update(network=MISS)
    yield "cold", lambda: rows["cold"].update(network=HIT)
    yield "mega-cache", lambda: rows["mega-cache"].update(product=MISS)
    yield "g\\+\\+ built 0", lambda: rows["mega-cache"].update(built=0)
    yield "images of machine code", lambda: (folder / "artifacts").write_bytes(b"..\x7fELF..")
    yield f"{NOT_A_VARIABLE} kept 1 files", lambda: (folder / "kept" / "entry").touch()
    yield "second process: .*hit", lambda: said[NOT_A_VARIABLE].update(product=HIT)
    yield "nothing was kept in the temporary", lambda: (folder / "tmp" / "entry").unlink()
    yield "FORCE_DISABLE_CACHES=1: .*hit", lambda: said["caches off"].update(network=HIT)
    yield "FORCE_DISABLE_CACHES=1: 0 built", lambda: said["caches off"].update(built=0)
    yield "AUTOGRAD_CACHE=0", lambda: said["AOTAutogradCache off"].update(network=HIT)
    yield "FX_GRAPH_CACHE=0", lambda: said["no compiler"].update(answers=MISS)
    yield "changing nothing", lambda: changed.update(nothing=MISS)
    yield "changing a shape", lambda: changed.update({"a shape": HIT})
    yield "below a file was taken", lambda: said["no folder"].update(said=[{"error": None}, {"error": None}])
    yield "took a folder below a file", lambda: said["no compiler"].update(told=None)
    yield "without a compiler", lambda: said["no compiler"].update(missing=None)
    yield "no advice for", lambda: said["no compiler"].update(missing={"error": "odd", "advice": None})
    yield "is off by 1", lambda: said["no compiler"].update(off=1.0)


@pytest.mark.parametrize("index", range(19))
def test_a_switch_that_does_not_do_what_it_should_fails(on_a_cpu, tmp_path, index):
    run = canned(tmp_path)
    faults = list(wrong(*run, tmp_path))
    assert len(faults) == 19
    complaint, make = faults[index]
    make()
    with pytest.raises(NotShown, match=complaint):
        caching.lessons(on_a_cpu, tmp_path, *run)


def test_a_process_that_cannot_compile_ends_the_run_with_advice(on_a_cpu, tmp_path):
    rows, said, changed = canned(tmp_path)
    said["caches off"] = {"error": "InductorError: odd", "advice": None}
    with pytest.raises(CannotCompile, match="caches off: InductorError: odd; it is none of the faults"):
        caching.lessons(on_a_cpu, tmp_path, rows, said, changed)


def test_profiling_does_nothing(h):
    h.profile = True
    caching.demo(h)
    assert not h.record.facts


@pytest.mark.slow
def test_the_technique(h, tmp_path, monkeypatch):
    monkeypatch.setattr(caching.tempfile, "tempdir", str(tmp_path))
    with settings_kept("caching", 0):
        caching.demo(h)
    facts = h.record.facts
    assert all(check["passed"] for check in h.record.checks)
    assert len(h.record.checks) == 3
    assert facts["variables"][NOT_A_VARIABLE].startswith("0 files")
    assert facts["processes"]["cold"]["FX graph"] == "miss"
    assert facts["processes"]["warm folder"]["FX graph"] == facts["processes"]["mega-cache"]["FX graph"] == "hit"
    assert not list(tmp_path.glob("caching-*"))


@pytest.mark.gpu
def test_a_gpu_builds_nothing_again(h):
    """Triton's kernels are in the bytes, so a process with an empty folder builds none of them; a warm one neither."""
    with settings_kept("caching", 0):
        caching.demo(h)
    rows = h.record.facts["processes"]
    assert rows["cold"]["cubins built"] > 0
    assert rows["warm folder"]["cubins built"] == rows["mega-cache"]["cubins built"] == 0
    assert h.record.facts["mega-cache"]["images of machine code"] >= rows["cold"]["cubins built"]
