"""Two records of one topic, one beside the other: the reader's GPU next to the reference, technique by technique.

    python -m harness compare results/h200/triton_examples.json mine.json                 where the two differ
    python -m harness compare results/h200/triton_examples.json mine.json softmax --all   every row of these
    python -m harness compare results/h200/triton_examples.json mine.json --fail-under 0.95   a regression check

Techniques are matched by name, tables by title, case and baseline, rows by variant. Of each row that both have timed:

speed           the reference's median over mine: above 1, mine is faster. Only between GPUs of one kind is it a
                difference at all, and there it is one when the p20 - p80 of the two runs do not overlap.
over baseline   the speed-up over the table's baseline, each taken within its own run, so that it survives a change of
                GPU. Its spread reaches from the baseline's p20 over the variant's p80 to the baseline's p80 over the
                variant's p20; the two differ when these do not overlap.
% of ceiling    of what each machine itself reaches, of the same work.

With --fail-under RATIO what is held is mine's ratio over the baseline, as a part of the reference's: of the variants of
this repository, and in a table of library calls alone, as those of torch.compile are, of all but the baseline. It fails
when it is under RATIO and the two differ by more than the spread; a RATIO above 1 asks for a gain, and no spread
excuses its absence. A time is not held: it is that of one GPU, one power limit and one driver. What the host decides,
as in tables that are launch-bound, is held like the rest: name the techniques to hold, or choose a lower RATIO, where
the hosts differ. Mine also fails where one of its techniques failed, where one that passed in the reference did not
pass or is absent, and where a ratio that would be held was not measured. p20 - p80 is the spread within a run: two runs
of the same code differ by some percent more where clocks or an autotuner's choice do, which RATIO leaves room for.

Facts carry no spread, so that none of them is held, and those that differ are only named (with --all, shown). Errors
and generated code are left out: each run has held them to its own budget and its own list.

Exit status: 0 nothing is under RATIO (or none was given), 1 something fails, 2 the two cannot be compared.
"""

from __future__ import annotations

import difflib
import math
import shutil
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap

from harness.report import load_record, make_console, say

# The columns of numbers and their widths: 57 of the 80 columns that are taken for granted.
GROUPS = {"ms": 19, "": 9, "over baseline": 16, "% of ceiling": 13}
NUMBERS = {"reference": 9, "mine": 10, "speed  ": 9, "ref.": 7, "mine  ": 9, " ref.": 6, " mine": 7}


# --- what is read of a record ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A variant as one run timed it. `ratio` is its speed-up over the baseline, `around` the spread of that."""

    ours: bool
    ms: float
    spread: tuple[float, float]
    ratio: float
    around: tuple[float, float]
    of_ceiling: float | None


@dataclass
class Table:
    """One comparison: the rows that were timed, and the names of those that were not."""

    title: str
    case: str
    baseline: str
    rows: dict[str, Row] = field(default_factory=dict)
    untimed: list[str] = field(default_factory=list)

    def held(self) -> list[str]:
        """The variants whose ratio says how well this repository does; see the module."""
        ours = {name for name, row in self.rows.items() if row.ours}
        return [name for name in self.rows if name != self.baseline and (name in ours or not ours)]


@dataclass
class Example:
    status: str
    reason: str
    tables: dict[tuple, Table]
    facts: dict

    @property
    def first_line(self) -> str:
        return f"{self.status}: {self.reason.splitlines()[0]}" if self.reason else self.status


@dataclass
class Run:
    """A record. `machine` is as recorded; what an older record lacks is empty or None."""

    path: Path
    topic: str
    command: str
    when: str
    commit: str
    sizes: str
    machine: dict
    copy_tbps: float | None
    gemm_tflops: dict[str, float]
    examples: dict[str, Example]

    @property
    def stopped_in(self) -> str | None:
        """The technique in which the run was interrupted or killed."""
        for name, example in self.examples.items():
            if example.status == "running" or (example.status, example.reason) == ("failed", "interrupted"):
                return name
        return None

    def why_untimed(self) -> str | None:
        """Why this run has no times, if its command or its machine allowed none, and what to do."""
        tables = [table for example in self.examples.values() for table in example.tables.values()]
        if any(table.rows for table in tables):
            return None
        for option in ("--check-only", "--profile"):
            if any(len(word) > 2 and option.startswith(word) for word in self.command.split()):  # as argparse reads it
                return f"it was run with {option}; run it without"
        if not any(table.untimed for table in tables):
            return None  # it compared nothing, or came to nothing
        if self.machine.get("mode") == "interpreted":
            return "Triton's kernels were interpreted, and an interpreted kernel has no speed; run it on a GPU"
        return "no row of it has a time; run it again"


def _number(recorded: dict, name: str) -> float | None:
    value = recorded.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        of = f" of {recorded['variant']!r}" if "variant" in recorded else ""
        raise TypeError(f"{name}{of} is {value!r}, and not a number above 0")
    return float(value)


def _table(recorded: dict) -> Table:
    table = Table(*(str(recorded[name]) for name in ("title", "case", "baseline")))
    spreads = {}
    for row in recorded["rows"]:
        if (ms := _number(row, "ms")) is None:
            table.untimed.append(str(row["variant"]))
        else:
            low, high = _number(row, "p20") or ms, _number(row, "p80") or ms
            spreads[str(row["variant"])] = row, ms, min(low, ms), max(high, ms)
    _, base, fast, slow = spreads.get(table.baseline, [None] * 4)
    for name, (row, ms, low, high) in spreads.items():
        ratio = _number(row, "speedup") or (base / ms if base else 1.0)
        around = (ratio, ratio)
        if base and name != table.baseline:
            around = min(fast / high, ratio), max(slow / low, ratio)
        table.rows[name] = Row(bool(row.get("ours")), ms, (low, high), ratio, around, _number(row, "of_ceiling"))
    return table


def read(path: Path) -> Run:
    """The record at `path`. Raises ValueError where there is none."""
    try:
        record = load_record(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name a record that python TOPIC.py --json PATH wrote") from None
    try:
        examples = {}
        for example in record["examples"]:
            tables: dict[tuple, Table] = {}
            for recorded in example.get("comparisons") or []:
                table = _table(recorded)
                key = (table.title, table.case, table.baseline)
                turn = sum(known[:3] == key for known in tables)  # of tables that share all three, first meets first
                tables[(*key, turn)] = table
            facts, reason = dict(example.get("facts") or {}), example.get("reason") or ""
            examples[str(example["name"])] = Example(str(example["status"]), str(reason), tables, facts)
        machine = dict(record["machine"])
        _number(machine, "power_limit_w")
        ceilings = dict(machine.get("ceilings") or {})
        rates = dict(ceilings.get("gemm_tflops") or {})
        return Run(
            path, str(record["topic"]), str(record.get("command") or ""), str(record.get("when") or ""),
            str(record.get("commit") or ""), str(record.get("sizes") or ""), machine, _number(ceilings, "copy_tbps"),
            {str(dtype): rate for dtype in rates if (rate := _number(rates, dtype))}, examples,
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: not a whole record of a run ({said}); expected what --json writes") from None


# --- what the two have in common ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One row of both records."""

    technique: str
    table: Table  # the reference's
    variant: str
    reference: Row
    mine: Row
    one_kind: bool  # of GPU: only then can times be compared

    @property
    def speed(self) -> float:
        return self.reference.ms / self.mine.ms

    @property
    def kept(self) -> float:
        """The part of the reference's ratio over the baseline that mine reaches."""
        return self.mine.ratio / self.reference.ratio

    @property
    def is_baseline(self) -> bool:
        return self.variant == self.table.baseline

    @property
    def held(self) -> bool:
        return self.variant in self.table.held()

    @property
    def time_sign(self) -> str:
        """ "-" slower, "+" faster, beyond the spread; a blank where they agree or cannot be compared."""
        return _sign(self.speed, self.reference.spread, self.mine.spread) if self.one_kind else " "

    @property
    def ratio_sign(self) -> str:
        return _sign(self.kept, self.reference.around, self.mine.around)

    @property
    def differs(self) -> bool:
        return self.time_sign + self.ratio_sign != "  "

    def fails(self, ratio: float) -> bool:
        return self.held and self.kept < ratio and (ratio > 1 or self.ratio_sign == "-")


def _sign(gain: float, one: tuple[float, float], other: tuple[float, float]) -> str:
    if one[1] < other[0] or other[1] < one[0]:
        return "+" if gain > 1 else "-"
    return " "


def _kind(run: Run) -> tuple:
    """What must be equal for two times to be comparable: the GPU, or without one the CPU."""
    m = run.machine
    return (m["gpu"],) if m.get("gpu") else (None, m.get("cpu"), m.get("cores"))


def _place(technique: str, table: Table) -> str:
    """How a table is called below its technique."""
    title = "" if table.title == technique else f"{table.title} "
    return f"{title}{table.case} over {table.baseline}"


@dataclass
class Both:
    """The two records, of the techniques that are asked for."""

    reference: Run
    mine: Run
    names: list[str]  # of both, in the reference's order

    @property
    def one_kind(self) -> bool:
        return _kind(self.reference) == _kind(self.mine)

    def pairs(self, name: str) -> Iterator[Pair]:
        there, here = self.reference.examples.get(name), self.mine.examples.get(name)
        if there and here:
            for key, table in there.tables.items():
                own = here.tables[key].rows if key in here.tables else {}
                for variant, row in table.rows.items():
                    if variant in own:
                        yield Pair(name, table, variant, row, own[variant], self.one_kind)

    def all_pairs(self) -> list[Pair]:
        return [pair for name in self.names for pair in self.pairs(name)]

    def compared(self, pairs: list[Pair]) -> list[Pair]:
        """Those that can agree or differ: of a baseline on another GPU there is only a time."""
        return [pair for pair in pairs if self.one_kind or not pair.is_baseline]

    def not_passed(self) -> list[str]:
        """Of the techniques: what fails mine, in words."""
        found, absent = [], []
        for name in self.names:
            there, here = self.reference.examples.get(name), self.mine.examples.get(name)
            passed = there is not None and there.status == "passed"
            if here is None:
                absent += [name] * passed
            elif here.status == "failed" or (here.status != "passed" and passed):
                found.append(f"{name} {here.first_line}")
        return found + ([f"not in {self.mine.path}: {', '.join(absent)}"] if absent else [])

    def not_measured(self) -> list[str]:
        """Of the techniques that passed in mine: the ratios that the reference holds and mine does not have."""
        found = []
        for name in self.names:
            there, here = self.reference.examples.get(name), self.mine.examples.get(name)
            if there and here and here.status == "passed":
                for key, table in there.tables.items():
                    own = here.tables[key].rows if key in here.tables else {}
                    if absent := [variant for variant in table.held() if variant not in own]:
                        which = f": {', '.join(absent)}" if own else ""
                        found.append(f"{name} {_place(name, table)}{which}: not measured")
        return found


def match(reference: Run, mine: Run, techniques: list[str]) -> Both:
    """Raises ValueError, which says what to do, where the two records cannot be put side by side."""
    names = list(dict.fromkeys([*reference.examples, *mine.examples]))
    if reference.topic != mine.topic:
        # A technique file that was run by itself names its record after itself.
        alone = [run.topic for run in (reference, mine) if list(run.examples) == [run.topic]]
        alone = [name for name in alone if name in reference.examples and name in mine.examples]
        if not alone:
            raise ValueError(
                f"{reference.path} is a record of {reference.topic}, {mine.path} of {mine.topic}; "
                "compare two records of one topic"
            )
        names = alone
    for name in techniques:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names)}"
            raise ValueError(f"there is no technique {name!r} to compare; {hint}")
    names = [name for name in names if not techniques or name in techniques]
    if not any(name in reference.examples and name in mine.examples for name in names):
        asked = " of those named" if techniques else ""
        raise ValueError(
            f"nothing in common{asked}: {reference.path} has {', '.join(reference.examples) or 'no technique'}, "
            f"{mine.path} has {', '.join(mine.examples) or 'no technique'}; "
            f"run python {reference.topic}.py --json {mine.path}"
        )
    return Both(reference, mine, names)


# --- what is shown --------------------------------------------------------------------------------------------------


class Page:
    """Lines of at most `width` columns: those of the terminal, 80 to 140, and 80 where there is none."""

    def __init__(self, both: Both) -> None:
        self.console = make_console()
        self.width = min(max(shutil.get_terminal_size().columns, 80), 140)
        longest = max([*map(len, both.names), *(4 + len(pair.variant) for pair in both.all_pairs())])
        self.first = min(self.width - sum(NUMBERS.values()), longest)

    def text(self, text: str, indent: int = 0, style: str = "") -> None:
        for i, line in enumerate(wrap(text, self.width - indent - 2, break_on_hyphens=False, break_long_words=False)):
            say(self.console, " " * (indent + 2 * (i > 0)) + line, style)

    def line(self, first: str, cells: Iterable[tuple[str, int]], style: str = "") -> None:
        """A line of the table: (cell, width) of its numbers. A name too long for its column has its own line."""
        if len(first) > self.first:
            say(self.console, first, style)
            first = ""
        numbers = "".join(f"{cell:>{width}}" for cell, width in cells)
        say(self.console, f"{first:{self.first}}{numbers}".rstrip(), style)

    def rule(self) -> None:
        line = "─" if self.console.encoding.startswith("utf") else "-"
        say(self.console, line * (self.first + sum(NUMBERS.values())), "dim")


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.1f}"


def show_machines(page: Page, both: Both) -> None:
    """The two machines in two columns, and how they differ in what they reach."""
    runs = (both.reference, both.mine)
    say(page.console, f"{both.mine.path} beside {both.reference.path}", style="bold")
    rows: list[tuple[str, list[str], str]] = [("", ["reference", "mine"], "")]

    def add(name: str, values: list[str], beside: str = "") -> None:
        if any(values):
            rows.append((name, [value or "unknown" for value in values], beside))

    machines = [run.machine for run in runs]
    power = [f", {m['power_limit_w']:.0f} W limit" if m.get("power_limit_w") else "" for m in machines]
    add("GPU", [f"{m.get('gpu') or 'none'}{limit}" for m, limit in zip(machines, power, strict=True)])
    add("host", [f"{m['cpu']}, {m.get('cores') or '?'} cores" if m.get("cpu") else "" for m in machines])
    for name in ("driver", "torch", "triton", "torch_xla"):
        add(name, [str(m.get(name) or "") for m in machines])
    limits = [("copy", "TB/s", "{:.2f}", [run.copy_tbps for run in runs])]
    for dtype in dict.fromkeys(dtype for run in runs for dtype in run.gemm_tflops):
        limits.append((f"GEMM {dtype}", "TFLOP/s", "{:.0f}", [run.gemm_tflops.get(dtype) for run in runs]))
    for name, unit, form, values in limits:
        beside = f"{values[1] / values[0]:.3f}x" if all(values) else ""
        if any(values):
            add(name, [f"{form.format(value)} {unit}" if value else "not measured" for value in values], beside)
    add("sizes", [run.sizes for run in runs])
    add("run", [f"{run.when[:10]} {(run.commit or 'commit unknown')[:12]}".strip() for run in runs])
    named = max(len(name) for name, _, _ in rows) + 2
    room = (page.width - 4 - named - 8) // 2
    widths = [min(room, max(len(values[i]) for _, values, _ in rows)) for i in (0, 1)]
    for name, values, beside in rows:
        cells = [wrap(value, width, break_on_hyphens=False) for value, width in zip(values, widths, strict=True)]
        for i, (one, other) in enumerate(zip_longest(*cells, fillvalue="")):
            line = f"  {name if not i else '':{named}}{one:{widths[0]}}  {other:{widths[1]}}  {'' if i else beside}"
            say(page.console, line.rstrip(), "" if name else "dim")
    if not both.one_kind:
        what = "GPU" if any(m.get("gpu") for m in machines) else "CPU"
        page.text(
            f"Another {what}: times are not comparable, and no difference is made of them; ratios over the baseline "
            "are, and so is the share of what each machine reaches.",
            style="yellow",
        )
    for which, run in zip(("the reference", "mine"), runs, strict=True):
        if why := run.why_untimed():
            page.text(f"Nothing was timed in {which} ({run.path}): {why}.", style="yellow")
        if stopped := run.stopped_in:
            page.text(f"The run of {which} ended in {stopped}: what came after it is missing.", style="yellow")


def show_heads(page: Page) -> None:
    say(page.console, "")
    page.text(
        "- worse, + better than the reference by more than the spread (p20 - p80) of both runs. Beside a technique: "
        "how many of its rows agree, and geometric means; of the ratios, that of this repository's variants, and in "
        "tables of library calls that of all but the baseline.",
        style="dim",
    )
    page.line("", ((f"{head:^{width - 2}}", width) for head, width in GROUPS.items()), "dim")
    page.line("", NUMBERS.items(), "dim")
    page.rule()


def show_pair(page: Page, pair: Pair, style: str = "") -> None:
    one, other = pair.reference, pair.mine
    cells = (
        f"{one.ms:.4f}", f"{other.ms:.4f}", f"{_ratio(pair.speed)} {pair.time_sign}",
        _ratio(one.ratio), f"{_ratio(other.ratio)} {pair.ratio_sign}",
        _percent(one.of_ceiling), _percent(other.of_ceiling),
    )  # fmt: skip
    page.line(f"    {pair.variant}", zip(cells, NUMBERS.values(), strict=True), style)


def show_technique(page: Page, both: Both, name: str, every: bool, fail_under: float | None) -> None:
    """One line, and below it what differs: rows, cases of one record alone, facts."""
    there, here = both.reference.examples.get(name), both.mine.examples.get(name)
    pairs = list(both.pairs(name))
    compared = both.compared(pairs)
    statuses = {which: each.first_line for which, each in (("the reference", there), ("mine", here)) if each}
    told = [f"{which} {status}" for which, status in statuses.items() if status != "passed"]
    if compared:
        agree = f"{sum(not pair.differs for pair in compared)} of {len(compared)} agree"
        ratios = [(pair.reference.ratio, pair.mine.ratio) for pair in pairs if pair.held]
        means = [_ratio(statistics.geometric_mean(side)) for side in zip(*ratios, strict=True)] or ["", ""]
        speed = _ratio(statistics.geometric_mean(pair.speed for pair in pairs))
        cells = (agree, f"{speed}  ", means[0], f"{means[1]}  ")
        page.line(name, zip(cells, (19, *list(NUMBERS.values())[2:5]), strict=True), "bold")
        for text in told:
            page.text(text, 2, "red")
    else:
        if len(statuses) == 1:
            told = [f"only in {which}: {status}" for which, status in statuses.items()]
        elif len(set(statuses.values())) == 1:
            told = [f"{statuses['mine']} in both, with no row that both have timed"]
        page.text(f"{name:{page.first}}  {'; '.join(told)}")
    last = None
    for pair in pairs if every else (pair for pair in compared if pair.differs):
        if pair.table is not last:
            page.text(_place(name, pair.table), 2)
            last = pair.table
        show_pair(page, pair, "red" if fail_under and pair.fails(fail_under) else "")
    passed = set(statuses.values()) == {"passed"}
    if there and here and (passed or pairs):  # of one that came to nothing its status has said all
        for line in _only_in_one(name, there, here):
            page.text(line, 2, "dim")
    if there and here and passed:
        show_facts(page, there.facts, here.facts, every)


def _only_in_one(name: str, there: Example, here: Example) -> Iterator[str]:
    """What one of the two has not measured: whole cases together, variants by their case."""
    for which, one, other in (("the reference", there, here), ("mine", here, there)):
        cases = [_place(name, table) for key, table in one.tables.items() if key not in other.tables]
        if cases:
            yield f"only in {which}: {'; '.join(cases)}"
        for key, table in one.tables.items():
            if key in other.tables:
                known = other.tables[key]
                absent = [v for v in table.rows if v not in known.rows and v not in known.untimed]
                untimed = [v for v in table.rows if v in known.untimed]
                for what, variants in (("only in", absent), ("timed only in", untimed)):
                    if variants:
                        yield f"{what} {which}: {', '.join(variants)} ({_place(name, table)})"


def _leaves(value, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(below, (*path, str(name)))
    else:
        yield path, value


def show_facts(page: Page, there: dict, here: dict, every: bool, at_most: int = 3) -> None:
    """The facts that differ, by name; with `every` each value. They carry no spread, so that this says no more."""
    old, new = dict(_leaves(there)), dict(_leaves(here))
    both = [path for path in dict.fromkeys([*old, *new]) if path]  # no path is that of no facts
    changed = [path for path in both if path not in old or path not in new or old[path] != new[path]]
    names = list(dict.fromkeys(path[0] for path in changed))
    if not names:
        return
    if not every:
        more = f"; and {len(names) - at_most} more" if len(names) > at_most else ""
        page.text(f"facts that differ: {'; '.join(names[:at_most])}{more}", 2, "dim")
        return
    page.text("facts that differ, the reference's -> mine:", 2, "dim")
    for path in changed:
        values = [str(facts[path]) if path in facts else "absent" for facts in (old, new)]
        page.text(f"{': '.join(path)}: {' -> '.join(values)}", 4, "dim")


def show_outcome(page: Page, both: Both, every: bool) -> None:
    compared = both.compared(both.all_pairs())
    differ = sum(pair.differs for pair in compared)
    page.rule()
    hint = "" if every or not differ else " (--all: every row)"
    if differ:
        page.text(f"{differ} of {len(compared)} rows differ by more than the spread of both runs{hint}", style="bold")
    else:
        page.text(f"all {len(compared)} rows agree" if compared else "no row was timed in both", style="bold")


def show_failures(page: Page, both: Both, ratio: float, held: list[Pair], failures: list[str]) -> None:
    """What --fail-under came to, the worst ratio first."""
    under = sorted((pair for pair in held if pair.fails(ratio)), key=lambda pair: pair.kept)
    told = f"{len(under) or 'none'} of {len(held)} ratios over the baseline under {ratio:g} of the reference's"
    if within := sum(pair.kept < ratio for pair in held) - len(under):
        told += f"; {within} within the spread"
    if not under and not failures:
        page.text(f"HELD: {told}", style="green")
        return
    page.text(f"FAILED: {told}{', and what is absent or did not pass' if failures else ''}", style="red")
    for pair in under:
        what = f"{pair.technique} {_place(pair.technique, pair.table)}: {pair.variant}"
        why = ""
        base = next(
            (other for other in both.pairs(pair.technique) if other.table is pair.table and other.is_baseline), None
        )
        if base and both.one_kind:
            why = f"; its speed {_ratio(pair.speed)}, {base.variant}'s {_ratio(base.speed)}"
        ratios = f"{_ratio(pair.reference.ratio)} -> {_ratio(pair.mine.ratio)}"
        page.text(f"{pair.kept:.3f}  {what} {ratios}{why}", 2)
    for failure in failures:
        page.text(failure, 2)


def compare_records(
    reference: Path, mine: Path, techniques: list[str], every: bool = False, fail_under: float | None = None
) -> int:
    """`python -m harness compare`; see the module. Returns the exit status; ValueError is wrong usage."""
    both = match(read(reference), read(mine), techniques)
    held = [pair for pair in both.all_pairs() if pair.held]
    failures: list[str] = []
    if fail_under is not None:
        for run in (both.reference, both.mine):
            if why := run.why_untimed():
                raise ValueError(
                    f"--fail-under {fail_under:g}: there is nothing to hold in {run.path}: {why}, "
                    f"as python {run.topic}.py --json PATH"
                )
        failures = both.not_passed()
        if not held and not failures:
            sizes = " and ".join(
                f"{run.path} has sizes {run.sizes or 'unknown'}" for run in (both.reference, both.mine)
            )
            raise ValueError(
                f"--fail-under {fail_under:g}: there is nothing to hold: no ratio over a baseline is in both records "
                f"({sizes}); run the same techniques with the same sizes"
            )
        failures += both.not_measured()
    page = Page(both)
    show_machines(page, both)
    show_heads(page)
    for name in both.names:
        show_technique(page, both, name, every, fail_under)
    show_outcome(page, both, every)
    if fail_under is None:
        return 0
    show_failures(page, both, fail_under, held, failures)
    return int(bool(failures) or any(pair.fails(fail_under) for pair in held))
