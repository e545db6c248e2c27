"""debugging, the other tools: what each says of a bug that is known to be there, and what hides it.

Each runs for real, in a process of its own where it needs other switches or ends in a fault, and has to name its bug:
one that finds nothing fails the run. debugging_memcheck.py has compute-sanitizer, debugging_ir.py the compiler's part.
"""

from __future__ import annotations

import inspect
import io
import pdb
import re
from contextlib import ExitStack
from pathlib import Path

from harness import Harness
from harness.codegen import compile_for, dump
from harness.process import Child, report, result_of

import torch
import triton
import triton.language as tl

from examples.common.operands import check_elementwise
from examples.triton.debugging import BLOCK, N, require, scale_overrun_kernel
from examples.triton.debugging_interpreted import DTYPES
from studies.triton.debugging_memcheck import place_of

CHECKED = 32  # values that sqrt_checked is shown: one per thread of one warp


@triton.jit
def sqrt_checked_kernel(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK >= 32, "BLOCK is less than a warp")
    tl.static_print("sqrt_checked_kernel: BLOCK", BLOCK, "of", x_ptr.dtype.element_ty)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # int32 on purpose: debug=True asserts no overflow
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements, other=1.0)
    tl.device_print("x", x)
    tl.device_assert(x >= 0, "x is negative")
    y = tl.sqrt(x.to(tl.float32))
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=offsets < n_elements)


def sqrt_checked(x: torch.Tensor, block: int = 32, debug: bool = False) -> torch.Tensor:
    """The square root of at least one element, printed and asserted on the way; `block` is a power of two."""
    check_elementwise("sqrt_checked", DTYPES, x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(x.numel(), block),)
    sqrt_checked_kernel[grid](x, y, x.numel(), BLOCK=block, num_warps=1, debug=debug)
    return y


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


# Processes: each runs one of these functions, with the switches of its tool.


def child_checked() -> None:
    """On the GPU: what device_print prints, and what device_assert does under this process's TRITON_DEBUG."""
    y = sqrt_checked(squares().cuda())
    try:
        torch.cuda.synchronize()
        report(error=None, nan=int(y.cpu().isnan().sum()))
    except RuntimeError as error:
        report(error=str(error).splitlines()[0], nan=None)


def child_interpreted() -> None:
    """On the CPU: values printed, an assertion that is skipped, and pdb in front of the store of the kernel's bug."""
    nan = int(sqrt_checked(squares(), debug=True).isnan().sum())
    file, line = place_of(scale_overrun_kernel, "tl.store")
    commands = f"""
        break {file}:{line}
        continue
        p (offsets.handle.data.max().item(), n_elements.handle.data.item())
        continue
    """
    session, printed = io.StringIO(inspect.cleandoc(commands) + "\n"), io.StringIO()
    pdb.Pdb(stdin=session, stdout=printed, nosigint=True, readrc=False).runcall(neighbour_overwritten, "cpu")
    report(nan=nan, pdb=printed.getvalue())


def printed_values(output: str) -> list[float]:
    """The block that tl.device_print("x", x) printed: a line per value on a GPU, an array in the interpreter."""
    if by_index := dict(re.findall(r"pid \(0, 0, 0\) idx \( *(\d+)\) x: (\S+)", output)):
        return [float(by_index[i]) for i in sorted(by_index, key=int)]
    array = re.search(r"\(0, 0, 0\) +x: +\[([^]]*)\]", output)
    return [float(value) for value in array[1].split()] if array else []


# The tools: each asks by itself or takes what a process printed, requires what must be in it, and records it.


def compile_time(h: Harness) -> None:
    x = h.meta(CHECKED, dtype=torch.float32)
    texts = dump(sqrt_checked, (x,), {"debug": True}, sm=90)
    printed = [line for line in texts["log"].splitlines() if line.startswith("sqrt_checked_kernel:")]
    require(printed == [f"sqrt_checked_kernel: BLOCK {CHECKED} of fp32"], f"tl.static_print printed {printed}")
    (refused,) = compile_for(sqrt_checked, (x,), {"block": 16}, sms=(90,))
    require("BLOCK is less than a warp" in (refused.error or ""), f"tl.static_assert: {refused.error}")
    asserts = sorted(set(re.findall(r'@assertMessage_\d+ = [^"]*"(.*?)\\00"', texts["llir"])))
    require("x is negative" in asserts, f"debug=True compiled the asserts {asserts}")
    h.fact("tl.static_print", printed[0])
    h.fact("tl.static_assert, block=16", refused.error)
    h.fact("asserts in the LLIR with debug=True", asserts)


def interpreter(h: Harness, output: str) -> None:
    result = result_of(output)
    values = printed_values(output)
    require(values == squares().tolist(), f"interpreted tl.device_print printed {values}")
    h.fact("tl.device_print, interpreted", f"all {len(values)} values of x, x[3] = {values[3]:g}")
    require(result["nan"] == 1, f"interpreted tl.device_assert: {result['nan']} values of y are NaN")
    h.fact("tl.device_assert, interpreted", f"skipped, with TRITON_DEBUG=1 too: {result['nan']} NaN in y, no error")
    shown = re.search(r"^\(Pdb\) \((\d+), (\d+)\)$", result["pdb"], re.MULTILINE)
    require(shown is not None and int(shown[1]) >= int(shown[2]), f"pdb does not show the overrun: {result['pdb']}")
    h.fact("pdb, interpreted", f"in front of the store offsets reach {shown[1]}, n_elements is {shown[2]}")


def on_the_gpu(h: Harness, silent: str, debug: str) -> None:
    values, result = printed_values(silent), result_of(silent)
    require(values == squares().tolist(), f"tl.device_print printed {values}:\n{silent[-2000:]}")
    h.fact("tl.device_print", re.search(r"pid .* x: -4.*", silent)[0])
    require((result["error"], result["nan"]) == (None, 1), f"TRITON_DEBUG=0: {result}")
    h.fact("tl.device_assert, TRITON_DEBUG=0", f"not compiled: {result['nan']} NaN in y, no error")

    result = result_of(debug)
    file, line = place_of(sqrt_checked_kernel, "tl.device_assert")
    failed = re.search(rf"{Path(file).name}:(\d+): .*Assertion .x is negative. failed", debug)
    require(failed is not None and bool(result["error"]), f"TRITON_DEBUG=1 did not abort:\n{debug[-2000:]}")
    require(int(failed[1]) == line, f"TRITON_DEBUG=1 names line {failed[1]}, not {line}")
    h.fact("tl.device_assert, TRITON_DEBUG=1", failed[0])
    h.fact("tl.device_assert, and then torch says", result["error"])


def study(h: Harness) -> None:
    if not h.shows_code:
        return  # a profiler would see the tools alone, and under a sanitizer the planted bugs end the run
    with ExitStack() as stack:
        # All at once, and read in turn: most of the time of each is the import of torch.
        stepping = stack.enter_context(Child(child_interpreted, env={"TRITON_INTERPRET": "1", "TRITON_DEBUG": "1"}))
        checked = []
        if h.machine.mode == "gpu":
            checked = [stack.enter_context(Child(child_checked, env={"TRITON_DEBUG": on})) for on in "01"]
        overwritten = neighbour_overwritten(h.device)
        require(overwritten == BLOCK - N, f"the bug changed {overwritten} values of its neighbour, not {BLOCK - N}")
        h.fact("without a tool", f"y is right, no error, and {overwritten} values behind it are overwritten")
        with h.progress("the interpreter"):
            interpreter(h, stepping.output())
        if checked:
            with h.progress("device_print and device_assert"):
                on_the_gpu(h, *(child.output() for child in checked))
    compile_time(h)
