"""What a profiler or the sanitizer wrote, as one short table: profiling/*.sh call this when the tool is done.

    python -m profiling.read names SCRIPT [TECHNIQUE ...]     are there such techniques? else exit status 2
    python -m profiling.read kernels SCRIPT [TECHNIQUE ...]   the names of their Triton kernels
    python -m profiling.read rest RECORD SCRIPT [TECHNIQUE ...]   those after the one that ended the process
    python -m profiling.read sanitizer OUT TOOL ... -- KERNEL ...   OUT.memcheck.log, ... by compute-sanitizer
    python -m profiling.read ncu RECORD CSV ...     `ncu --import FILE --page raw --csv`
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.catalog import CatalogError, Technique, Topic, read_topic
from harness.cli import USAGE_ERROR, _choose, _topic_of_one
from harness.record import as_run

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def techniques(script: Path, names: list[str]) -> tuple[Technique, ...]:
    """Those of a topic script, or of a technique file, that are named. Raises CatalogError when one is not there."""
    try:
        topic: Topic = read_topic(script)
    except CatalogError as error:
        try:
            topic = _topic_of_one(script)
        except CatalogError:
            raise error from None
    chosen = _choose(topic, names)
    if isinstance(chosen, str):
        raise CatalogError(chosen)
    return chosen


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

    tool: str
    errors: int = 0
    by_kernel: dict[str, list[str]] = field(default_factory=dict)  # the first lines of what was printed; "": elsewhere
    refused: str | None = None


def read_sanitizer(tool: str, log: str, kernels: list[str]) -> Findings:
    """Errors of a log, counted by the tool itself, and those it printed by the kernel of ours that each is in."""
    found = Findings(tool)
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
TIMED_OUT = (124, 137)  # what `timeout` ends with


@dataclass
class Status:
    """How the process under the tool ended: the record of the run, and what it launched."""

    code: int
    seconds: float
    filtered: bool
    techniques: dict[str, tuple[str, str | None]]
    launches: dict[str, int]


def read_status(stem: Path) -> Status:
    """From the files that sanitize.sh leaves: STEM.status ("code seconds ours|all"), STEM.json and STEM.launches."""
    try:
        code, seconds, which = stem.with_name(f"{stem.name}.status").read_text().split()
    except FileNotFoundError:  # stopped from outside
        code, seconds, which = "124", "nan", "ours"
    record, launches = (_json(stem.with_name(f"{stem.name}.{kind}")) for kind in ("json", "launches"))
    examples = {e["name"]: (e["status"], e["reason"]) for e in record.get("examples", [])}
    return Status(int(code), float(seconds), which == "ours", examples, launches)


def _json(path: Path) -> dict:
    try:
        return as_run(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # the process never came to write it
        return {}


def show_sanitizer(console: Console, out: Path, tools: list[str], kernels: list[str]) -> bool:
    """A row for each tool, and what it found. Whether all of them ran to the end and found nothing.

    initcheck before 2026.4 must look at all kernels, to see who initializes what; what it says of kernels that are not
    ours is shown and no failure. It does not see what a TMA store of a tensor's box writes, in no version so far: who
    reads that, a kernel of ours too, is reported without reason.
    """
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("tool", "techniques", "kernels launched", "launches"):
        table.add_column(head, no_wrap=True)
    for head in ("errors", "elsewhere", "seconds"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("log", overflow="fold")
    clean, notes, names = True, [], {}
    for tool in tools:
        stem = out.with_name(f"{out.name}.{tool}")
        log = stem.with_name(f"{stem.name}.log")
        found = read_sanitizer(tool, log.read_text(errors="replace") if log.exists() else "", kernels)
        status = read_status(stem)
        names |= dict.fromkeys(status.techniques)
        elsewhere = len(found.by_kernel.get("", [])) if tool == "initcheck" else 0
        errors = found.errors - elsewhere
        if tool == "initcheck" and not any(found.by_kernel.keys() - {""}):
            errors, elsewhere = 0, found.errors  # printed or not, none is in a kernel of ours
        looked_at = kernels or list(status.launches)
        ran = {name: status.launches[name] for name in looked_at if status.launches.get(name)}
        ended: dict[str, int] = {}
        for verdict, _ in status.techniques.values():
            ended[verdict] = ended.get(verdict, 0) + 1
        table.add_row(
            tool, ", ".join(f"{count} {verdict}" for verdict, count in ended.items()) or "-",
            f"{len(ran)} of {len(looked_at)}", str(sum(ran.values())),
            "-" if found.refused else str(errors), str(elsewhere or ""), f"{status.seconds:.0f}", log.name,
        )  # fmt: skip
        broken = {name: why for name, (verdict, why) in status.techniques.items() if verdict in ("failed", "running")}
        if found.refused:
            stopped = f"stopped after {status.seconds:.0f} s; " if status.code in TIMED_OUT else ""
            notes.append(("red", f"{tool} did not come to its end: {stopped}{found.refused}"))
        elif not status.techniques:
            notes.append(("red", f"{tool}: the script ended with status {status.code} before its first technique"))
        for name, why in broken.items():
            notes.append(("red", f"{tool}: {name} failed: {(why or 'no reason').splitlines()[0]}"))
        for name, said in found.by_kernel.items():
            style = "yellow" if tool == "initcheck" and not name else "red"
            kinds = Counter(said).most_common()
            notes.append((style, f"{tool}: {name or 'not in a kernel of ours'}: {len(said)} printed, first: {said[0]}"))
            notes += [(style, f"    {count} times: {kind}") for kind, count in kinds[:FINDINGS] if len(kinds) > 1]
            if len(kinds) > FINDINGS:
                notes.append((style, f"    and {len(kinds) - FINDINGS} other places"))
        others = [name for name in status.launches if kernels and name not in kernels]
        if others and status.filtered:
            notes.append(("yellow", f"{tool}: launched as well, and not looked at: {', '.join(others)}"))
        printed = sum(map(len, found.by_kernel.values()))
        if printed < found.errors:
            notes.append(("yellow", f"{tool}: {found.errors - printed} of its {found.errors} errors were not printed"))
        if not found.refused and (missing := [name for name in kernels if name not in ran]):
            notes.append(("yellow", f"{tool}: never launched here, so not looked at: {', '.join(missing)}"))
        clean &= not (found.refused or errors or broken or not status.techniques)
        clean &= bool(ran) or not kernels  # nothing was looked at
    console.print(table)
    for style, note in notes:
        console.print(Text(note, style=style), soft_wrap=True)
    if names:
        console.print(Text(f"techniques: {', '.join(names)}", style="dim"), soft_wrap=True)
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


# ncu's units, with --print-units base and without it; in ns and bytes.
_UNITS = {
    "ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
    "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
}  # fmt: skip
_TIME, _REGISTERS = "gpu__time_duration.sum", "launch__registers_per_thread"
_DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
_TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"


def read_ncu(text: str) -> list[Seen]:
    """`ncu --import FILE --page raw --csv`: a line of names, a line of units, a line for each launch.

    What ncu says before and between is left out. A launch outside every NVTX range belongs to the call "".
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        return []
    units, *rows = [*csv.DictReader(lines[start:])] or [{}]
    ranges = next((name for name in units if name and "Push/Pop_Range" in name), None)

    def number(row: dict, name: str) -> float | None:
        try:
            return float(row[name].replace(",", "")) * _UNITS.get(units[name], 1)
        except (KeyError, ValueError, AttributeError):  # not collected, "n/a", or a line that ncu says something in
            return None

    seen = []
    for row in rows:
        if (time := number(row, _TIME)) is None:
            continue
        moved = [number(row, name) for name in _DRAM]
        registers = number(row, _REGISTERS)
        named = re.findall(r'"<default domain>:(.*?)(?::[^:"]*){6}"', row.get(ranges) or "") if ranges else []
        seen.append(
            Seen(
                named[-1] if named else "", row["Kernel Name"], 1, time / 1e3,
                None if None in moved else sum(moved), number(row, _TENSOR), number(row, _OCCUPANCY),
                None if registers is None else int(registers),
            )
        )  # fmt: skip
    return together(seen)


def read_nsys(texts: Iterable[str]) -> list[Seen]:
    """`nsys stats --report nvtx_kern_sum --format csv` of each report; other lines of its output are left out."""
    seen = []
    for text in texts:
        lines = text.splitlines()
        start = next((i for i, line in enumerate(lines) if line.startswith("NVTX Range,")), len(lines))
        for row in csv.DictReader(lines[start:]):
            if (row.get("Kern Inst") or "").isdigit():
                call = row["NVTX Range"].removeprefix(":")  # the domain, which has no name
                seen.append(Seen(call, row["Kernel Name"], int(row["Kern Inst"]), float(row["Total Time (ns)"]) / 1e3))
    return together(seen)


def read_trace(trace: dict, call: str) -> list[Seen]:
    """A Chrome trace of torch.profiler: its kernels and copies, or where it has none the operators of the CPU.

    An operator's time is its own, without that of the operators it calls.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    seen = []
    for e in events:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            known = e.get("args", {})
            seen.append(
                Seen(
                    call, e["name"], 1, e["dur"], occupancy=known.get("est. achieved occupancy %"),
                    registers=known.get("registers per thread"),
                )
            )  # fmt: skip
    return together(seen or _operators(events, call))


def _operators(events: list[dict], call: str) -> Iterator[Seen]:
    threads: dict[tuple, list[dict]] = {}
    for e in events:
        if e.get("cat") == "cpu_op":
            threads.setdefault((e["pid"], e["tid"]), []).append(e)
    for thread in threads.values():
        own: dict[int, float] = {}
        open_: list[dict] = []
        for e in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while open_ and open_[-1]["ts"] + open_[-1]["dur"] <= e["ts"]:
                open_.pop()
            if open_:
                own[id(open_[-1])] -= e["dur"]
            own[id(e)] = e["dur"]
            open_.append(e)
        for e in thread:
            yield Seen(call, e["name"], 1, max(own[id(e)], 0.0))


def read_torch(folder: Path) -> list[Seen]:
    """The traces of a folder that profiling.run wrote."""
    seen = []
    for file, call in _json(folder / "names.json").items():
        seen += read_trace(_json(folder / file), call)
    return seen


def read_proton(tree: list[dict]) -> list[Seen]:
    """Proton's tree: the scopes below its root are the calls; below them, kernels have a time."""

    def leaves(node: dict) -> Iterator[dict]:
        if "time (ns)" in node.get("metrics", {}):
            yield node
        for child in node.get("children", []):
            yield from leaves(child)

    seen = []
    for root in tree:
        for scope in root.get("children", []):
            for node in leaves(scope):
                known = node["metrics"]
                seen.append(
                    Seen(scope["frame"]["name"], node["frame"]["name"], known.get("count", 1), known["time (ns)"] / 1e3)
                )
    return together(seen)


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
    memory, arithmetic = _shares(us, work, limits)
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


def _shares(us: float, work: dict | None, limits: Limits) -> tuple[float | None, float | None]:
    """Of the least bytes at the speed of a copy, and of the operations at that of the best GEMM: share of the time."""
    memory = arithmetic = None
    if work and work["bytes"] and limits.copy_tbps:
        memory = work["bytes"] / limits.copy_tbps / us / 1e6
    if work and work["flops"] and (rate := limits.gemm_tflops.get(work["dtype"])):
        arithmetic = work["flops"] / rate / us / 1e6
    return memory, arithmetic


MANY = 30


def show(
    console: Console,
    seen: list[Seen],
    works: dict[str, dict],
    limits: Limits,
    groups: dict[str, str] | None = None,
    most: int = 2,
    unit: str = "kernel",
) -> None:
    """A row for each call with one kernel, and what that says; a call of several has a row for each below its sum.

    Calls stand below their case, cases below the technique that `groups` gives each call. Empty columns are left out,
    and in a table of MANY calls the kernels of a library's.
    A terminal too narrow for the table gets the same as lines of text.
    """
    from harness.bench import is_ours  # which imports torch

    columns = {
        "TB/s": lambda one: round(one.bytes / one.us / 1e6, 3) if one.bytes is not None and one.us else None,
        "tensor cores": lambda one: one.tensor,
        "occupancy": lambda one: one.occupancy,
        "registers": lambda one: one.registers,
    }
    columns = {head: cell for head, cell in columns.items() if any(cell(one) is not None for one in seen)}
    shown = {"TB/s": "{:.3g}", "tensor cores": "{:.0f} %", "occupancy": "{:.0f} %", "registers": "{}"}
    of_work = [head for head, name in (("TB/s of work", "bytes"), ("TFLOP/s", "flops")) if _any(seen, works, name)]
    heads = ["launches", "us", *columns, *of_work]
    calls: dict[str, list[Seen]] = {}
    for one in seen:
        calls.setdefault(one.call, []).append(one)
    rows: list[tuple[str, str, list[str], str, str]] = []  # call, kernel, numbers, what they say, style

    def numbers(one: Seen) -> list[str]:
        cells = [cell(one) for cell in columns.values()]
        known = [shown[head].format(c) if c is not None else "" for head, c in zip(columns, cells, strict=True)]
        return [str(one.launches), f"{one.us:.1f}", *known]

    above = (None, None)
    for call, kernels in calls.items():
        technique = (groups or {}).get(call)
        case, _, variant = call.rpartition(": ")
        if technique and technique != above[0]:
            rows.append((technique, "", [], "", "bold"))
        if case and (technique, case) != above:
            rows.append((f" {case}", "", [], "", ""))
        above = (technique, case)
        us, says = sum(one.us for one in kernels), verdict(kernels, works.get(call), limits)
        rates = [_rate(works.get(call), us, "bytes" if head == "TB/s of work" else "flops") for head in of_work]
        label = f"   {variant}" if variant else "outside every range"
        if len(kernels) == 1:
            rows.append((label, short(kernels[0].kernel, 44), numbers(kernels[0]) + rates, says, ""))
            continue
        moved = None if any(one.bytes is None for one in kernels) else sum(one.bytes for one in kernels)
        whole = numbers(Seen(call, "", sum(one.launches for one in kernels), us, moved))
        if len(calls) > MANY and not is_ours(variant):
            rows.append((label, f"{len(kernels)}, most in {short(kernels[0].kernel, 32)}", whole + rates, says, ""))
            continue
        rows.append((label, f"{len(kernels)} {unit}s", whole + rates, says, ""))
        rows += [("", f"  {short(one.kernel, 42)}", numbers(one), "", "dim") for one in kernels[:most]]
        if rest := kernels[most:]:
            left = [str(sum(one.launches for one in rest)), f"{sum(one.us for one in rest):.1f}"]
            rows.append(("", f"  and {len(rest)} more", left, "", "dim"))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("case, and call", no_wrap=True)
    table.add_column(unit, no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    said = any(row[3] for row in rows)
    if said:
        table.add_column("what that says", no_wrap=True)
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


def _any(seen: list[Seen], works: dict[str, dict], name: str) -> bool:
    return any(works.get(one.call, {}).get(name) for one in seen)


def _rate(work: dict | None, us: float, name: str) -> str:
    amount = (work or {}).get(name)
    return f"{amount / us / 1e6:.3g}" if amount and us else ""


def works_of(record: dict) -> dict[str, dict]:
    """The work of each named call, from the record of the run that was profiled."""
    return {call: work for example in record.get("examples", []) for call, work in example.get("profiled", {}).items()}


def techniques_of(record: dict) -> dict[str, str]:
    """The technique of each named call."""
    return {call: e["name"] for e in record.get("examples", []) for call in e.get("profiled", {})}


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
    "torch": "nothing was captured: these techniques call nothing under --profile",
    "proton": "no kernel was captured: these techniques call nothing under --profile",
}


def _read(kind: str, paths: list[Path]) -> list[Seen]:
    if kind == "ncu":
        return [one for path in paths for one in read_ncu(path.read_text(encoding="utf-8", errors="replace"))]
    if kind == "nsys":
        return read_nsys(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    if kind == "torch":
        return read_torch(paths[0])
    return read_proton(json.loads(paths[0].read_text(encoding="utf-8")))


def _merged(records: list[dict]) -> dict:
    """One run of several processes, each of which went on after the technique that ended the one before."""
    return (records[0] if records else {}) | {"examples": [e for record in records for e in record.get("examples", [])]}


def show_profile(console: Console, kind: str, records: list[Path], paths: list[Path]) -> int:
    """The table of one profiler; 1 when it saw nothing, or a technique failed under it.

    ncu has a record and a table for each process that it took.
    """
    run = _merged([_json(record) for record in records])
    seen = _read(kind, paths)
    failed = [e for e in run.get("examples", []) if e["status"] in ("failed", "running")]
    for example in failed:
        reason = (example["reason"] or "it ended the process, and the profile goes on after it").splitlines()[0]
        console.print(Text(f"{example['name']} failed: {reason}", style="red"), soft_wrap=True)
    if not seen:
        console.print(Text(NOTHING[kind], style="red"), soft_wrap=True)
        return 1
    works = works_of(run)
    if run.get("sizes") == "interpreted":  # which has no speed
        works = {}
        said = "Triton kernels are interpreted: what is seen are the operators of torch, and no time is a kernel's."
        console.print(Text(said, style="yellow"), soft_wrap=True)
    on_gpu = bool(run.get("machine", {}).get("gpu"))
    limits = measured(works) if on_gpu else Limits()
    groups = techniques_of(run)
    show(console, seen, works, limits, groups, unit="operator" if kind == "torch" and not on_gpu else "kernel")
    notes = [f"copy {limits.copy_tbps:.2f} TB/s"] if limits.copy_tbps else []
    notes += [f"cuBLAS {name} {rate:.0f} TFLOP/s" for name, rate in limits.gemm_tflops.items() if rate]
    if notes:
        console.print(Text(f"measured here, now: {', '.join(notes)}", style="dim"), soft_wrap=True)
    there = {groups.get(one.call) for one in seen}
    for example in run.get("examples", []):
        if example["name"] not in there and example not in failed:
            why = (example["reason"] or "it calls nothing under --profile").splitlines()[0]
            console.print(Text(f"{example['name']}: not profiled: {why}", style="dim"), soft_wrap=True)
    for record in records:
        for call, why in _json(record.with_suffix(".left")).items():
            console.print(Text(f"{call}: profiled {why}", style="yellow"), soft_wrap=True)
    return int(bool(failed))


# --- the command line --------------------------------------------------------------------------------------------


def heading(record: dict) -> str:
    """What was run, when, on what, with what: the first lines of a text file."""
    machine = record.get("machine", {})
    gpu = machine.get("gpu")
    parts = [
        record.get("when", "")[:10],
        f"{gpu}, driver {machine.get('driver')}" if gpu else machine.get("cpu"),
        f"torch {machine.get('torch')}",
        f"Triton {machine['triton']}" if machine.get("triton") else None,
        os.environ.get("PROFILING_TOOL"),
        f"commit {record['commit'][:12]}{' and changes' if record.get('dirty') else ''}"
        if record.get("commit")
        else None,
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
    try:
        if verb == "names":
            techniques(first, more)
            return 0
        if verb == "kernels":
            chosen = techniques(first, more)
            files = [path for t in chosen if not t.error for path in (t.path, *t.variants)]
            names = dict.fromkeys(name for path in files for name in kernels_of(path))
            print("".join(f"{name}\n" for name in names), end="")
            return 0
    except CatalogError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
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
