"""Backends eager, aot_eager and inductor beside plain eager: results, times, and the first call's parts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from compile_inspect.errors import Results, error_ratio, references, results
from compile_inspect.fresh import fresh_cache, warm_up
from compile_inspect.main import main
from compile_inspect.report import Phase, reason_of
from compile_inspect.seconds import seconds_by_part
from compile_inspect.subject import Subject
from compile_inspect.timing import Timed, time_calls
from compile_inspect.watching import watch

QUESTION = "Does each backend return what eager returns, and what do the first call and the later ones take?"
MANY = 3  # blocks of one class, from which on one of them is worth compiling alone


@dataclass
class Run:
    """What a backend's first call leaves (results, in training gradients), and what calls take; or why it fails."""

    tensors: Results | None = None
    timed: Timed | None = None
    first_s: float = 0.0
    parts: dict[str, float] | None = None
    failure: str = ""


def look(subject: Subject, phase: Phase) -> None:
    warm_up(subject.device)
    (_, exact, steady), runs, errors, rows = references(subject), {}, {}, []
    with torch.compiler.set_stance("force_eager"):  # also what the model compiles inside
        eager = runs["none"] = run(subject, lambda fn: fn)
    # Dropout draws what eager draws only if Inductor leaves that to torch, which is slower.
    with torch._inductor.config.patch(fallback_random=True), fresh_cache():
        for name in ("eager", "aot_eager", "inductor"):
            try:
                with watch() as seen:
                    runs[name] = run(subject, lambda fn, name=name: torch.compile(fn, backend=name))
            except Exception as error:
                runs[name] = Run(failure=reason_of(error))
    for name, each in runs.items():
        errors[name], equal = 0.0, "not compared"
        if each.failure:
            errors[name], equal = math.inf, f"fails: {each.failure}"
        elif steady:
            errors[name] = error_ratio(each.tensors, eager.tensors, exact)
            equal = errors[name] <= 1
        times = [each.first_s, each.timed.ms, eager.timed.ms / each.timed.ms] if each.timed else [None] * 3
        rows.append([name, *times, errors[name], equal])
    columns = ["backend", "first call, s", "a call, ms", "x eager", "error / allowed", "equal"]
    phase.table(f"allowed: 4x eager's own error, against {'a float64 run' if exact else 'eager'}", columns, rows)
    if not steady:
        phase.note("The model returns something else at each call, in eager too: results are not compared.")
    inductor, wrong = runs["inductor"], next((name for name in runs if errors[name] > 1), None)
    phase.facts |= {"errors": {name: min(error, 1e9) for name, error in errors.items()}, "float64": exact is not None,
                    "steady": steady, "eager_ms": eager.timed.ms, "wrong": wrong, "graphs": seen.graphs}  # fmt: skip
    right = "each backend returns what eager returns" if steady and eager.tensors else "nothing to compare"
    if wrong:
        right = f'backend="{wrong}" {"fails" if runs[wrong].failure else "returns another result than plain eager"}'
        phase.finding(right, "run the phase triage: it finds the operation", urgent=True)
    if inductor.failure:
        phase.answer = f"{wrong} fails: {runs[wrong].failure or inductor.failure}"
        return
    if not seen.graphs:
        phase.answer = "Dynamo captures no graph: torch.compile leaves the whole model to eager; see graph_breaks"
        return
    ms, first, gain = inductor.timed.ms, inductor.first_s, eager.timed.ms - inductor.timed.ms
    paid = max(0, math.ceil((first - eager.first_s) * 1e3 / gain)) if gain > 0 else None
    parts = inductor.parts | {"everything else": first - sum(inductor.parts.values())}
    phase.facts |= {"compiled_ms": ms, "speedup": eager.timed.ms / ms, "break_even_calls": paid,
                    "first_call_s": first, "parts": parts}  # fmt: skip
    phase.bars(f"the first call's {first:.3g} s, with an empty cache", "s", parts)
    phase.note(
        "What the first compilation of a process or machine costs any model (imports, the C++ header) is not in it."
    )
    one_block(subject, phase)
    most, after = max(parts, key=parts.get), "never paid" if paid is None else f"paid after {paid:,} calls"
    phase.answer = (
        f"{right}; the first call takes {first:.3g} s, {parts[most] / first:.0%} of it {most}; "
        f"later ones {ms:.3g} ms, eager {eager.timed.ms:.3g} ms: {after}"
    )


def run(subject: Subject, wrap: Callable[[Callable], Callable]) -> Run:
    """wrap(model), from nothing: its first call, what that leaves, and the calls after it."""
    held = []

    def wrapped(fn: Callable) -> Callable:
        fn = wrap(fn)

        def first(*args, **kwargs):
            held[:] = [subject.caller(fn, args, kwargs), time.perf_counter()]
            return fn(*args, **kwargs)

        return first

    with seconds_by_part() as parts:
        tensors = results(subject, wrapped)
        subject.synchronize()
        first_s = time.perf_counter() - held[1]
    tensors[:] = [tensor.clone() for tensor in tensors]  # later calls may write to them
    return Run(tensors, time_calls(held[0], subject), first_s, parts)


def blocks_of(model: Callable) -> tuple[str, list[nn.Module]]:
    """(path, modules of one class) of the list of blocks with the most parameters; ("", []) without three in a list."""
    found = [("", [])]
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
            kind = Counter(map(type, module)).most_common(1)[0][0]
            found.append((path, [each for each in module if type(each) is kind and [*each.children()]]))
    found = [each for each in found if len(each[1]) >= MANY] or found[:1]
    return max(found, key=lambda each: sum(p.numel() for block in each[1] for p in block.parameters()))


def one_block(subject: Subject, phase: Phase) -> None:
    """Where a block is repeated: compile it alone, and compare the first call."""
    path, blocks = blocks_of(subject.model)
    if not blocks or subject.shared:  # block.compile() would stay on the user's own model
        return

    def regional(model: nn.Module) -> nn.Module:
        for block in blocks_of(model)[1]:
            block.compile()
        return model

    fix = f"compile one block: for block in {f'model.{path}' if path else 'model'}: block.compile()"
    with phase.noted(f"Tried: {fix}: it fails"), fresh_cache():
        tried, first, ms = run(subject, regional), phase.facts["first_call_s"], phase.facts["compiled_ms"]
        now, after = tried.first_s, tried.timed.ms
        phase.facts["regional"] = {"blocks": len(blocks), "path": path, "first_call_s": now, "ms": after}
        said = f"the first call takes {now:.3g} s for {first:.3g}, a call {after:.3g} ms for {ms:.3g}"
        if now < 0.8 * first and after < 1.25 * ms:
            what = f"each of the {len(blocks)} {type(blocks[0]).__name__} is compiled anew"
            phase.finding(what, fix, seconds=first - now, tried=said)
        else:
            phase.note(f"Tried, without gain: {fix}: {said}.")


if __name__ == "__main__":
    raise SystemExit(main(phase="basics"))
