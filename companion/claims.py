"""`python -m companion claims`: CLAIMS.md, what the chapter claims and what was measured of it, from results/.

The claims stand in companion/ledger.py; no measured number does. Each names what is read of a technique's record, and
what must hold of each value: all of them, and the claim holds; some, and it holds only there; none, and it does not.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from harness.bench import Table
from harness.catalog import ROOT, Topic, topics
from harness.record import REFERENCES, load, recorded

from companion import readme
from companion.readme import OLDER, OUTLINE, machine_name, stale_parts, tables_of

PAGE = "CLAIMS.md"
INSPECTED = "compile_inspect"  # the topic of what `python -m compile_inspect.main --json` writes
VERDICTS = {"holds": "hold", "holds only for": "hold only for named cases", "does not hold": "do not hold",
            "not measured": "are not measured"}  # fmt: skip


class Value(NamedTuple):
    """A measured value as it is shown, and whether the claim holds of it."""

    text: str
    holds: bool


class Ratio(float):
    """How many times as fast one row is as another; `faster`: where the host is twice as fast."""

    faster: float

    def __new__(cls, table: Table, over: str, variant: str) -> Ratio:
        self = super().__new__(cls, table.over(over, variant))
        self.faster, self.text = table.over(over, variant, host=2), table.by_host(over, variant)
        return self


def times(x: float, least: float = 0.0, most: float = float("inf")) -> Value:
    """A ratio of speeds, claimed to lie between `least` and `most`: on a host twice as fast, too, if it is a Ratio."""
    text, both = (x.text, (x, x.faster)) if isinstance(x, Ratio) else (f"{x:.2f}x", (x,))
    return Value(text, all(least <= round(each, 2) <= most for each in both))


def number(x: float, unit: str = "", least: float = 0.0, most: float = float("inf")) -> Value:
    return Value(f"{x:,.4g}{unit}", least <= x <= most)


def told(found: object, holds: bool) -> Value:
    return Value(f"{found}", holds)


class Claim(NamedTuple):
    """`says` is the chapter's claim in our words, below the heading `section` of docs/chapter.txt. `measured` reads
    the values by case; `of` is what they are. Without it nothing measures the claim, for lack of what `needs` names.
    `because` is why, by bytes, FLOPs, launches or code."""

    id: str
    section: str
    says: str
    because: str = ""
    measured: Callable[[Reader], dict[str, Value]] | None = None
    of: str = ""
    needs: str = ""


class Evidence:
    """The record of a technique's lesson, or of its study.

    Every method raises ValueError, with the technique and what was asked for, where the record does not hold that.
    """

    def __init__(self, name: str, part: dict) -> None:
        self.name, self.part = name, part

    def ratios(self, title: str, over: str, variant: str, *cases: str) -> dict[str, Ratio]:
        """How many times as fast as `over` the variant is, by case: all cases of that title with both, or `cases`."""
        found = {
            table.case: Ratio(table, over, variant)
            for table in tables_of(self.part)
            if table.title == title and over in table and variant in table and (not cases or table.case in cases)
        }
        if not found or set(cases) - set(found):
            wanted = f"{variant!r} and {over!r}, case {' and '.join(map(repr, cases)) or 'any'}"
            raise ValueError(f"{self.name}: no table {title!r} has {wanted}")
        return found

    def ratio(self, title: str, over: str, variant: str, case: str) -> Ratio:
        return self.ratios(title, over, variant, case)[case]

    def fact(self, *keys: str):
        """A recorded fact, or the cell of one that is a table."""
        try:
            return reduce(operator.getitem, keys, self.part["facts"])
        except (KeyError, TypeError):
            raise ValueError(f"{self.name}: no fact {' / '.join(keys)}") from None

    def code(self, kernel: str, sm: int, instruction: str) -> int:
        """How often an instruction stands in a kernel's code for an architecture, 0 where it was not found."""
        found = [each["found"] for each in self.part["codegen"] if (each["kernel"], each["sm"]) == (kernel, sm)]
        if not found:
            raise ValueError(f"{self.name}: no code of {kernel} for sm_{sm}")
        return max(each.get(instruction, 0) for each in found)


class Reader:
    """What a claim reads: reader("softmax") is the lesson's evidence, reader("softmax", study=True) the study's.

    It remembers which techniques were read: those are what reproduces the claim. `held` is what readers share: each
    record, and which parts of it were made with other code than today's. With `folder`, one of results/, it reads that
    alone.
    """

    def __init__(self, found: list[Topic], root: Path = ROOT, held: dict | None = None, folder: str = "") -> None:
        self.known = {technique.name: (topic, technique) for topic in found for technique in topic.techniques}
        self.root, self.folder, self.read, self.phases = root, folder, {}, []
        self.machines, self.older, self.held = {}, False, {} if held is None else held

    def __call__(self, name: str, study: bool = False) -> Evidence:
        if name not in self.known:
            raise ValueError(f"there is no technique {name!r}")
        topic, technique = self.known[name]
        if name not in self.held:
            example = self.recorded(topic.name, name)
            self.held[name] = example, stale_parts(technique, example, self.root) if example else []
        example, older = self.held[name]
        part, which = ((example or {}).get("study"), "study") if study else (example, "lesson")
        if part is None:
            raise ValueError(f"{name}: its {which} is not recorded")
        self.read[name] = self.read.get(name, False) or study
        machine = part["machine"]
        self.machines[machine_name(machine | machine.get("host", {}))] = None
        self.older |= which in older
        return Evidence(f"{name}{', study' if study else ''}", part)

    def recorded(self, topic: str, name: str) -> dict | None:
        """The example that README shows, or the one in the folder."""
        if not self.folder:
            return recorded(topic, name, self.root)
        path = self.root / "results" / self.folder / f"{topic}.json"
        examples = load(path)["examples"] if path.is_file() else []
        return next((example for example in examples if example["name"] == name), None)

    def inspected(self, phase: str) -> Evidence:
        """What a phase of compile_inspect recorded of the bundled model."""
        part = self.recorded(INSPECTED, phase)
        if part is None:
            raise ValueError(f"{INSPECTED}: its phase {phase} is not recorded")
        self.phases.append(phase)
        self.machines[machine_name(part["machine"] | part["machine"]["host"])] = None
        return Evidence(f"{INSPECTED}, {phase}", part)

    def commands(self) -> str:
        """What runs again what was read: a command for each technique."""
        lines = [f"`{readme.command(*self.known[name])}{' --study' * study}`" for name, study in self.read.items()]
        return ", ".join([*lines, *(f"`python -m {INSPECTED}.{phase}`" for phase in self.phases)])


def verdict(claim: Claim, values: dict[str, Value]) -> str:
    """Holds, holds only for the cases named, does not hold; or not measured, and what that needs."""
    if claim.measured is None:
        return f"not measured: needs {claim.needs}"
    good = [case for case, value in values.items() if value.holds]
    if len(good) == len(values):
        return "holds"
    return f"holds only for: {'; '.join(good)}" if good else "does not hold"


class Judged(NamedTuple):
    """A claim with what its records say: CLAIMS.md and the page tell it from this. `measured` is its values as text,
    `older` whether one of the records was made with other code than today's."""

    claim: Claim
    measured: str
    verdict: str
    older: bool
    commands: str
    machines: tuple[str, ...]

    @property
    def cells(self) -> tuple[str, str]:
        """Measured and verdict, as CLAIMS.md shows them."""
        return self.measured + OLDER * self.older, f"**{self.verdict}**"


def judge(claims: dict[str, list[Claim]], found: list[Topic], root: Path = ROOT) -> dict[str, list[Judged]]:
    """Every claim by its group, judged by the records below `root`.

    Raises ValueError, with the claim's id, where one reads what no record holds or names no section of the chapter.
    """
    outline = (root / OUTLINE).read_text(encoding="utf-8").splitlines()
    headings = {line.lstrip("#").strip() for line in outline if line.startswith("#")}
    held: dict = {}
    return {group: [_judged(claim, Reader(found, root, held), headings) for claim in claims[group]] for group in claims}


def _judged(claim: Claim, reader: Reader, headings: set[str]) -> Judged:
    try:
        if claim.section not in headings:
            raise ValueError(f"{OUTLINE} has no section {claim.section!r}")
        values = claim.measured(reader) if claim.measured else {}
    except ValueError as error:
        raise ValueError(f"claim {claim.id}: {error}") from None
    measured = "; ".join(f"{case}: {value.text}" if case else value.text for case, value in values.items())
    measured = f"{claim.of}: {measured}" if claim.of else measured
    said = verdict(claim, values)
    return Judged(claim, measured, said, reader.older, reader.commands(), tuple(reader.machines))


def judged_elsewhere(judged: dict[str, list[Judged]], found: list[Topic], root: Path = ROOT) -> list[Judged]:
    """Each claim again, by a record that README does not show, where all that it reads is there and the verdict is
    another one: a claim whose cases or study that machine has not recorded is left out."""
    told = []
    for folder in sorted({path.parent.name for path in (root / "results").glob("*/*.json")} - {*REFERENCES}):
        if readme.other_triton(folder):
            continue
        held: dict = {}
        for here in (each for members in judged.values() for each in members if each.claim.measured):
            with suppress(ValueError):
                there = _judged(here.claim, Reader(found, root, held, folder), {here.claim.section})
                told += [there] * (there.verdict != here.verdict)
    return told


def tally(judged: dict[str, list[Judged]]) -> str:
    """How many claims there are, and how many of each verdict."""
    counts = Counter(each.verdict.split(":")[0] for members in judged.values() for each in members)
    kinds = ", ".join(f"{counts[kind]} {said}" for kind, said in VERDICTS.items() if counts[kind])
    return f"{counts.total()} claims: {kinds}."


def ledger_page(claims: dict[str, list[Claim]], found: list[Topic], root: Path = ROOT) -> str:
    """CLAIMS.md, a table for each group of claims. Raises ValueError as judge() does."""
    judged = judge(claims, found, root)
    machines = dict.fromkeys(name for members in judged.values() for each in members for name in each.machines)
    tables = []
    for group, members in judged.items():
        rows = [
            (f'<a id="{c.id}"></a>{c.says} *({c.section})*', *each.cells, c.because, each.commands)
            for c, each in ((each.claim, each) for each in members)
        ]
        tables.append((group, "the claim | measured | verdict | why | reproduce with", rows))
    if others := judged_elsewhere(judged, found, root):
        rows = [(f"[{e.claim.says}](#{e.claim.id})", " and ".join(e.machines), *e.cells) for e in others]
        tables.append(("Other verdicts on other machines", "the claim | where | measured there | verdict there", rows))
    lines = []
    for heading, heads, rows in tables:
        escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        lines.append(f"\n## {heading}\n\n{readme.markdown_table(heads, escaped)}")
    return f"""# The chapter's claims

What five texts on the PyTorch compiler and Triton ("the chapter", [docs/chapter.md](docs/chapter.md)) claim, in this
project's words with the section in brackets, and what was measured of it. Each verdict follows from the numbers beside
it. Those are read from the records in results/: {" and ".join(machines)}.
A ratio that depends on the host is given for a host twice as fast, too, and a claim holds if it does on both. "Older
code" marks what was recorded before the code last changed. At the end is what another machine's records say otherwise.
This page is generated: `python -m companion claims`.

{tally(judged)}
{chr(10).join(lines)}
"""


def claims(check: bool, root: Path = ROOT) -> int:
    """Renew CLAIMS.md, or only say (`check`) whether it is up to date; 1 when it is not."""
    from companion.ledger import CLAIMS

    path = root / PAGE
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    texts = {path: (old, ledger_page(CLAIMS, topics(root), root))}
    return readme.renew(texts, root, check, "companion/ledger.py and results/; run: python -m companion claims")
