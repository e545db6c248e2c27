"""Debugging: bugs planted in small kernels, and the tool that finds each, with and without a GPU.

Technique  A kernel that writes past its output mostly gives the right answer; what breaks is its neighbour, later. So a
           bug is hunted with tools, and a tool is believed after it has found a bug that is known to be there. Here
           scale_overrun_kernel differs from scale_kernel in one mask, and sqrt_checked_kernel gets one bad value. Each
           tool runs for real, in a process of its own where it needs other switches or ends in a fault, and has to
           name its bug and pass the twin; one that finds nothing fails the run.
           The interpreter models values, not the machine: programs run one after the other, so races do not show,
           nor does a tile too large for shared memory; bfloat16 arithmetic is silently wrong, tl.device_assert is
           skipped, and a write out of bounds goes through. Nothing here is timed: each of these tools changes the code
           or what runs it. TRITON_DUMP_DIR=folder in front of the command keeps the text of every compiler stage.
Question   Which tool finds an out-of-bounds write, a bad value or a narrow load, and what does it need?
Needs      triton
Shapes     x contiguous, any number of elements (sqrt_checked: fewer than 2**31) -> the same shape and dtype.
Dtypes     float32, float16, bfloat16.
Errors     TypeError for another dtype; ValueError for a layout that is not contiguous, too many elements, or a block
           that is no power of two up to 16384 (one under 32 the compiler refuses, which is shown); RuntimeError for a
           device without Triton or an input that requires grad.
Wins when  something is wrong: begin with h.check (a guarded buffer, any machine), then the tool of the question.
Source     chapter section "Debugging Commands", which says of TRITON_DEBUG=1 only that it is the debug mode: what it
           compiles in is shown below. Triton's switches are listed in triton/knobs.py.
Run        python examples/triton/debugging.py
"""

from __future__ import annotations

import ctypes
import inspect
import io
import os
import pdb
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness, process, require_triton_device, run
from harness.check import CheckError, check
from harness.codegen import STAGES, compile_for, dump
from harness.process import Child, ChildFailed, report

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 1024
MAX_BLOCK = 16384
N = BLOCK - 61  # the overrun, 61 float32 values, stays within the 256 guard bytes, and so off the heap of a CPU
WIDE = 1 << 20  # a multiple of 16 elements, so that Triton may load 16 bytes at a time
CHECKED = 32  # values that sqrt_checked is shown: one per thread of one warp


class NothingFound(AssertionError):
    """A tool did not find the bug that is there, or found one in the twin that has none."""


@triton.jit
def scale_kernel(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements, other=0.0)
    tl.store(y_ptr + offsets, 2 * x, mask=offsets < n_elements)


@triton.jit
def scale_overrun_kernel(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements, other=0.0)
    tl.store(y_ptr + offsets, 2 * x, mask=offsets < tl.num_programs(0) * BLOCK)  # the planted bug: the padded size


@triton.jit
def sqrt_checked_kernel(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr, PLAIN: tl.constexpr):
    tl.static_assert(BLOCK >= 32, "BLOCK is less than a warp")
    tl.static_print("sqrt_checked_kernel: BLOCK", BLOCK, "of", x_ptr.dtype.element_ty)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # int32: what overflows is checked in a debug build
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements, other=1.0)
    tl.device_print("x", x)
    if PLAIN:
        # Python's own statement: device_assert when compiled, an assert when interpreted. There a block counts as true
        # whatever it holds, so the condition must be one value.
        assert tl.min(x.to(tl.float32), axis=0) >= 0, "x is negative"
    else:
        tl.device_assert(x >= 0, "x is negative")
    y = tl.sqrt(x.to(tl.float32))
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=offsets < n_elements)


def _checked_output(name: str, x: torch.Tensor) -> torch.Tensor:
    require_triton_device(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype} is not one of {DTYPES}")
    if not x.is_contiguous():
        raise ValueError(f"{name}: strides {x.stride()}; call .contiguous() first")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def scale(x: torch.Tensor) -> torch.Tensor:
    """2 * x for a contiguous tensor; limits and errors are in the module docstring."""
    y = _checked_output("scale", x)
    if x.numel():  # a grid of zero programs is a launch error
        scale_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
    return y


def scale_overrun(x: torch.Tensor) -> torch.Tensor:
    """scale() with the bug. Writes up to BLOCK - 1 elements behind its output: never on memory that matters."""
    y = _checked_output("scale_overrun", x)
    if x.numel():
        scale_overrun_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
    return y


def sqrt_checked(x: torch.Tensor, block: int = 32, debug: bool = False, plain: bool = False) -> torch.Tensor:
    """The square root of x, printed and asserted on the way; limits and errors are in the module docstring."""
    y = _checked_output("sqrt_checked", x)
    if x.numel() >= 2**31:
        raise ValueError(f"sqrt_checked: {x.numel()} elements; its int32 offsets end below 2**31: split the tensor")
    if type(block) is not int or not 0 < block <= MAX_BLOCK or block & (block - 1):
        raise ValueError(f"sqrt_checked: block is {block!r}; pass a power of two up to {MAX_BLOCK}, such as 32")
    if not (isinstance(debug, bool) and isinstance(plain, bool)):
        raise TypeError(f"sqrt_checked: debug is {debug!r} and plain {plain!r}; pass True or False")
    if x.numel():
        grid = (triton.cdiv(x.numel(), block),)
        sqrt_checked_kernel[grid](x, y, x.numel(), BLOCK=block, PLAIN=plain, num_warps=1, debug=debug)
    return y


def reference(x: torch.Tensor) -> torch.Tensor:
    return 2 * x.double()


def sqrt_reference(x: torch.Tensor) -> torch.Tensor:
    return x.double().sqrt()


def squares() -> torch.Tensor:
    """0, 1, 4, -4, 16, 25 ...: squares, and one value that has no square root."""
    x = torch.arange(CHECKED, dtype=torch.float32) ** 2
    x[3] = -4.0
    return x


def neighbour_overwritten(device: torch.device | str) -> int:
    """How many values of the tensor behind y the bug changes, in memory laid out so that nothing else is hit."""
    x, memory = torch.ones(N, device=device), torch.ones(2 * BLOCK, device=device)
    y, neighbour = memory[:N], memory[N:]
    scale_overrun_kernel[(1,)](x, y, N, BLOCK=BLOCK)
    require(torch.equal(y, 2 * x), "scale_overrun: the values inside y are wrong; the bug is meant to leave them right")
    return int((neighbour != 1).sum())


# Processes: each runs one of these functions, with the switches of its tool, and ends with one line "result: {...}".


def child_checked() -> None:
    """On the GPU: what device_print prints, and what device_assert does under this process's TRITON_DEBUG."""
    y = sqrt_checked(squares().cuda())
    try:
        torch.cuda.synchronize()
        report(error=None, nan=int(y.cpu().isnan().sum()))
    except RuntimeError as error:
        report(error=str(error).splitlines()[0], nan=None)


def child_interpreted() -> None:
    """On the CPU: printing, asserting and stepping inside kernels, and a write out of bounds."""
    try:
        nan = int(sqrt_checked(squares(), debug=True).isnan().sum())
        try:
            sqrt_checked(squares(), plain=True)
            plain = None
        except Exception as error:
            plain = str(error)
        report(nan=nan, plain=plain, pdb=stepped(), overwritten=neighbour_overwritten("cpu"))
    except Exception:
        from harness.catalog import Needs
        from harness.hardware import machine

        reason = machine().lacks(Needs.parse("triton"))  # a numpy that this Triton's interpreter does not know
        if not reason:
            raise
        report(cannot=reason)


def stepped() -> str:
    """A pdb session inside the kernel with the bug, stopped in front of its store."""
    commands = f"""
        break {__file__}:{line_of(scale_overrun_kernel, "tl.store")}
        continue
        p offsets
        p (offsets.handle.data.max().item(), n_elements.handle.data.item())
        continue
    """
    said = io.StringIO()
    session = io.StringIO(inspect.cleandoc(commands) + "\n")
    pdb.Pdb(stdin=session, stdout=said, nosigint=True, readrc=False).runcall(neighbour_overwritten, "cpu")
    return said.getvalue()


def child_compiled() -> None:
    """Compile for a GPU that need not be here, under Triton's own dump switches."""
    (kernel,) = compile_for(scale, (torch.empty(WIDE, device="meta"),), sms=(90,))
    report(error=kernel.error)


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


def result_of(output: str) -> dict:
    """What the process reported. Raises NothingFound, with the end of its output, when it never came to that."""
    try:
        return process.result_of(output)
    except ChildFailed as error:
        raise NothingFound(str(error)) from None


def require(found: bool, otherwise: str) -> None:
    if not found:
        raise NothingFound(otherwise)


def line_of(kernel, text: str) -> int:
    """The line of this file on which `text` first stands in the source of `kernel`."""
    lines, first = inspect.getsourcelines(kernel.fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


# What the tools' output says.


def printed_values(output: str) -> list[float]:
    """The block that tl.device_print("x", x) printed: a line per value on a GPU, an array in the interpreter."""
    if by_index := dict(re.findall(r"pid \(0, 0, 0\) idx \( *(\d+)\) x: (\S+)", output)):
        return [float(by_index[i]) for i in sorted(by_index, key=int)]
    array = re.search(r"\(0, 0, 0\) +x: +\[([^]]*)\]", output)
    return [float(value) for value in array[1].split()] if array else []


def memcheck_report(output: str) -> tuple[int | None, list[str]]:
    """Errors that compute-sanitizer counted (None: it never got that far), and the place of each invalid write."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error", output)
    return int(summary[1]) if summary else None, re.findall(r"Invalid __global__ write of .*\n=+ +at (.+)", output)


def memcheck_refusal(output: str) -> str | None:
    """The line in which compute-sanitizer says that it cannot work on this machine, if it does."""
    known = r"Device not supported|Internal \w+ [Ee]rror|[Ii]nsufficient p(?:ermissions|rivileges)"
    refusal = re.search(rf"^=* *(.*(?:{known}).*)$", output, re.MULTILINE)
    return refusal[1].strip() if refusal else None


def passes_of(text: str, pattern: str) -> tuple[int, str]:
    """How many passes MLIR_ENABLE_DUMP showed, and the first whose output has `pattern`; it prints before each."""
    parts = re.split(r"^// -----// IR Dump Before (\w+) .*$", text, flags=re.MULTILINE)
    names, bodies = parts[1::2], parts[2::2]
    first = next((i for i, body in enumerate(bodies) if re.search(pattern, body)), 0)
    require(first > 0, f"no pass of {len(names)} introduces {pattern}")
    return len(names), names[first - 1]


# The tools. Each asks by itself or takes what a process printed, requires what must be in it, records it, and returns
# rows of the closing table: (question, tool, answer).


def guarded_buffer(h: Harness) -> tuple[str, str, str]:
    # harness.check.check and not h.check: a failure that is wanted does not belong into the record of checks.
    x = h.randn(N)
    try:
        check(scale_overrun, reference, x, what="scale_overrun", terms=0)
    except CheckError as error:
        message = str(error)
    else:
        raise NothingFound("the guarded buffer: scale_overrun passed")
    require("outside its output were written" in message, f"the guarded buffer: another complaint: {message}")
    h.fact("guarded buffer", message)
    h.check(scale, reference, x, terms=0)
    count = re.search(r"(\d+) bytes", message)[1]
    return "does it write outside its output?", "h.check, any machine", f"{count} bytes behind {N} values; twin: none"


def nothing_at_all(h: Harness) -> tuple[str, str, str]:
    overwritten = neighbour_overwritten(h.device)
    require(overwritten == BLOCK - N, f"the bug changed {overwritten} values of its neighbour, not {BLOCK - N}")
    h.fact("neighbour's values overwritten, no error", overwritten)
    where = "interpreted" if h.interpreted else "on the GPU"
    return "is it noticed without a tool?", f"none, {where}", f"y right, {overwritten} values behind it overwritten"


def compile_time(h: Harness) -> list[tuple[str, str, str]]:
    x = h.meta(CHECKED, dtype=torch.float32)
    plain, debug = (dump(sqrt_checked, (x,), {"debug": on}, sm=90) for on in (False, True))
    said = [line for line in plain["log"].splitlines() if line.startswith("sqrt_checked_kernel:")]
    require(said == [f"sqrt_checked_kernel: BLOCK {CHECKED} of fp32"], f"tl.static_print said {said}")
    h.fact("tl.static_print", said[0])

    (refused,) = compile_for(sqrt_checked, (x,), {"block": 16}, sms=(90,))
    require("BLOCK is less than a warp" in (refused.error or ""), f"tl.static_assert: {refused.error}")
    h.fact("tl.static_assert, block=16", refused.error)

    pattern = r'@assertMessage_\d+ = [^"]*"(.*?)\\00"'
    without, compiled = (sorted(set(re.findall(pattern, texts["llir"]))) for texts in (plain, debug))
    require("x is negative" in compiled, f"debug=True compiled the asserts {compiled}")
    require(not without or triton.knobs.runtime.debug, f"debug=False compiled the asserts {without}")
    h.fact("asserts compiled with debug=True", compiled)
    h.fact("asserts compiled with debug=False", without)
    return [
        ("what was it compiled for?", "tl.static_print", said[0].removeprefix("sqrt_checked_kernel: ")),
        ("is that allowed?", "tl.static_assert", f"block=16 {refused.error}"),
        ("are its asserts in the code?", "LLIR", f"debug=True: {len(compiled)}; debug=False: {len(without)}"),
    ]


def stages(h: Harness) -> list[tuple[str, str, str]]:
    """What one load is at each stage, and why one element more makes it four times as narrow."""
    instruction = r"ld\.global[.\w]*"
    shows = {
        "ttir": r"tt\.load", "ttgir": r"sizePerThread = \[\d+\]", "llir": instruction, "ptx": instruction,
        "sass": r"LDG[.\w]*",
    }  # fmt: skip
    texts = {}
    for sm in (90, 100):
        with h.progress(f"compiling scale for sm_{sm}"):
            texts[sm] = dump(scale, (h.meta(WIDE, dtype=torch.float32),), sm=sm)
    for stage, pattern in shows.items():
        found = {sm: re.search(pattern, text[stage]) for sm, text in texts.items()}
        require(all(found.values()), f"{stage} has no {pattern}")
        for sm, text in texts.items():
            h.fact(f"{stage} for sm_{sm}", f"{len(text[stage].splitlines())} lines; the load: {found[sm][0]}")
    ptx, sass = (re.findall(shows[stage], texts[90][stage]) for stage in ("ptx", "sass"))
    require(ptx[0].endswith(".v4.b32") and sass[0].endswith(".128"), f"not 16 bytes at a time: {ptx[0]}, {sass[0]}")

    one_more = dump(scale, (h.meta(WIDE + 1, dtype=torch.float32),), sm=90)
    narrow = re.findall(shows["sass"], one_more["sass"])
    hint = r"%n_elements: i32 \{tt\.divisibility = 16"
    require(".128" not in narrow[0], f"{WIDE + 1} elements still load {narrow[0]}")
    require(bool(re.search(hint, texts[90]["ttir"])), "TTIR does not say that n_elements divides by 16")
    require(not re.search(hint, one_more["ttir"]), f"TTIR says that {WIDE + 1} divides by 16")
    h.fact(f"the load of {WIDE + 1} elements", narrow[0])
    if folder := os.environ.get("TRITON_DUMP_DIR"):
        for sm, text in texts.items():
            place = Path(folder) / f"sm_{sm}"
            place.mkdir(parents=True, exist_ok=True)
            for stage in STAGES:
                (place / f"scale_kernel.{stage}").write_text(text[stage], encoding="utf-8")
        h.say(f"kept: scale_kernel.{{{','.join(STAGES)}}} in {folder}/sm_90 and {folder}/sm_100")
    else:
        h.say("these texts are not kept; TRITON_DUMP_DIR=folder in front of the command keeps them there")
    answer = f"{WIDE} elements {sass[0]}, {WIDE + 1} {narrow[0]}: n_elements lost tt.divisibility = 16"
    return [("why are its loads narrow?", "SASS, then TTIR", answer)]


def instructions(ptx: str) -> list[str]:
    return [line.split("//")[0].strip() for line in ptx.splitlines() if re.match(r"\t[@a-z]", line)]


def dump_switches(h: Harness, output: str, folder: Path) -> list[tuple[str, str, str]]:
    result = result_of(output)
    require(result["error"] is None, f"scale did not compile: {result['error']}")
    wrote = {path.suffix[1:]: path for path in folder.glob("dump/*/scale_kernel.*")}
    require({*STAGES, "cubin"} <= set(wrote), f"TRITON_KERNEL_DUMP wrote {sorted(wrote)}")
    # Its instructions: the lines that name places in the source may be switched off, as Inductor does for a process.
    same = instructions(wrote["ptx"].read_text()) == instructions(
        dump(scale, (h.meta(WIDE, dtype=torch.float32),), sm=90)["ptx"]
    )
    require(same, "TRITON_KERNEL_DUMP wrote another PTX than the kernel has")
    # The folder's name is a hash of the source and its constants: another num_warps, num_stages or GPU writes over it.
    h.fact("TRITON_KERNEL_DUMP=1 wrote", sorted(wrote))
    count, name = passes_of((folder / "passes.mlir").read_text(), r"sizePerThread = \[4\]")
    h.fact("MLIR_ENABLE_DUMP", {"passes": count, "sizePerThread = [4] comes from": name})
    return [
        ("what is the code of my launch?", "TRITON_KERNEL_DUMP=1", f"{len(wrote)} files, with TRITON_ALWAYS_COMPILE=1"),
        ("which pass chose the layout?", "MLIR_ENABLE_DUMP", f"{name}, one of {count} passes"),
    ]


def interpreter(h: Harness, output: str) -> list[tuple[str, str, str]]:
    result = result_of(output)
    if "cannot" in result:
        return [("what happens inside?", "interpreter", f"not shown here: {result['cannot']}")]
    values = printed_values(output)
    require(values == squares().tolist(), f"interpreted tl.device_print printed {values}")
    h.fact("interpreted tl.device_print", f"one array of {len(values)} values")
    require(result["nan"] == 1, f"interpreted tl.device_assert: {result['nan']} values of y are NaN")
    require("x is negative" in (result["plain"] or ""), f"interpreted assert: {result['plain']}")
    h.fact("interpreted tl.device_assert, TRITON_DEBUG=1", f"skipped: {result['nan']} NaN in y, no error")
    h.fact("interpreted assert", result["plain"])
    require("array([" in result["pdb"], f"pdb did not stop inside the kernel: {result['pdb']}")
    shown = re.search(r"^\(Pdb\) \((\d+), (\d+)\)$", result["pdb"], re.MULTILINE)
    require(shown is not None and int(shown[1]) >= int(shown[2]), f"pdb does not show the overrun: {result['pdb']}")
    reach = f"offsets reach {shown[1]}, n_elements is {shown[2]}"
    h.fact("pdb inside the kernel", reach)
    require(result["overwritten"] == BLOCK - N, f"interpreted: {result['overwritten']} values were overwritten")
    h.fact("interpreted write out of bounds", f"{result['overwritten']} values of the neighbour overwritten, no error")
    return [
        ("what happens inside?", "pdb, interpreted", reach),
        ("what is in x?", "device_print, interpreted", f"all {len(values)} values, x[3] = {values[3]:g}"),
        ("is x as expected?", "assert, interpreted", f"{result['plain']}; tl.device_assert: skipped"),
    ]


def on_the_gpu(h: Harness, silent: str, debug: str) -> list[tuple[str, str, str]]:
    values, result = printed_values(silent), result_of(silent)
    require(values == squares().tolist(), f"tl.device_print printed {values}:\n{silent[-2000:]}")
    h.fact("tl.device_print", re.search(r"pid .* x: -4.*", silent)[0])
    require(result["error"] is None, f"TRITON_DEBUG=0: {result['error']}")
    require(result["nan"] == 1, f"TRITON_DEBUG=0: {result['nan']} values of y are NaN")
    h.fact("tl.device_assert, TRITON_DEBUG=0", f"not compiled: {result['nan']} NaN in y, no error")

    result = result_of(debug)
    failed = re.search(rf"{Path(__file__).name}:(\d+): .*Assertion .x is negative. failed", debug)
    require(failed is not None and bool(result["error"]), f"TRITON_DEBUG=1 did not abort:\n{debug[-2000:]}")
    line = line_of(sqrt_checked_kernel, "tl.device_assert")
    require(int(failed[1]) == line, f"TRITON_DEBUG=1 names line {failed[1]}, not {line}")
    h.fact("tl.device_assert, TRITON_DEBUG=1", failed[0])
    h.fact("tl.device_assert, and then torch says", result["error"])
    return [
        ("what is in x?", "tl.device_print", f"all {len(values)} values, x[3] = {values[3]:g}"),
        ("is x as expected?", "device_assert, TRITON_DEBUG=1", f"line {line}: x is negative; with 0: not compiled"),
    ]


def memcheck(h: Harness, alone: str, cached: Callable[[], str]) -> tuple[str, str, str]:
    """`alone` is what was said with every tensor an allocation of its own; `cached` asks again with torch's allocator.

    That one cuts tensors from pieces of 2 MiB, which are the allocations that compute-sanitizer knows: what leaves
    a tensor and stays in its piece is in bounds.
    """
    question, tool = "which line writes out of bounds?", "compute-sanitizer"
    _, places = memcheck_report(alone)
    if not places and (refusal := memcheck_refusal(alone)):
        return question, tool, f"not shown here: it says: {refusal}"
    result = result_of(alone)  # a run in which nothing was launched would be free of errors, too
    require(result["twin_right"], "under compute-sanitizer the twin is wrong")
    require(bool(places), f"compute-sanitizer found nothing:\n{alone[-2000:]}")
    others = [place for place in places if not re.search(r"\bscale_overrun_kernel\b", place)]
    require(not others, f"compute-sanitizer blames another kernel: {others[:1]}")
    line = line_of(scale_overrun_kernel, "tl.store")
    place = re.sub(r"\S*/", "", places[0])  # the file without its folders
    named = re.search(rf"{Path(__file__).name}:(\d+)", place)
    require(named is not None and int(named[1]) == line, f"compute-sanitizer names {place}, not line {line}")
    h.fact("compute-sanitizer", f"{len(places)} invalid writes, {len(others)} of the twin; the first at {place}")
    h.fact("compute-sanitizer, and then torch says", result["overrun_error"])

    output = cached()
    hidden, _ = memcheck_report(output)
    result = result_of(output)
    require(hidden == 0 and result["overrun_error"] is None, f"torch's allocator hid nothing:\n{output[-2000:]}")
    h.fact("compute-sanitizer, torch's allocator on", f"{hidden} errors for the same two kernels")
    return question, tool, f"line {line}, {len(places)} writes; with torch's allocator on: {hidden}"


def find_sanitizer() -> str | None:
    toolkits = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", os.defpath), *toolkits]))


def demo(h: Harness) -> None:
    if h.profile:
        h.say("nothing to profile: these kernels are about what is wrong, and their tools change how they run")
        return
    for n in (0, 1, 997, BLOCK, BLOCK + 1):
        h.check(scale, reference, h.randn(n), terms=0)
    if h.SANITIZED:
        h.say("the planted bug would end this run; without a sanitizer around it this technique puts it under memcheck")
        return

    gpu = h.machine.mode == "gpu"
    sanitizer = find_sanitizer() if gpu else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="triton-debugging-", ignore_cleanup_errors=True)))

        def start(function: Callable, before: tuple[str, ...] = (), log: Path | None = None, **switches: str) -> Child:
            return stack.enter_context(Child(function, before=before, log=log, env=switches))

        def start_sanitized(log: Path, **switches: str) -> Child:
            tool = (
                sanitizer, "--tool", "memcheck", "--log-file", str(log), "--show-backtrace", "no",
                "--print-limit", "4096",  # all of them: who is to blame for each is asked
                "--report-api-errors", "no",  # torch asks the driver things that may fail; these are no accesses
                "--target-processes", "application-only", "--launch-timeout", "0",
            )  # fmt: skip
            return start(child_sanitized, tool, log, **switches)

        # All at once, and read in turn: most of the time of each is the import of torch.
        stepping = start(child_interpreted, TRITON_INTERPRET="1", TRITON_DEBUG="1")
        dumping = start(
            child_compiled, TRITON_INTERPRET="0", TRITON_KERNEL_DUMP="1", TRITON_DUMP_DIR=f"{folder}/dump",
            TRITON_ALWAYS_COMPILE="1",  # a kernel found in the cache is not dumped
            MLIR_ENABLE_DUMP="scale_kernel", MLIR_DUMP_PATH=f"{folder}/passes.mlir", TMPDIR=str(folder),
        )  # fmt: skip
        if gpu:
            silent, debug = (start(child_checked, TRITON_DEBUG=on) for on in "01")
        if sanitizer:
            watched = start_sanitized(folder / "alone.log", PYTORCH_NO_CUDA_MEMORY_CACHING="1")

        found = [nothing_at_all(h), guarded_buffer(h)]
        if sanitizer:
            with h.progress("compute-sanitizer"):
                alone = watched.output()
                found.append(memcheck(h, alone, lambda: start_sanitized(folder / "cached.log").output()))
        else:
            why = "it is not on the PATH; it is part of the CUDA toolkit" if gpu else "it needs a GPU"
            found.append(("which line writes out of bounds?", "compute-sanitizer", f"not shown here: {why}"))
        with h.progress("the interpreter"):
            found += interpreter(h, stepping.output())
        if gpu:
            with h.progress("device_print and device_assert"):
                found += on_the_gpu(h, silent.output(), debug.output())
        else:
            found.append(("is x as expected?", "device_assert, TRITON_DEBUG=1", "not shown here: it needs a GPU"))
        found += compile_time(h)
        found += stages(h)
        with h.progress("the dump switches"):
            found += dump_switches(h, dumping.output(), folder)
    wide = [max(len(row[i]) for row in found) for i in (0, 1)]
    for question, tool, answer in found:
        h.say(f"{question:{wide[0]}}  {tool:{wide[1]}}  {answer}")


if __name__ == "__main__":
    run(demo)
