"""PEP 523 at work: when a frame is compiled, its bytecode before and after, and what Dynamo tracked its locals as."""

import dis
import linecache
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType
from unittest.mock import patch

import torch
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as entries_of
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from compile_inspect import watch
from compile_inspect.graphs import at, is_own
from compile_inspect.main import main
from compile_inspect.report import Phase, counted
from compile_inspect.subject import Subject

QUESTION = "When does Dynamo compile a frame, what becomes of its bytecode, and which functions does it leave alone?"
LISTINGS = 6


def finish(coroutine) -> None:
    """Run a coroutine that waits for nothing; asyncio.run would not start within a notebook's loop."""
    with suppress(StopIteration):
        coroutine.send(None)


# Name -> (source of fn, how what it returns is run to its end).
KINDS: dict[str, tuple[str, Callable]] = {
    "generator": ("def fn(x): yield x.sin()", list),
    "coroutine": ("async def fn(x): return x.sin()", finish),
    "coroutine that awaits": ("async def one(x): return x.sin()\nasync def fn(x): return await one(x)", finish),
    "async generator": ("async def fn(x): yield x.sin()", lambda made: finish(made.__anext__())),
    "function over a generator": ("def two(x): yield x.sin()\ndef fn(x): return sum(two(x))", lambda made: made),
}


@contextmanager
def converted() -> Iterator[list[tuple[CodeType, CodeType]]]:
    """(code, rewritten code) of each frame that Dynamo compiles within."""
    frames: list[tuple[CodeType, CodeType]] = []
    handle = register_bytecode_hook(lambda old, new: frames.append((old, new)))
    try:
        yield frames
    finally:
        handle.remove()


@contextmanager
def tracked() -> Iterator[dict[str, dict[str, str]]]:
    """{function of the user's: {local: class of its VariableTracker}}, as last seen before an instruction is traced."""
    found: dict[str, dict[str, str]] = {}
    step = InstructionTranslatorBase.step

    def watched(self):
        if is_own(self.f_code.co_filename):
            for name, value in self.symbolic_locals.items():
                if value is not None and not name.startswith("__"):
                    # Only asked for what it already holds: realizing a lazy one would guard it.
                    value = value.realize() if getattr(value, "is_realized", bool)() else value
                    function = getattr(self.f_code, "co_qualname", self.f_code.co_name)
                    found.setdefault(function, {})[name] = type(value).__name__
        return step(self)

    with patch.object(InstructionTranslatorBase, "step", watched):
        yield found


def look(subject: Subject, phase: Phase) -> None:
    fn, args, kwargs = subject.fresh()
    root = getattr(getattr(type(fn), "forward", fn), "__code__", None)
    stages, started = [], time.perf_counter()
    with converted() as frames, tracked() as trackers:
        call = subject.caller(torch.compile(fn, backend="eager"), args, kwargs)
        for stage, does in {"torch.compile(model)": int, "first call": call, "second call": call}.items():
            does()
            seconds, started = time.perf_counter() - started, time.perf_counter()
            codes = {code for code in [root, *(old for old, _ in frames)] if code is not None}
            stages.append([stage, len(frames), sum(len(entries_of(code)) for code in codes), seconds])
    (_, frames_before, before, _), (_, frames_after, after, _), _ = stages
    phase.facts |= {"trackers": trackers, "compiled_at": {
        "entries_before_call": before, "entries_after_call": after,
        "frames_before_call": frames_before, "frames_after_call": frames_after}}  # fmt: skip
    phase.table("when frames are compiled", stages, "after|frames|cache entries|seconds")
    look_at_bytecode(phase, frames)
    rows = [[function, *each] for function, held in trackers.items() for each in held.items()]
    phase.table("what Dynamo tracks locals as", rows, "function|local|VariableTracker")
    look_at_kinds(phase)
    left = ", ".join(kind for kind, outcome in phase.facts["kinds"].items() if outcome == "eager")
    resumed = ", ".join(each["at"] for each in phase.facts["resumes"])
    phase.answer = (
        f"at its first call: {before} cache entries after torch.compile, {after} after the call; "
        f"{counted(len(frames), 'frame')} rewritten{f', resumed after a break at {resumed}' if resumed else ''}; "
        f"of the kinds tried eager keeps {left}"
    )


def look_at_bytecode(phase: Phase, frames: list[tuple[CodeType, CodeType]]) -> None:
    """Each frame before and after, what the rewritten one calls, and where the functions after a break go on."""
    phase.facts["frames"], phase.facts["resumes"] = rows, resumes = [], []
    for old, new in frames:
        resumed = re.match(r"torch_dynamo_resume_in_.*_at_(\d+)", old.co_name)
        line = int(resumed[1]) if resumed else old.co_firstlineno
        frame = {"name": old.co_name, "at": at(old.co_filename, line)}
        if resumed:
            resumes.append(frame | {"source": linecache.getline(old.co_filename, line).strip()})
        before, after = (sum(1 for _ in dis.get_instructions(code)) for code in (old, new))
        calls = [name for name in new.co_names if name.startswith(("__compiled_fn_", "__resume_at_"))]
        rows.append(frame | {"before": before, "after": after, "calls": calls})
        if len(rows) <= LISTINGS:
            phase.code(f"{old.co_name}: bytecode before", dis.Bytecode(old).dis())
            phase.code(f"{old.co_name}: bytecode after", dis.Bytecode(new).dis())
    phase.table("rewritten frames, in instructions", rows)


def look_at_kinds(phase: Phase) -> None:
    """Tiny functions of ours, compiled and run to their end; the graphs that this makes are counted."""
    phase.facts["kinds"], rows = {}, []
    for kind, (source, run) in KINDS.items():
        if kind == "coroutine" and torch.__version__ < "2.15":  # once compiled, it crashes the process, later
            phase.facts["kinds"][kind] = "not tried"
            continue
        exec(compile(source, __file__, "exec"), names := {})  # code without a file is inlined into a frame of torch's
        with watch() as seen:
            run(torch.compile(names["fn"], backend="eager")(torch.ones(3)))
        reasons = [*seen.counters.get("unimplemented", {}), *(frame.failure or "" for frame in seen.frames)]
        reason = re.search(r"Explanation: (.*)", "\n".join(reasons))
        phase.facts["kinds"][kind] = outcome = "compiled" if seen.graphs else "eager"
        rows.append([kind, source, outcome, seen.graphs, reason[1] if reason else ""])
    phase.table("kinds of functions", rows, "kind|source||graphs|torch's reason")


if __name__ == "__main__":
    raise SystemExit(main(phase="frame_evaluation"))
