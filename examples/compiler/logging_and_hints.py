"""Logs and hints: one program with five things planted in it, and the name in TORCH_LOGS that shows each.

step() has a graph break, a number that makes it recompile when it changes, an operation that Inductor does not
generate, a softmax that fuses, and an input changed in place, which rules out CUDA graphs. TORCH_LOGS takes names of
artifacts, each of which shows one thing, and of components (dynamo, inductor), which report each stage they reach.
recompiles shows the guard that failed and, under "User stack trace", the line of your code that the guard is for. Set
TORCH_LOGS in the shell: torch reads it once, when imported. A running program calls
torch._logging.set_logs(graph_breaks=True) instead, which does nothing while TORCH_LOGS is set, even set after import.

Question   Which switch says why a graph breaks, why it is compiled again, what fused, and why no CUDA graph runs?
Needs      torch
Wins when  something is slow or compiled again and nobody knows why: begin with graph_breaks and recompiles.
Variants   logging_and_hints_environ.py (the log asked for by the running program)
Study      studies/compiler/logging_and_hints.py (TORCH_COMPILE_DEBUG=1; which of the chapter's hints there are)
Source     chapter sections "Environment Variables", "Debugging Tools" and "Performance Hints".
"""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from pathlib import Path

from harness import Harness, run

import torch
import torch.nn.functional as F

from compile_inspect import fresh_compiler, logs, watch
from examples.common.shown import require
from examples.compiler.logging_and_hints_environ import breaks_logged

N = 64
SCALES = (2, 3, 4)  # the second compiles again, for any int; the third does not. A float would become a tensor on
# the CPU, and need a C++ compiler beside a GPU
ARTIFACTS = ("graph_breaks", "recompiles", "output_code", "perf_hints", "fusion", "cudagraphs")
COMPONENTS = {"dynamo": "start tracing", "inductor": "torchinductor compiling"}  # and what each reports about a graph
KERNEL = r"\b(?:cpp|triton_[a-z]+)_fused_\w+"


def step(x: torch.Tensor, w: torch.Tensor, count: torch.Tensor, scale: int) -> torch.Tensor:
    count.add_(1)  # an input changed in place
    h = F.gelu(x @ w) * scale  # a number that is part of the code
    print(end="")  # a graph break
    far = torch.cdist(h, h, p=1.0) / len(h)  # not generated: a call of torch's own kernel
    return (h - far).softmax(dim=-1)  # two reductions and what is between them: fused


def reference(x: torch.Tensor, w: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return step(x.double(), w.double(), count.clone(), SCALES[-1])


def line_of(text: str) -> int:
    """The line of this file on which `text` first stands in step()."""
    lines, first = inspect.getsourcelines(step)
    return first + next(i for i, line in enumerate(lines) if text in line)


def shown_by(records: list[tuple[str, str]], skips: int, gpu: bool) -> dict[str, str]:
    """What each artifact says about what was planted for it; raises if its records do not show it."""
    texts = {name: [text for artifact, text in records if artifact == name] for name in ARTIFACTS}
    here, breaks, shown = Path(__file__).name, line_of("print("), {}
    text = next((t for t in texts["graph_breaks"] if f"{here}:{breaks}" in t), None)
    require(text is not None, f"graph_breaks does not name line {breaks}: {texts['graph_breaks']}")
    context = re.search(r"Developer debug context: (\S+ \S+)", text)
    shown["graph_breaks"] = f"line {breaks}: {context[1] if context else text.splitlines()[-1]}"

    trace = rf'(?s)- \d+/\d+: (scale == [\d.]+).*User stack trace:.*{re.escape(here)}", line (\d+), in step'
    changed = [f"line {m[2]}, {m[1]}" for t in texts["recompiles"] if (m := re.search(trace, t))]
    require(changed == [f"line {line_of('* scale')}, scale == {SCALES[0]}"], f"recompiles: {texts['recompiles']}")
    shown["recompiles"] = f"{changed[0]} no longer held; {len(SCALES)} values of scale, compiled again once"

    names = kernels_of("\n".join(texts["output_code"]))
    require(len(names) >= 2 and any("gelu" in n for n in names), f"output_code has the kernels {names}")
    shown["output_code"] = ", ".join(names)

    hints = list(dict.fromkeys(texts["perf_hints"]))
    require(any("_cdist_forward" in t for t in hints), f"perf_hints: {hints}")
    shown["perf_hints"] = "; ".join(hints)

    fused = [m[0] for t in texts["fusion"] if (m := re.search(r"fusing op\S+ with op\S+", t))]
    refused = [m[0] for t in texts["fusion"] if (m := re.search(r"cannot fuse .*", t))]
    require(bool(fused), f"fusion: nothing of {len(texts['fusion'])} records fuses")
    shown["fusion"] = f"fused {len(fused)} times, such as {fused[0]}" + (f"; refused: {refused[0]}" if refused else "")

    if gpu:
        text = next((t for t in texts["cudagraphs"] if "mutated inputs" in t), None)
        require(text is not None, f"cudagraphs: {texts['cudagraphs'][:5]}")
        place = re.search(rf"{re.escape(here)}\D+(\d+)", text)
        shown["cudagraphs"] = text.splitlines()[0].split(". Found")[0] + (f": line {place[1]}" if place else "")
    else:
        require(skips > 0, "CUDA graphs were not skipped on a CPU")
        shown["cudagraphs"] = f"nothing on a CPU; torch's counter cudagraph_skips is {skips}"

    for name, stage in COMPONENTS.items():
        own = [text for source, text in records if source.startswith(f"torch._{name}.")]
        text = next((t for t in own if stage in t), None)
        require(text is not None, f"{name}: no record of {len(own)} reports {stage!r}")
        shown[name] = f"{len(own)} records, such as: {re.sub(r' /.*', '', text.splitlines()[0])}"
    return shown


def kernels_of(code: str) -> list[str]:
    """The names of generated kernels in code, each once."""
    return list(dict.fromkeys(re.findall(rf"^({KERNEL}) = async_compile", code, re.MULTILINE)))


def artifacts_in_process(h: Harness) -> tuple[list[tuple[str, str]], int]:
    """(records, CUDA graphs skipped) of compiling and calling step() here; its output is held to float64."""
    x, w, count = h.randn(N, N), h.randn(N, N, scale=N**-0.5), torch.zeros(8, device=h.device)
    with torch.no_grad(), fresh_compiler():
        switches = dict.fromkeys(ARTIFACTS, True) | dict.fromkeys(COMPONENTS, logging.INFO)
        with watch() as seen, logs(**switches) as records, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = torch.compile(step, mode="reduce-overhead")
            for scale in SCALES:
                compiled(x, w, count, scale)
        require(torch.equal(count, torch.full_like(count, len(SCALES))), f"count is {count}")
        h.check(
            lambda x, w, count: compiled(x, w, count.clone(), SCALES[-1]), reference, x, w, count,
            what=f"step [{N}, {N}]", poison=False, terms=N * N, roundings=8,
        )  # fmt: skip
    return records, seen.counters.get("inductor", {}).get("cudagraph_skips", 0)


def demo(h: Harness) -> None:
    if h.profile:
        h.say("nothing to profile: what is shown is what the compiler logs")
        return
    with h.progress("the artifacts of TORCH_LOGS"):
        records, skips = artifacts_in_process(h)
    h.fact("records of each artifact", {name: sum(each == name for each, _ in records) for name in ARTIFACTS})
    shown = shown_by(records, skips, h.device.type == "cuda")
    h.table("what each switch shows", {f"TORCH_LOGS={name}": {"": answer} for name, answer in shown.items()})
    asked = breaks_logged(step, h.randn(N, N), h.randn(N, N), torch.zeros(8, device=h.device), SCALES[0])
    h.table("switched on by the running program", {way: {"records of the break": n} for way, n in asked.items()})
    h.answer(
        lambda: (
            f"TORCH_LOGS=graph_breaks: {shown['graph_breaks'].partition(':')[0]}; recompiles: "
            f"{shown['recompiles'].partition(';')[0]}; fusion: {shown['fusion'].partition(',')[0]}; cudagraphs: "
            f"{shown['cudagraphs']}. Set by the running program: too late, {min(asked.values())} records."
        ),
        timed=False,
    )


if __name__ == "__main__":
    run(demo)
