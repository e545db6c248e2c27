"""descriptors, broken: each rule of a descriptor and of a box, what Triton says, and what a launch does all the same.

A tensor that breaks one rule is handed to Triton as it is, by a host descriptor and by one that the kernel makes. What
compiles is launched: on a GPU in a process of its own each, as it may end the process's use of the GPU; without one in
the interpreter. The last column is what require_descriptor and require_box say before any of that.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from types import SimpleNamespace
from typing import NamedTuple

from harness import Harness
from harness.codegen import compile_for
from harness.process import Child, ChildFailed, report

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from examples.common.tma import rows_for_tma, tma_descriptor
from examples.tma.descriptors_rules import OFFLINE, RULES, numbered, require_box, require_descriptor
from examples.tma.descriptors_window import FORMS, launch_window, window_reference

BOX_BLOCK = (16, 32)
UNWRITTEN = -1.0


class Box(NamedTuple):
    """A move of 64 rows of float16 by boxes of 16 x 32 that breaks one rule of coordinates, and none of descriptors."""

    broken_by: str
    starts: tuple[int, int]
    into: bool = False  # stored from `starts` on, else loaded from there
    columns: int = 64


BOXES = {
    "last coordinate of 16 bytes": Box("load at column 1", (0, 1)),
    "last coordinate of 16 bytes (outside)": Box("load at column 300", (0, 300)),
    "last coordinate of 16 bytes (store)": Box("store at column 1", (0, 1), into=True),
    "no negative stores (rows)": Box("store at row -3", (-3, 0), into=True),
    "no negative stores (columns)": Box("store at column -8", (0, -8), into=True),
    "16 bytes a stored row": Box("store of 63 columns", (0, 0), into=True, columns=63),
}


def unchecked_box(form: str, x: torch.Tensor, y: torch.Tensor, into: bool, *starts: int) -> torch.Tensor:
    """x into y from `starts` on, or y from those of x on, in boxes of BOX_BLOCK, without a check of ours."""
    launch_window(form, *(tma_descriptor(t, list(BOX_BLOCK)) for t in (x, y)), starts, "zero", into)
    return y


def unchecked(form: str, x: torch.Tensor, padding: str, *block: int) -> torch.Tensor:
    """A copy of x as upstream would make it, without one check of ours: what breaks a rule goes to Triton as it is."""
    y = rows_for_tma(x)
    if form == "host":
        x_desc, y_desc = (
            TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), padding),
            tma_descriptor(y, list(block)),
        )
    else:
        x_desc, y_desc = (
            SimpleNamespace(base=t, shape=t.shape, strides=t.stride(), block_shape=list(block)) for t in (x, y)
        )
    launch_window(form, x_desc, y_desc, (0,) * x.ndim, padding)
    return y


def box_of(rule: str, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, bool, tuple[int, int]]:
    """x, y with poison in and beside it, whether the starts are y's, and the starts."""
    box = BOXES[rule]
    x = numbered(device, 64, 64)[:, : box.columns]
    return x, x.new_full((64, 128), UNWRITTEN)[:, : box.columns], box.into, box.starts


def box_outcome(form: str, rule: str, device: str) -> str:
    """What comes of a move that breaks the rule: the error, or how many values are wrong, and where."""
    x, y, into, starts = box_of(rule, device)
    memory = y.as_strided((64, 128), (128, 1))
    want = memory.clone()
    if into:  # y has the negative window of x, where x has something
        moved = window_reference(x, tuple(-n for n in starts), y.shape, padding="nan")
        want[:, : y.shape[1]] = torch.where(moved.isnan(), UNWRITTEN, moved).to(y.dtype)
    else:
        want[:, : y.shape[1]] = window_reference(x, starts, y.shape).to(y.dtype)
    try:
        unchecked_box(form, x, y, into, *starts)
        wrong = (memory != want).cpu()
    except Exception as error:
        return message_of(error)
    inside = int(wrong[:, : y.shape[1]].sum())
    if beside := int(wrong.sum()) - inside:
        return f"{inside} of {y.numel()} wrong, and {beside} beside them"
    return f"{inside} of {y.numel()} wrong" if inside else "right"


def outcome(form: str, rule: str, device: str) -> str:
    """What comes of a launch that breaks the rule: the error, or how many values are wrong."""
    x, padding, block = RULES[rule][1](device)
    try:
        y = unchecked(form, x, padding, *block).cpu()
    except Exception as error:
        return message_of(error)
    wrong = int((y.float() != x.cpu().float()).sum())
    return f"{wrong} of {x.numel()} wrong" if wrong else "right"


def message_of(error: BaseException | str) -> str:
    while isinstance(error, BaseException) and error.__cause__ is not None:  # of Triton's wrappers, the innermost
        error = error.__cause__
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return re.sub(r"TensorDescriptor\(.*", "...", next(iter(text.strip().splitlines()), "")).strip()


def launched(form: str, rule: str, device: str) -> str:
    return (box_outcome if rule in BOXES else outcome)(form, rule, device)


def child_outcome(form: str, rule: str) -> None:
    """In a process of its own: what TMA cannot do may end the process's use of the GPU."""
    report(outcome=launched(form, rule, "cuda"))


def harmless(messages: dict[str, dict[str, str]]) -> list[str]:
    """The rules that were broken by a launch or two, and all that ran gave the right result."""
    ran = {rule: [text for form, text in each.items() if form.endswith(", run")] for rule, each in messages.items()}
    return [rule for rule, ends in ran.items() if ends and set(ends) == {"right"}]


def refused(rule: str, device: torch.device) -> str:
    """The words of our own check; raises AssertionError when it lets the rule pass."""
    try:
        if rule in BOXES:
            x, y, into, starts = box_of(rule, device)
            require_box("copy", y if into else x, starts, store=into)
        else:
            x, padding, block = RULES[rule][1](device)
            require_descriptor("copy", x, block, padding)
    except (TypeError, ValueError) as error:
        return message_of(error).split(";")[0]
    raise AssertionError(f"our check let {rule!r} pass")


def break_rules(h: Harness, rules: list[str], gpu: bool) -> dict[str, dict[str, str]]:
    """For each rule: what the compiler says of either form, and, under "host, run" and "device, run", a launch."""
    messages: dict[str, dict[str, str]] = {}
    with ExitStack() as stack, h.progress("breaking every rule"):
        runs: dict[tuple[str, str], Child | str] = {}
        for rule in rules:
            if rule in BOXES:
                x, y, into, starts = box_of(rule, "meta")
                wrapper, arguments = unchecked_box, (x, y, into, *starts)
            else:
                x, padding, block = RULES[rule][1]("meta")
                wrapper, arguments = unchecked, (x, padding, *block)
            messages[rule] = {}
            for form in FORMS:
                (kernel, *_) = compile_for(wrapper, (form, *arguments), sms=(90,))
                messages[rule][form] = message_of(kernel.error) if kernel.error else "accepted"
                if kernel.error or rule in OFFLINE:
                    continue
                if gpu:
                    runs[rule, form] = stack.enter_context(Child(child_outcome, form, rule, timeout=45))
                elif h.interpreted:
                    runs[rule, form] = launched(form, rule, "cpu")
        for (rule, form), result in runs.items():
            if isinstance(result, Child):
                try:
                    result = result.result()["outcome"]
                except (ChildFailed, TimeoutError) as error:
                    result = f"no result: {str(error).splitlines()[-1]}"
            messages[rule][f"{form}, run"] = result
    return messages


def show_rules(h: Harness) -> None:
    """Break every rule: what Triton says when the kernel is made, what a launch does then, what our check says."""
    gpu = h.device.type == "cuda" and h.timing  # a run that only checks meets no fault
    rules = [*RULES, *BOXES]
    messages, rows = break_rules(h, rules, gpu), {}
    for rule, each in messages.items():
        each["our check"] = ours = refused(rule, h.device)
        ran = {form: each.get(f"{form}, run") for form in FORMS}
        rows[rule] = {
            "broken by": BOXES[rule].broken_by if rule in BOXES else RULES[rule][0],
            **{f"{form} descriptor": each[form].split(":")[0] for form in FORMS},
            "and run": [f"{form}: {text.split(': ')[0]}" for form, text in ran.items() if text],
            "our check": ours.split(":")[0],
        }
    h.table(f"rules broken; run {'by the GPU' if gpu else 'by the interpreter' if h.interpreted else 'nowhere'}", rows)
    h.fact("messages", messages)
    through = {form: [rule for rule in rules if messages[rule][form] == "accepted"] for form in FORMS}
    silent = [
        f"{rule} ({form})" for rule in rules for form in FORMS if " wrong" in messages[rule].get(f"{form}, run", "")
    ]
    h.say(
        f"of {len(rules)} broken rules Triton accepts {len(through['host'])} in a host descriptor, "
        f"{len(through['device'])} in one of the device; wrong without an error: {'; '.join(silent) or 'none here'}"
    )
    if gpu:
        h.say(f"refused, though nothing went wrong here: {', '.join(harmless(messages)) or 'none'}")


def study(h: Harness) -> None:
    if h.shows_code:
        show_rules(h)
