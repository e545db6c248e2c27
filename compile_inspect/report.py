"""What an inspection found: phases with their blocks, findings ranked by cost, and a verdict in three lines."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

PHASES = (
    "basics", "dynamo_capture", "frame_evaluation", "guards", "graph_breaks", "aot_autograd", "inductor_codegen",
    "cuda_graphs", "benchmark", "triage",
)  # fmt: skip


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
    def rank(self) -> tuple:
        # What costs nothing measurable in a call comes after what costs seconds once.
        return (not self.urgent, not self.ms, -(self.ms or 0.0), self.seconds is None, -(self.seconds or 0.0))


@dataclass
class Table:
    """Rows of cells under columns; numbers are floats or ints and are formatted here."""

    title: str
    columns: list[str]
    rows: list[list]
    kind: str = "table"

    def cells(self) -> list[list[str]]:
        return [[number(cell) for cell in row] for row in self.rows]


@dataclass
class Code:
    """Source text: `language` is python, cpp or text; `fold` hides it on the page until it is asked for."""

    title: str
    text: str
    language: str = "python"
    fold: bool = True
    kind: str = "code"


@dataclass
class Note:
    text: str
    kind: str = "note"


@dataclass
class Bars:
    """A plot: one horizontal bar for each label."""

    title: str
    unit: str
    values: dict[str, float]
    kind: str = "bars"


SHOWN = 8  # rows of a table on the terminal, unless asked for all
KINDS = {"table": Table, "code": Code, "note": Note, "bars": Bars}


def is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def number(cell: object) -> str:
    """A cell as text: floats with three significant digits."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return "inf" if math.isinf(cell) else f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return "" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell)


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
    blocks: list = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    changed: Callable[[Phase], None] = field(default=lambda phase: None, repr=False, compare=False)

    def _add(self, block) -> None:
        self.blocks.append(block)
        self.changed(self)

    def table(self, title: str, columns: list[str], rows: list[list]) -> None:
        self._add(Table(title, columns, rows))

    def code(self, title: str, text: str, language: str = "python", fold: bool = True) -> None:
        self._add(Code(title, text, language, fold))

    def note(self, text: str) -> None:
        self._add(Note(text))

    def bars(self, title: str, unit: str, values: dict[str, float]) -> None:
        self._add(Bars(title, unit, values))

    def finding(self, what: str, fix: str, **cost) -> None:
        self.findings.append(Finding(what, fix, **cost))
        self.changed(self)

    def as_dict(self) -> dict:
        plain = {name: value for name, value in vars(self).items() if name not in ("blocks", "findings", "changed")}
        return plain | {"blocks": [asdict(b) for b in self.blocks], "findings": [asdict(f) for f in self.findings]}

    @classmethod
    def from_dict(cls, held: dict) -> Phase:
        blocks = [KINDS[block["kind"]](**block) for block in held["blocks"]]
        return cls(**held | {"blocks": blocks, "findings": [Finding(**each) for each in held["findings"]]})


@dataclass
class Report:
    """An inspection of one model on one machine; `machine` has device, torch and python."""

    model: str
    machine: dict = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)

    def __getitem__(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    def __contains__(self, name: str) -> bool:
        return any(phase.name == name for phase in self.phases)

    @property
    def findings(self) -> list[Finding]:
        """What to change, the dearest first: a cost in each call before a cost paid once."""
        found = sorted((finding for phase in self.phases for finding in phase.findings), key=lambda each: each.rank)
        done = any(each.urgent for phase in self.phases if phase.name == "triage" for each in phase.findings)
        return [each for each in found if not (done and each.fix.startswith("run the phase triage"))]

    def verdict(self) -> list[str]:
        """Three lines: what compiling gives, what the breaks cost or what costs most, and what to change first."""
        facts = self["benchmark"].facts if "benchmark" in self else {}
        facts = facts or (self["basics"].facts if "basics" in self else {})
        lines, found = [], self.findings
        if "speedup" in facts:
            paid = facts.get("break_even_calls")
            after = "it never pays" if paid is None else f"paid after {paid:,} calls"
            compared = f"compiled {facts['compiled_ms']:.3g} ms a call, eager {facts['eager_ms']:.3g} ms"
            lines.append(f"{compared}: {facts['speedup']:.2f}x; {after}.")
        else:
            failed = (f"{p.name} {p.status}: {p.reason}" for p in self.phases if p.reason)
            lines.append(next(failed, "Eager and compiled were not timed: that is the phase benchmark."))
        breaks = next((phase for phase in self.phases if phase.name == "graph_breaks"), None)
        if breaks and breaks.facts.get("breaks"):
            count, share = len(breaks.facts["breaks"]), breaks.facts.get("share")
            least = "up to " * breaks.facts.get("at_most", False)
            cost = f"cost{'s' * (count == 1)} {least}{share:.0%} of the call" if share is not None else "found"
            first = breaks.facts["breaks"][0]
            lines.append(f"{count} graph break{'s' * (count > 1)} {cost}; first: {first['at']} {first['source']}")
        elif breaks and breaks.status == "passed":
            none = "No graph break" if breaks.facts.get("graphs") else "Dynamo captures no graph of the model"
            lines.append(f"{none}.")
        if found:
            what = found[0].what.partition(" `")[0]  # without the source line, which stands above
            lines.append(f"Change first: {what} ({found[0].cost}): {found[0].fix}")
        else:
            lines.append("Nothing to change was found.")
        return lines

    def as_dict(self) -> dict:
        return {"model": self.model, "machine": self.machine, "phases": [phase.as_dict() for phase in self.phases]}

    def html(self, path) -> None:
        """Write the page: one self-contained file."""
        from compile_inspect.page import write_page

        write_page(self, path)

    def __str__(self) -> str:
        return "\n".join(text for phase in self.phases for text in phase_lines(phase)) + "\n" + closing(self)


# --- the terminal


def width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)


def wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, width(), initial_indent=indent, subsequent_indent=indent) or [indent]


def table_lines(table: Table, most: int | None = None) -> list[str]:
    """A table in columns, `most` rows of it; one too wide for the terminal gives up the ends of its longest cells."""
    rows = [table.columns, *table.cells()[:most]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    while sum(widths) + 2 * len(widths) > width() and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1
    numeric = [all(row[i] is None or is_number(row[i]) for row in table.rows) for i in range(len(widths))]

    def line(row: list[str]) -> str:
        cut = [cell if len(cell) <= w else cell[: w - 1] + "…" for cell, w in zip(row, widths, strict=True)]
        parts = (c.rjust(w) if right else c.ljust(w) for c, w, right in zip(cut, widths, numeric, strict=True))
        return ("  " + "  ".join(parts)).rstrip()

    left = len(table.rows) - len(rows) + 1
    more = [f"  ... {left} more rows: -v, or --html"] if left > 0 else []
    return [f"  {table.title}", *(line([cell.replace("\n", " ") for cell in row]) for row in rows), *more]


def bar_lines(bars: Bars) -> list[str]:
    label, most = max(map(len, bars.values), default=0), max(bars.values.values(), default=0.0) or 1.0
    room = width() - label - 16
    return [f"  {bars.title}"] + [
        f"  {name.ljust(label)} {'█' * max(1, round(room * value / most))} {number(float(value))} {bars.unit}"
        for name, value in bars.values.items()
    ]


def phase_lines(phase: Phase, verbose: bool = False) -> list[str]:
    """A phase for the terminal; with `verbose` the code that it shows, too."""
    lines = [f"\n{phase.name}: {phase.question}"]
    for block in phase.blocks:
        if block.kind == "table":
            lines += table_lines(block, None if verbose else SHOWN)
        elif block.kind == "bars":
            lines += bar_lines(block)
        elif block.kind == "note":
            lines += wrapped(block.text)
        elif verbose or not block.fold:
            lines += [f"  {block.title}", *(f"    {line}" for line in block.text.splitlines())]
    if phase.status != "passed":
        lines += wrapped(f"{phase.status.upper()}: {phase.reason}")
    if phase.answer:
        lines += wrapped(f"=> {phase.answer}")
    return lines


def closing(report: Report) -> str:
    """The findings, the dearest first, and the verdict."""
    lines = []
    if report.findings:
        lines += ["", "findings, the dearest first"]
        for i, each in enumerate(report.findings, 1):
            at = f"{each.where}: " if each.where and each.where not in each.what else ""
            lines += wrapped(f"{i}. {at}{each.what}: {each.cost}")
            lines += wrapped(f"fix: {each.fix}" + (f" Tried: {each.tried}" if each.tried else ""), "     ")
    lines += ["", f"verdict on {report.model}"]
    return "\n".join([*lines, *(text for line in report.verdict() for text in wrapped(line))])
