"""logging_and_hints, shown: what TORCH_COMPILE_DEBUG=1 keeps of each stage, and the chapter's three hints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Harness
from harness.process import Child, report

import torch

from compile_inspect import fresh_compiler, logs, watch
from examples.common.shown import require
from examples.compiler.logging_and_hints import SCALES, N, line_of, step

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


def child_step() -> None:
    """The lesson's program under this process's switches."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = (torch.randn(N, N, device=device) for _ in range(2))
    with torch.no_grad(), watch() as seen:
        compiled = torch.compile(step, mode="reduce-overhead")
        for scale in SCALES:
            compiled(x, w, torch.zeros(8, device=device), scale)
    report(graphs=seen.graphs)


def debug_folder(h: Harness, folder: Path) -> None:
    """What TORCH_COMPILE_DEBUG=1 wrote; each file has to show what was planted for it."""
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
    h.say(f"{len(STAGES)} files for each of {len(graphs)} graphs; {nodes} of {before} nodes became {kernel[0]}")


def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(x.abs(), 2) + 1  # a random operation that Inductor does not generate


def hints(h: Harness) -> None:
    """The chapter quotes three hints: are they in torch's source, and what does perf_hints say in their place?"""
    folder, sources = Path(torch.__file__).parent, []
    for part in ("_dynamo", "_functorch", "_inductor"):
        sources += [file.read_text(encoding="utf-8").lower() for file in (folder / part).rglob("*.py")]
    require(any("mutated inputs" in text for text in sources), "torch's source is not where it is looked for")
    with torch.no_grad(), fresh_compiler(), logs(perf_hints=True, fusion=True) as records:
        torch.compile(drawn)(h.randn(8, 8))
    random = next((text for name, text in records if name == "perf_hints" and "multinomial" in text), None)
    require(random is not None, f"perf_hints says nothing of multinomial: {records}")
    instead = {
        "not used because input is mutated": "TORCH_LOGS=cudagraphs: skipping cudagraphs due to mutated inputs",
        "fell back to eager": f"TORCH_LOGS=perf_hints: {random}",
        "missed fusion": "TORCH_LOGS=fusion: cannot fuse op1 with op2, and why",
    }
    h.table(
        f"the chapter's hints, in torch {torch.__version__}",
        {hint: {"files": sum(hint in text for text in sources), "instead": told} for hint, told in instead.items()},
    )


def study(h: Harness) -> None:
    if h.profile:
        return
    hints(h)
    with TemporaryDirectory(prefix="logging-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        env = {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TORCH_COMPILE_DEBUG": "1",
            "TORCH_COMPILE_DEBUG_DIR": str(folder),
        }  # fmt: skip
        if h.device.type == "cpu":
            # No search for the CPU's vector units; this switch also makes torch import Triton before the harness does.
            env |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TRITON_INTERPRET": "1"}
        with h.progress("the switches of a process"), Child(child_step, env=env, timeout=TIMEOUT_S) as child:
            graphs = child.result()["graphs"]
            require(graphs == 3, f"the process compiled {graphs} graphs")
        debug_folder(h, folder)
