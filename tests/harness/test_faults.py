"""Faults in one sentence: as torch and Triton raise them here, and as they would on machines that are not here.

Those that can be provoked on any machine are provoked, through the command line, in test_cli.py.
"""

import errno
import os
import tempfile
from importlib.util import find_spec

from harness.check import CheckError
from harness.faults import CANNOT_WRITE, explain, where
from harness.process import ChildFailed

import pytest
import torch
from torch import nn
from torch.nn import functional


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


needs_xla = pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla: make test-xla")
CPP, LAST = "C++ compile error\n\nOutput:\n", "the process ended early; its last words:\n"
GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")


WRAPS = (lambda error: error, wrapped, cause, lambda error: cause(wrapped(error)))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GPU, "out of GPU memory: CUDA out of memory. Tried to allocate 9 GiB.; try --quick, or free the GPU"),
        (MemoryError(), "out of memory: MemoryError; try --quick"),
        (RuntimeError("CUDA error: out of memory\nfor debugging"), "out of GPU memory: CUDA error: out of memory; try"),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "install gcc (apt install gcc), or set CC"),
        (RuntimeError("Compiler: /x/g++ is not found.InvalidCxxCompiler"), "and /x/g++ does not work; install one"),
        (RuntimeError(f"{CPP}/a.h:3:10: fatal error: Python.h: No such file or directory"), "install Python's headers"),
        (RuntimeError(f"{CPP}x.cpp:1:2: error: what is this\n"), "error: what is this; install"),
        (RuntimeError("Cannot find a working triton installation. Either"), "pip install triton"),
        (ChildFailed(f"{LAST}InvalidCxxCompiler: x.cpp.cxx: (None, 'g++')\n\nSet"), "and g++ does not work"),
    ],
)
def test_each_fault_as_itself_and_inside_others(error, said, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    for wrap in WRAPS:
        assert said in explain(wrap(error))


def test_caches_that_cannot_be_written(monkeypatch, tmp_path):
    variables = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for variable, other in (variables, variables[::-1]):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(variable, "/mine/cache")
        for number, below in zip(CANNOT_WRITE, ("", "/5y", "/triton/0/X/k.cubin", "", "/5y", ""), strict=False):
            said = os.strerror(number)
            error = OSError(number, said, f"/mine/cache{below}")
            assert f"{said}: /mine/cache{below}; set {variable} to a folder" in explain(wrapped(error))
            assert f"set {variable} to" in explain(OSError(number, said, "/mine"))  # it would be made in
            assert explain(OSError(number, said, "/other/cache")) is None
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)  # where nobody chose one
    for path, variable in [
        (os.path.join(tempfile.gettempdir(), "torchinductor_someone", "5y"), "TORCHINDUCTOR_CACHE_DIR"),
        (os.path.expanduser("~/.triton/cache/X"), "TRITON_CACHE_DIR"),
        (os.path.join(tempfile.gettempdir(), "empty-cache-abc", "5y"), "TMPDIR"),
    ]:
        assert f"set {variable} to" in explain(PermissionError(errno.EACCES, "Permission denied", path))
        assert explain(FileNotFoundError(errno.ENOENT, "No such file or directory", path)) is None
    monkeypatch.setenv(variables[0], "/proc/cache")  # where making a folder says that there is no such file
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/cache")
    assert "set TORCHINDUCTOR_CACHE_DIR to a folder" in explain(error)
    monkeypatch.setenv(variables[0], "some/where")
    error = RuntimeError(f"{CPP}cc1plus: fatal error: some/where/x.cpp: No such file or directory")
    assert "'some/where' is not found; set TORCHINDUCTOR_CACHE_DIR to an absolute path" in explain(error)
    (tmp_path / "file").touch()
    again = AssertionError("Artifact of type=precompile already registered in mega-cache artifact factory")
    for place, said in (("cache", "the first technique that failed says"), ("file/cache", "Not a directory")):
        monkeypatch.setenv(variables[0], str(tmp_path / place))  # a compiler whose first import failed
        assert said in explain(again)


def test_an_option_that_torch_compile_does_not_have():
    for name, hint in [("max_autotun", "did you mean max_autotune"), ("zzz", "list_options() names them")]:
        with pytest.raises(RuntimeError) as failure:
            torch.compile(lambda x: x, options={name: True})
        message = explain(failure.value)
        assert (f"no option '{name}'; " in message, hint in message, len(message) < 200) == (True, True, True)
        assert all(len(line) < 400 for line in where(failure.value))


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


# --- PyTorch/XLA: its own words, as torch_xla 2.9 says them; where it is installed it is made to say them

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
OTHER_TORCH = "/x/_XLAC.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN5torch8autograd10deleteNodeEPNS0_4NodeE"
UNSET = "unset PJRT_DEVICE, or set it to CPU"
TOO_MUCH = "Error dispatching computation: Error preparing: Out of memory allocating 2147483648 bytes."


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(NO_PLUGIN.format("FOO")), f"PJRT_DEVICE=FOO: there is no such device here; {UNSET}"),
        (RuntimeError(NO_PLUGIN.format("CUDA")), "PJRT_DEVICE=CUDA: torch_xla has no CUDA plugin any more"),
        (RuntimeError(NO_PLUGIN.format("GPU")), f"removed upstream after 2.8; {UNSET}; on a GPU use torch.comp"),
        (RuntimeError("$PJRT_DEVICE is not set."), f"PJRT_DEVICE is empty; {UNSET}"),
        (OSError("libtpu not found"), "=TPU: there is no libtpu here; on a TPU pip install 'torch_xla[tpu]'"),
        (ChildFailed(f"{LAST}OSError: libtpu not found\n"), f"; elsewhere {UNSET}"),
        (
            ImportError(OTHER_TORCH),
            f"with torch {torch.__version__}: it was built for another torch; `make xla` installs",
        ),
        (RuntimeError("Out of memory allocating 140737488355328 bytes."), "140737488355328 bytes (131,072.0 GiB); try"),
        (RuntimeError(TOO_MUCH), "out of memory on XLA's device: Out of memory allocating 2147483648 bytes (2.0 GiB)"),
        (ValueError("RESOURCE_EXHAUSTED: Attempting to reserve 9.5G.\nmore"), "to reserve 9.5G.; try --quick"),
        (RuntimeError("Expected XLA tensor. Got: CPUBoolType"), "Expected XLA tensor. Got: CPUBoolType; move them, or"),
        (RuntimeError(FAKE), "model.py:26 in forward: return self.linear(x): found two different devices xla:0, cpu"),
        (ChildFailed(CHILD), "demo.py:7 in child: y = x @ w: Expected XLA tensor. Got: torch.FloatTensor; move"),
    ],
)
def test_each_fault_of_xla(error, said):
    for wrap in WRAPS:
        assert said in explain(wrap(error))
        assert "\n" not in explain(wrap(error))


# A matrix x on the device and a matrix w on the CPU, both 4 x 4; for each call that does not move w there by itself.
LEFT_BEHIND = {
    "mm": lambda x, w: x @ w,
    "addmm": lambda x, w: torch.addmm(w, x, x),
    "add, compiled": lambda x, w: torch.compile(torch.add, backend="openxla")(x, w),
    "a model that stayed": lambda x, w: nn.Linear(4, 4)(x),
    "a model that stayed, compiled": lambda x, w: torch.compile(nn.Linear(4, 4), backend="openxla")(x),
    "cat": lambda x, w: torch.cat([w, x]),
    "index_select": lambda x, w: x.index_select(0, torch.tensor([0, 1])),
    "embedding": lambda x, w: nn.Embedding(4, 4).to(x.device)(torch.tensor([0, 1])),
    "a mask": lambda x, w: x.masked_fill(w > 0, 0.0),
    "layer norm": lambda x, w: nn.LayerNorm(4)(x),
    "attention": lambda x, w: functional.scaled_dot_product_attention(x[None], w[None], w[None]),
    "a recurrent network": lambda x, w: nn.LSTM(4, 4).to(x.device)(w),
    "a gradient": lambda x, w: nn.Linear(4, 4).to(x.device)(x).backward(torch.ones(4, 4)),
}


@needs_xla
@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_tensors_left_on_the_cpu_are_told_by_the_call(name):
    from torch._dynamo.exc import TorchDynamoException

    from examples.common import xla

    with pytest.raises((RuntimeError, TorchDynamoException)) as failure:
        LEFT_BEHIND[name](torch.randn(4, 4).to(xla.device()), torch.randn(4, 4))
    torch.compiler.reset()
    said = explain(failure.value)
    assert said.startswith("tensors on the CPU among those on the XLA device, test_faults.py:")
    assert f' in <lambda>: "{name}": lambda x, w: ' in said
    assert said.endswith("; move them, or the model, with .to(xla.device())")
    assert len(said) < 400
