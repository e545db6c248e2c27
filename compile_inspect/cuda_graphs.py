"""CUDA graphs: what mode="reduce-overhead" records and gives, and what keeps a graph from being recorded."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch

from compile_inspect import cuda_graphs_held, kernels_run, logs, watch
from compile_inspect.graph_breaks import breaks_of
from compile_inspect.graphs import aot_backend, line_of, name_of
from compile_inspect.main import main
from compile_inspect.report import Phase, Skip, reason_of
from compile_inspect.subject import Subject

QUESTION = "Can CUDA graphs launch the model's kernels, what keeps a graph from it, and what do they give?"
GAIN = 1.05  # a speed-up above it is not noise
# What the reason of a skip has in it, and the fix.
FIXES = {
    "mutated": "return the new value, or keep it in a registered buffer, instead of writing to an input",
    "cpu": "make the tensor on the GPU: device=x.device, and no .cpu()",
    "dynamic": "pad to a few sizes, and compile with dynamic=False",
    "incompatible": "replace the operation, or move it out of the compiled function",
}


def look(subject: Subject, phase: Phase) -> None:
    try:
        breaks, graphs = breaks_of(subject).breaks, graphs_of(subject)
    except Exception as error:
        raise Skip(f"Dynamo or AOTAutograd fails: {reason_of(error)}; see the phase triage") from error
    phase.facts |= {"graphs": graphs, "breaks": [str(each) for each in breaks], "recorded": 0}
    if not graphs:
        phase.answer = "there is nothing to record: Dynamo captures no graph of it"
        return
    columns = {"operations": "operations", "writes_to": "writes to inputs", "on_cpu": "on the CPU",
               "unsafe": "not to be recorded", "skip": "torch's own check"}  # fmt: skip
    phase.table("graphs: each is a CUDA graph of its own, launched apart", graphs, columns)
    hindered = sum(any(graph[key] for key in ("writes_to", "on_cpu", "unsafe")) for graph in graphs)
    phase.facts["hindered"] = hindered
    if not subject.on_gpu:
        kept = f"{hindered} kept from it, whole or in part" if hindered else "and nothing seen here keeps one from it"
        phase.answer = f"nothing was recorded, there is no GPU; on one, {len(graphs)} would be recorded apart, {kept}"
        return
    default, recorded, faster = measure(subject)
    phase.facts |= {"default": default, "reduce_overhead": recorded, "recorded": recorded["held"]}
    columns = {"mode": "mode", "ms": "a call, ms", "host_ms": "host, ms", "idle": "GPU idle, share",
               "kernels": "kernels", "launched": "graphs launched", "held": "graphs held",
               "reserved": "memory, MiB"}  # fmt: skip
    phase.table("one call", [{"mode": "default"} | default, {"mode": "reduce-overhead"} | recorded], columns)
    before, after, idle = default["ms"], recorded["ms"], f"{recorded['idle']:.0%} for {default['idle']:.0%}"
    if faster > GAIN:
        fix, share = 'torch.compile(..., mode="reduce-overhead")', 1 - 1 / faster
        tried = f"{after:.3g} ms a call for {before:.3g}, {faster:.2f}x turn by turn"
        phase.finding("kernels are launched one by one", fix, tried=tried, ms=before * share, share=share)
    for reason in recorded["reasons"]:
        fix = next((fix for word, fix in FIXES.items() if word in reason.lower()), "see the table of graphs")
        phase.finding(f"no CUDA graph: {reason}", fix)
    phase.answer = (
        f"{recorded['held']} CUDA graphs are recorded for {len(graphs)} graphs, {recorded['skips']} skipped; "
        f"reduce-overhead takes {after:.3g} ms a call for {before:.3g}, and the GPU is idle {idle} of it"
    )


def measure(subject: Subject) -> tuple[dict, dict, float]:
    """Facts of a call in default mode and in reduce-overhead, and how many times faster the second is, turn by turn.

    Each mode has a compiled call of its own, and what is logged, counted and held while it settles is that mode's; the
    calls are then timed in turns. Both are made before either compiles: fresh() forgets what was compiled.
    """
    calls, runs = [subject.compiled(mode=mode) for mode in (None, "reduce-overhead")], []
    both = torch._dynamo.config.patch(recompile_limit=2 * torch._dynamo.config.recompile_limit)  # entries of both modes
    with torch.cuda.device(subject.device), both:
        for call in calls:
            graphs, pools = cuda_graphs_held(), pools_of_graphs()
            with logs(cudagraphs=True, perf_hints=True) as records, watch() as seen:
                for _ in range(3):  # it compiles, records a CUDA graph, and launches it
                    call()
            lines = [text.strip().splitlines()[0] for _, text in records if "skipping cudagraph" in text.lower()]
            mib = sum(size for pool, size in pools_of_graphs().items() if pool not in pools) / 2**20
            runs.append({"held": cuda_graphs_held() - graphs, "reserved": mib, "reasons": list(dict.fromkeys(lines)),
                         "skips": seen.counters.get("inductor", {}).get("cudagraph_skips", 0)})  # fmt: skip
        times = subject.in_turns(dict.fromkeys(calls, nullcontext))
        for run, call, timed in zip(runs, calls, times, strict=True):
            names, launched = kernels_run(call)
            idle = max(0.0, 1 - busy_ms(subject.profiled(call)) / timed.ms)
            run |= {"ms": timed.ms, "host_ms": timed.host_ms, "idle": idle, "kernels": len(names), "launched": launched}
    default, recorded = times
    return *runs, median(a / b for a, b in zip(default.all, recorded.all, strict=True))


def pools_of_graphs() -> Counter:
    """Bytes of each memory pool that CUDA graphs have to themselves, by its id; (0, 0) is the allocator's."""
    pools = Counter()
    for segment in torch.cuda.memory_snapshot():
        pools[tuple(segment["segment_pool_id"])] += segment["total_size"]
    del pools[0, 0]
    return pools


def busy_ms(seen: torch.profiler.profile) -> float:
    """Milliseconds in which a kernel or a copy runs; the profiler slows the host, not these."""
    busy, until = 0.0, 0.0
    ran = sorted(
        (event.time_range.start, event.time_range.end) for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    )  # fmt: skip
    for start, end in ran:
        busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
    return busy / 1e3


def graphs_of(subject: Subject) -> list[dict]:
    """Each graph of a call: operations, inputs it writes to, what lies on the CPU, what CUDA graphs do not allow."""
    from torch._dynamo.backends.cudagraphs import check_multiple_devices_or_any_cpu_nodes, get_device_node_mapping
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    found = []

    def at(node: torch.fx.Node) -> str:
        return f"{name_of(node)} ({line_of(node)})"

    def on_cpu(node: torch.fx.Node) -> bool:
        """Whether its tensor lies on the CPU; without a GPU: whether it still would where the model is on one."""
        value, *inputs = (each.meta.get("example_value") for each in [node, *node.all_input_nodes])
        if subject.on_gpu:
            return isinstance(value, torch.Tensor) and value.device.type == "cpu"
        made = isinstance(value, torch.Tensor) and not any(isinstance(each, torch.Tensor) for each in inputs)
        return node.target in ("cpu", "numpy") or (made and node.kwargs.get("device") is None)

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        nodes = [node for node in graph.graph.nodes if node.op.startswith("call_")]
        names = [node.name.removeprefix("l_").strip("_") for node in graph.graph.find_nodes(op="placeholder")]
        sizes = any(isinstance(each, torch.SymInt) for each in inputs)
        held = {"operations": len(nodes), "writes_to": [], "on_cpu": [at(node) for node in nodes if on_cpu(node)],
                "unsafe": ["dynamic sizes: each is recorded anew"] * sizes, "skip": ""}  # fmt: skip
        found.append(held)

        def forward(aten: torch.fx.GraphModule) -> None:
            meta = torch._guards.TracingContext.get().fw_metadata
            static = set(meta.static_input_indices or ())
            written = [i for i, info in enumerate(meta.input_info) if info.mutates_data and i not in static]
            held["writes_to"] = [names[i] if i < len(names) else f"input {i}" for i in written]
            skip = check_multiple_devices_or_any_cpu_nodes(get_device_node_mapping(aten))
            held["skip"] = skip.strip().splitlines()[0].split(". Found from")[0] if skip else ""
            if node := get_first_incompatible_cudagraph_node(aten):
                held["unsafe"].append(at(node))

        return aot_backend(forward)(graph, inputs)

    subject.compiled(backend=backend)()
    return found


if __name__ == "__main__":
    raise SystemExit(main(phase="cuda_graphs"))
