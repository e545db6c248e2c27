"""A compile that fails or gives a wrong result: the stage, the first wrong operation, the smallest wrong graph."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from compile_inspect.breaks import NOT_THE_USERS
from compile_inspect.errors import as_double, error_ratio, results
from compile_inspect.inspecting import reason_of
from compile_inspect.report import Phase, Skip
from compile_inspect.subject import Subject, tensors_of

QUESTION = "Is the compiled result right, and if not, which stage and which operation is the first that is wrong?"
STAGES = {"eager": "Dynamo's capture", "aot_eager": "AOTAutograd", "inductor": "Inductor's code"}
TLPARSE = shutil.which("tlparse") or shutil.which("tlparse", path=str(Path(sys.executable).parent))
MINIFYING = 15.0  # seconds after which the minifier keeps what it has

Graph = tuple[torch.fx.GraphModule, list]


def look(subject: Subject, phase: Phase) -> None:
    with torch._inductor.config.patch(fallback_random=True), traced() as trace:
        with torch.compiler.set_stance("force_eager"):  # also what the model compiles inside
            eager, exact, again = results(subject), results(subject, double=True), results(subject)
        if error_ratio(again, eager, None) > 1:
            raise Skip("the model returns something else at each call, in eager too: there is nothing to compare with")
        rows, wrong = [], None
        for stage, does in STAGES.items():
            ratio, said = outcome(lambda: results(subject, compiled_by(stage)), eager, exact)  # noqa: B023
            rows.append([stage, does, ratio, said])
            wrong = wrong or (stage if ratio > 1 else None)
    columns = ["backend", "adds", "error / allowed", "outcome"]
    phase.table("the same call, one stage of the compiler more at a time", columns, rows)
    phase.facts |= {"errors": {row[0]: row[2] for row in rows}, "float64": exact is not None, "stage": wrong}
    if page := tlparse_page(trace):
        phase.facts["tlparse"] = str(page)
        phase.note(f"tlparse's page of these compilations: {page}")
    if wrong is None:
        worst = max(row[2] for row in rows)
        phase.answer = (
            "backends eager, aot_eager and inductor agree with plain eager: "
            f"the largest error is {worst:.2g} of what is allowed" if eager else
            "it returns no tensor, so there is nothing to compare; no backend fails"
        )  # fmt: skip
        return
    said = next(row[3] for row in rows if row[0] == wrong)
    phase.answer = f"{STAGES[wrong]} ({wrong}): {said}"
    instead = "leave the model in eager" if wrong == "eager" else f'backend="{earlier(wrong)}"'
    fix = f"until it is mended: {instead}, or torch.compiler.disable around that line"
    found = bisect(subject, wrong) if wrong != "eager" else None
    if found is None:
        phase.finding(f'backend="{wrong}" {said}', fix, urgent=True)
        return
    graph, inputs, node = found
    at, layer = place(node)
    name = getattr(node.target, "__name__", str(node.target))
    where = ", ".join(filter(None, [f"layer {layer}" if layer else "", at]))
    phase.facts["first_wrong"] = {"operation": name, "at": at, "layer": layer}
    phase.note(f"The first operation after which {wrong} is wrong is {name} ({where}).")
    small = minify(graph, inputs, wrong)
    phase.facts["minified"] = sum(each.op.startswith("call") for each in small.graph.nodes)
    phase.code(f"the smallest graph that torch's minifier finds to be wrong in {wrong}", small.code, fold=False)
    phase.answer += f"; first after {name} ({where})"
    phase.finding(
        f"{wrong} {said} after {name} ({where})", f"report the minified graph to PyTorch; {fix}", where=at, urgent=True
    )


def earlier(stage: str) -> str:
    return list(STAGES)[max(list(STAGES).index(stage) - 1, 0)]


def compiled_by(stage: str) -> Callable[[Callable], Callable]:
    return lambda fn: torch.compile(fn, backend=stage, dynamic=False)


def outcome(run: Callable[[], list], eager: list, exact: list | None) -> tuple[float, str]:
    """(error over what is allowed, that in words); inf where it raises."""
    try:
        ratio = error_ratio(run(), eager, exact)
    except Exception as error:
        return float("inf"), f"fails: {reason_of(error)}"
    return ratio, "gives another result" if ratio > 1 else "right"


def bisect(subject: Subject, stage: str) -> tuple[torch.fx.GraphModule, list, torch.fx.Node] | None:
    """The shortest prefix of the first graph that is wrong in this stage, its inputs, and the node it ends with."""
    for graph, inputs in graphs_of(subject):
        operations = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
        right, wrong = 0, len(operations)
        if not is_wrong(graph, inputs, stage):
            continue
        while wrong - right > 1:
            middle = (right + wrong) // 2
            if is_wrong(prefix(graph, operations[:middle]), inputs, stage):
                wrong = middle
            else:
                right = middle
        return prefix(graph, operations[:wrong]), inputs, operations[wrong - 1]
    return None


def graphs_of(subject: Subject) -> list[Graph]:
    """Each graph that Dynamo captures in one call, with the inputs that it is called with."""
    found: list[Graph] = []

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


def place(node: torch.fx.Node) -> tuple[str, str]:
    """(file:line, the layer's path) of the user's code that a node comes from; empty where it is not known."""
    files = [
        line.strip().split('"')[1] + ":" + line.split("line ")[1].split(",")[0]
        for line in (node.stack_trace or "").splitlines() if line.strip().startswith('File "')
    ]  # fmt: skip
    own = [at for at in files if not at.startswith(NOT_THE_USERS)] or files or [""]
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    layer = re.sub(r"^L\['\w+'\]\.?", "", str(stack[-1][0])) if stack else ""
    return own[-1].rsplit("/", 1)[-1], layer


@contextlib.contextmanager
def traced() -> Iterator[Path | None]:
    """The folder of torch's structured trace of what is compiled within, where tlparse is there to read it."""
    if TLPARSE is None:
        yield None
        return
    from torch._logging import _internal

    folder = Path(tempfile.mkdtemp(prefix="compile-inspect-trace-"))
    handler = _internal.LazyTraceHandler(str(folder))
    handler.setFormatter(_internal.TorchLogsFormatter(trace=True))
    level = _internal.trace_log.level
    _internal.trace_log.setLevel(logging.DEBUG)
    _internal.trace_log.addHandler(handler)
    try:
        yield folder
    finally:
        _internal.trace_log.removeHandler(handler)
        _internal.trace_log.setLevel(level)
        handler.close()


def tlparse_page(trace: Path | None) -> Path | None:
    """The page that tlparse makes of a trace; None without tlparse, or where it fails."""
    found = sorted(trace.glob("*.log")) if trace else []
    if not found:
        return None
    page = trace / "page"
    made = subprocess.run([TLPARSE, found[-1], "-o", page, "--no-browser", "--overwrite"], capture_output=True)
    return page / "index.html" if made.returncode == 0 else None


if __name__ == "__main__":
    from compile_inspect.main import main

    sys.exit(main(phase="triage"))
