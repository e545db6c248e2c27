"""What went wrong, in one sentence with its fix: for the faults that a machine, or a reader's own change, brings.

torch.compile raises them from deep inside, wrapped in exceptions of its own, with tracebacks of a hundred lines.
"""

from __future__ import annotations

import os
import re
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


def explain(error: BaseException) -> str | None:
    """One line that says what is wrong and what to do, or None when the error is not one of those known here: by its
    text, as another process's comes as its last words. What a technique says by an AssertionError needs no other."""
    if "already registered in mega-cache artifact factory" in str(error):  # which a second import meets
        return "torch.compile could not be loaded, for what the first technique that failed says"
    for each in () if isinstance(error, AssertionError) else _chain(error):
        text = f"{type(each).__name__}: {each}"
        for pattern, said in FAULTS:
            if found := re.search(pattern, text):
                message = said(each, found) if callable(said) else said.format(found[0].strip(), *found.groups())
                if message:
                    return " ".join(message.split())
    return None


def where(error: BaseException) -> list[str]:
    """The first line of the error as it was raised, and the lines of code that it came through, no library's."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{type(error).__name__}: {_first_line(str(error))}", *_places("".join(traceback.format_list(frames)))]


def _places(text: str) -> list[str]:
    """The readers' lines in a traceback, which may be text within an error: another process's, or the compiler's."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n +(.+)', text)
    folders = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries = ("<", str(Path(__file__).parent), str(Path(torch.__file__).parent), *folders)
    return [f"{Path(f).name}:{line} in {name}: {code}" for f, line, name, code in frames if not f.startswith(libraries)]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised for: what torch's own errors hold inside, and causes."""
    waiting, seen = [error], []
    while waiting:
        each = waiting.pop(0)
        if each is not None and each not in seen:
            seen.append(each)
            yield each
            waiting += [getattr(each, "inner_exception", None), each.__cause__]


def _first_line(text: str) -> str:
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= 300 else f"{line[:300]} ..."


# Each of these is shown one error of the chain, and what of its text has been found.


def _failed_cpp(_: BaseException, found: re.Match) -> str:
    wrong = re.search(r"^.*\berror: .*$", found.string, re.MULTILINE)
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/")
    if not os.path.isabs(folder):  # torch 2.11 compiles from within another folder
        return f"the compiler's cache {folder!r} is not found; set TORCHINDUCTOR_CACHE_DIR to an absolute path"
    said = wrong[0] if wrong else _first_line(found.string.partition("Output:")[2])
    return f"{os.environ.get('CXX', 'the C++ compiler')} failed on what Inductor wrote: {said}; {INSTALL_CXX}"


def _cache(_: BaseException, found: re.Match) -> str | None:
    """A cache that cannot be written, told from other files by its place."""
    file = os.path.abspath(found[2])
    for variable, default in (
        ("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "torchinductor_")),  # and the user's name
        ("TRITON_CACHE_DIR", str(Path.home() / ".triton")),
    ):
        chosen = os.environ.get(variable)
        # Within it, or above, where it would have to be made.
        if file.startswith(os.path.abspath(chosen or default)) or (chosen and Path(chosen).is_relative_to(file)):
            wrong = f"the compiler cannot write its cache: {found[1]}: {found[2]}"
            return f"{wrong}; set {variable} to a folder where you may write"
    return None


def _graph_break(_: BaseException, found: re.Match) -> str:
    """What fullgraph=True does not allow, and where."""
    places = _places(found.string.rpartition("from user code:")[2])
    at = f"{places[-1].rstrip(':')}: " if places else ""
    return (
        f"cannot be compiled as one graph (fullgraph=True): {at}{_first_line(found[1])}; "
        "python torch_compiler_examples.py graph_breaks shows each cause and its fix"
    )


def _xla_tensors(error: BaseException, found: re.Match) -> str:
    places = _places(found.string) or where(error)[1:]
    return (
        f"tensors on the CPU among those on the XLA device{f', {places[-1]}' if places else ''}: {found[0]}; "
        "move them, or the model, with .to(xla.device())"
    )


INSTALL_CXX = "install one (apt install g++), or set CXX to one"
UNSET = "unset PJRT_DEVICE, or set it to CPU"
# What torch_xla raises for a tensor that is not on its device, and torch for tensors on two devices of which one is.
NOT_ON_XLA = (
    r"Expected XLA tensor\. Got: .*|Element at index \d+ is not an XLA tensor\. Got: .*"
    r"|the indexed tensor must be an XLA tensor"
    r"|found two different devices (?:xla:\d+, cpu|cpu, xla:\d+)|expected device xla:\d+ but got cpu"
    r"|to have the same device type, but got (?=.*xla:\d)(?=.*cpu).*"
    r"|not at the same device, (?=.*xla:\d)(?=.*cpu).*"
)
# A pattern of "type: text", and what it means: {0} is what was found, {1} its first group.
FAULTS: tuple[tuple[str, str | Callable[[BaseException, re.Match], str | None]], ...] = (
    (
        r"(?<=^OutOfMemoryError: ).*|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|(?:CUBLAS|CUDNN)_STATUS_ALLOC_FAILED",
        "out of GPU memory: {0}; try --quick, or free the GPU",
    ),
    (
        r"(?<=DefaultCPUAllocator: ).*memory.*|std::bad_alloc|^MemoryError",
        "out of memory: {0}; try --quick, or free some",
    ),
    (
        r"(?:cpp\.cxx: .*'|Compiler: )([^'\s]+)(?:'| is not found)",
        f"torch.compile needs a C++ compiler, and {{1}} does not work; {INSTALL_CXX}",
    ),
    (
        "Failed to find C compiler",
        "Triton needs a C compiler, and finds neither gcc nor clang; install gcc (apt install gcc), or set CC",
    ),
    (r"Python\.h.*No such file", "the compiler finds no Python.h; install Python's headers (apt install python3-dev)"),
    (r"C\+\+ compile error", _failed_cpp),
    (r"\[Errno \d+\] ([^:\n]+): '([^'\n]+)'", _cache),
    (r"Invalid backend: .*|Unrecognized mode=.*", "torch.compile: {0}"),
    (
        r"Unexpected optimization option (\S+?),",
        "torch.compile has no option {1}; torch._inductor.list_options() names them",
    ),
    (r"^Unsupported:\s*(.*)", _graph_break),
    (  # torch_xla's library is compiled against one version of torch, and pip does not know which
        r"_XLAC\S*: undefined symbol",
        f"torch_xla cannot be loaded with torch {torch.__version__}: it was built for "
        "another torch; `make xla` installs a pair that fits into .venv-xla and runs the topic there",
    ),
    # torch.distributed, which waits for every rank; torchrun's own port, or one that the environment names.
    (
        r"port: (\d+).*EADDRINUSE|EADDRINUSE.*port: (\d+)",
        "port {1} is in use by another process; choose another (MASTER_PORT, or torchrun's --master-port)",
    ),
    (
        r"Timed out waiting \d+ms for (?:recv|send)|[Tt]imed out after \d+ seconds waiting for clients",
        "a rank waited in vain for another one, which did not join a collective, or not with the same shape: {0}",
    ),
    # PJRT_DEVICE, which is read when the first tensor goes to the device.
    (
        r"No PjRtPlugin registered for: (.*?)\. Make sure",
        f"PJRT_DEVICE={{1}}: there is no such device here (torch_xla's CUDA plugin ended with 2.8); {UNSET}",
    ),
    (r"\$PJRT_DEVICE is not set", f"PJRT_DEVICE is empty; {UNSET}"),
    (
        "libtpu not found",
        f"PJRT_DEVICE=TPU: there is no libtpu here; on a TPU pip install 'torch_xla[tpu]'; elsewhere {UNSET}",
    ),
    (
        r"Out of memory allocating \d+ bytes|RESOURCE_EXHAUSTED: .*",
        "out of memory on XLA's device: {0}; try --quick, or a smaller batch",
    ),
    (NOT_ON_XLA, _xla_tensors),
)
