"""What a profiler or the sanitizer wrote, as one short table: profiling/*.sh call this when the tool is done.

    python -m profiling.read kernels SCRIPT [TECHNIQUE ...]   the names of their Triton kernels; 2: no such technique
    python -m profiling.read rest RECORD SCRIPT [TECHNIQUE ...]   those after the one that ended the process
    python -m profiling.read sanitizer OUT TOOL ... -- KERNEL ...   OUT.memcheck.log, ... by compute-sanitizer
    python -m profiling.read ncu RECORD CSV ...     `ncu --import FILE --page raw --csv --print-units base`
    python -m profiling.read nsys RECORD CSV ...    `nsys stats --report nvtx_kern_sum --format csv`
    python -m profiling.read torch RECORD FOLDER    the traces of profiling.run
    python -m profiling.read proton RECORD FILE     Proton's .hatchet

RECORD is what the profiled script wrote with --json: it knows the bytes and operations of each call that it named.
What is printed is also written, with the command and the versions, to a text file beside RECORD (x.ncu.json: x.ncu.txt)
or OUT (OUT.sanitize.txt).
"""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.catalog import CatalogError, Technique, read_topic
from harness.cli import USAGE_ERROR, choose, topic_of_one
from harness.console import say
from harness.record import as_run

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text


def techniques(script: Path, names: list[str]) -> tuple[Technique, ...]:
    """Those of a topic script, or of a technique file, that are named. Raises CatalogError when one is not there."""
    try:
        topic = read_topic(script)
    except CatalogError as error:
        try:
            topic = topic_of_one(script)
        except CatalogError:
            raise error from None
    return choose(topic, names)


def kernels_of(path: Path) -> list[str]:
    """The kernels of a technique file: what Triton or Gluon compiles and is called ..._kernel; the rest is inlined."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    decorated = (node for node in found if any(re.search(r"\bjit\b", ast.unparse(d)) for d in node.decorator_list))
    return [node.name for node in decorated if node.name.endswith("_kernel")]


# --- compute-sanitizer ------------------------------------------------------------------------------------------


@dataclass
class Findings:
    """What one tool of compute-sanitizer found; `refused` says why it did not come to its end."""

    errors: int = 0
    by_kernel: dict[str, list[str]] = field(default_factory=dict)  # the first lines of what was printed; "": elsewhere
    refused: str | None = None


def read_sanitizer(log: str, kernels: list[str]) -> Findings:
    """Errors of a log, counted by the tool itself, and those it printed by the kernel of ours that each is in."""
    found = Findings()
    counts = re.findall(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)s?(?! were not)(.*)$", log, re.M)
    if not counts:
        said = [line.lstrip("= ").strip() for line in log.splitlines() if line.startswith("=")]
        said = [line for line in said if line and line != "COMPUTE-SANITIZER"]
        found.refused = next((line for line in said if "rror" in line), said[-1] if said else "it wrote nothing")
        return found
    found.errors = max(int(count) for count, _ in counts)
    for block in re.split(r"^(?==+ \S)", log, flags=re.M):  # what follows a first line is indented further
        if not re.match(r"=+ (?!COMPUTE-SANITIZER|\w+ SUMMARY|Saved|Target application)", block):
            continue
        lines = [line.lstrip("=").strip() for line in block.splitlines()]
        named = re.search(rf"\b({'|'.join(map(re.escape, kernels))})\b", block) if kernels else None
        where = next((line for line in lines[1:] if line.startswith(("at ", "and "))), "")
        found.by_kernel.setdefault(named[1] if named else "", []).append(f"{lines[0]} {where}".strip())
    return found


FINDINGS = 8  # different ones that are shown for each kernel


def _json(path: Path) -> dict:
    try:
        return as_run(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # the process never came to write it
        return {}


def show_sanitizer(console: Console, out: Path, tools: list[str], kernels: list[str]) -> bool:
    """A row for each tool, and what it found. Whether all of them ran to the end and found nothing.

    initcheck before 2026.4 must look at all kernels, to see who initializes what: what it says of kernels that are not
    ours is no failure. No version so far sees what a TMA store writes: who reads that is reported without reason.
    """
    table = Table(
        *(Column(head, no_wrap=True) for head in ("tool", "techniques", "kernels launched", "launches")),
        *(Column(head, justify="right", no_wrap=True) for head in ("errors", "elsewhere", "seconds")),
        Column("log", overflow="fold"), box=box.SIMPLE_HEAD,
    )  # fmt: skip
    clean, notes, names = True, [], {}
    for tool in tools:
        stem = f"{out.name}.{tool}"
        log = out.with_name(f"{stem}.log")
        found = read_sanitizer(log.read_text(errors="replace") if log.exists() else "", kernels)
        try:  # what sanitize.sh leaves: "code seconds ours|all"
            code, seconds, which = out.with_name(f"{stem}.status").read_text().split()
        except FileNotFoundError:  # stopped from outside
            code, seconds, which = "124", "nan", "ours"
        record, launches = (_json(out.with_name(f"{stem}.{kind}")) for kind in ("json", "launches"))
        told, examples = [], {e["name"]: e for e in record.get("examples", [])}
        names |= dict.fromkeys(examples)
        elsewhere = len(found.by_kernel.get("", [])) if tool == "initcheck" else 0
        errors = found.errors - elsewhere
        if tool == "initcheck" and not any(found.by_kernel.keys() - {""}):
            errors, elsewhere = 0, found.errors  # printed or not, none is in a kernel of ours
        looked_at = kernels or list(launches)
        ran = {name: launches[name] for name in looked_at if launches.get(name)}
        ended = Counter(e["status"] for e in examples.values())
        table.add_row(
            tool, ", ".join(f"{count} {status}" for status, count in ended.items()) or "-",
            f"{len(ran)} of {len(looked_at)}", str(sum(ran.values())),
            "-" if found.refused else str(errors), str(elsewhere or ""), f"{float(seconds):.0f}", log.name,
        )  # fmt: skip
        broken = [e for e in examples.values() if e["status"] in ("failed", "running")]
        if found.refused:
            stopped = f"stopped after {float(seconds):.0f} s; " if code in ("124", "137") else ""  # by `timeout`
            told.append(("red", f"did not come to its end: {stopped}{found.refused}"))
        elif not examples:
            told.append(("red", f"the script ended with status {code} before its first technique"))
        told += [("red", f"{e['name']} failed: {(e['reason'] or 'no reason').splitlines()[0]}") for e in broken]
        for name, said in found.by_kernel.items():
            style, kinds = "yellow" if tool == "initcheck" and not name else "red", Counter(said).most_common()
            told.append((style, f"{name or 'not in a kernel of ours'}: {len(said)} printed, first: {said[0]}"))
            told += [(style, f"    {count} times: {kind}") for kind, count in kinds[:FINDINGS] if len(kinds) > 1]
            if len(kinds) > FINDINGS:
                told.append((style, f"    and {len(kinds) - FINDINGS} other places"))
        if which == "ours" and (others := [name for name in launches if kernels and name not in kernels]):
            told.append(("yellow", f"launched as well, and not looked at: {', '.join(others)}"))
        printed = sum(map(len, found.by_kernel.values()))
        if printed < found.errors:
            told.append(("yellow", f"{found.errors - printed} of its {found.errors} errors were not printed"))
        if not found.refused and (missing := [name for name in kernels if name not in ran]):
            told.append(("yellow", f"never launched here, so not looked at: {', '.join(missing)}"))
        clean &= not (found.refused or errors or broken or not examples)
        clean &= bool(ran) or not kernels  # nothing was looked at
        notes += [(style, text if text.startswith(" ") else f"{tool}: {text}") for style, text in told]
    console.print(table)
    for style, note in notes:
        say(console, note, style)
    if names:
        say(console, f"techniques: {', '.join(names)}", "dim")
    return clean


# --- what a profiler saw ----------------------------------------------------------------------------------------


@dataclass
class Seen:
    """One kernel within one named call, all its launches together; None is what this profiler does not know.

    `tensor` and `occupancy` are percentages of the time its SMs are active, averaged over the launches by their time.
    """

    call: str
    kernel: str
    launches: int
    us: float
    bytes: float | None = None
    tensor: float | None = None
    occupancy: float | None = None
    registers: int | None = None


def together(seen: Iterable[Seen]) -> list[Seen]:
    """One entry for each kernel of each call, calls in their order and kernels by their time."""
    groups: dict[tuple[str, str], list[Seen]] = {}
    for one in seen:
        groups.setdefault((one.call, one.kernel), []).append(one)
    order = list(dict.fromkeys(call for call, _ in groups))

    def mean(group: list[Seen], name: str) -> float | None:
        known = [(getattr(one, name), one.us) for one in group if getattr(one, name) is not None]
        time = sum(us for _, us in known)
        return sum(value * us for value, us in known) / time if time else None

    merged = [
        Seen(
            call, kernel, sum(one.launches for one in group), sum(one.us for one in group),
            None if any(one.bytes is None for one in group) else sum(one.bytes for one in group),
            mean(group, "tensor"), mean(group, "occupancy"),
            max((one.registers for one in group if one.registers is not None), default=None),
        )
        for (call, kernel), group in groups.items()
    ]  # fmt: skip
    return sorted(merged, key=lambda one: (order.index(one.call), -one.us))


_TIME, _REGISTERS = "gpu__time_duration.sum", "launch__registers_per_thread"
_DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
_TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"


def _rows(text: str, head: str) -> list[dict]:
    """The rows of the CSV table whose first line begins so; what the tool says before it is left out."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(head)), len(lines))
    return [*csv.DictReader(lines[start:])]


def read_ncu(text: str) -> list[Seen]:
    """A line of names, a line of units (ns and bytes), a line for each launch.

    What ncu says before and between is left out. A launch outside every NVTX range belongs to the call "".
    """
    _, *rows = _rows(text, '"ID",') or [{}]

    def number(row: dict, name: str) -> float | None:
        try:
            return float(row[name].replace(",", ""))
        except (KeyError, ValueError, AttributeError):  # not collected, "n/a", or a line that ncu says something in
            return None

    seen = []
    for row in rows:
        if (time := number(row, _TIME)) is None:
            continue
        moved = [number(row, name) for name in _DRAM]
        registers = number(row, _REGISTERS)
        ranges = next((row[name] for name in row if name and "Push/Pop_Range" in name), None)
        named = re.findall(r'"<default domain>:(.*?)(?::[^:"]*){6}"', ranges or "")
        seen.append(
            Seen(
                named[-1] if named else "", row["Kernel Name"], 1, time / 1e3,
                None if None in moved else sum(moved), number(row, _TENSOR), number(row, _OCCUPANCY),
                None if registers is None else int(registers),
            )
        )  # fmt: skip
    return together(seen)


def read_nsys(texts: Iterable[str]) -> list[Seen]:
    """The table of each report; other lines of the tool's output are left out."""
    seen = []
    for row in (row for text in texts for row in _rows(text, "NVTX Range,")):
        if (row.get("Kern Inst") or "").isdigit():
            call = row["NVTX Range"].removeprefix(":")  # the domain, which has no name
            seen.append(Seen(call, row["Kernel Name"], int(row["Kern Inst"]), float(row["Total Time (ns)"]) / 1e3))
    return together(seen)


def read_trace(trace: dict, call: str) -> list[Seen]:
    """A Chrome trace of torch.profiler: its kernels and copies, or where it has none the operators of the CPU.

    An operator's time is its own, without that of the operators it calls.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    on_gpu = [(e, e.get("args", {})) for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    occupancy, registers = "est. achieved occupancy %", "registers per thread"
    seen = [Seen(call, e["name"], 1, e["dur"], None, None, a.get(occupancy), a.get(registers)) for e, a in on_gpu]
    return together(seen or _operators(events, call))


def _operators(events: list[dict], call: str) -> list[Seen]:
    own: dict[int, float] = {}
    running: dict[tuple, list[dict]] = defaultdict(list)  # the operators of each thread that have not ended
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    for e in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        outer = running[e["pid"], e["tid"]]
        while outer and outer[-1]["ts"] + outer[-1]["dur"] <= e["ts"]:
            outer.pop()
        if outer:
            own[id(outer[-1])] -= e["dur"]
        own[id(e)] = e["dur"]
        outer.append(e)
    return [Seen(call, e["name"], 1, max(own[id(e)], 0.0)) for e in operators]


def read_torch(folder: Path) -> list[Seen]:
    """The traces of a folder that profiling.run wrote."""
    names = _json(folder / "names.json")
    return [one for file, call in names.items() for one in read_trace(_json(folder / file), call)]


def read_proton(tree: list[dict]) -> list[Seen]:
    """Proton's tree: the scopes below its root are the calls; below them, kernels have a time."""

    def leaves(node: dict, call: str) -> Iterator[Seen]:
        if "time (ns)" in (known := node.get("metrics", {})):
            yield Seen(call, node["frame"]["name"], known.get("count", 1), known["time (ns)"] / 1e3)
        for child in node.get("children", []):
            yield from leaves(child, call)

    scopes = [scope for root in tree for scope in root.get("children", [])]
    return together(one for scope in scopes for one in leaves(scope, scope["frame"]["name"]))


def short(kernel: str, most: int = 56) -> str:
    """A kernel's name without its return type, its template's arguments and its parameters; cut to `most`."""
    name = re.sub(r"^(?:void|static) +", "", kernel)
    while "<" in name and (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    name = re.sub(r"\((?!anonymous).*\)$", "", name).removeprefix("at::native::")
    return name if len(name) <= most else name[: most - 3] + "..."


@dataclass
class Limits:
    """What this GPU really reaches, measured; None where there is no GPU, or nothing to measure for this dtype."""

    copy_tbps: float | None = None
    gemm_tflops: dict[str, float | None] = field(default_factory=dict)


def verdict(kernels: list[Seen], work: dict | None, limits: Limits) -> str:
    """What the numbers of one call say of it; "" when they say nothing."""
    us = sum(one.us for one in kernels)
    if not us:
        return ""
    rate = limits.gemm_tflops.get(work["dtype"]) if work else None
    memory = work["bytes"] / limits.copy_tbps / us / 1e6 if work and work["bytes"] and limits.copy_tbps else None
    arithmetic = work["flops"] / rate / us / 1e6 if work and work["flops"] and rate else None
    if any(one.bytes is None for one in kernels):  # nobody counted: as if it moved no more than it must
        if memory is None and arithmetic is None:
            return ""
        share, what = max(
            (memory or 0.0, "memory-bound by its work: {:.0%} of copy"),
            (arithmetic or 0.0, f"bound by arithmetic by its work: {{:.0%}} of cuBLAS {work['dtype']}"),
        )
        return what.format(share) + (", as L2 is warm here" if share > 1.02 else "")
    moved = sum(one.bytes for one in kernels)
    tbps = moved / us / 1e6
    tensor = sum((one.tensor or 0.0) * one.us for one in kernels) / us / 100
    occupancy = sum((one.occupancy or 0.0) * one.us for one in kernels) / us
    share = tbps / limits.copy_tbps if limits.copy_tbps else None
    least = work["bytes"] if work else 0
    excess = f", {moved / least:.2f}x the least bytes" if least and moved > 1.05 * least else ""
    if share is None:
        return f"{tbps:.2f} TB/s of memory, tensor cores busy {tensor:.0%}{excess}"
    if share >= 0.6 and share >= tensor:
        return f"memory-bound: {share:.0%} of copy{excess}"
    if tensor >= 0.6:
        of = f", {arithmetic:.0%} of cuBLAS {work['dtype']}" if arithmetic else ""
        return f"bound by the tensor cores: busy {tensor:.0%}{of}"
    if us < 10:
        return f"short: launching bounds it ({share:.0%} of copy)"
    return f"waiting: {share:.0%} of copy, tensor cores busy {tensor:.0%}, {occupancy:.0f}% of the warps{excess}"


MANY = 30


def show(
    console: Console, seen: list[Seen], works: dict[str, dict], limits: Limits, groups: dict[str, str], unit: str
) -> None:
    """A row for each call with one kernel, and what that says; a call of several has a row for each below its sum.

    Calls stand below their case, cases below the technique that `groups` gives each call. Empty columns are left out,
    in a table of MANY calls also a library's kernels. A terminal too narrow for the table gets lines of text.
    """
    from harness.bench import is_ours  # which imports torch

    columns = {
        "launches": lambda one: f"{one.launches}",
        "us": lambda one: f"{one.us:.1f}",
        "TB/s": lambda one: f"{round(one.bytes / one.us / 1e6, 3):.3g}" if one.bytes is not None and one.us else "",
        "tensor cores": lambda one: f"{one.tensor:.0f} %" if one.tensor is not None else "",
        "occupancy": lambda one: f"{one.occupancy:.0f} %" if one.occupancy is not None else "",
        "registers": lambda one: f"{one.registers}" if one.registers is not None else "",
    }
    columns = {head: cell for head, cell in columns.items() if any(map(cell, seen))}
    of_work = {"TB/s of work": "bytes", "TFLOP/s": "flops"}
    of_work = {head: x for head, x in of_work.items() if any(works.get(one.call, {}).get(x) for one in seen)}
    heads = [*columns, *of_work]
    calls: dict[str, list[Seen]] = {}
    for one in seen:
        calls.setdefault(one.call, []).append(one)
    rows: list[tuple[str, str, list[str], str, str]] = []  # call, kernel, numbers, what they say, style

    def numbers(one: Seen) -> list[str]:
        return [cell(one) for cell in columns.values()]

    above = (None, None)
    for call, kernels in calls.items():
        technique, work = groups.get(call), works.get(call, {})
        case, _, variant = call.rpartition(": ")
        if technique and technique != above[0]:
            rows.append((technique, "", [], "", "bold"))
        if case and (technique, case) != above:
            rows.append((f" {case}", "", [], "", ""))
        above = (technique, case)
        us, says = sum(one.us for one in kernels), verdict(kernels, work, limits)
        rates = [f"{work[x] / us / 1e6:.3g}" if work.get(x) and us else "" for x in of_work.values()]
        label = f"   {variant}" if variant else "outside every range"
        if len(kernels) == 1:
            rows.append((label, short(kernels[0].kernel, 44), numbers(kernels[0]) + rates, says, ""))
            continue
        (whole,) = together(replace(one, kernel="", tensor=None, occupancy=None, registers=None) for one in kernels)
        cells = numbers(whole) + rates
        if len(calls) > MANY and not is_ours(variant):
            rows.append((label, f"{len(kernels)}, most in {short(kernels[0].kernel, 32)}", cells, says, ""))
            continue
        rows.append((label, f"{len(kernels)} {unit}s", cells, says, ""))
        rows += [("", f"  {short(one.kernel, 42)}", numbers(one), "", "dim") for one in kernels[:2]]
        if rest := kernels[2:]:
            left = sum(one.launches for one in rest), sum(one.us for one in rest)
            rows.append(("", f"  and {len(rest)} more", numbers(Seen("", "", *left)), "", "dim"))
    said = any(row[3] for row in rows)
    table = Table(
        Column("case, and call", no_wrap=True), Column(unit, no_wrap=True),
        *(Column(head, justify="right", no_wrap=True) for head in heads),
        *[Column("what that says", no_wrap=True)] * said,
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for label, kernel, known, says, style in rows:
        known = known + [""] * (len(heads) - len(known))
        table.add_row(Text(label), kernel, *known, *([says] if said else []), style=style)
    width = console.measure(table, options=console.options.update(max_width=1000)).maximum
    if width <= console.width or not console.is_terminal:
        console.width = max(console.width, width)
        console.print(table)
        return
    for label, kernel, known, says, style in rows:
        told = [f"{head} {number}" for head, number in zip(heads, known, strict=False) if number]
        line = label if kernel == "" else f"{label or '    '} {kernel}: {', '.join(told)}"
        console.print(Text(line, style=style))
        if says:
            console.print(Text(f"     -> {says}", style="dim"))


def measured(works: dict[str, dict]) -> Limits:
    """This GPU's ceilings, measured now; nothing where there is none."""
    import harness.hardware as hardware

    import torch

    if not works or hardware.machine().mode != "gpu":
        return Limits()
    limits = hardware.ceilings()
    dtypes = {work["dtype"] for work in works.values() if work["flops"]} - {None}
    return Limits(limits.copy_tbps(), {name: limits.gemm_tflops(getattr(torch, name)) for name in sorted(dtypes)})


# --- the table of a profile, and why there is none ----------------------------------------------------------------

NOTHING = {
    "ncu": "no kernel was captured. Where ncu says ERR_NVGPUCTRPERM, the driver lets only root count; NVIDIA's page of "
    "that name says how to change it. Without counters: profiling/torch_profile.sh",
    "nsys": "no kernel was captured within a named call. Without a GPU: profiling/torch_profile.sh",
}
NOTHING |= dict.fromkeys(("torch", "proton"), "nothing was captured: these techniques call nothing under --profile")


def _read(kind: str, paths: list[Path]) -> list[Seen]:
    if kind == "torch":
        return read_torch(paths[0])
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    if kind == "proton":
        return read_proton(json.loads(texts[0]))
    return read_nsys(texts) if kind == "nsys" else [one for text in texts for one in read_ncu(text)]


def show_profile(console: Console, kind: str, records: list[Path], paths: list[Path]) -> int:
    """The table of one profiler; 1 when it saw nothing, or a technique failed under it.

    ncu has a record and a table for each process that it took.
    """
    runs = [_json(record) for record in records]
    run = runs[0] | {"examples": [example for each in runs for example in each.get("examples", [])]}
    seen = _read(kind, paths)
    failed = [e for e in run["examples"] if e["status"] in ("failed", "running")]
    for example in failed:
        reason = (example["reason"] or "it ended the process, and the profile goes on after it").splitlines()[0]
        say(console, f"{example['name']} failed: {reason}", "red")
    if not seen:
        say(console, NOTHING[kind], "red")
        return 1
    works = {call: work for e in run["examples"] for call, work in e.get("profiled", {}).items()}
    groups = {call: e["name"] for e in run["examples"] for call in e.get("profiled", {})}
    if run.get("sizes") == "interpreted":  # which has no speed
        works, note = {}, "what is seen are the operators of torch, and no time is a kernel's."
        say(console, f"Triton kernels are interpreted: {note}", "yellow")
    on_gpu = bool(run.get("machine", {}).get("gpu"))
    limits = measured(works) if on_gpu else Limits()
    show(console, seen, works, limits, groups, "operator" if kind == "torch" and not on_gpu else "kernel")
    if limits.copy_tbps:
        rates = "".join(f", cuBLAS {name} {rate:.0f} TFLOP/s" for name, rate in limits.gemm_tflops.items() if rate)
        say(console, f"measured here, now: copy {limits.copy_tbps:.2f} TB/s{rates}", "dim")
    there = {groups.get(one.call) for one in seen}
    for example in run["examples"]:
        if example["name"] not in there and example not in failed:
            why = (example["reason"] or "it calls nothing under --profile").splitlines()[0]
            say(console, f"{example['name']}: not profiled: {why}", "dim")
    for record in records:
        for call, why in _json(record.with_suffix(".left")).items():
            say(console, f"{call}: profiled {why}", "yellow")
    return int(bool(failed))


# --- the command line --------------------------------------------------------------------------------------------


def heading(record: dict) -> str:
    """What was run, when, on what, with what: the first lines of a text file."""
    machine = record.get("machine", {})
    gpu, commit = machine.get("gpu"), record.get("commit")
    parts = [
        record.get("when", "")[:10],
        f"{gpu}, driver {machine.get('driver')}" if gpu else machine.get("cpu"),
        f"torch {machine.get('torch')}",
        machine.get("triton") and f"Triton {machine['triton']}",
        os.environ.get("PROFILING_TOOL"),
        commit and f"commit {commit[:12]}{' and changes' if record.get('dirty') else ''}",
    ]
    command = os.environ.get("PROFILING_COMMAND") or "python -m profiling.read"
    return f"# {command}\n# {', '.join(part for part in parts if part)}\n"


def printed(show: Callable[[Console], int], text: Path, record: dict) -> int:
    """show(console) for whoever is there, and the same without colours in a text file."""
    console = Console(highlight=False)
    if console.is_terminal:
        show(console)  # as wide as the terminal
    plain = Console(file=io.StringIO(), highlight=False, width=160, no_color=True)
    code = show(plain)
    body = "\n".join(line.rstrip() for line in plain.file.getvalue().splitlines()).strip("\n") + "\n"
    if not console.is_terminal:
        print(body, end="")
    text.write_text(heading(record) + "\n" + body, encoding="utf-8")
    print(f"table: {text}")
    return code


def rest(record: Path, script: Path, names: list[str]) -> list[str]:
    """The techniques after the one that was running when the process ended; none when it came to its end."""
    examples = _json(record).get("examples", [])
    if not examples or examples[-1]["status"] != "running":
        return []
    chosen = [technique.name for technique in techniques(script, names)]
    return chosen[chosen.index(examples[-1]["name"]) + 1 :]


def main(argv: list[str]) -> int:
    verb, *more = argv
    first, more = Path(more[0]), more[1:]
    if verb == "kernels":
        try:
            chosen = techniques(first, more)
        except CatalogError as error:
            print(f"error: {error}", file=sys.stderr)
            return USAGE_ERROR
        files = [path for t in chosen if not t.error for path in (t.path, *t.variants)]
        print(*dict.fromkeys(f"{name}\n" for path in files for name in kernels_of(path)), sep="", end="")
        return 0
    if verb == "rest":
        print("".join(f"{name}\n" for name in rest(first, Path(more[0]), more[1:])), end="")
        return 0
    if verb == "sanitizer":
        end = more.index("--")
        tools, kernels = more[:end], more[end + 1 :]
        text = first.with_name(f"{first.name}.sanitize.txt")
        record = next(filter(None, (_json(first.with_name(f"{first.name}.{tool}.json")) for tool in tools)), {})
        return printed(lambda console: int(not show_sanitizer(console, first, tools, kernels)), text, record)
    paths = [first, *map(Path, more)]
    records, paths = (paths[::2], paths[1::2]) if verb == "ncu" else (paths[:1], paths[1:])
    text = first.with_suffix(".txt")
    return printed(lambda console: show_profile(console, verb, records, paths), text, _json(first))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
