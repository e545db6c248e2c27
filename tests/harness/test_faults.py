"""Faults in one sentence: as torch and Triton raise them here, and as they would on machines that are not here.

Those that can be provoked on any machine are provoked, through the command line, in test_cli.py.
"""

import errno
import os
import tempfile

from harness.check import CheckError
from harness.faults import explain, where
from harness.process import ChildFailed

import pytest
import torch


def wrapped(error):
    """As torch.compile raises what went wrong in a backend: the error inside, and no cause."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        try:
            raise error
        except Exception as inner:
            raise BackendCompilerFailed(lambda: None, inner, None) from None
    except BackendCompilerFailed as outer:
        return outer


def cause(error):
    try:
        raise ValueError("something else") from error
    except ValueError as outer:
        return outer


CPP = "C++ compile error\n\nOutput:\n"
GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")


@pytest.mark.parametrize("wrap", [lambda error: error, wrapped, cause, lambda error: cause(wrapped(error))])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GPU, "out of GPU memory: CUDA out of memory. Tried to allocate 9 GiB.; try --quick, or free the GPU"),
        (MemoryError(), "out of memory: MemoryError; try --quick"),
        (RuntimeError("CUDA error: out of memory\nfor debugging"), "out of GPU memory: CUDA error: out of memory; try"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out of GPU memory: CUBLAS_STATUS"),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "install gcc (apt install gcc), or set CC"),
        (RuntimeError("Compiler: /x/g++ is not found.InvalidCxxCompiler"), "and /x/g++ does not work; install one"),
        (RuntimeError(f"{CPP}/a.h:3:10: fatal error: Python.h: No such file or directory"), "install Python's headers"),
        (RuntimeError(f"{CPP}x.cpp:1:2: error: what is this\n"), "error: what is this; install"),
        (RuntimeError("Cannot find a working triton installation. Either"), "pip install triton"),
    ],
)  # fmt: skip
def test_each_fault_as_itself_and_inside_others(wrap, error, said, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    assert said in explain(wrap(error))


def test_the_last_words_of_a_process_are_read():
    words = "the process ended early; its last words:\nInvalidCxxCompiler: No working C++ compiler found in x.cpp.cxx: "
    assert "and g++ does not work" in explain(ChildFailed(words + "(None, 'g++')\n\nSet TORCHDYNAMO_VERBOSE=1"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.ENOSPC])
@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
@pytest.mark.parametrize("below", ["", "/5y", "/triton/0/X/k.cubin"])
def test_caches_that_cannot_be_written(monkeypatch, number, variable, below):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "/mine/cache")
    error = OSError(number, os.strerror(number), f"/mine/cache{below}")
    assert f"{os.strerror(number)}: /mine/cache{below}; set {variable} to a folder" in explain(wrapped(error))
    assert f"set {variable} to" in explain(OSError(number, os.strerror(number), "/mine"))  # it would be made in
    assert explain(OSError(number, os.strerror(number), "/other/cache")) is None


def test_caches_where_nobody_chose_them(monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for path, variable in [
        (os.path.join(tempfile.gettempdir(), "torchinductor_someone", "5y"), "TORCHINDUCTOR_CACHE_DIR"),
        (os.path.expanduser("~/.triton/cache/X"), "TRITON_CACHE_DIR"),
        (os.path.join(tempfile.gettempdir(), "empty-cache-abc", "5y"), "TMPDIR"),
    ]:
        assert f"set {variable} to" in explain(PermissionError(errno.EACCES, "Permission denied", path))
        assert explain(FileNotFoundError(errno.ENOENT, "No such file or directory", path)) is None


def test_a_cache_that_cannot_be_made(monkeypatch):
    """As below /proc, where making a folder says that there is no such file."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/cache")
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/cache")
    assert "set TORCHINDUCTOR_CACHE_DIR to a folder" in explain(error)


def test_a_cache_in_a_relative_folder(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "some/where")
    error = RuntimeError(f"{CPP}cc1plus: fatal error: some/where/x.cpp: No such file or directory")
    assert "'some/where' is not found; set TORCHINDUCTOR_CACHE_DIR to an absolute path" in explain(error)


def test_an_option_that_torch_compile_does_not_have():
    for name, hint in [("max_autotun", "did you mean max_autotune"), ("zzz", "list_options() names them")]:
        with pytest.raises(RuntimeError) as failure:
            torch.compile(lambda x: x, options={name: True})
        assert f"no option '{name}'; " in explain(failure.value)
        assert hint in explain(failure.value)
        assert len(explain(failure.value)) < 200
        assert all(len(line) < 400 for line in where(failure.value))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        KeyError(),
        SystemExit(3),
        CheckError("matmul: 3 of 4 elements are wrong; CUDA error: out of memory"),  # its own words
        PermissionError(errno.EACCES, "Permission denied", "/somewhere/data"),
        OSError("no number"),
    ],
)
def test_what_is_not_known_is_not_explained(error):
    assert explain(error) is None
    assert explain(cause(error)) is None or isinstance(error, CheckError)


def test_a_compiler_that_is_imported_again_after_its_import_has_failed(monkeypatch, tmp_path):
    error = AssertionError("Artifact of type=precompile already registered in mega-cache artifact factory")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert "the first technique that failed says" in explain(error)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert "Not a directory" in explain(error)
    assert "set TORCHINDUCTOR_CACHE_DIR to a folder" in explain(error)


def test_a_circle_of_causes_ends():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert explain(one) is None


def test_where_names_the_readers_lines_only():
    def mine():
        torch.empty(2, 3) @ torch.empty(2, 3)

    with pytest.raises(RuntimeError) as failure:
        torch.compile(mine, backend="nope")()
    first, *places = where(failure.value)
    assert first.startswith("InvalidBackend: Invalid backend: 'nope'")
    assert [place.split(":")[0] for place in places] == ["test_faults.py"]
    assert 'backend="nope"' in places[0]
