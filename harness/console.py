"""What a run prints: short unless -v asks for everything, whole in 80 columns, the same in a pipe."""

from __future__ import annotations

import os
import re
import sys
import threading
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryFile
from textwrap import wrap
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

if TYPE_CHECKING:
    from harness.bench import Row, Table
    from harness.catalog import Technique
    from harness.codegen import Kernel
    from harness.record import ExampleRecord

PIPE_WIDTH = 100  # of what goes to a pipe or a file, unless COLUMNS says otherwise
LONGEST_NUMBER = 24  # characters; a cell with more of them is a text


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """`| head` has seen enough: the run goes on and keeps its record, and prints nothing more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_console(quiet: bool = False) -> Console:
    """As wide as the terminal; in a pipe or a file as COLUMNS says, or 100 columns."""
    fits = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return _Console(highlight=False, quiet=quiet, width=None if fits else PIPE_WIDTH)


def say(console: Console, text: str, style: str = "") -> None:
    """One line as it is: no markup, and no breaking where a reader may want to copy or search."""
    console.print(Text(text, style=style), soft_wrap=True)


def paragraph(console: Console, text: str, style: str = "", indent: str = "  ") -> None:
    """A text broken at words to the console's width."""
    for line in wrap(text, console.width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False):
        say(console, line, style)


# --- tables


def plain_grid() -> Grid:
    return Grid(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)


def _grid(names: list[str], columns: dict[str, list[str]], styles: list[str] | None = None) -> Grid:
    """Named rows, and columns by their heads with a cell for each row: numbers at the right, texts at the left."""
    out = plain_grid()
    out.add_column("", no_wrap=True)
    for head, cells in columns.items():
        out.add_column(Text(head), justify="left" if max(map(len, cells), default=0) > LONGEST_NUMBER else "right")
    for i, row in enumerate(zip(names, *columns.values(), strict=True)):
        out.add_row(*map(Text, row), style=styles and styles[i])
    return out


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


def show_cases(console: Console, tables: list[Table]) -> None:
    """Tables of one title and baseline as one: a row for each variant of a single case, or of whole calls; of other
    cases, how many times as fast as the baseline each variant is in each. Nothing where nothing was timed."""
    tables = [table for table in tables if table.timed]
    if not tables:
        return
    say(console, "")
    if len(tables) == 1 or of_calls(tables[0]):
        _show_each(console, tables)
    else:
        ends = {table.case.rpartition(" ")[2] for table in tables}  # the dtype of all of them stands in the title
        end = f" {ends.pop()}" if len(ends) == 1 and re.search(r"[a-z]\d", *ends) else ""
        say(console, f"  {tables[0].title}{end}, times as fast as {tables[0].baseline}", style="bold")
        _show_several(console, tables, end)
    _show_notes(console, tables)


def of_calls(table: Table) -> bool:
    """Whether whole calls were timed on a GPU: their times have the host's share in them."""
    return any(row.gpu_ms for row in table.rows)


def noise(table: Table, row: Row) -> tuple[float, float] | None:
    """The least and the most that a ratio may be, from p20 to p80, where that says too little: it reaches from below 1
    to above, a call takes half as long again as another, or the ratio of both times is another than that of the rounds.
    Times of the GPU alone are steady: of them only the last."""
    base = table[table.baseline]
    if row is base:
        return None
    low, high = base.p20 / row.p80, base.p80 / row.p20
    uneven = abs(row.speedup / base.speedup * row.ms / base.ms - 1) > 0.03
    if row.enqueue_us is None or row.gpu_ms:
        uneven |= low <= 1 <= high or max(base.p80 / base.p20, row.p80 / row.p20) > 1.5
    return (low, high) if uneven else None


def _over(table: Table, row: Row) -> str:
    return f"{row.speedup:.2f}" + "?" * bool(noise(table, row))


def _show_each(console: Console, tables: list[Table], whole: bool = False) -> None:
    """A row for each variant, under its case where there are several; `whole` has errors and first calls, too. Empty
    columns are left out, of whole calls also those that a narrow terminal can do without. A ratio of whole calls is
    this host's: beside it stand the GPU's time, the host's to launch, and the ratio on a host twice as fast."""
    one, calls, several = tables[0], of_calls(tables[0]), len(tables) > 1
    say(console, f"  {one.title}{', whole calls' * calls}{f'  {one.case}' * (not several)}", style="bold")
    of_baseline = f"x {one.baseline}" if len(one.baseline) <= 20 else "x baseline"  # the row that has 1.00
    kinds = {
        "ms": lambda _, row: f"{row.ms:.4f}" if whole else f"{row.ms:.4g}",
        "spread": lambda _, row: "" if whole else f"{(row.p80 - row.p20) / row.ms:.0%}",
        "p20 - p80": lambda _, row: f"{row.p20:.4f} - {row.p80:.4f}" * whole,
        "GPU ms": lambda _, row: f"{row.gpu_ms:.4g}" if calls else "",
        "host us": lambda _, row: f"{row.enqueue_us:.0f}" if calls else "",
        "TB/s": lambda _, row: _rate(row.tbps),
        "TFLOP/s": lambda _, row: _rate(row.tflops),
        "% of ceiling": lambda _, row: _part(row.of_ceiling),
        of_baseline: _over,
        "host twice as fast": lambda table, row: f"{table.over(table.baseline, row.variant, 2):.2f}" if calls else "",
        "error, of allowed": lambda _, row: f"{row.error:.0%}" * whole,
        "first call s": lambda _, row: "" if not whole or row.first_call_s is None else f"{row.first_call_s:.2f}",
    }
    lines = [(table, row) for table in tables for row in [*[None] * several, *table.rows]]
    names = [f"{'  ' * several}{row.variant}" if row else table.case for table, row in lines]
    styles = ["bold" if row and row.ours and not row.peer else "" for _, row in lines]
    columns = {head: [text(*line) if line[1] else "" for line in lines] for head, text in kinds.items()}
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    for spare in ("TB/s", "TFLOP/s", "% of ceiling", "spread") if calls and not whole else ():
        if _least(console, _grid(names, columns)) > console.width:
            columns.pop(spare, None)
    show_grid(console, _grid(names, columns, styles))


def _show_notes(console: Console, tables: list[Table]) -> None:
    """The ratios that are marked, with their spreads; then the tables' notes."""
    told = [
        f"{row.variant}{f', {table.case},' * (len(tables) > 1)} {spread[0]:.2f} to {spread[1]:.2f}"
        for table in tables for row in table.rows if (spread := noise(table, row))
    ]  # fmt: skip
    if told:
        paragraph(console, f"? uneven times: from p20 to p80 the ratio is {'; '.join(told)}")
    kinds: dict[str, list[str]] = {}  # notes that differ in their numbers alone
    for note in (note for table in tables for note in table.notes):
        kinds.setdefault(re.sub(r"\d+", "", note.split(" (")[0]), []).append(note)
    for first, *more in kinds.values():
        paragraph(console, first + (f"; and so in {len(more)} more case{'s' * (len(more) > 1)}" if more else ""), "dim")


def _show_several(console: Console, tables: list[Table], end: str) -> None:
    """Cases beside each other: as rows, as columns where only those fit the width, in two halves where neither do."""
    baseline = tables[0].baseline
    variants = list(dict.fromkeys(row.variant for table in tables for row in table.rows if row.variant != baseline))
    columns = {f"{baseline} ms": [f"{table[baseline].ms:.4g}" for table in tables]}
    for name in variants:  # ours are all Triton's: their heads need not say so
        cells = [_over(table, table[name]) if name in table else "" for table in tables]
        columns[name.removeprefix("triton ")] = cells
    if any(row.of_ceiling for table in tables for row in table.rows):
        columns["fastest, % of ceiling"] = [_part(table.best.of_ceiling) for table in tables]
    cases = [table.case.removesuffix(end) for table in tables]
    by_case = _grid(cases, columns)
    by_variant = _grid(list(columns), dict(zip(cases, zip(*columns.values(), strict=True), strict=True)))
    if _least(console, by_case) <= console.width or len(tables) == 1:
        show_grid(console, by_case)
    elif _least(console, by_variant) <= console.width:
        show_grid(console, by_variant)
    else:
        half = len(tables) // 2
        _show_several(console, tables[:half], end)
        _show_several(console, tables[half:], end)


def show_comparison(console: Console, table: Table) -> None:
    """One table of variants with all that is known of them, or the errors alone where nothing was timed."""
    if not table.timed:
        errors = ", ".join(f"{row.variant} {row.error:.0%}" for row in table.rows)
        say(console, f"  right  {table.title} {table.case}: largest error, of what rounding allows: {errors}")
        return
    _show_each(console, [table], whole=True)
    _show_notes(console, [table])


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _part(value: float | None) -> str:
    return f"{value:.0%}" if value else ""


def show_rows(console: Console, title: str, rows: dict[str, dict]) -> None:
    """Rows of named cells; a cell that a row lacks stays empty, a list reads a / b, a sentence is broken at words. What
    is wider than the console with all its words whole is shown row after row, each cell beside its name."""
    say(console, "")
    paragraph(console, title, "bold", indent="")
    _show_named(console, list(rows.items()))


def _show_named(console: Console, rows: list[tuple[str, dict]]) -> None:
    texts = [{head: _text(cell) for head, cell in cells.items()} for _, cells in rows]
    heads = dict.fromkeys(head for cells in texts for head in cells)
    columns = {head: [cells.get(head, "") for cells in texts] for head in heads}
    out = _grid([name for name, _ in rows], columns)
    if _least(console, out) <= console.width:
        show_grid(console, out)
        return
    for (name, _), cells in zip(rows, texts, strict=True):
        paragraph(console, name)
        paragraph(console, "; ".join(f"{head}: {cell}" for head, cell in cells.items() if cell), indent="    ")


def _text(cell) -> str:
    return " / ".join(map(str, cell)) if isinstance(cell, list) else str(cell)


def show_codegen(console: Console, kernels: list[Kernel]) -> None:
    say(console, "code for each architecture, compiled here", style="bold")
    _show_named(console, [(f"{kernel.kernel} sm_{kernel.sm}", _program(kernel)) for kernel in kernels])


def _program(kernel: Kernel) -> dict:
    if kernel.error:
        return {"instructions": f"not supported: {kernel.error}"}
    found = [f"{name} x{count}" for name, count in kernel.found.items()]
    found += [f"does not fit: {kernel.too_much}"] if kernel.too_much else []
    cells = {"instructions": ", ".join(found) or "-", "registers": kernel.registers, "spill bytes": kernel.spills}
    tensor = {"tensor memory": kernel.tensor_memory} if kernel.tensor_memory else {}
    return cells | {"shared KiB": f"{kernel.shared / 1024:.1f}"} | tensor


# --- the parts of a run


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


def show_evidence(console: Console, record: ExampleRecord, evidence: dict[int, dict[str, None]]) -> None:
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


@contextmanager
def progress(console: Console, what: str):
    """Say what is going on once it takes more than a second: a spinner, or one plain line in a pipe."""
    status = console.status(f"{what} ...")
    timer = threading.Timer(1.0, status.start if console.is_terminal else partial(say, console, f"  ... {what}"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextmanager
def errors_held_back():
    """Show what is written to standard error, be it by C++, only if the block raises: an autotuner tells of every
    configuration that does not fit."""
    if sys.stderr is None:  # it was closed when Python started
        yield
        return
    sys.stderr.flush()
    shown = os.dup(2)
    with TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            held.seek(0)
            os.write(shown, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)


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
