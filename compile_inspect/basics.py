"""Backends eager, aot_eager and inductor beside plain eager: results, times, and the first call's parts."""

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo.utils import ChromiumEventLogger

from compile_inspect import fresh_cache, warm_up, watch
from compile_inspect.main import main
from compile_inspect.report import TRIAGE, Phase, reason_of
from compile_inspect.subject import Subject, in_eager
from compile_inspect.triage import Results, error_ratio, references, results

QUESTION = "Does each backend return what eager returns, and what do the first call and the later ones take?"
# torch's compile-time events by how their names begin; one that is not listed belongs to the part that it lies in.
PARTS = {
    "Dynamo": ("dynamo", "entire_frame_compile"),
    "AOTAutograd": ("create_aot_dispatcher_function", "aot_"),
    "Inductor: graph passes": ("_recursive_", "additional_fake_tensor_prop"),
    "Inductor: lowering": ("compile_fx", "inductor_compile", "fx_codegen", "GraphLowering.run", "entire_backward"),
    "Inductor: scheduling": ("Scheduler.__init__",),
    "code generation": ("code_gen", "GraphLowering.co", "Scheduler.codegen"),
    "C++ or Triton compiler": ("async_compile", "PyCodeCache", "CachingAutotuner", "TritonBundler", "compile_file"),
}
MANY = 3  # blocks of one class, from which on one of them is worth compiling alone


def look(subject: Subject, phase: Phase) -> None:
    warm_up(subject.device)
    (_, exact, steady), runs, errors, rows = references(subject), {}, {}, []
    # Dropout draws what eager draws only if Inductor leaves that to torch, which is slower.
    with torch._inductor.config.patch(fallback_random=True), fresh_cache():
        for name in ("none", "eager", "aot_eager", "inductor"):
            runs[name] = one = run(subject, name, runs.get("none"))
            eager = runs["none"]
            errors[name] = math.inf if one.failure else error_ratio(one, eager, exact) if steady else 0.0
            equal = f"fails: {one.failure}" if one.failure else errors[name] <= 1 if steady else "not compared"
            rows.append([name, one.seconds, one.ms, one.eager_ms, one.speedup, errors[name], equal])
    against = "a float64 run" if exact else "eager"
    columns = "backend|first call, s|a call, ms|eager, ms|x eager|error|equal"
    phase.table(
        f"in turns with eager; errors are parts of what is allowed, 4x eager's own, against {against}", rows, columns
    )
    if not steady:
        phase.note("The model returns something else at each call, in eager too: results are not compared.")
    inductor, wrong = runs["inductor"], next((name for name in runs if errors[name] > 1), None)
    eager_ms = eager.ms if inductor.failure else inductor.eager_ms
    phase.facts |= {"errors": {name: min(error, 1e9) for name, error in errors.items()}, "float64": exact is not None,
                    "steady": steady, "eager_ms": eager_ms, "wrong": wrong, "graphs": inductor.graphs}  # fmt: skip
    right = "each backend returns what eager returns" if steady and eager else "nothing to compare"
    if wrong:
        right = f'backend="{wrong}" {"fails" if runs[wrong].failure else "returns another result than plain eager"}'
        phase.finding(right, TRIAGE, urgent=True)
    if inductor.failure:
        phase.answer = f"{wrong} fails: {runs[wrong].failure or inductor.failure}"
    elif not inductor.graphs:
        phase.answer = "Dynamo captures no graph: torch.compile leaves the whole model to eager; see graph_breaks"
    else:
        first, gain = inductor.seconds, inductor.ms * (inductor.speedup - 1)
        paid = max(0, math.ceil((first - eager.seconds) * 1e3 / gain)) if gain > 0 else None
        parts = inductor.parts | {"everything else": first - sum(inductor.parts.values())}
        phase.facts |= {"compiled_ms": inductor.ms, "speedup": inductor.speedup, "break_even_calls": paid,
                        "first_call_s": first, "parts": parts}  # fmt: skip
        phase.bars(f"the first call's {first:.3g} s, with an empty cache; a process's first imports apart", "s", parts)
        most, after = max(parts, key=parts.get), "never paid" if paid is None else f"paid after {paid:,} calls"
        phase.answer = (
            f"{right}; the first call takes {first:.3g} s, {parts[most] / first:.0%} of it {most}; "
            f"later ones {inductor.ms:.3g} ms, eager {eager_ms:.3g} ms: {after}"
        )
        one_block(subject, phase, inductor, eager)  # last: a large model may not have the time for it


def run(subject: Subject, backend: str | Callable, eager: Results | None = None) -> Results:
    """The model compiled for a backend, or in eager for "none", or what a function makes of it; its calls are timed, in
    turns with those of `eager`.

    What fails has the reason as its `failure`, but what eager raises is passed on.
    """

    def wrap(fn: Callable) -> Callable:
        if callable(backend):
            return backend(fn)
        return fn if backend == "none" else torch.compile(fn, backend=backend)

    # In eager is also what the model compiles inside.
    with torch.compiler.set_stance("force_eager" if backend == "none" else "default"):
        try:
            with watch() as seen, seconds_by_part() as parts:
                out = results(subject, wrap, calls=(calls := []))
            out[:] = [tensor.clone() for tensor in out]  # later calls may write to them
            out.call, out.parts, out.graphs = calls[0], parts, seen.graphs
            beside = out if eager is None else eager  # Results of a model that returns no tensor are empty, and false
            timed = subject.in_turns({out.call: nullcontext, beside.call: in_eager})
            mine, theirs = timed[0], timed[-1]
            out.ms, out.eager_ms = mine.ms, theirs.ms
            out.speedup = median(a / b for a, b in zip(theirs.all, mine.all, strict=True))
        except Exception as error:
            if backend == "none":
                raise
            out = Results()
            out.failure = reason_of(error)
        return out


@contextmanager
def seconds_by_part() -> Iterator[dict[str, float]]:
    """Seconds of each of PARTS in what is compiled within, each without the parts that lie in it."""
    spent, stacks, main = dict.fromkeys(PARTS, 0.0), defaultdict(list), threading.get_ident()
    starts, ends = ChromiumEventLogger.log_event_start, ChromiumEventLogger.log_event_end

    def start(self, name, ns, *rest, **more):
        stack = stacks[threading.get_ident()]
        outer = stack[-1][0] if stack else None
        stack.append([next((part for part, names in PARTS.items() if name.startswith(names)), outer), ns, 0])
        return starts(self, name, ns, *rest, **more)

    def end(self, name, ns, *rest, **more):
        if stack := stacks[threading.get_ident()]:
            part, since, inner = stack.pop()
            if stack:
                stack[-1][2] += ns - since
            # Threads that run the C++ compiler, which the main thread waits for, are not counted twice.
            if part and (stack or name != "compile_file" or threading.get_ident() == main):
                spent[part] += (ns - since - inner) / 1e9
        return ends(self, name, ns, *rest, **more)

    with patch.multiple(ChromiumEventLogger, log_event_start=start, log_event_end=end):
        yield spent


def blocks_of(model: Callable) -> tuple[str, list[nn.Module]]:
    """(path, modules of one class) of the list of blocks with the most parameters; ("", []) without three in a list."""
    found = {"": []}
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(each) for each in module if [*each.children()])
            for kind in (kind for kind, n in kinds.most_common(1) if n >= MANY):
                found[path] = [each for each in module if type(each) is kind]
    return max(found.items(), key=lambda held: sum(p.numel() for block in held[1] for p in block.parameters()))


def one_block(subject: Subject, phase: Phase, whole: Results, eager: Results) -> None:
    """Where a block is repeated: compile it alone, and compare the first call."""
    path, blocks = blocks_of(subject.model)
    if not blocks or subject.shared:  # block.compile() would stay on the user's own model
        return

    def regional(model: nn.Module) -> nn.Module:
        for block in blocks_of(model)[1]:
            block.compile()
        return model

    with fresh_cache():
        tried, first, ms = run(subject, regional, eager), whole.seconds, whole.ms
    fix = f"compile one block: for block in {f'model.{path}' if path else 'model'}: block.compile()"
    if tried.failure:
        return phase.note(f"Tried: {fix}: it fails: {tried.failure}")
    phase.facts["regional"] = {"blocks": len(blocks), "path": path, "first_call_s": tried.seconds, "ms": tried.ms}
    said = f"the first call takes {tried.seconds:.3g} s for {first:.3g}, a call {tried.ms:.3g} ms for {ms:.3g}"
    if tried.seconds < 0.8 * first and tried.speedup > 0.8 * whole.speedup:
        what = f"each of the {len(blocks)} {type(blocks[0]).__name__} is compiled anew"
        phase.finding(what, fix, seconds=first - tried.seconds, tried=said)
    else:
        phase.note(f"Tried, without gain: {fix}: {said}.")


if __name__ == "__main__":
    raise SystemExit(main(phase="basics"))
