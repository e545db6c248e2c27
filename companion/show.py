"""`python -m companion show NAME`: what was recorded of a technique: its answer, its tables, the evidence."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from harness import console as out
from harness.catalog import ROOT, Technique, topics
from harness.record import REFERENCES, load, recorded

from companion.readme import stale_parts, tables_of


def technique_named(name: str, command: str = "show") -> tuple[str, Technique]:
    """The topic's name and the technique. Raises ValueError when there is none of that name."""
    known = {technique.name: (topic.name, technique) for topic in topics() for technique in topic.techniques}
    if name not in known:
        for owner, (_, technique) in known.items():
            if name in (path.stem for path in technique.variants):
                raise ValueError(f"{name} is a variant of {owner}: {command} that")
        near = get_close_matches(name, known, 3, 0.5)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"there is no technique {name!r}; {meant}`python -m companion show` lists them all")
    return known[name]


def example_of(name: str, path: Path | None) -> dict:
    """The recorded example of a technique: in the record at `path`, or the one that README shows.

    Raises ValueError, with what to run, where there is none.
    """
    topic, technique = technique_named(name)
    if path is None:
        found = recorded(topic, name)
        where = " or ".join(f"results/{folder}" for folder in REFERENCES)
    else:
        try:
            examples = load(path)["examples"]
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; name a record that --json wrote") from None
        found, where = next((each for each in examples if each["name"] == name), None), str(path)
    if found is None:
        raise ValueError(f"{where}: {name} is not recorded; python {technique.file} --json PATH records it")
    return found


def show(names: list[str], record: Path | None, study: bool, verbose: bool) -> int:
    """What was recorded of each technique; without names, every technique with its question, by topic."""
    for name in names:
        _show_example(name, record, study, verbose)
    if names:
        return 0
    console = out.make_console()
    for topic in topics():
        out.say(console, topic.file, "bold")
        for technique in topic.techniques:
            out.paragraph(console, f"{technique.name}: {technique.question or technique.error}")
    out.say(console, "python -m companion show TECHNIQUE shows what was recorded of one")
    return 0


def _show_example(name: str, path: Path | None, study: bool, verbose: bool) -> None:
    example, console = example_of(name, path), out.make_console()
    _, technique = technique_named(name)
    out.technique_heading(console, technique)
    older = stale_parts(technique, example)
    _show_part(console, example, verbose, "lesson" in older)
    if study and example.get("study"):
        out.technique_heading(console, technique, ", study")
        _show_part(console, example["study"], verbose, "study" in older)
    elif study:
        unrecorded = f"its study is not recorded; python {technique.file} --study --json PATH records it"
        out.paragraph(console, unrecorded if technique.studies else f"{name} has no study")
    out.say(console, "")
    if technique.wins_when:
        out.paragraph(console, f"wins when: {technique.wins_when}")
    out.paragraph(console, f"lesson: {technique.file}", "dim")
    for label, files in (("variant", technique.variants), ("study", technique.studies)):
        for file in files:
            out.paragraph(console, f"{label}: {file.relative_to(ROOT)}", "dim")


def _show_part(console, example: dict, verbose: bool, older: bool) -> None:
    if example["status"] != "passed":
        out.paragraph(console, f"{example['status']}: {example['reason']}", "red")
    if older:
        changed = "recorded with older code: what it runs, or the check or the timer, has changed since"
        out.paragraph(console, changed, "dim")
    if example["answer"]:
        out.show_answer(console, example["answer"])
    found: dict[int, dict[str, None]] = {}
    for kernel in example["codegen"]:
        found.setdefault(kernel["sm"], {}).update(dict.fromkeys(kernel["found"]))
    errors = [each["error"] for each in example["checks"]] + [r["error"] for t in example["tables"] for r in t["rows"]]
    if errors := [error for error in errors if error is not None]:
        out.show_checks(console, errors)
    if found and verbose:
        code = " | ".join(f"sm_{sm} {', '.join(names)}" for sm, names in sorted(found.items()))
        out.paragraph(console, f"in the code: {code}")
    tables = tables_of(example)
    for key in dict.fromkeys((table.title, table.baseline) for table in tables):
        cases = [table for table in tables if (table.title, table.baseline) == key]
        for one in cases if verbose else [cases]:
            (out.show_comparison if verbose else out.show_cases)(console, one)
    for text in example["conclusions"]:
        out.paragraph(console, text)
    for fact, value in example["facts"].items():
        if isinstance(value, dict) and value and all(isinstance(cells, dict) for cells in value.values()):
            out.show_rows(console, fact, value)  # what the run printed as a table
        elif verbose:
            out.show_fact(console, fact, value)
    out.say(console, "")
    machine = example["machine"]
    versions = f"torch {machine['torch']}" + (f", Triton {machine['triton']}" if machine.get("triton") else "")
    where, commit = machine["gpu"] or machine["host"]["cpu"], (example["commit"] or "unknown")[:12]
    text = f"recorded on {where}, {example['when'][:10]}, {versions}, commit {commit}: {example['command']}"
    out.paragraph(console, text, "dim")
