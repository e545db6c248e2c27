"""`python -m companion compare REFERENCE MINE`: two records of one topic joined row by row, and a regression check.

Techniques are matched by name, tables by title, case and baseline, rows by variant. What is compared is a row's speed
over its table's baseline, each taken within its own run, so that it survives another GPU. Its spread reaches from the
baseline's p20 over the variant's p80 to the baseline's p80 over the variant's p20. Two runs of one code on two machines
with the same GPU differ by more than either spread: by up to 2.3 % in nine of ten rows. So a row differs where the two
spreads, further apart than that, do not meet.

Whole calls have the host's time in them, and two hosts differ by a factor: of them the GPU's part is compared. Where
that agrees and the call does not, or there is none to compare, the row is marked "host" and is no regression. There is
none in an old record, and for a call that waits for the GPU: what the host does after that counts as the GPU's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.console import make_console, paragraph, plain_grid, say, show_grid
from harness.record import load

from rich.text import Text

DIFFERS = 0.05  # from which on a ratio of another machine is another answer
BETWEEN_MACHINES = 0.023  # seen between two H200 machines: nine tenths of 435 ratios were within it
GPU_PART = 0.1  # of whole calls: a median of few calls, whose spread is not recorded
EVENTS_MS = 0.001  # what the two events around a GPU's part may be off by: half a microsecond each


@dataclass(frozen=True)
class Row:
    """One variant in both runs: times in ms, ratios over the baseline, the spread of each ratio; of a `whole` call
    also the ratios of the GPU's part and their spreads, None in a record that has none to compare."""

    technique: str
    case: str
    variant: str
    held: bool  # whether its ratio says how well this repository does
    ms: tuple[float, float]
    ratio: tuple[float, float]
    spread: tuple[tuple[float, float], tuple[float, float]]
    whole: bool
    on_gpu: tuple[float | None, float | None]
    gpu_spread: tuple[tuple[float, float] | None, tuple[float, float] | None]

    @property
    def kept(self) -> float:
        """Mine as a part of the reference's ratio, of whole calls on the GPU: below 1, slower."""
        before, mine = self.on_gpu if all(self.on_gpu) else self.ratio
        return mine / before

    @property
    def differs(self) -> bool:
        if self.whole:
            return all(self.on_gpu) and _apart(self.gpu_spread, GPU_PART)
        return _apart(self.spread)

    @property
    def far(self) -> bool:
        return self.differs and abs(self.kept - 1) > DIFFERS

    @property
    def by_host(self) -> bool:
        """Whether a whole call differs, and nothing that the GPU does: its host is another."""
        return self.whole and not self.differs and _apart(self.spread)


def _apart(spreads: Sequence[tuple[float, float]], by: float = BETWEEN_MACHINES) -> bool:
    (low, high), (own_low, own_high) = spreads
    return own_high * (1 + by) < low or own_low > high * (1 + by)


def _gpu_part(row: dict) -> float | None:
    """ms of a whole call on the GPU; None where both host and GPU seem to take all of its time: it waits for the GPU.

    A call of which each takes as long as the other, by chance, looks the same, and is not compared either.
    """
    part = row.get("gpu_ms")
    return None if part and row["enqueue_us"] > 950 * row["ms"] and part > 0.98 * row["ms"] else part


def by_name(record: dict) -> dict[str, dict]:
    return {example["name"]: example for example in record["examples"]}


def timed_rows(example: dict) -> dict[tuple, dict]:
    """(title, case, baseline, variant) -> each row beside a baseline, with its spread, of what was timed."""
    found = {}
    for table in example["tables"]:
        rows = {row["variant"]: row for row in table["rows"]}
        base = rows[table["baseline"]]
        whole = any(row.get("gpu_ms") for row in rows.values())
        ours = any(row["ours"] for row in rows.values())
        for variant, row in rows.items():
            if row["ms"] and row is not base:
                held = not ours or (row["ours"] and not row["peer"])
                around = (base["p20"] / row["p80"], base["p80"] / row["p20"])
                key = (table["title"], table["case"], table["baseline"], variant)
                before, part = _gpu_part(base), _gpu_part(row)
                on_gpu = gpu_around = None
                if before and part:
                    on_gpu = before / part
                    low, high = max(before - EVENTS_MS, 0), max(part - EVENTS_MS, 1e-9)
                    gpu_around = low / (part + EVENTS_MS), (before + EVENTS_MS) / high
                found[key] = row | {
                    "held": held, "around": around, "whole": whole, "on_gpu": on_gpu, "gpu_around": gpu_around
                }  # fmt: skip
    return found


def join(reference: dict, mine: dict, techniques: list[str]) -> Iterator[Row]:
    """The rows that both have timed, in the reference's order."""
    own = by_name(mine)
    for example in reference["examples"]:
        name = example["name"]
        if name not in own or (techniques and name not in techniques):
            continue
        theirs, ours = timed_rows(example), timed_rows(own[name])
        for key, row in theirs.items():
            if other := ours.get(key):
                title, case, _, variant = key
                case = case if title == name else f"{title} {case}"
                ms, ratio, spread, on_gpu, gpu_spread = (
                    (row[of], other[of]) for of in ("ms", "speedup", "around", "on_gpu", "gpu_around")
                )
                whole = row["whole"] or other["whole"]
                yield Row(name, case, variant, row["held"], ms, ratio, spread, whole, on_gpu, gpu_spread)


def missing(reference: dict, mine: dict, techniques: list[str]) -> list[str]:
    """Why a technique that passed in the reference counts as failed in mine, one line each."""
    own = by_name(mine)
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
    _show([row for row in rows if all_rows or row.differs or row.by_host], same_gpu, bad)
    console = make_console()
    agree = sum(not row.differs for row in rows)
    within = sum(abs(row.kept - 1) <= 0.05 for row in rows)
    gpus = f"{theirs['gpu'] or 'a CPU'} and {ours['gpu'] or 'a CPU'}"
    paragraph(console, f"{agree} of {len(rows)} ratios agree, {within} within 5 %; {gpus}")
    if hosts := sum(row.by_host for row in rows):
        paragraph(console, f"{hosts} whole calls differ by their host alone, which counts as agreement")
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
            of, compared, kept = "", row.ratio, row.kept
            if row.by_host:
                of, kept = "host ", row.ratio[1] / row.ratio[0]
            elif all(row.on_gpu):
                of, compared = "GPU ", row.on_gpu
            cells = [*times, *(f"{ratio:.2f}" for ratio in compared), f"{of}{kept:.3f}"]
            out.add_row(Text(row.case), Text(row.variant), *cells, style=style)
        show_grid(console, out)
