"""What the reader sees and what is kept: console tables, the JSON record of a run, README's tables from records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from harness.catalog import ROOT, Technique, Topic, topics
from harness.codegen import Kernel

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # they import torch, which reading a record does without
    from harness.compare import Comparison
    from harness.hardware import Ceilings, Machine

SCHEMA = 1


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """`| head` has seen enough: the run goes on and keeps its record, and prints nothing more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_console() -> Console:
    """A console that keeps tables whole in a pipe or a file, where rich would assume 80 columns."""
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(highlight=False, width=140)


def say(console: Console, text: str, style: str = "") -> None:
    """One line as it is: no markup, and no breaking where a reader may want to copy or search."""
    console.print(Text(text, style=style), soft_wrap=True)


def show_table(console: Console, table: Table) -> None:
    """A table at its own width. A terminal that is narrower wraps its lines; no number is cut short."""
    before = console.width
    console.width = 1000
    console.width = max(before, console.measure(table).maximum)
    console.print(table)
    console.width = before


# --- the record -------------------------------------------------------------------------------------------------


@dataclass
class ExampleRecord:
    """What one technique did; the shape of one entry of "examples" in the JSON record."""

    name: str
    status: str = "running"
    reason: str | None = None
    seconds: float = 0.0
    checks: list[dict] = field(default_factory=list)
    comparisons: list[dict] = field(default_factory=list)
    codegen: list[dict] = field(default_factory=list)
    facts: dict = field(default_factory=dict)
    profiled: dict[str, dict] = field(default_factory=dict)  # with --profile: the work of each named call


@dataclass
class RunRecord:
    """The whole run. `save` replaces the file in one step, so that an interrupted run leaves a readable record."""

    topic: str
    command: str
    machine: Machine
    ceilings: Ceilings
    seed: int
    sizes: str
    when: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    examples: list[ExampleRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.commit, self.dirty = git_state()

    def as_dict(self) -> dict:
        machine = {**vars(self.machine), "mode": self.machine.mode, "ceilings": self.ceilings.record()}
        return {
            "schema": SCHEMA, "topic": self.topic, "command": self.command, "when": self.when, "commit": self.commit,
            "dirty": self.dirty, "seed": self.seed, "sizes": self.sizes, "machine": machine,
            "examples": [vars(example) for example in self.examples],
        }  # fmt: skip

    def save(self, path: Path | None) -> None:
        if path is None:
            return
        text = json.dumps(self.as_dict(), indent=1, allow_nan=False, default=str) + "\n"
        if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
            path.write_text(text, encoding="utf-8")
            return
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        except OSError:  # a file that may be written in a folder that may not
            path.write_text(text, encoding="utf-8")


def git_state() -> tuple[str | None, bool | None]:
    """(commit, dirty) of this checkout. Where git does not know it, GIT_COMMIT from the environment, dirty unknown."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    if commit is None:
        return os.environ.get("GIT_COMMIT"), None
    status = git("status", "--porcelain", "--untracked-files=no")
    return commit, None if status is None else bool(status)


# --- the console ------------------------------------------------------------------------------------------------


def header(console: Console, record: RunRecord, title: str) -> None:
    m = record.machine
    say(console, title, style="bold")
    if m.gpu:
        parts = [m.gpu, f"sm_{m.sm}", f"{m.sms} SMs", f"{m.memory_gib:.0f} GiB"]
        parts += [f"{m.power_limit_w:.0f} W limit"] if m.power_limit_w else []
        parts += [f"{m.max_clock_mhz} MHz max"] if m.max_clock_mhz else []
        parts += [f"driver {m.driver}"] if m.driver else []
    else:
        parts = [m.cpu, f"{m.cores} cores", "no GPU"]
    parts += [f"torch {m.torch}", f"triton {m.triton}" if m.triton else "no triton"]
    parts += [f"torch_xla {m.torch_xla}"] if m.torch_xla else []
    parts += [f"python {m.python}"]
    commit = (record.commit or "unknown")[:12] + (" (modified)" if record.dirty else "")
    say(console, "  ".join([*parts, f"commit {commit}"]), style="dim")


def technique_heading(console: Console, technique: Technique) -> None:
    console.rule(f"[bold]{technique.name}[/]", align="left")
    say(console, technique.lesson)


def show_comparison(console: Console, table: Comparison) -> None:
    """One table of variants. Columns that hold nothing are left out."""
    timed = any(row.ms is not None for row in table.rows)
    if not timed:
        errors = ", ".join(f"{row.variant} {row.error:.2f}" for row in table.rows)
        say(console, f"  right  {table.title} {table.case}: largest error / budget: {errors}")
        return
    out = Table(
        title=Text(f"{table.title}  {table.case}"), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    out.add_column("variant", no_wrap=True)
    rates = [name for name in ("tbps", "tflops") if any(getattr(row, name) for row in table.rows)]
    ceiling = any(row.of_ceiling for row in table.rows)
    heads = ["ms", "p20 - p80", *({"tbps": "TB/s", "tflops": "TFLOP/s"}[r] for r in rates)]
    heads += ["% of ceiling"] if ceiling else []
    for head in [*heads, f"x {table.baseline}", "error", "first call s"]:
        out.add_column(head, justify="right", no_wrap=True)
    for row in table.rows:
        cells = [f"{row.ms:.4f}", f"{row.p20:.4f} - {row.p80:.4f}"]
        cells += [_rate(getattr(row, r)) for r in rates]
        cells += [f"{row.of_ceiling:.1%}" if row.of_ceiling else ""] if ceiling else []
        cells += [f"{row.speedup:.2f}", f"{row.error:.2f}"]
        cells += ["" if row.first_call_s is None else f"{row.first_call_s:.2f}"]
        out.add_row(Text(row.variant), *cells, style="bold" if row.ours and not row.comparator else None)
    show_table(console, out)
    for note in table.notes:
        say(console, f"  {note}", style="dim")


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def show_rows(console: Console, title: str, rows: dict[str, dict]) -> None:
    """Rows of named cells; a cell that a row lacks stays empty, and a list reads a / b."""
    say(console, title, style="bold")  # not as the table's title, which would be broken to the table's width
    out = Table(box=box.SIMPLE_HEAD)
    out.add_column("", no_wrap=True)
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    for column in columns:
        out.add_column(Text(column), justify="right", no_wrap=True)
    for name, cells in rows.items():
        shown = (cells.get(column, "") for column in columns)
        out.add_row(Text(name), *(Text(" / ".join(map(str, c)) if isinstance(c, list) else str(c)) for c in shown))
    show_table(console, out)


def show_codegen(console: Console, kernels: list[Kernel]) -> None:
    out = Table(
        title="code for each architecture, compiled here", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for head in ("kernel", "sm", "instructions"):
        out.add_column(head, no_wrap=head != "instructions")
    tensor = any(k.tensor_memory for k in kernels)
    for head in ("registers", "spill bytes", "shared KiB", *(["tensor memory"] if tensor else [])):
        out.add_column(head, justify="right")
    for k in kernels:
        if k.error:
            out.add_row(k.kernel, f"sm_{k.sm}", Text(f"cannot, because {k.error}", style="red"))
            continue
        found = ", ".join(f"{name} x{count}" for name, count in k.found.items())
        cells = [str(k.registers), str(k.spills), f"{k.shared / 1024:.1f}", str(k.tensor_memory or "")]
        if k.too_much:
            found += f"{', ' if found else ''}does not fit: {k.too_much}"
        out.add_row(k.kernel, f"sm_{k.sm}", Text(found or "-"), *cells[: 4 if tensor else 3])
    show_table(console, out)


def show_architectures(console: Console, record: RunRecord, sms: tuple[int, ...]) -> None:
    """The last table of a topic: what each of its techniques becomes on each of these architectures, or why it cannot.

    Nothing is shown when nothing was compiled. The lines are set here: with the technique's name above its rows, and
    not beside them, 80 columns leave room for the instructions.
    """
    if not sms or not any(example.codegen for example in record.examples):
        return
    heads = (("", "registers"), ("spill", "bytes"), ("shared", "KiB"), ("tensor", "memory"))
    widths = [2 + max(map(len, head)) for head in heads]
    width = min(max(console.width, 80), 140) - 10 - sum(widths)  # of the instructions
    style = ""

    def line(first: str, text: str, *cells) -> None:
        numbers = "".join(f"{cell:>{n}}" for cell, n in zip(cells, widths, strict=False))
        say(console, f" {first:8} {text:{width}}{numbers}".rstrip(), style)

    def row(sm: int, text: str, room: int, *cells) -> None:
        text = text.replace(" x", "\0x")  # a count stays with its name
        first, *more = (part.replace("\0", " ") for part in wrap(text, room, break_on_hyphens=False))
        line(f"  sm_{sm}", first, *cells)
        for part in more:
            line("", part)

    say(console, "what each technique becomes on each architecture, compiled here", style="bold")
    line("", "", *(upper for upper, _ in heads))
    line("  sm", "instructions", *(lower for _, lower in heads))
    say(console, f" {'─' * (9 + width + sum(widths))}")
    for example in record.examples:
        said = "" if example.codegen else f"  nothing was compiled: {example.status}"
        say(console, f" {example.name}{said}", style="bold")
        for sm in sms if example.codegen else ():
            kernels = _first_compiled(example.codegen, sm, sms)
            for k in kernels:
                name = f"{k.kernel}: " if len(kernels) > 1 else ""
                if problem := k.error or (k.too_much and f"a program takes {k.too_much}"):
                    style = "red"
                    row(sm, f"{name}cannot, because {problem}", width + sum(widths))
                else:
                    tensor = "" if k.tensor_memory is None else k.tensor_memory
                    row(sm, name + _evidence(k.found), width, k.registers, k.spills, f"{k.shared / 1024:.1f}", tensor)
                style = ""
            if not kernels:
                row(sm, "not compiled for it", width)
    note = "registers of a thread; shared memory and columns of tensor memory of a program"
    say(console, f" {note}", style="dim")


def _first_compiled(entries: list[dict], sm: int, sms: tuple[int, ...]) -> list[Kernel]:
    """The kernels for `sm` of the first call of h.codegen that covers it; those that cover more of `sms` come first."""
    calls: dict[int, list[dict]] = {}
    for entry in entries:
        calls.setdefault(entry.get("call", 0), []).append(entry)
    for call in sorted(calls.values(), key=lambda call: -len({entry["sm"] for entry in call} & set(sms))):
        if found := [entry for entry in call if entry["sm"] == sm]:
            return [Kernel(**{name: value for name, value in entry.items() if name != "call"}) for entry in found]
    return []


# What any kernel may have comes last: it says least of a technique.
_ORDINARY = ("ld.global.v4", "st.global.v4", "atom", "mul.hi", "fma.f32")


def _evidence(found: dict[str, int], at_most: int = 8) -> str:
    names = sorted(found, key=lambda name: name in _ORDINARY)
    shown = [f"{name} x{found[name]}" for name in names[:at_most]]
    shown += [f"and {len(names) - at_most} more"] if len(names) > at_most else []
    return ", ".join(shown) or "none of those counted"


@contextmanager
def progress(console: Console, what: str):
    """Say what is going on once it takes more than a second: a spinner, or one plain line in a pipe."""
    status = console.status(f"{what} ...")

    def say() -> None:
        if console.is_terminal:
            status.start()
        else:
            console.print(f"  ... {what}")

    timer = threading.Timer(1.0, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if console.is_terminal:
            status.stop()


def show_summary(console: Console, record: RunRecord) -> None:
    """The closing lines: a table of the best row per case, then one line per technique."""
    timed = [(example, table) for example in record.examples for table in example.comparisons if best_row(table)]
    if timed:
        out = Table(title="the best of each case", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for head in ("technique", "case", "variant"):
            out.add_column(head, no_wrap=True)
        for head in ("ms", "% of ceiling", "x baseline", "baseline"):
            out.add_column(head, justify="right", no_wrap=True)
        for example, table in timed:
            best = best_row(table)
            ceiling = f"{best['of_ceiling']:.1%}" if best["of_ceiling"] else ""
            out.add_row(
                *map(Text, (label(example.name, table["title"]), table["case"], best["variant"])),
                f"{best['ms']:.4f}", ceiling, f"{best['speedup']:.2f}", Text(table["baseline"]),
            )  # fmt: skip
        show_table(console, out)
    styles = {"passed": "green", "failed": "red", "skipped": "yellow"}
    for example in record.examples:
        reason = f"  {example.reason.splitlines()[0]}" if example.reason else ""
        line = Text(f"{example.status.upper():8}", style=styles.get(example.status, ""))
        line.append(f"{example.name}  {example.seconds:.1f} s{reason}", style="default")
        console.print(line, soft_wrap=True)


def best_row(table: dict) -> dict | None:
    """The fastest row of a recorded table that is the technique's own; in a table of library calls, of those that are
    put next to the baseline.

    None when no such row was timed, or when the table counts no work: its times are those of launches.
    """
    ours = any(row["ours"] for row in table["rows"])
    if ours:
        rows = [row for row in table["rows"] if row["ours"] and not _is_comparator(row)]
    else:
        rows = [row for row in table["rows"] if row["variant"] != table["baseline"]]
    return _fastest(rows)


def _is_comparator(row: dict) -> bool:
    return row.get("comparator", False)  # which older records do not have


def _fastest(rows: list[dict]) -> dict | None:
    rows = [row for row in rows if row["ms"] is not None and (row["tbps"] or row["tflops"])]
    return min(rows, key=lambda row: row["ms"], default=None)


def _beside(table: dict, best: dict) -> list[dict]:
    """The rows a best row is put next to: the library's, or in a table of library calls the baseline."""
    if best["ours"]:
        return [row for row in table["rows"] if not row["ours"]]
    return [row for row in table["rows"] if row["variant"] == table["baseline"]]


# --- README -----------------------------------------------------------------------------------------------------


def load_record(path: Path) -> dict:
    """A record of a run. Raises ValueError when the file is no record of this schema."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{path}: not JSON ({error}); expected what --json writes") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a record of schema {SCHEMA}; expected what --json writes")
    return record


def techniques_table(found: list[Topic], records: dict[str, dict] | None = None) -> str:
    """README's map: one row per technique, from the docstrings, with what `records` (by topic) say of it."""
    lines = ["| technique | the question it answers | needs | measured | run |", "| --- | --- | --- | --- | --- |"]
    for topic in found:
        record = (records or {}).get(topic.name)
        recorded = {example["name"]: example for example in record["examples"]} if record else {}
        for t in topic.techniques:
            if t.error:
                raise ValueError(t.error)
            python = ".venv-xla/bin/python" if t.needs.xla else "python"
            measured = measured_cell(recorded[t.name]) if t.name in recorded else "not recorded yet"
            run = f"`{python} {topic.file} {t.name}`"
            lines.append(f"| [{t.name}]({t.file}) | {t.question} | {t.needs.text} | {measured} | {run} |")
    return "\n".join(lines)


def measured_cell(example: dict) -> str:
    """The cases of a technique in one line: the least and the most that the best of its own variants reach.

    Over the fastest library call of each table, or where all are library calls, over the table's baseline.
    """
    if example["status"] != "passed":
        return f"{example['status']}: {example['reason']}"
    ratios, ceilings, others = [], [], []
    for table in example["comparisons"]:
        if best := best_row(table):
            ceilings += [best["of_ceiling"]] if best["of_ceiling"] else []
            beside = {row["variant"]: best["speedup"] / row["speedup"] for row in _beside(table, best)}
            if beside:
                ratios.append(min(beside.values()))
                others.append(list(beside))
    said = []
    if ratios:
        names = list(dict.fromkeys(name for each in others for name in each))
        most = max(map(len, others))
        if len(names) == 1:
            name = names[0]
        elif most == 1:
            name = "each case's baseline"
        else:
            name = f"the better of {' and '.join(names)}" if len(names) == 2 else f"the best of {most} calls"
        said.append(f"{_span([f'{ratio:.2f}' for ratio in (min(ratios), max(ratios))])}x {name}")
    if ceilings:
        said.append(f"{_span([f'{100 * share:.0f}' for share in (min(ceilings), max(ceilings))])} % of ceiling")
    if not said:
        checks = len(example["checks"])
        return f"{checks} check{'s' if checks > 1 else ''}" if checks else "counts"
    return ", ".join(said)


def _span(ends: list[str]) -> str:
    return " to ".join(dict.fromkeys(ends))


def coverage_table(found: list[Topic], records: dict[str, dict]) -> str:
    """What ran where: one row per topic, from its record; what was compiled for other GPUs was not run on them."""
    lines = ["| topic | ran on | with | techniques | compiled, not run |", "| --- | --- | --- | --- | --- |"]
    for topic in found:
        record = records.get(topic.name)
        if record is None:
            lines.append(f"| {topic.file} | not recorded yet | | {len(topic.techniques)} | |")
            continue
        m = record["machine"]
        own = "sm_{}{}".format(*m["capability"]) if m["gpu"] else None
        where = f"{m['gpu']} ({own})" if own else f"{m['cpu']}, {m['cores']} cores"
        versions = [f"torch {m['torch']}"]
        versions += [f"torch_xla {m['torch_xla']}"] if m.get("torch_xla") else [f"Triton {m['triton']}"]
        passed = [example for example in record["examples"] if example["status"] == "passed"]
        code = {k["sm"] for example in passed for k in example["codegen"] if not k["error"] and not k.get("too_much")}
        compiled = ", ".join(f"sm_{sm}" for sm in sorted(code) if f"sm_{sm}" != own)
        count = f"{len(passed)} of {len(topic.techniques)}"
        lines.append(f"| {topic.file} | {where} | {', '.join(versions)} | {count} | {compiled} |")
    return "\n".join(lines)


def results_tables(folder: Path) -> str:
    """All cases of the recorded topics of one machine, a table for each topic, for a file in docs/."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        record = load_record(path)
        m = record["machine"]
        power = f", {m['power_limit_w']:.0f} W limit" if m.get("power_limit_w") else ""
        limits = [f"copy {m['ceilings']['copy_tbps']:.2f} TB/s"] if m["ceilings"]["copy_tbps"] else []
        limits += [f"cuBLAS {dtype} {rate:.0f} TFLOP/s" for dtype, rate in m["ceilings"]["gemm_tflops"].items()]
        measured = f"; measured ceilings: {', '.join(limits)}" if limits else ""
        beside = f"Triton {m['triton']}" if m["gpu"] else f"torch_xla {m['torch_xla']}, {m['cores']} cores"
        commit = (record["commit"] or "unknown")[:12]
        parts.append(
            f"**{record['topic']}** on {m['gpu'] or m['cpu']}{power}, torch {m['torch']}, {beside}{measured} "
            f"([record](../results/{folder.name}/{path.name}), commit `{commit}`)\n"
        )
        lines = [
            "| technique | case | variant | ms | rate | % of ceiling | speed-up |",
            "| --- | --- | --- | ---: | ---: | ---: | --- |",
        ]
        for example in record["examples"]:
            for table in example["comparisons"]:
                if best := best_row(table):
                    rate = _nearer_rate(best, m["ceilings"])
                    ceiling = f"{best['of_ceiling']:.1%}" if best["of_ceiling"] else ""
                    # Of this repository's other kernels the fastest is enough: there may be many.
                    other = _fastest([row for row in table["rows"] if _is_comparator(row)])
                    beside = [*_beside(table, best), *([other] if other else [])]
                    others = [(row, best["speedup"] / row["speedup"]) for row in beside]
                    versus = ", ".join(f"{ratio:.2f}x {row['variant']}" for row, ratio in others)
                    name, case, variant = label(example["name"], table["title"]), table["case"], best["variant"]
                    lines.append(f"| {name} | {case} | {variant} | {best['ms']:.3f} | {rate} | {ceiling} | {versus} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts).rstrip()


def _nearer_rate(row: dict, ceilings: dict) -> str:
    """The rate of a row that is nearer to its ceiling: of matrices of one column that is the memory's."""
    moving, computing = row["tbps"] or 0.0, row["tflops"] or 0.0
    fastest = max(ceilings["gemm_tflops"].values(), default=0.0)
    memory = moving / ceilings["copy_tbps"] if ceilings["copy_tbps"] else 1.0
    if computing and (not fastest or computing / fastest >= memory):
        return f"{computing:.0f} TFLOP/s" if computing >= 1 else f"{1000 * computing:.0f} GFLOP/s"
    return f"{moving:.2f} TB/s" if moving else f"{computing:.0f} TFLOP/s"


def label(technique: str, title: str) -> str:
    """How a table is called among those of other techniques: by its title, which may or may not name its own."""
    return title if title.startswith(technique) else f"{technique}: {title}"


DOCUMENTS = {  # each generated part, in the document that has its markers
    "README.md": ("techniques", "coverage"),
    "docs/results.md": ("results", "results on a CPU"),
}
_START, _END = "<!-- {}: python -m harness readme -->", "<!-- end of {} -->"


def documents(root: Path = ROOT) -> dict[Path, tuple[str, str]]:
    """README.md and docs/: what each is, and what it is with its generated parts renewed.

    Raises ValueError when a marker is missing.
    """
    found = sorted(topics(root), key=lambda topic: any(t.needs.xla for t in topic.techniques))  # as README tells them
    machines = ("cpu", "h200")  # the GPU's record of a topic counts where there are both
    paths = (path for machine in machines for path in sorted((root / "results" / machine).glob("*.json")))
    records = {record["topic"]: record for record in map(load_record, paths)}
    parts = {
        "techniques": techniques_table(found, records),
        "coverage": coverage_table(found, records),
        "results": results_tables(root / "results" / "h200"),
        "results on a CPU": results_tables(root / "results" / "cpu"),
    }
    texts = {}
    for name, names in DOCUMENTS.items():
        path = root / name
        old = path.read_text(encoding="utf-8")
        texts[path] = (old, renewed(old, {part: parts[part] for part in names}, name))
    return texts


def renewed(text: str, parts: dict[str, str], where: str) -> str:
    """`text` with each part between its markers replaced. Raises ValueError when a marker is missing."""
    for name, body in parts.items():
        start, end = _START.format(name), _END.format(name)
        if start not in text or end not in text:
            raise ValueError(f"{where}: the markers {start} and {end} are missing")
        head, rest = text.split(start, 1)
        text = f"{head}{start}\n{body}\n{end}{rest.split(end, 1)[1]}"
    return text
