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


CPP, LAST = "C++ compile error\n\nOutput:\n", "the process ended early; its last words:\n"
UNSET = "unset PJRT_DEVICE, or set it to CPU"
NO_PLUGIN = "No PjRtPlugin registered for: {}. Make sure the environment variable PJRT_DEVICE is set to a correct one"
FAKE = (
    "Dynamo failed to run FX node with fake tensors: call_function <built-in function linear>(*(FakeTensor(..., "
    "device='xla:0', size=(2, 3)), Parameter(FakeTensor(..., size=(5, 3)))), **{}): got RuntimeError('Unhandled "
    "FakeTensor Device Propagation for aten.mm.default, found two different devices xla:0, cpu')\n\nfrom user code:\n"
    '   File "/mine/model.py", line 26, in forward\n    return self.linear(x)\n'
)
CHILD = (
    f'{LAST}Traceback (most recent call last):\n  File "/mine/demo.py", line 7, in child\n    y = x @ w\n'
    "        ~~^~~\nRuntimeError: Expected XLA tensor. Got: torch.FloatTensor\n"
)
ATTENTION = "Expected them to have the same device type, but got query.device: xla:0 key.device: cpu"
OTHER_TORCH = "/x/_XLAC.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN5torch8autograd10deleteNodeEPNS0_4NodeE"
TOO_MUCH = "Error dispatching computation: Error preparing: Out of memory allocating 2147483648 bytes."
KNOWN = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried 9.\nmore"), "GPU memory: CUDA out of memory. Tried 9.; try"),
    (MemoryError(), "out of memory: MemoryError; try --quick"),
    (RuntimeError("CUDA error: out of memory\nfor debugging"), "out of GPU memory: CUDA error: out of memory; try"),
    (RuntimeError("Failed to find C compiler. Please specify via CC"), "install gcc (apt install gcc), or set CC"),
    (RuntimeError("Compiler: /x/g++ is not found."), "and /x/g++ does not work; install one"),
    (ChildFailed(f"{LAST}InvalidCxxCompiler: x.cpp.cxx: (None, 'g++')\n\nSet"), "and g++ does not work"),
    (RuntimeError(f"{CPP}/a.h:3:10: fatal error: Python.h: No such file or directory"), "install Python's headers"),
    (RuntimeError(f"{CPP}x.cpp:1:2: error: what is this\n"), "error: what is this; install"),
    (RuntimeError("Unexpected optimization option zzz, known options are ['a']"), "no option zzz; torch._inductor"),
    # PyTorch/XLA's own words, as torch_xla 2.9 says them
    (RuntimeError(NO_PLUGIN.format("FOO")), "PJRT_DEVICE=FOO: there is no such device here"),
    (RuntimeError("$PJRT_DEVICE is not set."), f"PJRT_DEVICE is empty; {UNSET}"),
    (ChildFailed(f"{LAST}OSError: libtpu not found\n"), "=TPU: there is no libtpu here"),
    (ImportError(OTHER_TORCH), f"with torch {torch.__version__}: it was built for another torch; `make xla` installs"),
    (RuntimeError(TOO_MUCH), "out of memory on XLA's device: Out of memory allocating 2147483648 bytes; try"),
    (ValueError("RESOURCE_EXHAUSTED: Attempting to reserve 9.5G.\nmore"), "to reserve 9.5G.; try --quick"),
    (RuntimeError("Expected XLA tensor. Got: CPUBoolType"), "Expected XLA tensor. Got: CPUBoolType; move them, or"),
    (RuntimeError("the indexed tensor must be an XLA tensor"), "tensors on the CPU among those on the XLA device"),
    (RuntimeError(ATTENTION), "query.device: xla:0 key.device: cpu; move them, or the model, with .to(xla.device())"),
    (RuntimeError(FAKE), "model.py:26 in forward: return self.linear(x): found two different devices xla:0, cpu"),
    (ChildFailed(CHILD), "demo.py:7 in child: y = x @ w: Expected XLA tensor. Got: torch.FloatTensor; move"),
]


def test_each_fault_as_itself_and_inside_others(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    for error, said in KNOWN:
        for wrap in (lambda error: error, wrapped, cause, lambda error: cause(wrapped(error))):
            message = explain(wrap(error))
            assert message, error
            assert (said in message, "\n" in message) == (True, False), message


def test_caches_that_cannot_be_written(monkeypatch):
    variables = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for variable, other in (variables, variables[::-1]):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(variable, "/mine/cache")
        for place in ("/mine/cache", "/mine/cache/triton/0/X/k.cubin", "/mine"):  # "/mine": it would be made in
            error = PermissionError(errno.EACCES, "Permission denied", place)
            assert f"Permission denied: {place}; set {variable} to a folder" in explain(wrapped(error))
        assert explain(PermissionError(errno.EACCES, "Permission denied", "/other/cache")) is None
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)  # where nobody chose one
    for path, variable in [
        (os.path.join(tempfile.gettempdir(), "torchinductor_someone", "5y"), "TORCHINDUCTOR_CACHE_DIR"),
        (os.path.expanduser("~/.triton/cache/X"), "TRITON_CACHE_DIR"),
    ]:
        assert f"set {variable} to" in explain(PermissionError(errno.EACCES, "Permission denied", path))
    monkeypatch.setenv(variables[0], "some/where")
    error = RuntimeError(f"{CPP}cc1plus: fatal error: some/where/x.cpp: No such file or directory")
    assert "'some/where' is not found; set TORCHINDUCTOR_CACHE_DIR to an absolute path" in explain(error)


def test_what_is_not_known_is_not_explained():
    elsewhere = PermissionError(errno.EACCES, "Permission denied", "/somewhere/data")
    for error in (ValueError("no"), KeyError(), SystemExit(3), elsewhere, OSError("no number")):
        assert explain(error) is explain(cause(error)) is None
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert explain(one) is None
    assert explain(CheckError("matmul: 3 of 4 elements are wrong; CUDA error: out of memory")) is None
    for text in (  # devices that are not XLA's
        "found two different devices cuda:0, cpu",
        "Expected query, key, and value to have the same device type, but got query.device: xla:0 key.device: xla:1",
        "undefined symbol: _ZN5torch8autograd10deleteNodeEPNS0_4NodeE",
    ):
        assert explain(RuntimeError(text)) is None


def test_where_names_the_readers_lines_only():
    def mine():
        torch.empty(2, 3) @ torch.empty(2, 3)

    with pytest.raises(RuntimeError) as failure:
        torch.compile(mine, backend="nope")()
    first, *places = where(failure.value)
    assert first.startswith("InvalidBackend: Invalid backend: 'nope'")
    assert [place.split(":")[0] for place in places] == ["test_faults.py"]
    assert 'backend="nope"' in places[0]
