"""Graph breaks: where, why, what is left to eager, what that costs in a call, and the fix, tried where it can be."""

from collections.abc import Callable
from statistics import median

import torch

from compile_inspect import SPLIT, Break, Breaks, find_breaks
from compile_inspect.graphs import at
from compile_inspect.main import main
from compile_inspect.report import Phase, counted, reason_of
from compile_inspect.subject import BUDGET, ROUNDS, Subject, turns

QUESTION = "Which lines break the graph, what does that cost, and how are they written without?"

# What torch's reason, or the line, has in it; the mended form; and the settings with which it can be tried unchanged.
FIXES: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = [
    ((".item()", "Tensor.item", "aten._local_scalar_dense"), "keep the number in its tensor (y / t instead of "
     "y / t.item()), or set torch._dynamo.config.capture_scalar_outputs = True", ("capture_scalar_outputs",)),
    (("nonzero", "data-dependent shape", "ynamic shape operator", "masked_select", "unique"),
     "select with torch.where on the whole tensor, or set torch._dynamo.config.capture_dynamic_output_shape_ops = True",
     ("capture_dynamic_output_shape_ops", "capture_scalar_outputs")),
    (("data-dependent branching", "generic_jump", "Data-dependent branch", "data dependent"),
     "compute both sides and select with torch.where, or use torch.cond", ()),
    (("print", "logging", "warnings.warn"), "print only `if not torch.compiler.is_compiling()`, or add the function to "
     "torch._dynamo.config.reorderable_logging_functions", ()),
    (("numpy", ".cpu()", ".tolist()"), "stay in torch until the end: a NumPy array or a list needs the value now", ()),
    (("torch.compiler.disable", "torch._dynamo.disable", "Skip calling"),
     "leave the decorator out, or make the function a torch.library.custom_op: then it is one node of the graph", ()),
    (("allow_rnn",), "set torch._dynamo.config.allow_rnn = True: an LSTM, GRU or RNN is one node then", ("allow_rnn",)),
    (("manual_seed",), "seed once, before the compiled function is called", ()),
    (("context manager",), "enter it outside the compiled function: Dynamo knows torch's context managers alone", ()),
    (("generator",), "pass a list or a tuple instead of a generator", ()),
    (("Observed exception",), "it raises while it is traced: mend that, or move it out of the compiled function", ()),
    ((".backward(", "zero_grad(", ".step()"),
     "compile the model alone, and call backward() and the optimizer outside: AOTAutograd compiles the backward", ()),
    (("graph_break()",), "leave the call of torch._dynamo.graph_break() out, or that of the function that has it", ()),
    (("C/C++", "builtin", "Attempted to call function marked as skipped", "skipfiles", "trace_rules", "not traceable"),
     "make the call a torch.library.custom_op with a fake implementation: then it is one node of the graph", ()),
]  # fmt: skip


def fix_of(found: Break) -> tuple[str, dict[str, bool]]:
    """The mended form of a break, and the settings that try it, by what torch says and what the line holds.

    Of an installed package's line it is what its user can set, where there is such a setting.
    """
    branch = "data-dependent branching" if found.source.startswith(("if ", "elif ", "while ")) else ""
    matches = (row for text in (found.source, found.reason, branch) for row in FIXES if any(w in text for w in row[0]))
    other = f"torch says: {found.reason.rstrip('.')}; move it out of the compiled function"
    _, fix, settings = next(matches, ((), other, ()))
    if package := found.file.partition("site-packages/")[2].partition("/")[0]:
        set_them = "set " + " and ".join(f"torch._dynamo.config.{key} = True" for key in settings)
        fix = f"{set_them if settings else fix} (the line is one of {package})"
    return fix, dict.fromkeys(settings, True)


def look(subject: Subject, phase: Phase) -> None:
    found, facts = breaks_of(subject), phase.facts
    count = len(found.breaks)
    facts |= {"graphs": found.graphs, "operations": found.operations}
    facts["breaks"] = [
        {"at": at(each.file, each.line), "source": each.source, "reason": each.reason, "lost": each.lost,
         "fix": fix_of(each)[0]} for each in found.breaks
    ]  # fmt: skip
    if not count:
        none = "" if found.graphs else ": Dynamo finds no operation on tensors, or leaves the whole model to eager"
        phase.answer = f"no line breaks it: graphs {found.graphs}, operations {found.operations}{none}"
        return
    columns = {"at": "line", "source": "source", "lost": "left to eager", "reason": "torch's reason"}
    for row in phase.table("graph breaks", facts["breaks"], columns):
        # Before they are timed, which may take longer than there is time.
        phase.finding(f"graph break at {row['at']} `{row['source']}`", row["fix"], where=row["at"])
    whole, outside = time_outside(subject)
    facts |= {"compiled_ms": whole, "outside_ms": outside, "share": outside / whole, "at_most": True}
    saved, tried = outside, try_settings(subject, phase, found.breaks)
    trial = facts.get("tried")
    if trial and not trial["breaks"]:  # what mending them all saved, which is less than what lies outside the graphs
        saved = max(trial["before_ms"] - trial["ms"], 0.0)
        facts |= {"share": saved / trial["before_ms"], "at_most": False}
    for each, finding in zip(found.breaks, phase.findings, strict=True):
        finding.ms, finding.share, finding.at_most = saved / count, facts["share"] / count, facts["at_most"]
        finding.tried = tried if fix_of(each)[1] else ""
    worst = "" if all(each.lost == SPLIT for each in found.breaks) else "; after some, eager takes all that follows"
    phase.answer = (
        f"{counted(count, 'break')}, {counted(found.graphs, 'graph')}; {outside / whole:.0%} of a compiled call "
        f"({outside:.3g} of {whole:.3g} ms) lies outside them, in these lines and in what resumes after them{worst}"
    )


def breaks_of(subject: Subject) -> Breaks:
    fn, args, kwargs = subject.fresh()
    with subject.grad():
        return find_breaks(fn, *args, **kwargs)


def try_settings(subject: Subject, phase: Phase, breaks: list[Break]) -> str:
    """The model again, unchanged, with the settings that mend these breaks: the breaks left, and the time of a call."""
    settings = {key: value for each in breaks for key, value in fix_of(each)[1].items()}
    if not settings:
        return ""

    def timed(settings: dict[str, bool]) -> float:
        with torch._dynamo.config.patch(settings):
            return subject.timed(subject.compiled()).ms

    said = ", ".join(f"{key} = True" for key in settings)
    try:
        with torch._dynamo.config.patch(settings):
            left = len(breaks_of(subject).breaks)
        # In turns, and the better of two: on a busy host calls of one process settle at different speeds.
        before, after = map(min, zip(*((timed({}), timed(settings)) for _ in range(2)), strict=True))
    except Exception as error:
        return f"{said}: it fails: {reason_of(error)}"
    phase.facts["tried"] = {"settings": list(settings), "breaks": left, "ms": after, "before_ms": before}
    return f"{said}: {counted(left, 'break')} left, {after:.3g} ms a call where it was {before:.3g}."


def time_outside(subject: Subject) -> tuple[float, float]:
    """(milliseconds of a compiled call, those outside its graphs), medians; on a GPU each graph is waited for."""
    inside = 0.0

    def timed(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        compiled = torch._dynamo.lookup_backend("inductor")(graph, inputs)

        def run(*values):
            nonlocal inside
            ms, _, out = subject.once(lambda: compiled(*values))
            inside += ms
            return out

        return run

    call, times = subject.compiled(backend=timed), []
    for _ in turns(ROUNDS, BUDGET, settle=3):
        inside = 0.0
        whole = subject.once(call)[0]
        times.append((whole, whole - inside))
    return tuple(map(median, zip(*times[3:], strict=True)))


if __name__ == "__main__":
    raise SystemExit(main(phase="graph_breaks"))
