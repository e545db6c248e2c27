"""logging_and_hints, shown: the switches of a whole process, in one of its own; each has to show what is planted.

TORCH_COMPILE_DEBUG=1 keeps what each stage made, and TORCH_TRACE writes the log that tlparse turns into pages.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness
from harness.process import Child, report

import torch

from compile_inspect import watch
from examples.common.shown import require
from examples.compiler.logging_and_hints import SCALES, N, line_of, step

TIMEOUT_S = 240

Row = tuple[str, str]  # a switch, and what it showed

# What TORCH_COMPILE_DEBUG=1 writes for each graph.
STAGES = {
    "fx_graph_readable.py": "the graph given to Inductor, each operation with the line that it comes from",
    "fx_graph_transformed.py": "the same after Inductor's own rewrites",
    "fx_graph_runnable.py": "the same as a script that compiles and runs it alone: attach it to a bug report",
    "ir_pre_fusion.txt": "loops and library calls, one node each",
    "ir_post_fusion.txt": "the nodes that became one",
    "output_code.py": "what is run: kernels, and the function that calls them",
    "inductor_provenance_tracking_node_mappings.json": "which operation ended in which kernel",
}


def child_step() -> None:
    """The program under this process's switches."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = (torch.randn(N, N, device=device) for _ in range(2))
    with torch.no_grad(), watch() as seen:
        compiled = torch.compile(step, mode="reduce-overhead")
        for scale in SCALES:
            compiled(x, w, torch.zeros(8, device=device), scale)
    report(graphs=seen.graphs)


# --- what the switches showed: each function requires what was planted


def environment(output: str) -> Row:
    """What a process printed under TORCH_LOGS="graph_breaks,recompiles"."""
    found = Counter(re.findall(r"\[__(\w+)\]", output))
    # Beside those that were asked for, torch prints on a GPU why a CUDA graph was skipped.
    asked = {"graph_breaks", "recompiles"}
    require(asked <= set(found) <= asked | {"cudagraphs"}, f"TORCH_LOGS printed {dict(found)}")
    counts = ", ".join(f"{count} lines of {name}" for name, count in sorted(found.items()))
    return "TORCH_LOGS=graph_breaks,recompiles", f"{counts}, on stderr"


def debug_folder(h: Harness, folder: Path) -> Row:
    """What TORCH_COMPILE_DEBUG=1 wrote."""
    graphs = sorted(folder.glob("torch_compile_debug/run_*/torchinductor/model__*"), key=lambda path: path.suffix)
    require(len(graphs) == 3, f"TORCH_COMPILE_DEBUG=1 kept {len(graphs)} graphs of 3")
    texts = {name: (graphs[-2] / name).read_text() for name in STAGES if (graphs[-2] / name).exists()}
    require(set(texts) == set(STAGES), f"TORCH_COMPILE_DEBUG=1 wrote {sorted(texts)}")
    h.fact(
        "TORCH_COMPILE_DEBUG=1",
        {name: f"{len(texts[name].splitlines())} lines: {purpose}" for name, purpose in STAGES.items()},
    )
    require(str(line_of("softmax")) in texts["fx_graph_readable.py"], "fx_graph_readable.py names no line of step()")
    fused = re.findall(r"^(op\d+(?:_op\d+)+): \w+Node", texts["ir_post_fusion.txt"], re.MULTILINE)
    before = len(re.findall(r"^op\d+: \w*SchedulerNode", texts["ir_pre_fusion.txt"], re.MULTILINE))
    require(bool(fused), "ir_post_fusion.txt: nothing is fused")
    nodes = fused[0].count("op")
    where = json.loads(texts["inductor_provenance_tracking_node_mappings.json"])
    kernel = sorted({k.split(":")[0] for kernels in where["postToCppCode"].values() for k in kernels if "fused" in k})
    require(bool(kernel), "the provenance names no fused kernel")
    answer = f"{len(STAGES)} files for each of {len(graphs)} graphs; {nodes} of {before} nodes became {kernel[0]}"
    return "TORCH_COMPILE_DEBUG=1", answer


def trace_events(text: str) -> Counter:
    """How often each event, and each artifact by its name, is in a log of TORCH_TRACE."""
    events: Counter = Counter()
    where = {"frame_id", "frame_compile_id", "attempt", "has_payload", "rank", "stack"}
    for line in text.splitlines():
        if not re.match(r"[VIWE]\d{4} ", line):
            continue  # a payload
        entry = json.loads(line[line.index("] {") + 2 :])
        for name in set(entry) - where:
            events[entry["artifact"]["name"] if name == "artifact" else name] += 1
    return events


def traced(h: Harness, folder: Path) -> Row:
    log = max(folder.glob("*.log"), key=lambda path: path.stat().st_size, default=None)
    require(log is not None, "TORCH_TRACE wrote no log")
    events = trace_events(log.read_text())
    wanted = ("inductor_output_code", "dynamo_graph_break_reason", "recompile_reasons", "compilation_metrics")
    require(all(events[name] for name in wanted), f"TORCH_TRACE has {dict(events)}")
    counts = {name: events[name] for name in wanted} | {"events in all": sum(events.values())}
    h.fact("TORCH_TRACE", counts)
    answer = f"{counts['inductor_output_code']} graphs in {counts['events in all']} events"
    return "TORCH_TRACE=folder", f"{answer}; pip install tlparse, then tlparse FOLDER/*.log makes pages of it"


def study(h: Harness) -> None:
    if h.profile:
        return
    with TemporaryDirectory(prefix="logging-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        env = {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TORCH_COMPILE_DEBUG": "1",
            "TORCH_COMPILE_DEBUG_DIR": str(folder), "TORCH_TRACE": str(folder / "trace"),
            "TORCH_LOGS": "graph_breaks,recompiles",
        }  # fmt: skip
        if h.device.type == "cpu":
            env["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # no search for the CPU's vector units
        with h.progress("the switches of a process"), Child(child_step, env=env, timeout=TIMEOUT_S) as child:
            graphs = child.result()["graphs"]
            require(graphs == 3, f"the process compiled {graphs} graphs")
            rows = [environment(child.output())]
        h.fact("answers", dict([*rows, debug_folder(h, folder), traced(h, folder / "trace")]))
