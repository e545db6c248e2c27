"""descriptors, broken: what a launch does with a broken rule of a descriptor, or with a box at a forbidden place.

A tensor that breaks one of RULES goes to Triton as it is, in a host descriptor and in one that the kernel makes; what
TensorDescriptor refuses is not launched. A box breaks no rule of its descriptor, but begins where none may begin, or is
stored to rows whose length is no multiple of 16 bytes. On a GPU each launch has a process of its own, as an illegal
instruction ends the process's use of the GPU; without one the interpreter runs it.
"""

from __future__ import annotations

from contextlib import ExitStack

from harness import Harness
from harness.process import Child, ChildFailed, report

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from examples.common.tma import rows_for_tma, tma_descriptor
from examples.tma.descriptors import copy_device_kernel, copy_host_kernel, with_workspace
from examples.tma.descriptors_rules import OFFLINE, RULES, noticed, numbered

BOX = (16, 32)
# Of float16: where the box is loaded from a matrix of 64 x 64, where it is stored to another, and the columns of that.
BOXES = {
    "load from row -3, column -8": ((-3, -8), (0, 0), 64),  # is allowed: zeros arrive for what lies outside
    "load from column 1": ((0, 1), (0, 0), 64),
    "load from column 300": ((0, 300), (0, 0), 64),
    "store to column 1": ((0, 0), (0, 1), 64),
    "store to row -3": ((0, 0), (-3, 0), 64),
    "store to column -8": ((0, 0), (0, -8), 64),
    "store to rows of 63": ((0, 0), (0, 32), 63),
}


@triton.jit
def move_box_kernel(x_desc, y_desc, x_row, x_col, y_row, y_col):
    y_desc.store([y_row, y_col], x_desc.load([x_row, x_col]))


def move_box(name: str, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """All of the memory around the target after the move, and what should be there."""
    (x_row, x_col), (y_row, y_col), columns = BOXES[name]
    x, around = numbered(device, 64, 64), numbered(device, 64, 128) - 300
    box = torch.nn.functional.pad(x, (512,) * 4)[512 + x_row :, 512 + x_col :][: BOX[0], : BOX[1]]
    want = torch.nn.functional.pad(around, (64,) * 4)
    want[64 + y_row :, 64 + y_col :][: BOX[0], : BOX[1]] = box
    want = want[64:-64, 64:-64]
    want[:, columns:] = around[:, columns:]
    described = (tma_descriptor(t, list(BOX)) for t in (x, around[:, :columns]))
    move_box_kernel[(1,)](*described, x_row, x_col, y_row, y_col)
    return around, want


def copy_broken(form: str, rule: str, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy as Triton makes it of the tensor that breaks the rule, and the tensor."""
    x, padding, block = RULES[rule][1](device)
    (M, N), y = x.shape, rows_for_tma(x)
    grid = (triton.cdiv(M, block[0]) * triton.cdiv(N, block[1]),)
    if form == "host":
        x_desc = TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), padding)
        copy_host_kernel[grid](x_desc, tma_descriptor(y, list(block)), N, *block)
    else:
        strides = x.stride(0), y.stride(0)
        with_workspace(y.device, lambda: copy_device_kernel[grid](x, y, M, N, *strides, *block, KEPT=False))
    return y, x


def outcome(form: str, case: str, device: torch.device | str) -> str:
    """What comes of a launch: the error, or how many values are wrong."""
    try:
        got, want = move_box(case, device) if case in BOXES else copy_broken(form, case, device)
        wrong = int((got != want).sum())
    except Exception as error:
        while error.__cause__ is not None:  # of Triton's wrappers, the innermost
            error = error.__cause__
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{wrong} of {want.numel()} wrong" if wrong else "right"


def child_outcome(form: str, case: str) -> None:
    report(outcome=outcome(form, case, "cuda"))


def of_child(child: Child) -> str:
    try:
        return child.result()["outcome"]
    except (ChildFailed, TimeoutError) as error:
        return f"no result: {str(error).splitlines()[-1]}"


def study(h: Harness) -> None:
    gpu = h.device.type == "cuda"
    if h.profile or (gpu and not h.timing):  # a run that only checks meets no fault
        h.fact("broken rules", "launched by a run that times, and only there")
        return
    refused, rows = noticed(h.device), {}
    for rule, (_, broken) in RULES.items():
        x, padding, block = broken("meta")
        large = "not run, for its size" if rule in OFFLINE else ""
        rows[rule] = {"host": "refused when it is made" if rule in refused else large}
        if padding == "zero" and x.ndim == len(block) == 2:
            rows[rule]["device"] = large
    rows |= {name: {"host": ""} for name in BOXES}
    runs = [(case, form) for case, row in rows.items() for form, result in row.items() if not result]
    with ExitStack() as stack, h.progress("breaking every rule"):
        if gpu:
            children = [stack.enter_context(Child(child_outcome, form, case, timeout=45)) for case, form in runs]
            results = list(map(of_child, children))
        else:
            results = [outcome(form, case, h.device) for case, form in runs]
    for (case, form), result in zip(runs, results, strict=True):
        rows[case][form] = result
    h.table("what a launch does with a broken rule, by who makes the descriptor", rows)
    silent = [f"{case} ({form})" for (case, form), result in zip(runs, results, strict=True) if " wrong" in result]
    h.say(f"wrong without an error: {'; '.join(silent) or 'none here'}")
