"""What went wrong, in one sentence with its fix: for the faults that a machine, or a reader's own change, brings.

torch.compile raises them from deep inside, wrapped in exceptions of its own, with tracebacks of a hundred lines.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from harness.hardware import package_version

import torch

CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT)
NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: .*memory.*|std::bad_alloc|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
)
# What torch_xla raises for a tensor that is not on its device, and torch for tensors on two devices of which one is.
NOT_ON_XLA = re.compile(
    r"Expected XLA tensor\. Got: .*|Element at index \d+ is not an XLA tensor\. Got: .*"
    r"|the indexed tensor must be an XLA tensor"
    r"|found two different devices (?:xla:\d+, cpu|cpu, xla:\d+)|expected device xla:\d+ but got cpu"
    r"|to have the same device type, but got (?=.*xla:\d)(?=.*cpu).*"
    r"|not at the same device, (?=.*xla:\d)(?=.*cpu).*"
)
INSTALL_CXX = "install one (apt install g++), or set CXX to one"


def explain(error: BaseException) -> str | None:
    """One line that says what is wrong and what to do, or None when the error is not one of those known here.

    The texts are asked, not only the types: the error of a process of its own comes as that one's last words. What a
    technique says itself, by an AssertionError, needs no other words.
    """
    if "already registered in mega-cache artifact factory" in str(error):
        return _half_imported()
    if isinstance(error, AssertionError):
        return None
    for each in _chain(error):
        for look in FAULTS:
            if said := look(each, str(each)):
                return " ".join(said.split())
    return None


def _half_imported() -> str:
    """The compiler makes its cache while it is imported; when that fails, a second import fails in another way."""
    try:
        os.makedirs(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir(), exist_ok=True)
    except OSError as error:
        return _cache(error, str(error)) or str(error)
    return "torch.compile could not be loaded, for what the first technique that failed says"


def where(error: BaseException) -> list[str]:
    """The first line of the error as it was raised, and the lines of code that it came through, no library's."""
    return [f"{type(error).__name__}: {_first_line(str(error))}", *_places(error)]


Frame = tuple[str, "int | str | None", str, "str | None"]  # file, line, function, code


def _places(error: BaseException) -> list[str]:
    """The lines of code that the error came through, no library's; the last is where it was raised."""
    return _readers((f.filename, f.lineno, f.name, f.line) for f in traceback.extract_tb(error.__traceback__))


def _frames_told(text: str) -> list[Frame]:
    """The frames of a traceback that is text within an error: of another process, or of the code a compiler read."""
    return re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n +(.+)', text)


def _readers(frames: Iterable[Frame]) -> list[str]:
    folders = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries = ("<", str(Path(__file__).parent), str(Path(torch.__file__).parent), *folders)
    return [_place(frame) for frame in frames if not frame[0].startswith(libraries)]


def _place(frame: Frame) -> str:
    file, line, function, code = frame
    return f"{Path(file).name}:{line} in {function}: {code}"


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


# Each of these is shown one error of the chain, and its text.


def _memory(error: BaseException, text: str) -> str | None:
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of GPU memory: {_first_line(text)}; try --quick, or free the GPU"
    found = NO_MEMORY.search(text)
    if not found and not isinstance(error, MemoryError):
        return None
    said = found[0].removeprefix("DefaultCPUAllocator: ") if found else "MemoryError"
    kind, free = ("GPU memory", "the GPU") if said.startswith("CU") else ("memory", "some")
    return f"out of {kind}: {said}; try --quick, or free {free}"


def _compiler(error: BaseException, text: str) -> str | None:
    if "No working C++ compiler found" in text or "InvalidCxxCompiler" in f"{type(error).__name__} {text}":
        tried = re.search(r"cpp\.cxx: .*'(.+?)'|Compiler: (\S+) is not found", text)
        name = (tried[1] or tried[2]) if tried else "the one asked for"
        return f"torch.compile needs a C++ compiler, and {name} does not work; {INSTALL_CXX}"
    if "Failed to find C compiler" in text:
        return "Triton needs a C compiler, and finds neither gcc nor clang; install gcc (apt install gcc), or set CC"
    if re.search(r"Python\.h.*No such file", text):
        return "the compiler finds no Python.h; install Python's headers (apt install python3-dev)"
    if "C++ compile error" in text:
        wrong = re.search(r"^.*\berror: .*$", text, re.MULTILINE)
        folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/")
        if not os.path.isabs(folder):  # torch 2.11 compiles from within another folder
            return f"the compiler's cache {folder!r} is not found; set TORCHINDUCTOR_CACHE_DIR to an absolute path"
        return (
            f"{os.environ.get('CXX', 'the C++ compiler')} failed on what Inductor wrote: "
            f"{wrong[0] if wrong else _first_line(text.partition('Output:')[2])}; {INSTALL_CXX}"
        )
    if "Cannot find a working triton installation" in text:
        return "Inductor needs Triton on this GPU, and it is missing or too old; pip install triton"
    return None


def _cache(_: BaseException, text: str) -> str | None:
    """A cache that cannot be written, told from other files by its place."""
    found = re.search(r"\[Errno (\d+)\] ([^:\n]+): '([^'\n]+)'", text)
    if not found:
        return None
    number, file, temporary = int(found[1]), os.path.abspath(found[3]), tempfile.gettempdir()
    for variable, default in (
        ("TORCHINDUCTOR_CACHE_DIR", os.path.join(temporary, "torchinductor_")),  # and the user's name
        ("TRITON_CACHE_DIR", str(Path.home() / ".triton")),
        ("TMPDIR", os.path.join(temporary, "empty-cache-")),  # compiler.empty_cache()
    ):
        folder = os.path.abspath(os.environ[variable]) if os.environ.get(variable) else None
        inside = file.startswith(folder if folder and variable != "TMPDIR" else default)
        above = folder is not None and Path(folder).is_relative_to(file)  # where it would have to be made
        unmade = number == errno.ENOENT and folder is not None and not os.path.isdir(folder)
        if (inside or above) and (number in CANNOT_WRITE or unmade):
            return (
                f"the compiler cannot write its cache: {found[2]}: {found[3]}; "
                f"set {variable} to a folder where you may write"
            )
    return None


def _choice(_: BaseException, text: str) -> str | None:
    if found := re.search(r"Invalid backend: '([^'\n]*)'", text):
        usable = ["eager", "aot_eager", *torch.compiler.list_backends()]
        near = difflib.get_close_matches(found[1], torch.compiler.list_backends(None), n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        return f"torch.compile has no backend {found[1]!r}; {hint}there are: {', '.join(usable)}"
    if found := re.search(r"Unrecognized mode=(.+?), should be one of: (.*)", text):
        return f"torch.compile has no mode {found[1]!r}; there are: {found[2]}"
    if found := re.search(r"Unexpected optimization option (\S+?),", text):
        near = difflib.get_close_matches(found[1], torch._inductor.list_options(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "torch._inductor.list_options() names them"
        return f"torch.compile has no option {found[1]!r}; {hint}"
    return None


def _graph_break(error: BaseException, text: str) -> str | None:
    """What fullgraph=True does not allow, and where."""
    if type(error).__name__ != "Unsupported":
        return None
    frames = _frames_told(text.rpartition("from user code:")[2])
    at = f"{_place(frames[-1]).rstrip(':')}: " if frames else ""
    return (
        f"cannot be compiled as one graph (fullgraph=True): {at}{_first_line(text)}; "
        "python torch_compiler_examples.py graph_breaks shows each cause and its fix"
    )


def _xla_pair(_: BaseException, text: str) -> str | None:
    """torch_xla's library is compiled against one version of torch, and pip does not know which."""
    if not re.search(r"_XLAC\S*: undefined symbol", text):
        return None
    return (
        f"torch_xla {package_version('torch_xla') or ''} cannot be loaded with torch {torch.__version__}: it was built "
        "for another torch; `make xla` installs a pair that fits into .venv-xla and runs the topic there"
    )


def _xla_device(_: BaseException, text: str) -> str | None:
    """PJRT_DEVICE, which is read when the first tensor goes to the device."""
    unset = "unset PJRT_DEVICE, or set it to CPU"
    if found := re.search(r"No PjRtPlugin registered for: (.*?)\. Make sure", text):
        if found[1].upper() in ("CUDA", "GPU"):
            return (
                f"PJRT_DEVICE={found[1]}: torch_xla has no CUDA plugin any more, it was removed upstream after 2.8; "
                f"{unset}; on a GPU use torch.compile with Inductor, or XLA through JAX"
            )
        return f"PJRT_DEVICE={found[1]}: there is no such device here; {unset}"
    if "$PJRT_DEVICE is not set" in text:
        return f"PJRT_DEVICE is empty; {unset}"
    if "libtpu not found" in text:
        return f"PJRT_DEVICE=TPU: there is no libtpu here; on a TPU pip install 'torch_xla[tpu]'; elsewhere {unset}"
    if "No module named 'libneuronxla'" in text:
        return f"PJRT_DEVICE=NEURON: there is no libneuronxla here; install it on a Trainium; elsewhere {unset}"
    return None


def _xla_memory(_: BaseException, text: str) -> str | None:
    found = re.search(r"Out of memory allocating (\d+) bytes|RESOURCE_EXHAUSTED: .*", text)
    if not found:
        return None
    size = f" ({int(found[1]) / 2**30:,.1f} GiB)" if found[1] else ""
    return f"out of memory on XLA's device: {_first_line(found[0])}{size}; try --quick, or a smaller batch"


def _xla_tensors(error: BaseException, text: str) -> str | None:
    found = NOT_ON_XLA.search(text)
    if not found:
        return None
    places = _readers(_frames_told(text)) or _places(error)
    return (
        f"tensors on the CPU among those on the XLA device{f', {places[-1]}' if places else ''}: {found[0]}; "
        "move them, or the model, with .to(xla.device())"
    )


FAULTS: tuple[Callable[[BaseException, str], str | None], ...] = (
    _memory, _compiler, _cache, _choice, _graph_break, _xla_pair, _xla_device, _xla_memory, _xla_tensors,
)  # fmt: skip
