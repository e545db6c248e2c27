"""What an inspection found: phases with what they show, findings by cost, and a verdict; as text and as a page."""

import math
import shutil
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from compile_inspect.breaks import NOT_THE_USERS

PHASES = (
    "basics", "dynamo_capture", "frame_evaluation", "guards", "graph_breaks", "aot_autograd", "inductor_codegen",
    "cuda_graphs", "benchmark", "triage",
)  # fmt: skip
ROWS, LINES, BAR, SHOWN = 40, 1000, 40, 8  # of a table, of a text, characters of a bar, rows on the terminal
BOUND = 4  # a cost that is an upper bound counts as a quarter of it: what the fix gives is not known
TRIAGE = "run the phase triage: it finds the operation"


class Skip(Exception):
    """Raised by a phase that this machine or this model has nothing for; the message says why."""


@dataclass
class Finding:
    """Something to change: `ms` is its cost in each call, `share` of the compiled call; `seconds` are paid once."""

    what: str
    fix: str
    where: str = ""  # file:line
    ms: float | None = None
    share: float | None = None
    seconds: float | None = None
    tried: str = ""  # what the fix gave where it was tried, with numbers
    urgent: bool = False  # a result is wrong
    at_most: bool = False  # `ms` has in it what eager's own work takes

    @property
    def cost(self) -> str:
        if self.urgent:
            return "wrong, or no result"
        if self.ms is not None:
            share = f", {self.share:.0%}" if self.share is not None else ""
            return f"{'up to ' * self.at_most}{self.ms:.3g} ms a call{share}"
        return f"{self.seconds:.3g} s once" if self.seconds is not None else "not measured"

    @property
    def heading(self) -> str:
        return f"{f'{self.where}: ' if self.where not in self.what else ''}{self.what}: {self.cost}"

    @property
    def rank(self) -> tuple:
        # What costs nothing measurable in a call comes after what costs seconds once.
        ms = (self.ms or 0.0) / (BOUND if self.at_most else 1)
        return (not self.urgent, not ms, -ms, self.seconds is None, -(self.seconds or 0.0))


@dataclass
class Block:
    """A `table`, a `note`, or `code`, which `fold` hides on the page and the terminal until it is asked for."""

    kind: str
    title: str = ""
    text: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)  # of each column, whether it has numbers alone
    fold: bool = True


def text_of(cell: object) -> str:
    """A cell as text: floats with three significant digits, lists with commas."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, list | tuple):
        return ", ".join(map(text_of, cell))
    if isinstance(cell, float):
        return "inf" if math.isinf(cell) else f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return "" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell)


def counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def reason_of(error: BaseException) -> str:
    """An error in one line: its type, the first sentence of its text, and the innermost line of the model's code."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(said[: 2 if said[0].endswith(":") else 1])
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*NOT_THE_USERS, str(Path(__file__).parent)))]
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        text += "; try smaller inputs"
    where = f" (at {Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text}{where}"


@dataclass
class Phase:
    """One look at the model. It is filled step by step, so that what was seen before a failure is kept."""

    name: str
    question: str = ""
    status: str = "running"  # then passed, failed, timed out, skipped
    reason: str = ""
    answer: str = ""
    seconds: float = 0.0
    facts: dict = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    changed = staticmethod(lambda phase: None)  # told of the phase as it grows; no field of it

    def _add(self, *block, **more) -> None:
        self.blocks.append(Block(*block, **more))
        self.changed(self)

    def table(self, title: str, rows: Iterable, columns: str | dict[str, str] = "") -> list:
        """A table, which is not shown without rows; the rows are returned.

        Rows of cells have `columns` "a|b|c"; dicts a column for each key of the first, or of `columns`: {key: name}.
        """
        rows = list(rows)
        if rows:
            names, shown = columns.split("|") if isinstance(columns, str) else [*columns.values()], rows[:ROWS]
            if isinstance(rows[0], dict):
                keys = [*(columns or rows[0])]
                names = names if columns else ["line" if key == "at" else key.replace("_", " ") for key in keys]
                shown = [[row.get(key) for key in keys] for row in shown]
            right = [all(c is None or type(c) in (int, float) for c in cells) for cells in zip(*shown, strict=True)]
            left = f" (the first {ROWS} of {len(rows)})" if len(rows) > ROWS else ""
            cells = [[text_of(cell) for cell in row] for row in shown]
            self._add("table", title + left, columns=names, rows=cells, right=right)
        return rows

    def bars(self, title: str, unit: str, values: dict[str, float]) -> None:
        """A table with a bar in each row."""
        bar = BAR / (max(values.values()) or 1)
        rows = [[name, float(value), "█" * max(1, round(bar * value))] for name, value in values.items()]
        self.table(title, rows, f"|{unit}|")

    def code(self, title: str, text: str, fold: bool = True) -> None:
        lines = text.strip("\n").splitlines()
        left = [f"... {len(lines) - LINES} more lines"] if len(lines) > LINES else []
        self._add("code", title, "\n".join(lines[:LINES] + left), fold=fold)

    def note(self, text: str) -> None:
        self._add("note", text=text)

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """An error within becomes a note, and the phase goes on."""
        try:
            yield
        except Exception as error:
            self.note(f"{what}: {reason_of(error)}")

    def finding(self, what: str, fix: str, **cost) -> None:
        self.findings.append(Finding(what, fix, **cost))
        self.changed(self)

    @classmethod
    def from_dict(cls, held: dict) -> "Phase":
        """The phase of which dataclasses.asdict() made `held`."""
        blocks, findings = [Block(**each) for each in held["blocks"]], [Finding(**each) for each in held["findings"]]
        return cls(**held | {"blocks": blocks, "findings": findings})


@dataclass
class Report:
    """An inspection of one model on one machine; `machine` has device, torch and python."""

    model: str
    machine: dict = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    shared: str = ""  # why the phases share one model, where it is not copied

    def __getitem__(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    def facts(self, name: str) -> dict:
        return next((phase.facts for phase in self.phases if phase.name == name), {})

    @property
    def timed(self) -> dict:
        """Facts with the times of a call, in eager and compiled; empty where there are none."""
        return self.facts("benchmark") or self.facts("basics")

    @property
    def findings(self) -> list[Finding]:
        """What to change, the dearest first: a cost in each call before a cost paid once."""
        found = (finding for phase in self.phases for finding in phase.findings)
        if call := self.timed.get("compiled_ms"):
            found = (replace(each, share=each.ms / call) if each.ms and each.share is None else each for each in found)
        if self.facts("triage").get("stage"):
            found = (finding for finding in found if finding.fix != TRIAGE)
        return sorted(found, key=lambda each: each.rank)

    def verdict(self) -> list[str]:
        """Three lines: what compiling gives, what the breaks cost or what costs most, and what to change first."""
        timed, broken, lines = self.timed, self.facts("graph_breaks"), []
        if "speedup" in timed:
            paid = timed.get("break_even_calls")
            after = "it never pays" if paid is None else f"paid after {paid:,} calls"
            compared = f"compiled {timed['compiled_ms']:.3g} ms a call, eager {timed['eager_ms']:.3g} ms"
            lines.append(f"{compared}: {timed['speedup']:.2f}x; {after}.")
        else:
            failed = (f"{p.name} {p.status}: {p.reason}" for p in self.phases if p.reason)
            lines.append(next(failed, "Eager and compiled were not timed: that is the phase benchmark."))
        if breaks := broken.get("breaks"):
            least, share = "up to " * broken.get("at_most", False), broken.get("share")
            cost = f"cost{'s' * (len(breaks) == 1)} {least}{share:.0%} of the call" if share is not None else "found"
            first = f"{breaks[0]['at']} {breaks[0]['source']}"
            lines.append(f"{counted(len(breaks), 'graph break')} {cost}; first: {first}")
        elif "breaks" in broken:
            lines.append("No graph break." if broken["graphs"] else "Dynamo captures no graph of the model.")
        if findings := self.findings:
            first = findings[0]  # without the source line, which stands above
            return [*lines, f"Change first: {first.what.partition(' `')[0]} ({first.cost}): {first.fix}"]
        whole = all(phase.status in ("passed", "skipped") for phase in self.phases)
        return [*lines, f"Nothing to change was found{'' if whole else ', but not every phase came to its end'}."]

    def html(self, path: str | Path) -> None:
        """Write the page: one self-contained file. Raises OSError."""
        Path(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        return "\n".join(text for phase in self.phases for text in phase_lines(phase)) + "\n" + closing(self)


def page(report: Report) -> str:
    """The report as HTML that loads nothing: the verdict, the findings with their fixes, then the phases."""
    from jinja2 import Environment  # which torch requires

    template = Environment(autoescape=True).from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    about = ", ".join(f"{name} {value}" for name, value in report.machine.items() if name != "gpu")
    return template.render(report=report, about=about + (f"; the model {report.shared}" if report.shared else ""))


# --- the terminal


def width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)


def wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, width(), initial_indent=indent, subsequent_indent=indent) or [indent]


def table_lines(table: Block, most: int | None) -> list[str]:
    """A table in columns, `most` rows of it; one too wide for the terminal gives up the ends of its longest cells."""
    rows = [[cell.replace("\n", " ") for cell in row] for row in [table.columns, *table.rows[:most]]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * len(widths) > width() and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1
    lines = [f"  {table.title}"]
    for row in rows:
        cut = [cell if len(cell) <= w else cell[: w - 1] + "…" for cell, w in zip(row, widths, strict=True)]
        aligned = zip(cut, widths, table.right, strict=True)
        lines.append(("  " + "  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in aligned)).rstrip())
    left = len(table.rows) - len(rows) + 1
    return lines + [f"  ... {left} more rows: -v, or --html"] * (left > 0)


def phase_lines(phase: Phase, verbose: bool = False) -> list[str]:
    """A phase for the terminal; with `verbose` the code that it shows, too."""
    lines = [f"\n{phase.name}: {phase.question}"]
    for block in phase.blocks:
        if block.kind == "table":
            lines += table_lines(block, None if verbose else SHOWN)
        elif block.kind == "note":
            lines += wrapped(block.text)
        elif verbose or not block.fold:
            lines += [f"  {block.title}", *(f"    {line}" for line in block.text.splitlines())]
    if phase.status != "passed":
        lines += wrapped(f"{phase.status.upper()}: {phase.reason}")
    return lines + (wrapped(f"=> {phase.answer}") if phase.answer else [])


def closing(report: Report) -> str:
    """The findings, the dearest first, and the verdict."""
    lines = ["", "findings, the dearest first"] if report.findings else []
    for i, each in enumerate(report.findings, 1):
        lines += wrapped(f"{i}. {each.heading}")
        lines += wrapped(f"fix: {each.fix}" + (f" Tried: {each.tried}" if each.tried else ""), "     ")
    lines += ["", f"verdict on {report.model}"]
    lines += wrapped(f"The model {report.shared}.") if report.shared else []
    return "\n".join([*lines, *(text for line in report.verdict() for text in wrapped(line))])
