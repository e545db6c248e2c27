"""debugging, compute-sanitizer: the line that writes out of bounds, and the allocator that hides it."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness
from harness.process import Child, report, result_of

import torch

from examples.triton.debugging import BLOCK, require, scale, scale_overrun, scale_overrun_kernel


def study(h: Harness) -> None:
    if not h.shows_code:
        return  # a profiler would see the tool alone, and a sanitizer does not watch another one
    sanitizer = find_sanitizer() if h.machine.mode == "gpu" else None
    if sanitizer is None:
        h.fact("compute-sanitizer", "not shown here: it needs a GPU, and to be on the PATH (it is part of CUDA)")
        return
    with (
        TemporaryDirectory(prefix="triton-debugging-", ignore_cleanup_errors=True) as folder,
        sanitized(sanitizer, Path(folder, "cached.log")) as cached,
        sanitized(sanitizer, Path(folder, "alone.log"), PYTORCH_NO_CUDA_MEMORY_CACHING="1") as alone,
        h.progress("compute-sanitizer"),
    ):
        read_memcheck(h, alone.output(), cached.output())


def sanitized(sanitizer: str, log: Path, **switches: str) -> Child:
    before = (
        sanitizer, "--tool", "memcheck", "--log-file", str(log), "--show-backtrace", "no",
        "--print-limit", "4096",  # all of them: who is to blame for each is asked
        "--report-api-errors", "no",  # torch asks the driver things that may fail; these are no accesses
        "--target-processes", "application-only", "--launch-timeout", "0",
    )  # fmt: skip
    return Child(child_sanitized, before=before, log=log, env=switches)


def find_sanitizer() -> str | None:
    toolkits = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", os.defpath), *toolkits]))


def child_sanitized() -> None:
    """Both kernels on the GPU, the right one first, since the other may end the process's use of the GPU."""
    # Made on the CPU: each kernel of torch's that ran here would be instrumented too, which takes seconds.
    x = torch.arange(BLOCK + 1, dtype=torch.float32)
    on_gpu = x.cuda()
    right = torch.equal(scale(on_gpu).cpu(), 2 * x)
    y = scale_overrun(on_gpu)
    for tensor in (on_gpu, y):  # never freed: cudaFree would report the fault again, from a destructor, and abort
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))
    try:
        torch.cuda.synchronize()
        report(twin_right=right, overrun_error=None)
    except RuntimeError as error:
        report(twin_right=right, overrun_error=str(error).splitlines()[0])


def read_memcheck(h: Harness, alone: str, cached: str) -> None:
    """`alone` is what was printed with every tensor an allocation of its own, `cached` with torch's allocator.

    The latter cuts tensors from pieces of 2 MiB, which are the allocations that compute-sanitizer knows: what leaves a
    tensor and stays in its piece is in bounds.
    """
    _, places = memcheck_report(alone)
    known = r"Device not supported|Internal \w+ [Ee]rror|[Ii]nsufficient p(?:ermissions|rivileges)"
    if not places and (refusal := re.search(rf"^=* *(.*(?:{known}).*)$", alone, re.MULTILINE)):
        h.fact("compute-sanitizer", f"not shown here: it says: {refusal[1].strip()}")
        return
    result = result_of(alone)  # a run in which nothing was launched would be free of errors, too
    require(result["twin_right"], "under compute-sanitizer the twin is wrong")
    require(bool(places), f"compute-sanitizer found nothing:\n{alone[-2000:]}")
    others = [place for place in places if not re.search(r"\bscale_overrun_kernel\b", place)]
    require(not others, f"compute-sanitizer blames another kernel: {others[:1]}")
    file, line = place_of(scale_overrun_kernel, "tl.store")
    place = re.sub(r"\S*/", "", places[0])  # the file without its folders
    named = re.search(rf"{Path(file).name}:(\d+)", place)
    require(named is not None and int(named[1]) == line, f"compute-sanitizer names {place}, not line {line}")
    h.fact("compute-sanitizer", f"{len(places)} invalid writes, {len(others)} of the twin; the first at {place}")
    h.fact("compute-sanitizer, and then torch says", result["overrun_error"])

    hidden, _ = memcheck_report(cached)
    result = result_of(cached)
    require(hidden == 0 and result["overrun_error"] is None, f"torch's allocator hid nothing:\n{cached[-2000:]}")
    h.fact("compute-sanitizer, torch's allocator on", f"{hidden} errors for the same two kernels")


def memcheck_report(output: str) -> tuple[int | None, list[str]]:
    """Errors that compute-sanitizer counted (None: it never got that far), and the place of each invalid write."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error", output)
    return int(summary[1]) if summary else None, re.findall(r"Invalid __global__ write of .*\n=+ +at (.+)", output)


def place_of(kernel, text: str) -> tuple[str, int]:
    """The file of a kernel, and the line on which `text` first stands in its source."""
    lines, first = inspect.getsourcelines(kernel.fn)
    return kernel.fn.__code__.co_filename, first + next(i for i, line in enumerate(lines) if text in line)
