"""The FX graphs as Dynamo hands them to a backend: operations, inputs, source lines, and what explain() leaves out."""

import linecache
import re
from collections import Counter

import torch

from compile_inspect import logs, watch
from compile_inspect.graph_breaks import breaks_of
from compile_inspect.graphs import at, is_own, own_line, target_of
from compile_inspect.main import main
from compile_inspect.report import Phase, Skip, counted
from compile_inspect.subject import Subject

QUESTION = "Which graphs does Dynamo capture, and is a line of Python a node of them?"
CODES = 6  # listings


def look(subject: Subject, phase: Phase) -> None:
    graphs, facts = [], phase.facts

    def backend(graph: torch.fx.GraphModule, values: list):
        graphs.append(graph)
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        inputs = [
            {"name": name, "type": type(value).__name__, "dtype": str(getattr(value, "dtype", ""))[6:],
             "shape": list(getattr(value, "shape", [])), "parameter": isinstance(value, torch.nn.Parameter)}
            for name, value in zip(names, values, strict=False)
        ]  # fmt: skip
        operations = sum(node.op.startswith("call_") for node in graph.graph.nodes)
        facts["graphs"].append({"operations": operations, "nodes": len(graph.graph.nodes), "inputs": inputs})
        return graph.forward

    facts["graphs"] = []
    with watch() as seen, logs(trace_source=True) as records:
        subject.compiled(backend=backend)()
    if not graphs:
        failures = [frame.failure for frame in seen.frames if frame.failure]
        why = [*failures, *seen.counters.get("unimplemented", {}), "no operation on tensors is called"][0]
        said = f"Dynamo captures no graph: {why.splitlines()[0]}"
        if not failures:
            raise Skip(said)
        phase.note(said)
    nodes = [(i, node) for i, graph in enumerate(graphs) for node in graph.graph.nodes if node.op != "placeholder"]
    calls = [node for _, node in nodes if node.op != "output" and node.op != "get_attr"]
    inputs = [{"graph": i} | each for i, graph in enumerate(facts["graphs"]) for each in graph["inputs"]]
    phase.table("inputs, as a backend gets them", sorted(inputs, key=lambda each: each["parameter"]))
    rows = [[i, node.op, node.name, target_of(node), str(node.args)] for i, node in nodes]
    phase.table("nodes, without the inputs", rows, "graph|opcode|name|target|args")
    for i, graph in enumerate(graphs[:CODES]):
        phase.code(f"graph {i} of {len(graphs)}", graph.print_readable(print_output=False))
    facts["operations_by_target"] = by_target = dict(Counter(map(target_of, calls)).most_common())
    phase.table("operations by target", by_target.items(), "target|operations")
    # Lines that became no node are there too, but the header of a function, which is traced, is no statement.
    traced = (re.match(r"TRACE starts_line (.+):(\d+) in .*\n(?!\s*(async )?def )", text) for _, text in records)
    lines = {(match[1], int(match[2])): [] for match in traced if match and is_own(match[1])}
    for node in calls:
        if own := own_line(node):
            lines.setdefault(own, []).append(node.name)
    facts["nodes_per_line"] = each = {str(n): k for n, k in sorted(Counter(map(len, lines.values())).items())}
    facts["lines"] = phase.table(
        "source line -> nodes; a line that runs twice has those of both runs",
        ({"at": at(*line), "source": linecache.getline(*line).strip(), "nodes": lines[line]} for line in sorted(lines)),
    )
    look_at_explain(subject, phase)
    missed, total = facts["missed_by_explain"], counted(sum(each.values()), "line")
    phase.answer = (
        f"{counted(len(graphs), 'graph')}, {counted(len(calls), 'operation')}; of {total} traced {each.get('1', 0)} "
        f"became one node, {each.get('0', 0)} none"
        + (f"; explain() misses the break at {', '.join(missed)}" if missed else "")
    )


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
    phase.table("torch._dynamo.explain(), and the log that find_breaks reads", rows, "|graphs|breaks|operations")
    if (methods := found.operations - said.op_count) > 0:
        phase.note(f"explain() counts functions only: {methods} methods of tensors (opcode call_method) are left out.")
    if missed:
        phase.note(f"explain() does not list the break at {', '.join(missed)}: it knows breaks that end a graph alone.")


if __name__ == "__main__":
    raise SystemExit(main(phase="dynamo_capture"))
