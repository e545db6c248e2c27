"""The record of a topic on one kind of machine, schema 2: what `--json` writes, and what README and companion read.

    {"schema": 2, "topic": "triton_examples", "gpu": "NVIDIA H200", "running": null, "examples": [EXAMPLE, ...]}

Examples are recorded one by one, each with everything that describes its run:

    name, status (passed, failed, skipped), reason, seconds, when, command, seed, sizes (full, quick, interpreted)
    commit, dirty       of the checkout;  sources  a hash of the code that had a part in it (harness.sources)
    peers               files of other techniques whose kernels stand in its tables, which are among the sources
    machine             GPU, its limits, driver, torch, triton, python; host {cpu, cores}; ceilings, as measured then
    question, answer    of its docstring, and of this run; answer is null where nothing was timed
    conclusions         the sentences that the run drew from its numbers
    checks, tables, codegen, facts, profiled    what was measured
    study               an EXAMPLE of its own, or absent

A run replaces the examples that it ran and keeps the others; without `--study` it keeps a study too. The file is
written after each technique, in one step; while one runs, "running" names it.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from harness.catalog import ROOT

SCHEMA = 2
# The folders of results/ in which a recorded answer is looked for.
REFERENCES = ("h200", "h200-x2", "cpu")


@dataclass
class ExampleRecord:
    """What one technique, or its study, did; the shape of one entry of "examples"."""

    name: str
    status: str = "running"
    reason: str | None = None
    seconds: float = 0.0
    when: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    command: str = ""
    seed: int = 0
    sizes: str = ""
    commit: str | None = None
    dirty: bool | None = None
    sources: str | None = None
    peers: list[str] = field(default_factory=list)
    machine: dict = field(default_factory=dict)
    question: str = ""
    answer: str | None = None
    conclusions: list[str] = field(default_factory=list)
    checks: list[dict] = field(default_factory=list)
    tables: list[dict] = field(default_factory=list)
    codegen: list[dict] = field(default_factory=list)
    facts: dict = field(default_factory=dict)
    profiled: dict[str, dict] = field(default_factory=dict)  # with --profile: the work of each named call
    study: ExampleRecord | None = None

    def as_dict(self) -> dict:
        held = dict(vars(self))
        study = held.pop("study")
        return held | ({"study": study.as_dict()} if study else {})


class Record:
    """The record of a topic that a run writes to: `path` None keeps it in memory. Raises ValueError when the file holds
    something else than a record of this topic on this kind of machine."""

    def __init__(self, path: Path | None, topic: str, gpu: str | None) -> None:
        self.path, self.topic, self.gpu = path, topic, gpu
        self.running: str | None = None
        self.examples: list[dict] = []
        if path is not None and path.is_file() and path.stat().st_size:
            held = load(path)
            if (held["topic"], held["gpu"]) != (topic, gpu):
                have, wanted = f"{held['topic']} on {held['gpu'] or 'a CPU'}", f"{topic} on {gpu or 'a CPU'}"
                raise ValueError(f"{path}: holds {have}, and this run is {wanted}; choose another file")
            self.examples = held["examples"]

    def put(self, example: ExampleRecord, order: list[str] | None = None) -> None:
        """Replace the example of that name, but for a study that this run has not made; `order` are names, as told."""
        held = {each["name"]: each for each in self.examples}
        new, old = example.as_dict(), held.pop(example.name, {})
        if "study" in old:
            new.setdefault("study", old["study"])
        self.examples = [*held.values(), new]
        if order:
            self.examples.sort(key=lambda each: order.index(each["name"]) if each["name"] in order else len(order))

    def save(self) -> None:
        if self.path is None:
            return
        held = {"schema": SCHEMA, **{name: getattr(self, name) for name in ("topic", "gpu", "running", "examples")}}
        text = json.dumps(held, indent=1, allow_nan=False, default=str) + "\n"
        if self.path.exists() and not self.path.is_file():  # a pipe or a device is written to, not replaced
            self.path.write_text(text, encoding="utf-8")
            return
        partial = self.path.with_name(f".{self.path.name}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, self.path)
        except OSError:  # a file that may be written in a folder that may not
            self.path.write_text(text, encoding="utf-8")


def load(path: Path) -> dict:
    """A record as it is. Raises ValueError when the file is no record of this schema."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON, or of UTF-8
        raise ValueError(f"{path}: not JSON ({error}); expected what --json writes") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a record of schema {SCHEMA}; expected what --json writes")
    kinds = {"topic": str, "gpu": (str, type(None)), "running": (str, type(None)), "examples": list}
    wrong = [name for name, kind in kinds.items() if name not in record or not isinstance(record[name], kind)]
    if wrong or not all(isinstance(example, dict) and "name" in example for example in record["examples"]):
        raise ValueError(f"{path}: its {', '.join(wrong) or 'examples'} cannot be read; expected what --json writes")
    return record


def as_run(record: dict) -> dict:
    """A record with what its newest example says of machine, commit and command at its top: of one run, that run. The
    technique in which a run was killed is its last example, "running"."""
    examples = record.get("examples") or []
    newest = max(examples or [{}], key=lambda example: example.get("when", ""))
    named = ("machine", "when", "commit", "dirty", "command", "sizes", "seed")
    run = {name: newest[name] for name in named if name in newest}
    if "machine" in run:
        run["machine"] = run["machine"] | run["machine"].get("host", {})
    if name := record.get("running"):
        rest = [example for example in examples if example["name"] != name]
        run["examples"] = [*rest, ExampleRecord(name, when="").as_dict()]
    return record | run


def reference_files(root: Path = ROOT) -> list[Path]:
    """The records that README and the page show: of two of a topic the one of the first of REFERENCES."""
    found: dict[str, Path] = {}
    for path in (path for name in REFERENCES for path in sorted((root / "results" / name).glob("*.json"))):
        found.setdefault(path.name, path)
    return list(found.values())


def gpus(machine: dict) -> str | None:
    """The GPU of a recorded machine by its name, with their number where its ranks had one each; None for a CPU."""
    several = f"{machine['ranks']} " if machine.get("ranks", 1) > 1 else ""
    return machine["gpu"] and f"{several}{machine['gpu']}"


def recorded(topic: str, name: str, root: Path = ROOT) -> dict | None:
    """The example of that name that README shows: of the first of REFERENCES that has recorded it; None of none."""
    for machine in REFERENCES:
        path = root / "results" / machine / f"{topic}.json"
        examples = load(path)["examples"] if path.is_file() else []
        if found := next((example for example in examples if example["name"] == name), None):
            return found
    return None


def recorded_answer(topic: str, name: str) -> str | None:
    """`recorded on an NVIDIA H200, 2026-11-22: ...`, or None where no answer was recorded."""
    example = recorded(topic, name)
    if not (example and example["answer"]):
        return None
    machine = example["machine"]
    where = gpus(machine) or f"{machine['host']['cores']} cores of a CPU"
    where = f"an {where}" if where == machine["gpu"] else where
    return f"recorded on {where}, {example['when'][:10]}: {example['answer']}"


def git_state() -> tuple[str | None, bool | None]:
    """(commit, dirty) of this checkout. Where git does not know it, GIT_COMMIT from the environment, dirty unknown."""
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    if (ROOT / ".git").exists():
        with suppress(OSError, subprocess.CalledProcessError):
            state = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
            return state.removesuffix("-dirty"), state.endswith("-dirty")
    return os.environ.get("GIT_COMMIT"), None
