"""The FX graphs as Dynamo hands them to a backend: operations, inputs, source lines, and what explain() leaves out."""

import linecache
import re
from collections import Counter

import torch

from compile_inspect.graph_breaks import breaks_of
from compile_inspect.graphs import at, is_own, own_line, target_of
from compile_inspect.logs import logs
from compile_inspect.main import main
from compile_inspect.report import Phase, Skip, counted
from compile_inspect.subject import Subject
from compile_inspect.watching import watch

QUESTION = "Which graphs does Dynamo capture, and is a line of Python a node of them?"
CODES = 6  # listings


def described(name: str, value: object) -> dict:
    dtype, shape = str(getattr(value, "dtype", "")).removeprefix("torch."), list(getattr(value, "shape", []))
    made, parameter = type(value).__name__, isinstance(value, torch.nn.Parameter)
    return {"name": name, "type": made, "dtype": dtype, "shape": shape, "parameter": parameter}


def look(subject: Subject, phase: Phase) -> None:
    graphs, inputs = [], []

    def backend(graph: torch.fx.GraphModule, values: list):
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        graphs.append(graph)
        inputs.append([described(*each) for each in zip(names, values, strict=False)])
        return graph.forward

    with watch() as seen, logs(trace_source=True) as records:
        subject.compiled(backend=backend)()
    if not graphs:
        failures = [frame.failure for frame in seen.frames if frame.failure]
        why = [*failures, *seen.counters.get("unimplemented", {}), "no operation on tensors is called"][0]
        said = f"Dynamo captures no graph: {why.splitlines()[0]}"
        if not failures:
            raise Skip(said)
        phase.note(said)
    phase.facts["graphs"], calls, rows, nodes = [], [], [], []
    for i, (graph, given) in enumerate(zip(graphs, inputs, strict=True)):
        own = [node for node in graph.graph.nodes if node.op.startswith("call_")]
        phase.facts["graphs"].append({"operations": len(own), "nodes": len(graph.graph.nodes), "inputs": given})
        calls += own
        rows += [[i, *each.values()] for each in sorted(given, key=lambda each: each["parameter"])]
        nodes += [[i, n.op, n.name, target_of(n), str(n.args)] for n in graph.graph.nodes if n.op != "placeholder"]
    phase.table("inputs, as a backend gets them", ["graph", "name", "type", "dtype", "shape", "parameter"], rows)
    phase.table("nodes, without the inputs", ["graph", "opcode", "name", "target", "args"], nodes)
    for i, graph in enumerate(graphs[:CODES]):
        phase.code(f"graph {i} of {len(graphs)}", graph.print_readable(print_output=False))
    phase.facts["operations_by_target"] = by_target = dict(Counter(map(target_of, calls)).most_common())
    phase.table("operations by target", ["target", "operations"], [list(each) for each in by_target.items()])
    # The header of a function is traced too, and is no statement.
    traced = (re.match(r"TRACE starts_line (.+):(\d+) in .*\n(?!\s*(async )?def )", text) for _, text in records)
    look_at_lines(phase, calls, {(match[1], int(match[2])) for match in traced if match and is_own(match[1])})
    look_at_explain(subject, phase)
    each, missed = phase.facts["nodes_per_line"], phase.facts["missed_by_explain"]
    said = (
        f"of {counted(sum(each.values()), 'line')} traced {each.get('1', 0)} became one node, {each.get('0', 0)} none"
    )
    said += f"; explain() misses the break at {', '.join(missed)}" if missed else ""
    phase.answer = f"{counted(len(graphs), 'graph')}, {counted(len(calls), 'operation')}; {said}"


def look_at_lines(phase: Phase, calls: list[torch.fx.Node], traced: set[tuple[str, int]]) -> None:
    """Source line -> nodes: the innermost line of the user's own code; lines that became none are there too."""
    lines: dict[tuple[str, int], list[str]] = {line: [] for line in traced}
    for node in calls:
        if own := own_line(node):
            lines.setdefault(own, []).append(node.name)
    phase.facts["lines"] = [
        {"at": at(*line), "source": linecache.getline(*line).strip(), "nodes": lines[line]} for line in sorted(lines)
    ]
    phase.facts["nodes_per_line"] = {str(n): count for n, count in sorted(Counter(map(len, lines.values())).items())}
    columns = {"at": "line", "source": "source", "nodes": "nodes"}
    phase.table("source line -> nodes; a line that runs twice has those of both runs", columns, phase.facts["lines"])


def look_at_explain(subject: Subject, phase: Phase) -> None:
    """torch._dynamo.explain() beside torch's own log of breaks."""
    fn, args, kwargs = subject.fresh()
    with subject.grad():
        said = torch._dynamo.explain(fn)(*args, **kwargs)
    found = breaks_of(subject)
    known = {(frame.filename, frame.lineno) for each in said.break_reasons for frame in each.user_stack}
    missed = [at(each.file, each.line) for each in found.breaks if (each.file, each.line) not in known]
    phase.facts["missed_by_explain"] = missed
    phase.facts["explain"] = {"graphs": said.graph_count, "breaks": said.graph_break_count, "ops": said.op_count}
    rows = [["explain", *phase.facts["explain"].values()], ["log", found.graphs, len(found.breaks), found.operations]]
    title = "torch._dynamo.explain(), and the log that find_breaks reads"
    phase.table(title, ["", "graphs", "breaks", "operations"], rows)
    if (methods := found.operations - said.op_count) > 0:
        phase.note(f"explain() counts functions only: {methods} methods of tensors (opcode call_method) are left out.")
    if missed:
        phase.note(f"explain() does not list the break at {', '.join(missed)}: it knows breaks that end a graph alone.")


if __name__ == "__main__":
    raise SystemExit(main(phase="dynamo_capture"))
