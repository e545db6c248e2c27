"""Debugging: bugs planted in small kernels, and the tool that finds each.

A kernel that writes past its output mostly gives the right answer; what breaks is another tensor, later. One that
relies on the order of its programs is right in the interpreter, which runs them in order, and wrong on a GPU. Such bugs
call for tools, and a tool is trusted once it has found a bug that is known to be there: here each has to name the
planted bug and to pass the same kernel without it, or the run fails.

All four tools work on any machine. The study covers those of a GPU (tl.device_print, tl.device_assert,
compute-sanitizer) and the compiler's stages. Nothing is timed: these tools change the code or what runs it.

Question   Which tool finds an out-of-bounds write, a bad value, a narrow load or a race?
Needs      triton
Wins when  something is wrong: begin with h.check, then take the tool for the symptom.
Variants   debugging_interpreted.py (a bad value and a race, and the tool that runs programs in reverse)
Study      studies/triton/debugging.py, studies/triton/debugging_memcheck.py, studies/triton/debugging_ir.py
Source     chapter section "Debugging Commands", which says of TRITON_DEBUG=1 only that it is the debug mode, and gives
           ncu an option that it does not have (docs/running.md)
"""

from __future__ import annotations

from harness import Harness, process, run
from harness.check import check

import torch
import triton
import triton.language as tl

from examples.triton.debugging_interpreted import BLOCK, elementwise, programs_in_reverse, sqrt, total

N = BLOCK - 61  # the overrun, 61 float32 values, stays within the 256 guard bytes, and so off the heap of a CPU
WIDE = 1 << 20  # a multiple of 16 elements, so that Triton may load 16 bytes at a time


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


def scale(x: torch.Tensor) -> torch.Tensor:
    """2 * x for a contiguous x in float32, float16 or bfloat16. Raises what check_elementwise does for another."""
    return elementwise("scale", scale_kernel, x)


def scale_overrun(x: torch.Tensor) -> torch.Tensor:
    """scale() with the bug. Writes up to BLOCK - 1 elements past its output: never run it near memory that matters."""
    return elementwise("scale_overrun", scale_overrun_kernel, x)


def reference(x: torch.Tensor) -> torch.Tensor:
    return 2 * x.double()


class NothingFound(AssertionError):
    """A tool did not find the bug that is there, or found one in the twin that has none."""


def require(found: bool, otherwise: str) -> None:
    if not found:
        raise NothingFound(otherwise)


# What each tool says of the bug that is planted for it.


def guarded_output(h: Harness) -> str:
    message = "nothing"
    try:  # not h.check, whose failures belong to the run's record; this one is wanted
        check(scale_overrun, reference, h.randn(N), what="scale_overrun", terms=0)
    except AssertionError as error:
        message = str(error)
    require("outside its output were written" in message, f"h.check says {message} of scale_overrun")
    return message.split(": ")[1].split(" were")[0]


def required_instruction(h: Harness) -> str:
    # In float16; in float32 even single elements keep memory busy (studies/triton/vector_add.py).
    h.codegen(scale, h.meta(WIDE, dtype=torch.float16), find={90: ("ld.global.v4", "st.global.v4")})
    kernels = h.codegen(scale, h.meta(WIDE + 1, dtype=torch.float16), find={90: ()})
    require(not any(kernel.error or "ld.global.v4" in kernel.found for kernel in kernels), f"h.codegen says {kernels}")
    return f"no ld.global.v4 at {WIDE + 1}"


def assertion(result: dict) -> str:
    require("x is negative" in result["message"], f"the assertion says {result['message']}")
    return result["message"]


def reversed_order(result: dict) -> str:
    require(result["in order"] == result["right"], f"the race shows in order: {result}")
    require(result["in reverse"] != result["right"], f"the race does not show in reverse: {result}")
    return f"{result['in reverse']:g} where {result['right']:g} is right"


def child_interpreted() -> None:
    """In a process of its own, whose kernels are interpreted."""
    x = torch.ones(4 * BLOCK)
    result = {"in order": total(x, racy=True).item(), "right": total(x).item(), "message": "nothing"}
    with programs_in_reverse():
        result["in reverse"] = total(x, racy=True).item()
    sqrt(x)  # the twin: an assertion that failed here would end the process without a result
    x[3] = -4
    try:
        sqrt(x)
    except Exception as error:
        result["message"] = str(error)
    process.report(**result)


def demo(h: Harness) -> None:
    for n in (0, 1, 997, BLOCK, BLOCK + 1):
        h.check(scale, reference, h.randn(n), terms=0)
    found = {}
    if h.shows_code:  # a profiler would see the tools alone, and a sanitizer would report what is planted
        with process.Child(child_interpreted, env={"TRITON_INTERPRET": "1"}) as child, h.progress("four tools"):
            found["out-of-bounds write"] = "another tensor changes", "h.check", guarded_output(h)
            found["narrow load"] = "slower than its bytes allow", "h.codegen", required_instruction(h)
            found["bad value"] = "NaN", "assert in the interpreter", assertion(child.result())
            found["race"] = "wrong only on a GPU", "programs_in_reverse", reversed_order(child.result())
        h.table("planted bugs", {bug: {"found by": tool, "says": says} for bug, (_, tool, says) in found.items()})
    answer = "; ".join(f"{bug} ({symptom}): {tool}" for bug, (symptom, tool, _) in found.items())
    h.answer(lambda: answer or "no bug is planted under a profiler or a sanitizer", timed=False)


if __name__ == "__main__":
    run(demo)
