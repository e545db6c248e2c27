"""A compile that fails or gives a wrong result: the stage, the first wrong operation, the smallest wrong graph."""

import contextlib
import copy
import io
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from compile_inspect.errors import as_double, error_ratio, references, results
from compile_inspect.graphs import at, layer_of, name_of, own_line
from compile_inspect.main import main
from compile_inspect.report import Phase, Skip, reason_of
from compile_inspect.subject import Subject, tensors_of

QUESTION = "Is the compiled result right, and if not, which stage and which operation is the first that is wrong?"
STAGES = {"eager": "Dynamo's capture", "aot_eager": "AOTAutograd", "inductor": "Inductor's code"}
INSTEAD = {"eager": "leave the model in eager", "aot_eager": 'backend="eager"', "inductor": 'backend="aot_eager"'}
TLPARSE = shutil.which("tlparse") or shutil.which("tlparse", path=str(Path(sys.executable).parent))
MINIFYING = 15.0  # seconds after which the minifier keeps what it has


def look(subject: Subject, phase: Phase) -> None:
    rows = []
    with torch._inductor.config.patch(fallback_random=True), traced(phase):
        eager, exact, steady = references(subject)
        if not steady:
            raise Skip("the model returns something else at each call, in eager too: there is nothing to compare with")
        for stage, does in STAGES.items():
            rows.append([stage, does, *outcome(lambda: results(subject, compiled_by(stage)), eager, exact)])  # noqa: B023
    columns = "backend|adds|error / allowed|outcome"
    phase.table("the same call, one stage of the compiler more at a time", rows, columns)
    wrong, _, _, happens = next((row for row in rows if row[2] > 1), (None,) * 4)
    phase.facts |= {"errors": {row[0]: row[2] for row in rows}, "float64": exact is not None, "stage": wrong}
    if not wrong:
        phase.answer = "it returns no tensor, so there is nothing to compare; no backend fails"
        if eager:
            worst = f"the largest error is {max(row[2] for row in rows):.2g} of what is allowed"
            phase.answer = f"backends {', '.join(STAGES)} agree with plain eager: {worst}"
        return
    phase.answer = f"{STAGES[wrong]} ({wrong}): {happens}"
    fix = f"until it is mended: {INSTEAD[wrong]}, or torch.compiler.disable around that line"
    found = first_wrong(subject, wrong) if wrong != "eager" else None
    if found is None:
        phase.finding(f'backend="{wrong}" {happens}', fix, urgent=True)
        return
    graph, inputs, node = found
    own, layer = own_line(node), layer_of(node)
    line = at(*own) if own else ""
    where = f"{name_of(node)} ({', '.join(filter(None, [f'layer {layer}' if layer else '', line])) or 'no line'})"
    phase.facts["first_wrong"] = {"operation": name_of(node), "at": line, "layer": layer}
    small = minify(graph, inputs, wrong)
    phase.facts["minified"] = sum(each.op.startswith("call") for each in small.graph.nodes)
    phase.code(f"the smallest graph that torch's minifier finds to be wrong in {wrong}", small.code, fold=False)
    phase.answer += f"; first after {where}"
    fix = f"report the minified graph to PyTorch; {fix}"
    phase.finding(f"{wrong} {happens} after {where}", fix, where=line, urgent=True)


def compiled_by(stage: str) -> Callable[[Callable], Callable]:
    return lambda fn: torch.compile(fn, backend=stage, dynamic=False)


def outcome(run: Callable[[], list], eager: list, exact: list | None) -> tuple[float, str]:
    """(error over what is allowed, that in words); inf where it raises."""
    try:
        ratio = error_ratio(run(), eager, exact)
    except Exception as error:
        return float("inf"), f"fails: {reason_of(error)}"
    return ratio, "gives another result" if ratio > 1 else "right"


def first_wrong(subject: Subject, stage: str) -> tuple[torch.fx.GraphModule, list, torch.fx.Node] | None:
    """The shortest prefix of the first graph that is wrong in this stage, its inputs, and the node it ends with."""
    wrong = (found for found in graphs_of(subject) if is_wrong(*found, stage))
    for graph, inputs in wrong:
        operations = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]

        def fails(length: int) -> bool:
            return is_wrong(prefix(graph, operations[:length]), inputs, stage)  # noqa: B023

        length = 1 + bisect_left(range(1, len(operations)), True, key=fails)
        return prefix(graph, operations[:length]), inputs, operations[length - 1]
    return None


def graphs_of(subject: Subject) -> list[tuple[torch.fx.GraphModule, list]]:
    """Each graph that Dynamo captures in one call, with the inputs that it is called with."""
    found = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        def run(*values):
            found.append((graph, [copied(value) for value in values]))
            return graph.forward(*values)

        return run

    results(subject, lambda fn: torch.compile(fn, backend=backend, dynamic=False))
    return found


def copied(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def prefix(graph: torch.fx.GraphModule, operations: list[torch.fx.Node]) -> torch.fx.GraphModule:
    """The graph up to the last of these operations, whose value it returns."""
    cut, held = torch.fx.Graph(), {}
    for node in [*(n for n in graph.graph.nodes if n.op == "placeholder"), *operations]:
        held[node] = cut.node_copy(node, held.__getitem__)
    cut.output((held[operations[-1]],))
    return torch.fx.GraphModule(graph, cut)


def is_wrong(graph: torch.fx.GraphModule, inputs: list, stage: str) -> bool:
    """Whether the graph, compiled by this stage alone, fails or returns something else than run as it is."""
    with torch.no_grad():
        eager = tensors_of(graph(*map(copied, inputs)))
        try:
            exact = tensors_of(copy.deepcopy(graph).double()(*tree_map(as_double, inputs)))
        except Exception:
            exact = None
        torch.compiler.reset()
        return outcome(lambda: tensors_of(compiled_by(stage)(graph)(*map(copied, inputs))), eager, exact)[0] > 1


def minify(graph: torch.fx.GraphModule, inputs: list, stage: str) -> torch.fx.GraphModule:
    """The graph as small as torch's minifier makes it while it stays wrong, or as small as it got in 15 s."""
    from functorch.compile import minifier

    smallest, until = graph, time.monotonic() + MINIFYING

    def fails(candidate: torch.fx.GraphModule, candidate_inputs: list) -> bool:
        nonlocal smallest
        if time.monotonic() > until or not is_wrong(candidate, candidate_inputs, stage):
            return False
        smallest = candidate
        return True

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
        minifier(graph, inputs, fails, dump_state=lambda *_, **__: None, skip_offload=True)
    return smallest


@contextlib.contextmanager
def traced(phase: Phase) -> Iterator[None]:
    """The page that tlparse, where it is installed, makes of torch's structured trace of what is compiled within."""
    if TLPARSE is None:
        yield
        return
    from torch._logging import _internal

    folder, log = Path(tempfile.mkdtemp(prefix="compile-inspect-trace-")), _internal.trace_log
    handler, level = _internal.LazyTraceHandler(str(folder)), log.level
    handler.setFormatter(_internal.TorchLogsFormatter(trace=True))
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        handler.close()
    for trace in sorted(folder.glob("*.log"))[-1:]:
        command = [TLPARSE, trace, "-o", folder / "page", "--no-browser", "--overwrite"]
        if subprocess.run(command, capture_output=True).returncode == 0:
            phase.facts["tlparse"] = str(folder / "page" / "index.html")
            phase.note(f"tlparse's page of these compilations: {phase.facts['tlparse']}")


if __name__ == "__main__":
    raise SystemExit(main(phase="triage"))
