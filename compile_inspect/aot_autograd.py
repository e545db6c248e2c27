"""AOTAutograd: joint, forward and backward graphs, what is saved between them, decompositions, autograd's own cost."""

from collections.abc import Callable
from dataclasses import fields

import torch

from compile_inspect.graphs import VIEWS, aot_backend, copied, line_of, lower, operation_of, operations
from compile_inspect.main import main
from compile_inspect.partition import Split, _split
from compile_inspect.report import Phase, Skip
from compile_inspect.subject import BUDGET, ROUNDS, Subject, parameters, tensors_of, turns

QUESTION = "What becomes of a training step: its graphs, what forward saves for backward, autograd's own cost?"
MANY, LEAST = 4, 2**20  # saved activations of this many times the parameters' bytes, and above 1 MiB, are a finding
PARTS, HALF = ("joint", "forward", "backward"), "min-cut, budget 0.5"
LEVELS = {"torch": "torch functions (Dynamo)", "aten": "ATen", "core_aten": "Core ATen", "prims": "prims",
          "loop_ir": "Inductor's loop IR"}  # fmt: skip


def look(subject: Subject, phase: Phase) -> None:
    """With gradients on, whether or not a call is a training step; a module stays in the mode that it runs in."""
    fn, args, kwargs = subject.fresh()
    held, graphs, facts = sum(each.nbytes for each in parameters(fn)), [], phase.facts
    with torch.enable_grad():
        torch.compile(fn, backend=lambda graph, inputs: parts_of(graph, inputs, graphs, held))(*args, **kwargs)
    if not graphs:
        raise Skip("Dynamo captured no graph of it: eager runs all; see graph_breaks")
    sizes = [{part: len(operations(graph.get(part))) for part in PARTS} for graph in graphs]
    facts |= {"graphs": sizes, "saved": [], "saved_bytes": {}, "autograd_ms": {}}
    total = {part: sum(each[part] for each in sizes) for part in PARTS}
    largest = max(graphs, key=lambda graph: len(operations(graph.get("joint", graph.get("forward")))))
    for part in filter(largest.get, PARTS):
        which = ", of the largest graph" if len(graphs) > 1 else ""
        phase.code(f"{part} graph{which}", largest[part].print_readable(print_output=False))
    with phase.noted("The levels of operators cannot be traced"):  # operators without fakes, or that depend on data
        ladder(phase, graphs)
    graphs = [graph for graph in graphs if "cuts" in graph]
    if not graphs:
        phase.answer = f"nothing requires a gradient: {total['forward']} operations forward, and no joint graph"
        return
    cuts, sums = [graph["cuts"] for graph in graphs], {}
    for name in dict.fromkeys(name for each in cuts for name in each):  # of a graph without budget 0.5, min-cut's
        of_each = [each.get(name, each["min-cut"]) for each in cuts]
        sums[name] = {key.name: sum(getattr(cut, key.name) for cut in of_each) for key in fields(Split)}
    phase.table("partitioners", [{"partitioner": name} | row for name, row in sums.items()])
    saved = sorted((tensor for graph in graphs for tensor in graph["saved"]), key=lambda tensor: -tensor["bytes"])
    facts["saved"] = phase.table("saved for backward (min-cut)", saved)
    facts["saved_bytes"] = {name: row["saved_bytes"] for name, row in sums.items()}
    mb = {name: f"{size / 1e6:.3g} MB" for name, size in facts["saved_bytes"].items()}
    if subject.train and HALF in mb:
        phase.finding(
            f"forward saves {mb['min-cut']} for backward; the parameters have {held / 1e6:.3g} MB",
            "torch._functorch.config.activation_memory_budget = 0.5, or torch.utils.checkpoint around each block",
            tried=f"budget 0.5 saves {mb[HALF]}, backward {sums[HALF]['backward']} operations for {total['backward']}",
        )
    phase.answer = (
        f"a joint graph of {total['joint']} operations is cut into forward {total['forward']} and backward "
        f"{total['backward']}; {len(saved)} tensors, {mb['min-cut']}, are saved, by the default partitioner "
        f"{mb['default']}"
    )
    with phase.noted("Its backward cannot be timed"):  # a model that is not made for training
        if times := time_autograd(subject, phase):
            phase.answer += "; autograd walks {} nodes for eager's {}, backward takes {:.3g} ms for {:.3g}".format(
                *(times[name][key] for key in ("nodes", "backward") for name in ("aot", "eager"))
            )


def parts_of(graph: torch.fx.GraphModule, inputs: list, graphs: list[dict], held: int) -> Callable:
    """A backend that keeps the graph, its joint graph, and each partitioner's cut, with Inductor's decompositions."""
    from functorch.compile import default_partition, min_cut_rematerialization_partition
    from torch._functorch import config
    from torch._inductor.decomposition import select_decomp_table

    found = {"graph": copied(graph), "inputs": list(inputs)}
    graphs.append(found)

    def partition(joint, joint_inputs, **options):
        def halves(partitioner, budget=1.0):
            with config.patch(activation_memory_budget=budget):
                return partitioner(copied(joint), joint_inputs, **options)

        parts = halves(min_cut_rematerialization_partition)
        cuts = {"min-cut": _split(joint, *parts), "default": _split(joint, *halves(default_partition))}
        if cuts["min-cut"].saved_bytes > max(MANY * held, LEAST):
            cuts[HALF] = _split(joint, *halves(min_cut_rematerialization_partition, 0.5))
        found.update(zip(PARTS, (joint, *parts), strict=True), cuts=cuts, saved=saved_of(*parts))
        return parts

    table = select_decomp_table()
    backend = aot_backend(lambda part: found.setdefault("forward", part), partition_fn=partition, decompositions=table)
    return backend(graph, inputs)


def saved_of(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> list[dict]:
    """The tensors that forward keeps for backward alone, each memory once, with the operation that makes them."""

    def memory(graph) -> dict:
        nodes = [n for n in graph.graph.nodes if n.op == "placeholder" and not n.name.startswith("tangents")]
        values = {n: n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)}
        return {value.untyped_storage()._cdata: (node.name, value) for node, value in values.items()}

    made, given, found = {node.name: node for node in forward.graph.nodes}, memory(forward), []
    for name, value in (held for storage, held in memory(backward).items() if storage not in given):
        source = made.get(name)
        while source is not None and source.all_input_nodes and operation_of(source) in VIEWS:
            source = source.all_input_nodes[0]  # whose memory it is, or whose output it unpacks
        operation, line = (operation_of(source), line_of(source)) if source is not None else ("", "")
        found.append({"name": name, "shape": [int(n) for n in value.shape], "bytes": value.untyped_storage().nbytes(),
                      "operation": operation, "line": line})  # fmt: skip
    return found


def ladder(phase: Phase, graphs: list[dict]) -> None:
    """The model without gradients, level by level, and how many operators each level has in this torch."""
    from torch._decomp import core_aten_decompositions, decomposition_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    tables = {"aten": {}, "core_aten": core_aten_decompositions(), "prims": decomposition_table}
    names, loops = {level: [] for level in LEVELS}, 0
    for graph, inputs in ((each["graph"], each["inputs"]) for each in graphs):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        names["torch"] += operations(graph)
        with torch.no_grad():
            for level, table in tables.items():
                names[level] += operations(make_fx(copied(graph), table, "fake", _allow_non_fake_inputs=True)(*fakes))
            for lowered in lower(lambda backend, g=graph, x=inputs: backend(copied(g), x)):
                loops += sum(not step.extern for step in lowered.before)
                names["loop_ir"] += [name for step in lowered.before for name in step.primitives]
    sets, counts = sizes_of_sets(), {level: len(used) for level, used in names.items()} | {"loops": loops}
    distinct = {level: len(set(used)) for level, used in names.items()}
    phase.facts["ladder"] = {"model": counts, "sets": sets, "distinct": distinct}
    rows = [[title, counts[level], distinct[level], sets.get(level)] for level, title in LEVELS.items()]
    phase.table("levels, forward without gradients", rows, "level|operations|distinct|operators it has")
    phase.note(
        f"Inductor's loop IR has {loops} loops. ATen has {sets['aten_overloads']:,} overloads; "
        f"{sets['aten_public']:,} of its operators are public and not in place. Inductor has lowerings for "
        f"{sets['lowerings']:,}, of ATen and others."
    )


def sizes_of_sets() -> dict[str, int]:
    """How many operators each level has in this torch; overloads count once."""
    from torch._inductor import lowering, ops_handler

    names = [name.partition("::")[::2] for name in torch._C._dispatch_get_all_op_names()]
    aten = [[*name.split("."), "default"][:2] for space, name in names if space == "aten"]
    core = {name for name, overload in aten if torch.Tag.core in getattr(getattr(torch.ops.aten, name), overload).tags}
    packets = {name for name, _ in aten}
    return {
        "aten": len(packets), "aten_overloads": len(aten), "core_aten": len(core),
        "aten_public": sum(name[0] != "_" and name[-1] != "_" for name in packets),
        "prims": len({name.split(".")[0] for space, name in names if space == "prims"}),
        "lowerings": len({getattr(target, "overloadpacket", target) for target in lowering.lowerings}),
        "loop_ir": len(ops_handler.OP_NAMES),
    }  # fmt: skip


def time_autograd(subject: Subject, phase: Phase) -> dict:
    """Milliseconds of forward without and with a gradient and of backward, in eager and through AOTAutograd alone."""
    from functorch.compile import default_partition

    fn, args, kwargs = subject.fresh()
    compiled = torch.compile(fn, backend=aot_backend(lambda graph: None, partition_fn=default_partition))
    calls, steps = {"eager": fn, "aot": compiled}, {"eager": [], "aot": []}
    for _ in turns(ROUNDS, 2 * BUDGET, settle=2):  # until both are compiled
        for name, call in calls.items():
            if not (step := one_step(lambda call=call: call(*args, **kwargs), subject)):
                return {}
            steps[name].append(step)
    times = phase.facts["autograd_ms"] = {
        name: {key: min(step[key] for step in found[2:]) for key in found[0]} for name, found in steps.items()
    }
    rows = [[name, *each.values()] for name, each in times.items()]
    columns = "ms, the same kernels|forward, no grad|forward|backward|autograd nodes"
    phase.table("what autograd costs at run time", rows, columns)
    phase.note("AOTAutograd alone saves no launch: its graphs call each kernel, from Python, as eager does.")
    return times


def one_step(call: Callable, subject: Subject) -> dict:
    """One forward without a gradient, one with, and its backward; empty where no output has a gradient."""
    with torch.no_grad():
        no_grad = subject.once(call)[0]
    with torch.enable_grad():
        forward, _, out = subject.once(call)
        floats = [each for each in tensors_of(out) if each.requires_grad]
        nodes, todo = set(), [each.grad_fn for each in floats]
        while todo:
            if (node := todo.pop()) is not None and node not in nodes:
                nodes.add(node)
                todo += [following for following, _ in node.next_functions]
        leaves = [node.variable for node in nodes if "AccumulateGrad" in node.name()]
        if not leaves:
            return {}
        ones = [torch.ones_like(each) for each in floats]  # grad, not backward: it leaves the model's .grad alone
        backward = subject.once(lambda: torch.autograd.grad(floats, leaves, ones, allow_unused=True))[0]
    return {"no_grad": no_grad, "forward": forward, "backward": backward, "nodes": len(nodes) - len(leaves)}


if __name__ == "__main__":
    raise SystemExit(main(phase="aot_autograd"))
