"""`python -m companion compare REFERENCE MINE`: two records of one topic joined row by row, and a regression check.

Techniques are matched by name, tables by title, case and baseline, rows by variant. What is compared is a row's speed
over its table's baseline, each taken within its own run, so that it survives another GPU. Its spread reaches from the
baseline's p20 over the variant's p80 to the baseline's p80 over the variant's p20. Two runs of one code on two machines
with the same GPU differ by more than either spread: by up to 2.3 % in nine of ten rows. So a row differs where the two
spreads, each widened by that, do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.console import make_console, paragraph, plain_grid, say, show_grid
from harness.record import load

from rich.text import Text

BETWEEN_MACHINES = 0.023  # seen between two H200 machines: nine tenths of 435 ratios were within it


@dataclass(frozen=True)
class Row:
    """One variant in both runs: times in ms, ratios over the baseline, the spread of each ratio."""

    technique: str
    case: str
    variant: str
    held: bool  # whether its ratio says how well this repository does
    ms: tuple[float, float]
    ratio: tuple[float, float]
    spread: tuple[tuple[float, float], tuple[float, float]]

    @property
    def kept(self) -> float:
        """Mine as a part of the reference's ratio: below 1, slower."""
        return self.ratio[1] / self.ratio[0]

    @property
    def differs(self) -> bool:
        (low, high), (own_low, own_high) = self.spread
        return own_high * (1 + BETWEEN_MACHINES) < low or own_low > high * (1 + BETWEEN_MACHINES)


def timed_rows(example: dict) -> dict[tuple, dict]:
    """(title, case, baseline, variant) -> the row with the times of its baseline, of a technique that was timed."""
    found = {}
    for table in example["tables"]:
        rows = {row["variant"]: row for row in table["rows"]}
        base = rows[table["baseline"]]
        ours = any(row["ours"] for row in rows.values())
        for variant, row in rows.items():
            if row["ms"]:
                held = variant != table["baseline"] and (not ours or (row["ours"] and not row["peer"]))
                around = (base["p20"] / row["p80"], base["p80"] / row["p20"])
                key = (table["title"], table["case"], table["baseline"], variant)
                found[key] = row | {"held": held, "around": around}
    return found


def join(reference: dict, mine: dict, techniques: list[str]) -> Iterator[Row]:
    """The rows that both have timed, in the reference's order."""
    own = {example["name"]: example for example in mine["examples"]}
    for example in reference["examples"]:
        name = example["name"]
        if name not in own or (techniques and name not in techniques):
            continue
        theirs, ours = timed_rows(example), timed_rows(own[name])
        for key, row in theirs.items():
            if other := ours.get(key):
                title, case, _, variant = key
                yield Row(
                    name, case if title == name else f"{title} {case}", variant, row["held"],
                    (row["ms"], other["ms"]), (row["speedup"], other["speedup"]), (row["around"], other["around"]),
                )  # fmt: skip


def missing(reference: dict, mine: dict, techniques: list[str]) -> list[str]:
    """Why a technique that passed in the reference counts as failed in mine, one line each."""
    own = {example["name"]: example for example in mine["examples"]}
    lines = [f"{mine['running']}: the run ended in it"] if mine["running"] else []
    for example in reference["examples"]:
        name = example["name"]
        if example["status"] != "passed" or (techniques and name not in techniques):
            continue
        if name not in own:
            lines.append(f"{name}: not in my record")
        elif own[name]["status"] != "passed":
            lines.append(f"{name}: {own[name]['status']}: {own[name]['reason']}")
    return lines


def compare(reference: Path, mine: Path, techniques: list[str], all_rows: bool, fail_under: float | None) -> int:
    """Print the join; 1 when `fail_under` is given and a held row, or a technique, falls under it.

    Raises ValueError for what is no record, records of two topics, an unknown technique, or nothing in common.
    """
    try:
        theirs, ours = load(reference), load(mine)
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}; name a record that --json wrote") from None
    if theirs["topic"] != ours["topic"]:
        raise ValueError(f"{reference} is of {theirs['topic']} and {mine} of {ours['topic']}; compare one topic")
    known = [example["name"] for example in theirs["examples"]]
    if unknown := set(techniques) - set(known):
        raise ValueError(f"{reference} has no technique {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    rows, gone = list(join(theirs, ours, techniques)), missing(theirs, ours, techniques)
    if not rows and not gone:
        raise ValueError(f"{reference} and {mine} have no timed row in common; a run without a GPU times no kernel")
    same_gpu = theirs["gpu"] == ours["gpu"]
    bad = [row for row in rows if fail_under and row.held and row.kept < fail_under and row.differs]
    _show([row for row in rows if all_rows or row.differs], same_gpu, bad)
    console = make_console()
    agree = sum(not row.differs for row in rows)
    within = sum(abs(row.kept - 1) <= 0.05 for row in rows)
    gpus = f"{theirs['gpu'] or 'a CPU'} and {ours['gpu'] or 'a CPU'}"
    paragraph(console, f"{agree} of {len(rows)} ratios agree, {within} within 5 %; {gpus}")
    for line in gone:
        paragraph(console, line, "red")
    if fail_under is None:
        return 0
    paragraph(console, f"{len(bad)} of {sum(row.held for row in rows)} held ratios are under {fail_under:g}")
    return int(bool(bad or gone))


def _show(rows: list[Row], same_gpu: bool, bad: list[Row]) -> None:
    console = make_console()
    for technique in dict.fromkeys(row.technique for row in rows):
        say(console, technique, style="bold")
        out = plain_grid()
        for head in ("case", "variant"):
            out.add_column(head, overflow="fold")
        for head in (["ref. ms", "my ms"] if same_gpu else []) + ["ref. x", "my x", "mine / ref."]:
            out.add_column(head, justify="right", no_wrap=True)
        for row in (row for row in rows if row.technique == technique):
            times = [f"{ms:.4g}" for ms in row.ms] if same_gpu else []
            style = "red" if row in bad else "bold" if row.differs else None
            cells = [*times, *(f"{ratio:.2f}" for ratio in row.ratio), f"{row.kept:.3f}"]
            out.add_row(Text(row.case), Text(row.variant), *cells, style=style)
        show_grid(console, out)
