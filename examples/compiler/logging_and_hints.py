"""Logs and hints: one program with five things planted in it, and the name in TORCH_LOGS that shows each.

step() has a graph break, a number whose change compiles it again, an operation that Inductor does not generate, a
softmax that fuses, and an input changed in place, which keeps CUDA graphs from being used. TORCH_LOGS takes names of
artifacts; here they are collected in this process, by compile_inspect.logs. Each has to show what was planted; one that
does not fails the run.

Question   Which switch says why a graph breaks, why it is compiled again, what fused, and why no CUDA graph runs?
Needs      torch
Wins when  something is slow or compiled again and nobody knows why: begin with graph_breaks and recompiles.
Study      studies/compiler/logging_and_hints.py (switches of a whole process: TORCH_COMPILE_DEBUG, TORCH_TRACE, ...)
Source     chapter sections on debugging torch.compile and on its logs.
"""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness import Harness, run

import torch
import torch.nn.functional as F

from compile_inspect import fresh_compiler, logs, watch

N = 64
SCALES = (2.0, 3.0, 4.0)  # the second compiles again, for any number; the third does not
ARTIFACTS = (
    "graph_breaks", "recompiles", "guards", "output_code", "perf_hints", "fusion", "cudagraphs", "schedule",
)  # fmt: skip
KERNEL = r"\b(?:cpp|triton_[a-z]+)_fused_\w+"

Row = tuple[str, str, str]  # question, switch, what it showed


def step(x: torch.Tensor, w: torch.Tensor, count: torch.Tensor, scale: float) -> torch.Tensor:
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


@contextmanager
def recorded(*artifacts: str) -> Iterator[list[tuple[str, str]]]:
    """Collect these log artifacts of torch as (artifact, text); TORCH_LOGS=a,b prints what recorded("a", "b") collects.

    Raises ValueError for a name that torch has no artifact of.
    """
    with ExitStack() as stack:
        try:
            records = stack.enter_context(logs(**dict.fromkeys(artifacts, True)))
        except (TypeError, ValueError) as error:  # it names the one that it does not know
            unknown = next((name for name in artifacts if repr(name) in str(error)), ", ".join(artifacts))
            near = difflib.get_close_matches(unknown, ARTIFACTS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "TORCH_LOGS=help lists them"
            raise ValueError(f"recorded: torch has no log artifact {unknown!r}; {hint}") from None
        yield records


class NothingShown(AssertionError):
    """A switch did not show what was planted for it."""


def require(shown: bool, otherwise: str) -> None:
    if not shown:
        raise NothingShown(otherwise)


def artifacts_of(records: list[tuple[str, str]], skips: int, gpu: bool) -> list[Row]:
    """Require what was planted in the records, and return a row for each question."""
    texts = {name: [text for artifact, text in records if artifact == name] for name in ARTIFACTS}
    here, breaks = Path(__file__).name, line_of("print(")
    text = next((t for t in texts["graph_breaks"] if f"{here}:{breaks}" in t), None)
    require(text is not None, f"graph_breaks does not name line {breaks}: {texts['graph_breaks']}")
    reason = next((line for line in text.splitlines() if line.startswith("Failed")), text.splitlines()[-1])
    context = re.search(r"Developer debug context: (\S+ \S+)", text)
    answer = f"line {breaks}: {reason}" + (f" ({context[1]})" if context else "")
    rows = [("where does the graph break?", "TORCH_LOGS=graph_breaks", answer)]

    changed = [m[1] for t in texts["recompiles"] if (m := re.search(r"- \d+/\d+: (scale == [\d.]+)", t))]
    require(changed == [f"scale == {SCALES[0]}"], f"recompiles: {texts['recompiles']}")
    answer = f"{changed[0]} no longer held; {len(SCALES)} values of scale, compiled again {len(changed)} time"
    rows.append(("why was it compiled again?", "TORCH_LOGS=recompiles", answer))

    trees = [t for t in texts["guards"] if "TREE_GUARD_MANAGER" in t]
    tree = next((t for t in trees if f"L['scale'] == {SCALES[0]}" in t), None)
    require(tree is not None, f"guards: none of {len(trees)} cache entries checks scale")
    count = sum("+- " in line and "GuardManager" not in line for line in tree.splitlines())
    latency = next((m[1] for t in texts["guards"] if (m := re.search(r"latency = ([\d.]+ us)", t))), "not logged")
    answer = f"{count} guards, one of them L['scale'] == {SCALES[0]}; evaluating them: {latency}"
    rows.append(("what is checked on every call?", "TORCH_LOGS=guards", answer))

    names = kernels_of("\n".join(texts["output_code"]))
    require(len(names) >= 2 and any("gelu" in n for n in names), f"output_code has the kernels {names}")
    rows.append(("what code was generated?", "TORCH_LOGS=output_code", ", ".join(names)))

    hints = list(dict.fromkeys(texts["perf_hints"]))
    require(any("_cdist_forward" in t for t in hints), f"perf_hints: {hints}")
    rows.append(("what keeps the code from being faster?", "TORCH_LOGS=perf_hints", "; ".join(hints)))

    fused = [m[0] for t in texts["fusion"] if (m := re.search(r"fusing op\S+ with op\S+", t))]
    refused = [m[0] for t in texts["fusion"] if (m := re.search(r"cannot fuse .*", t))]
    require(bool(fused), f"fusion: nothing of {len(texts['fusion'])} records fuses")
    answer = f"{len(fused)} times, such as {fused[0]}" + (f"; refused: {refused[0]}" if refused else "")
    rows.append(("what was fused, and what not?", "TORCH_LOGS=fusion", answer))

    question, switch = "why does no CUDA graph run?", "TORCH_LOGS=cudagraphs"
    if gpu:
        text = next((t for t in texts["cudagraphs"] if "mutated inputs" in t), None)
        require(text is not None, f"cudagraphs: {texts['cudagraphs'][:5]}")
        place = re.search(rf"{re.escape(here)}\D+(\d+)", text)
        answer = text.splitlines()[0].split(". Found")[0] + (f": line {place[1]}" if place else "")
    else:
        require(skips > 0, "CUDA graphs were not skipped on a CPU")
        answer = f"{len(texts['cudagraphs'])} records on a CPU; torch's counter cudagraph_skips is {skips}"
    rows.append((question, switch, answer))
    if warned := list(dict.fromkeys(text for artifact, text in records if artifact == "warnings")):
        rows.append(("what does it warn of unasked?", "Python's warnings", "; ".join(warned)))
    count = len(texts["schedule"])
    answer = f"{count} records" + ("" if count else ": a name that torch takes and never writes to; see fusion")
    rows.append(("in which order?", "TORCH_LOGS=schedule", answer))
    return rows


def kernels_of(code: str) -> list[str]:
    """The names of generated kernels in code, each once."""
    names = re.findall(rf"^({KERNEL}) = async_compile", code, re.MULTILINE)
    return list(dict.fromkeys(names))


def artifacts_in_process(h: Harness) -> tuple[list[tuple[str, str]], int]:
    """(records, CUDA graphs skipped) of compiling and calling step() here; its output is held to float64."""
    x, w, count = h.randn(N, N), h.randn(N, N, scale=N**-0.5), torch.zeros(8, device=h.device)
    with torch.no_grad(), fresh_compiler():
        with watch() as seen, recorded(*ARTIFACTS) as records, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            compiled = torch.compile(step, mode="reduce-overhead")
            for scale in SCALES:
                compiled(x, w, count, scale)
        counted = count.clone()
        h.check(
            lambda x, w, count: compiled(x, w, count.clone(), SCALES[-1]), reference, x, w, count,
            what=f"step [{N}, {N}]", poison=False, terms=N * N, roundings=8,
        )  # fmt: skip
    require(torch.equal(counted, torch.full_like(counted, len(SCALES))), f"count is {counted}")
    records += [
        ("warnings", str(each.message).strip().splitlines()[0]) for each in warned if each.category is UserWarning
    ]
    return records, seen.counters.get("inductor", {}).get("cudagraph_skips", 0)


def demo(h: Harness) -> None:
    if h.profile:
        h.say("nothing to profile: what is shown is what the compiler logs")
        return
    with h.progress("the artifacts of TORCH_LOGS"):
        records, skips = artifacts_in_process(h)
    h.fact("records of each artifact", {name: sum(each == name for each, _ in records) for name in ARTIFACTS})
    rows = artifacts_of(records, skips, h.device.type == "cuda")
    h.table("what each switch shows", {switch: {"": f"{question} {answer}"} for question, switch, answer in rows})
    shown = {switch.partition("=")[2]: answer for _, switch, answer in rows}
    h.answer(
        lambda: (
            f"TORCH_LOGS=graph_breaks: {shown['graph_breaks'].partition(':')[0]}; recompiles: "
            f"{shown['recompiles'].partition(';')[0]}; fusion: {shown['fusion'].partition(',')[0]}; cudagraphs: "
            f"{shown['cudagraphs']}."
        ),
        timed=False,
    )


if __name__ == "__main__":
    run(demo)
