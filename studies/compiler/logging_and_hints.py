"""logging_and_hints, shown: the switches of a whole process, each in one of its own; each has to show what is planted.

TORCH_COMPILE_DEBUG=1 keeps what each stage made, TORCHINDUCTOR_UNIQUE_KERNEL_NAMES names the kernels,
TORCHINDUCTOR_BENCHMARK_KERNEL makes generated files time themselves, and TORCH_TRACE writes the log that tlparse turns
into pages.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness
from harness.process import Child, report

import torch

from compile_inspect import watch
from examples.compiler.logging_and_hints import (
    KERNEL,
    SCALES,
    N,
    Row,
    artifacts_in_process,
    line_of,
    require,
    step,
)  # fmt: skip

TIMEOUT_S = 240

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


def study(h: Harness) -> None:
    if h.profile:
        return
    rows = switches_of_processes(h)
    h.fact("answers", {f"{question} {switch}": answer for question, switch, answer in rows})


# --- processes


def run_step(device: str) -> None:
    generator = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(N, N, device=device, generator=generator) for _ in range(2))
    with torch.no_grad():
        compiled = torch.compile(step, mode="reduce-overhead")
        for scale in SCALES:
            compiled(x, w, torch.zeros(8, device=device), scale)


def child_step() -> None:
    """The program under this process's switches."""
    with watch() as seen:
        run_step("cuda" if torch.cuda.is_available() else "cpu")
    report(graphs=seen.graphs)


def child_generated(file: str, *flags: str) -> None:
    """A file that Inductor generated, run as a script."""
    sys.argv = [file, *flags]
    runpy.run_path(file, run_name="__main__")


# --- what the switches showed: each function requires what was planted


def environment(output: str) -> Row:
    """What a process printed under TORCH_LOGS="graph_breaks,recompiles"."""
    found = Counter(re.findall(r"\[__(\w+)\]", output))
    # Beside those that were asked for, torch prints on a GPU why a CUDA graph was skipped.
    asked = {"graph_breaks", "recompiles"}
    require(asked <= set(found) <= asked | {"cudagraphs"}, f"TORCH_LOGS printed {dict(found)}")
    counts = ", ".join(f"{count} lines of {name}" for name, count in sorted(found.items()))
    return "and without changing the program?", "TORCH_LOGS=graph_breaks,recompiles", f"{counts}, on stderr"


def misspelt(output: str) -> Row:
    """What becomes of a process whose TORCH_LOGS names no artifact."""
    printed = re.search(r"Invalid log settings: [^,]*", output)
    require(printed is not None and "result:" not in output, f"TORCH_LOGS=fusions was taken:\n{output[-2000:]}")
    return "is the name right?", "TORCH_LOGS=fusions", f"the process ends at import torch: {printed[0]}; it is fusion"


def debug_folder(h: Harness, folder: Path) -> tuple[Row, list[Path]]:
    """(row, the folders of the graphs) of what TORCH_COMPILE_DEBUG=1 wrote."""
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
    return ("what did each stage make?", "TORCH_COMPILE_DEBUG=1", answer), graphs


def kernel_names(h: Harness, named: str, unnamed: str) -> Row:
    """Generated code with names of their own for kernels (the default) and without."""
    gpu = h.device.type == "cuda"
    defined = r"def (triton_\w*)\(" if gpu else rf"^({KERNEL}) = async_compile"
    own, common = (sorted(set(re.findall(defined, code, re.MULTILINE))) for code in (named, unnamed))
    require(bool(own) and bool(common), f"kernels in the generated code: {own} and {common}")
    h.fact("kernel names", {"UNIQUE_KERNEL_NAMES=1, the default": own, "UNIQUE_KERNEL_NAMES=0": common})
    switch = "TORCHINDUCTOR_UNIQUE_KERNEL_NAMES"
    if gpu:
        require(common == ["triton_"] and own != common, f"{switch}=0 left {common}")
        answer = f"1, the default: {', '.join(own)}; 0: all are {common[0]}, and equal kernels are compiled once"
    else:
        require(own == common, f"on a CPU {switch}=0 changed {own} to {common}")
        answer = f"on a CPU the same {len(own)} names with 0 and 1: it is about Triton's kernels"
    return "which kernel is that in a profile?", switch, answer


def benchmarked(h: Harness, output: str) -> Row:
    """What a generated file printed, run as a script: on a GPU its kernels' times, on a CPU the whole graph's."""
    question, switch = "how fast is it alone?", "TORCHINDUCTOR_BENCHMARK_KERNEL=1"
    if h.device.type == "cuda":
        times = re.findall(r"([\d.]+)ms\s+([\d.]+) GB\s+([\d.]+)GB/s", output)
        require(bool(times), f"the generated file timed no kernel:\n{output[-2000:]}")
        each = ", ".join(f"{ms} ms at {rate} GB/s" for ms, _, rate in times)
        return question, switch, f"output_code.py -k: {len(times)} kernels: {each}"
    times = re.findall(r"^(\d+\.\d+)$", output, re.MULTILINE)
    require(bool(times), f"the generated file timed nothing:\n{output[-2000:]}")
    answer = f"no kernels on a CPU to time alone; output_code.py runs its graph: {float(times[-1]) * 1e6:.0f} us a call"
    return question, switch, answer


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


def traced(h: Harness, folder: Path, pages: Path) -> Row:
    log = max(folder.glob("*.log"), key=lambda path: path.stat().st_size, default=None)
    require(log is not None, "TORCH_TRACE wrote no log")
    events = trace_events(log.read_text())
    wanted = ("inductor_output_code", "dynamo_graph_break_reason", "recompile_reasons", "compilation_metrics")
    require(all(events[name] for name in wanted), f"TORCH_TRACE has {dict(events)}")
    counts = {name: events[name] for name in wanted} | {"events in all": sum(events.values())}
    h.fact("TORCH_TRACE", counts)
    answer = f"{counts['inductor_output_code']} graphs in {counts['events in all']} events"
    if tool := find_tlparse():
        done = subprocess.run(
            [tool, str(log), "-o", str(pages), "--overwrite", "--no-browser"],
            capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        wrote = [path.name for path in pages.rglob("*") if path.is_file()]
        require("index.html" in wrote, f"tlparse wrote no index.html:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
        kinds = Counter(re.sub(r"_c[a-z0-9]{51}|_\d+(?=[._])", "", name) for name in wrote)
        h.fact("tlparse", dict(sorted(kinds.items())))
        answer += f"; tlparse made {len(wrote)} pages of it, begin with index.html"
    else:
        answer += "; pip install tlparse, then tlparse FOLDER/*.log makes pages of it"
    return "what happened, in order?", "TORCH_TRACE=folder", answer


def find_tlparse() -> str | None:
    beside = str(Path(sys.executable).parent)  # of a virtual environment that is not activated
    return shutil.which("tlparse", path=os.pathsep.join([os.environ.get("PATH", os.defpath), beside]))


def switches_of_processes(h: Harness) -> list[Row]:
    with TemporaryDirectory(prefix="logging-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        cpu = h.device.type == "cpu"
        own = {kind: {"TORCHINDUCTOR_CACHE_DIR": str(folder / kind)} for kind in ("debug", "names")}
        if cpu:
            own = {kind: env | {"TORCHINDUCTOR_VEC_ISA_OK": "1"} for kind, env in own.items()}  # no search for units
        # No workers: a kernel that one of them compiled is not among those that its file can time.
        timed = {"TORCHINDUCTOR_BENCHMARK_KERNEL": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        debug = own["debug"] | timed | {
            "TORCH_COMPILE_DEBUG": "1", "TORCH_COMPILE_DEBUG_DIR": str(folder), "TORCH_TRACE": str(folder / "trace"),
        }  # fmt: skip
        names = {"TORCH_LOGS": "graph_breaks,recompiles", "TORCHINDUCTOR_UNIQUE_KERNEL_NAMES": "0"}
        with ExitStack() as stack:
            switches = {"debug": debug | names} if cpu else {"debug": debug, "names": own["names"] | names}
            started = [stack.enter_context(Child(child_step, env=e, timeout=TIMEOUT_S)) for e in switches.values()]
            debugged, renamed = started[0], started[-1]  # one process on a CPU, which has no Triton kernels to name
            misled = stack.enter_context(Child(child_step, env={"TORCH_LOGS": "fusions"}, timeout=TIMEOUT_S))
            with h.progress("the artifacts of TORCH_LOGS"):
                records, _ = artifacts_in_process(h)
            with h.progress("the switches of a process"):
                graphs = [child.result()["graphs"] for child in (debugged, renamed)]
                require(graphs == [3, 3], f"the processes compiled {graphs} graphs")
                rows = [environment(renamed.output()), misspelt(misled.output())]
        row, kept = debug_folder(h, folder)
        rows.append(row)
        codes = "\n".join(text for artifact, text in records if artifact == "output_code")
        generated = "\n".join(path.read_text() for path in (folder / list(switches)[-1]).rglob("*.py"))
        rows.append(kernel_names(h, codes, generated))
        if h.timing:
            flags = ["-k"] if h.device.type == "cuda" else ["--times", "5", "--repeat", "5"]
            command, env = (str(kept[-2] / "output_code.py"), *flags), own["debug"] | timed
            with h.progress("a generated file"), Child(child_generated, *command, env=env, timeout=TIMEOUT_S) as child:
                rows.append(benchmarked(h, child.output()))
        rows.append(traced(h, folder / "trace", folder / "pages"))
    return rows
