"""What a run prints: short unless -v asks for everything, whole in 80 columns, the same in a pipe."""

from __future__ import annotations

import os
import re
import sys
import threading
from contextlib import contextmanager
from textwrap import wrap
from typing import TYPE_CHECKING

from harness.codegen import Kernel

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

if TYPE_CHECKING:
    from harness.bench import Table
    from harness.catalog import Technique
    from harness.record import ExampleRecord

PIPE_WIDTH = 100  # of what goes to a pipe or a file, unless COLUMNS says otherwise


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """`| head` has seen enough: the run goes on and keeps its record, and prints nothing more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_console() -> Console:
    """As wide as the terminal; in a pipe or a file as COLUMNS says, or 100 columns."""
    fits = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return _Console(highlight=False, width=None if fits else PIPE_WIDTH)


def say(console: Console, text: str, style: str = "") -> None:
    """One line as it is: no markup, and no breaking where a reader may want to copy or search."""
    console.print(Text(text, style=style), soft_wrap=True)


def show_grid(console: Console, table: Grid) -> None:
    """A table within the console's width if breaking heads and texts at words can do that; no number is cut short."""
    before, needs = console.width, _least(console, table)
    for _ in range(before - needs):  # rich would take from the widest columns first, and break words
        if narrow := [column for column in table.columns if column.width < column.max_width]:
            min(narrow, key=lambda column: column.width).width += 1
    console.width = max(before, needs)
    console.print(table)
    console.width = before


def _least(console: Console, table: Grid) -> int:
    """The least width at which all words of a table are whole, and numbers, which stand at the right, in one line each;
    its columns are set to that."""
    wide = console.options.update(max_width=1000)
    for column in table.columns:
        head, *cells = (console.measure(cell, options=wide) for cell in (column.header, *column.cells))
        whole = [cell.maximum if column.no_wrap or column.justify == "right" else cell.minimum for cell in cells]
        column.width = max(head.maximum if column.no_wrap else head.minimum, *whole, 1)
        column.max_width = max(size.maximum for size in (head, *cells))
    return console.measure(table, options=wide).minimum


def paragraph(console: Console, text: str, style: str = "", indent: str = "  ") -> None:
    """A text broken at words to the console's width."""
    for line in wrap(text, console.width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False):
        say(console, line, style)


def header(console: Console, machine: dict, title: str, commit: str | None, dirty: bool | None) -> None:
    m, host = machine, machine["host"]
    say(console, title, style="bold")
    parts = [host["cpu"], f"{host['cores']} cores", "no GPU"]
    if m["gpu"]:
        parts = [
            m["gpu"], "sm_{}{}".format(*m["capability"]), f"{m['sms']} SMs", f"{m['memory_gib']:.0f} GiB",
            m["power_limit_w"] and f"{m['power_limit_w']:.0f} W limit",
            m["max_clock_mhz"] and f"{m['max_clock_mhz']} MHz max", m["driver"] and f"driver {m['driver']}",
        ]  # fmt: skip
    parts += [f"torch {m['torch']}", f"triton {m['triton']}" if m["triton"] else "no triton"]
    parts += [m["torch_xla"] and f"torch_xla {m['torch_xla']}", f"python {m['python']}"]
    parts += [f"commit {(commit or 'unknown')[:12]}" + " (modified)" * bool(dirty)]
    paragraph(console, "  ".join(filter(None, parts)), "dim", indent="")


def technique_heading(console: Console, technique: Technique, part: str = "") -> None:
    console.rule(f"[bold]{technique.name}{part}[/]", align="left")
    if not part:
        paragraph(console, technique.question or technique.lesson, indent="")


def show_checks(console: Console, errors: list[float]) -> None:
    checks = f"{len(errors)} check{'s' if len(errors) > 1 else ''}"
    paragraph(console, f"{checks} passed; the largest error is {max(errors):.0%} of what rounding allows")


def show_evidence(console: Console, record: ExampleRecord, evidence: dict[int, list[str]]) -> None:
    """One line for all checks, and one for the instructions that were required of the code and found in it."""
    errors = [check["error"] for check in record.checks if check["passed"]]
    errors += [row["error"] for table in record.tables for row in table["rows"]]
    if errors:
        show_checks(console, errors)
    by_code: dict[str, list[str]] = {}
    for sm, names in sorted(evidence.items()):
        by_code.setdefault(", ".join(names), []).append(f"sm_{sm}")
    if by_code:
        parts = " | ".join(f"{', '.join(sms)} {names}" for names, sms in by_code.items())
        paragraph(console, f"code: {parts}")


def show_answer(console: Console, answer: str) -> None:
    paragraph(console, f"Answer: {answer}", "bold")


def show_fact(console: Console, name: str, value) -> None:
    if not isinstance(value, dict):
        say(console, f"  {name}: {value}")
        return
    say(console, f"  {name}:")
    for key, each in value.items():  # one line for each, and one more level fits on it
        shown = ", ".join(f"{k}: {v}" for k, v in each.items()) if isinstance(each, dict) else each
        say(console, f"    {key}: {shown}")


def show_cases(console: Console, tables: list[Table]) -> None:
    """Tables of one title and baseline as one: a row for each variant of a single case; of several cases, how many
    times as fast as the baseline each variant is in each. Nothing where nothing was timed."""
    tables = [table for table in tables if table.timed]
    if not tables:
        return
    say(console, "")
    if len(tables) == 1:
        _show_one(console, tables[0])
    else:
        _show_several(console, tables)
    kinds: dict[str, list[str]] = {}  # notes that differ in their numbers alone
    for note in (note for table in tables for note in table.notes):
        kinds.setdefault(re.sub(r"\d+", "", note.split(" (")[0]), []).append(note)
    for first, *more in kinds.values():
        paragraph(console, first + (f"; and so in {len(more)} more case{'s' * (len(more) > 1)}" if more else ""), "dim")


def _show_one(console: Console, table: Table, whole: bool = False) -> None:
    """A row for each variant. Columns that hold nothing are left out; `whole` has errors and first calls, too."""
    say(console, f"  {table.title}  {table.case}", style="bold")
    rates = {name: head for name, head in RATES.items() if any(getattr(row, name) for row in table.rows)}
    ceiling = any(row.of_ceiling for row in table.rows)
    of_baseline = f"x {table.baseline}" if len(table.baseline) <= 20 else "x baseline"  # the row that has 1.00
    heads = ["ms", "p20 - p80" if whole else "spread", *rates.values(), *(["% of ceiling"] if ceiling else [])]
    out = _grid("", *heads, of_baseline, *(["error", "first call s"] if whole else []))
    for row in table.rows:
        spread = f"{row.p20:.4f} - {row.p80:.4f}" if whole else f"{(row.p80 - row.p20) / row.ms:.0%}"
        cells = [f"{row.ms:.4f}" if whole else f"{row.ms:.4g}", spread, *(_rate(getattr(row, name)) for name in rates)]
        cells += [f"{row.of_ceiling:.0%}" if row.of_ceiling else ""] if ceiling else []
        cells += [f"{row.speedup:.2f}"]
        first = "" if row.first_call_s is None else f"{row.first_call_s:.2f}"
        cells += [f"{row.error:.2f}", first] if whole else []
        style = "bold" if row.ours and not row.peer else None
        out.add_row(Text(row.variant), *cells, style=style)
    show_grid(console, out)


def _show_several(console: Console, tables: list[Table]) -> None:
    """Cases beside each other: as rows, as columns where only those fit the width, in several grids where neither."""
    baseline = tables[0].baseline
    variants = list(dict.fromkeys(row.variant for table in tables for row in table.rows if row.variant != baseline))
    ceiling = any(row.of_ceiling for table in tables for row in table.rows)
    ends = {table.case.rpartition(" ")[2] for table in tables}
    end = f" {ends.pop()}" if len(ends) == 1 else ""  # the dtype that all have in common stands in the title
    # Ours are all Triton's: their heads need not say so.
    short = [name.removeprefix("triton ") for name in variants]
    head = [f"{baseline} ms", *short, *(["fastest, % of ceiling"] if ceiling else [])]
    columns = {}
    for table in tables:
        cells = [f"{table[baseline].ms:.4g}"]
        cells += [f"{table[name].speedup:.2f}" if name in table else "" for name in variants]
        cells += [f"{table.best.of_ceiling:.0%}" if table.best.of_ceiling else ""] if ceiling else []
        columns[table.case.removesuffix(end)] = cells
    say(console, f"  {tables[0].title}{end}, times as fast as {baseline}", style="bold")
    _show_cases_that_fit(console, head, columns)


def _show_cases_that_fit(console: Console, head: list[str], columns: dict[str, list[str]]) -> None:
    """One cell of `columns` for each of `head`, by case."""
    by_case, by_variant = _grid("", *head), _grid("", *columns)
    for case, cells in columns.items():
        by_case.add_row(Text(case), *cells)
    for name, *cells in zip(head, *columns.values(), strict=True):
        by_variant.add_row(Text(name), *cells)
    if _least(console, by_case) <= console.width or len(columns) == 1 or not head:
        show_grid(console, by_case)
    elif _least(console, by_variant) <= console.width:
        show_grid(console, by_variant)
    else:
        cases, half = list(columns), len(columns) // 2
        for part in (cases[:half], cases[half:]):
            _show_cases_that_fit(console, head, {case: columns[case] for case in part})


RATES = {"tbps": "TB/s", "tflops": "TFLOP/s"}


def plain_grid() -> Grid:
    return Grid(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)


def _grid(first: str, *heads: str) -> Grid:
    out = plain_grid()
    out.add_column(Text(first), no_wrap=True)
    for head in heads:
        out.add_column(Text(head), justify="right", min_width=max(map(len, head.split()), default=0))
    return out


def show_comparison(console: Console, table: Table) -> None:
    """One table of variants with all that is known of them, or the errors alone where nothing was timed."""
    if not any(row.ms is not None for row in table.rows):
        errors = ", ".join(f"{row.variant} {row.error:.2f}" for row in table.rows)
        say(console, f"  right  {table.title} {table.case}: largest error / budget: {errors}")
        return
    _show_one(console, table, whole=True)
    for note in table.notes:
        paragraph(console, note, "dim")


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


LONGEST_NUMBER = 24  # of the cells that stand at the right


def show_rows(console: Console, title: str, rows: dict[str, dict]) -> None:
    """Rows of named cells; a cell that a row lacks stays empty, a list reads a / b, a sentence is broken at words.

    What is wider than the console with all its words whole is shown row after row, each cell beside its name.
    """
    say(console, "")
    paragraph(console, title, "bold", indent="")
    out = plain_grid()
    out.add_column("", no_wrap=True)
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    for column in columns:
        longest = max((len(str(cells.get(column, ""))) for cells in rows.values()), default=0)
        justify = "right" if longest <= LONGEST_NUMBER else "left"
        out.add_column(Text(column), justify=justify, min_width=max(map(len, column.split()), default=0))
    texts = {name: {column: _text(cell) for column, cell in cells.items()} for name, cells in rows.items()}
    for name, cells in texts.items():
        out.add_row(Text(name), *(Text(cells.get(column, "")) for column in columns))
    if _least(console, out) <= console.width:
        show_grid(console, out)
        return
    for name, cells in texts.items():
        paragraph(console, name)
        paragraph(console, "; ".join(f"{column}: {cell}" for column, cell in cells.items() if cell), indent="    ")


def _text(cell) -> str:
    return " / ".join(map(str, cell)) if isinstance(cell, list) else str(cell)


def show_codegen(console: Console, kernels: list[Kernel]) -> None:
    say(console, "code for each architecture, compiled here", style="bold")
    out = plain_grid()
    for head in ("kernel", "sm", "instructions"):
        out.add_column(head, no_wrap=head != "instructions")
    tensor = any(k.tensor_memory for k in kernels)
    for head in ("registers", "spill bytes", "shared KiB", *(["tensor memory"] if tensor else [])):
        out.add_column(head, justify="right")
    for k in kernels:
        if k.error:
            out.add_row(k.kernel, f"sm_{k.sm}", Text(f"not supported: {k.error}", style="red"))
            continue
        found = ", ".join(f"{name} x{count}" for name, count in k.found.items())
        cells = [str(k.registers), str(k.spills), f"{k.shared / 1024:.1f}", str(k.tensor_memory or "")]
        if k.too_much:
            found += f"{', ' if found else ''}does not fit: {k.too_much}"
        out.add_row(k.kernel, f"sm_{k.sm}", Text(found or "-"), *cells[: 4 if tensor else 3])
    show_grid(console, out)


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


def show_summary(console: Console, examples: list[ExampleRecord], known: dict[str, str | None]) -> None:
    """The closing table: each technique, whether it passed or why not, and its answer, or the one that was recorded."""
    out = plain_grid()
    out.add_column("technique", no_wrap=True)
    out.add_column("", no_wrap=True)
    out.add_column("answer", overflow="fold")
    styles = {"passed": "green", "failed": "red", "skipped": "yellow"}
    for example in examples:
        study = f", study {example.study.status}" if example.study and example.study.status != example.status else ""
        reason = example.reason or (example.study and example.study.reason) or ""
        checks = f"{len(example.checks)} checks; not timed here" if example.checks else ""
        answer = reason.splitlines()[0] if reason else example.answer or known.get(example.name) or checks
        status = Text(example.status + study, style=styles.get(example.status, ""))
        out.add_row(Text(example.name), status, Text(answer))
    console.print(out)
