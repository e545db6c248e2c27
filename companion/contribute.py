"""`python -m companion contribute RECORD ...`: records of a machine, checked and put into results/<machine>/.

A record counts when a reader of this repository could have made it: of today's code, at full sizes, with every
technique of its topic and its study passed or skipped for a reason, on one machine. Paths of home folders, and the
names of this host and user, are taken out of what it says in words.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from harness.catalog import ROOT, Topic, topics
from harness.record import ExampleRecord, as_run, load

from companion.claims import claims
from companion.readme import is_stale, readme

_NO_PART_OF_A_NAME = {"nvidia", "geforce", "gpu", "corporation"}
_MEMORY = re.compile(r"\d+gb|hbm\w*")
_HOMES = (
    rf"(?<![\w.])(?:(?:/[\w.-]+)*/(?:home|homes|Users)/[^/\s\"']+|(?:{re.escape(str(Path.home()))}|/root)(?![\w.-]))"
)
_ONE_MACHINE = ("gpu", "capability", "torch", "triton", "torch_xla")
_WORDS = ("command", "reason", "conclusions", "facts")  # of an example: the rest is numbers, and names of code
_FIELDS = {field.name for field in fields(ExampleRecord)} - {"study"}
_KINDS = {"machine": dict, "facts": dict, "tables": list, "codegen": list, "peers": list, "conclusions": list}


def folder_name(gpu: str | None) -> str:
    """The folder of a GPU: "NVIDIA H100 80GB HBM3" is h100, "NVIDIA GeForce RTX 4090" rtx-4090; without one, cpu.

    An A100 keeps the size of its memory, which has two speeds. Raises ValueError for a name of which nothing is left.
    """
    words = [word for word in re.split(r"[^a-z0-9]+", (gpu or "cpu").lower()) if word not in {"", *_NO_PART_OF_A_NAME}]
    kept = [word for word in words if "a100" in words or not _MEMORY.fullmatch(word)]
    if not kept:
        raise ValueError(f"no folder can be named after the GPU {gpu!r}; name one with --folder")
    return "-".join(kept)


def _parts(example: dict) -> dict[str, dict]:
    """What was run under an example's name: the lesson, and its study."""
    study = {f"the study of {example['name']}": example["study"]} if example.get("study") else {}
    return {example["name"]: example} | study


def wrong_with(record: dict, topic: Topic, root: Path = ROOT) -> list[str]:
    """What keeps a record of this topic from being contributed, one line each, with what to do about it."""
    known, examples = {technique.name: technique for technique in topic.techniques}, record["examples"]
    for example in examples:
        for what, part in _parts(example).items():
            if lacking := _FIELDS - part.keys():
                return [f"{what}: lacks {', '.join(sorted(lacking))}; expected what --json writes"]
            if wrong := [name for name, kind in _KINDS.items() if not isinstance(part[name], kind)]:
                return [f"{what}: its {', '.join(wrong)} cannot be read; expected what --json writes"]
    names = [example["name"] for example in examples]
    found = [f"{record['running']}: the run ended in it; run it again"] if record["running"] else []
    if strange := {name for name in names if name not in known or names.count(name) > 1}:
        found.append(f"{', '.join(sorted(strange))}: no technique of {topic.name}, or there twice; run on today's main")
    if missing := [name for name in known if name not in names]:
        again = f"python {topic.file} {' '.join(missing)} --study --json PATH"
        found.append(f"{', '.join(missing)}: not recorded; {again}")
    for example in examples:
        name = example["name"]
        if name in known and known[name].studies and not example.get("study") and example["status"] == "passed":
            found.append(f"{name}: without its study; run it with --study")
        for what, part in _parts(example).items():
            if part["status"] == "skipped" and part["reason"]:
                continue
            if part["status"] != "passed":
                found.append(f"{what}: {part['status']}: {part['reason']}; run it again, or report it as an issue")
            elif part["sizes"] != "full" and record["gpu"]:
                found.append(f"{what}: at {part['sizes']} sizes; run it with --full")
            if part["dirty"] or not part["commit"]:
                found.append(f"{what}: of a checkout with local changes, or of none; run it on a commit of main")
        if example["status"] == "passed" and name in known and is_stale(known[name], example, root):
            found.append(f"{name}: of other code than this checkout's; run it again here")
    rows = [row for each in examples for table in each["tables"] for row in table["rows"]]
    if not any(row.get("ms") for row in rows):
        found.append("nothing was timed in it; kernels are timed on a GPU only")
    machines = [part["machine"] for example in examples for part in _parts(example).values()]
    if any(machine.get(name) != machines[0].get(name) for machine in machines for name in _ONE_MACHINE):
        found.append("it mixes GPUs or versions of torch and Triton; record them into a file each")
    elif machines and machines[0].get("gpu") != record["gpu"]:
        found.append(f"it says {record['gpu']}, and its examples {machines[0].get('gpu')}; expected what --json writes")
    return found


def anonymous(record: dict, names: dict[str, str]) -> tuple[dict, int]:
    """The record without paths of home folders and without `names` ({"myhost": "host"}), and how many there were.

    A name that is also a word of the record's tables, as torch is, stays.
    """
    count = 0
    tables = json.dumps([[each["name"], each["tables"]] for each in record["examples"]]).lower()
    names = {name: instead for name, instead in names.items() if name.lower() not in re.findall(r"\w+", tables)}

    def cleaned(value):
        nonlocal count
        if isinstance(value, dict):
            return {cleaned(key): cleaned(each) for key, each in value.items()}
        if isinstance(value, list):
            return [cleaned(each) for each in value]
        if not isinstance(value, str):
            return value
        value, homes = re.subn(_HOMES, "~", value.replace(f"{ROOT}/", ""))
        count += homes
        for name, instead in names.items():
            value, named = re.subn(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", instead, value, flags=re.I)
            count += named
        return value

    def of_example(part: dict) -> dict:
        held = part | {word: cleaned(part[word]) for word in _WORDS}
        held["codegen"] = [kernel | {"error": cleaned(kernel.get("error"))} for kernel in part["codegen"]]
        return held | ({"study": of_example(part["study"])} if part.get("study") else {})

    return record | {"examples": [of_example(example) for example in record["examples"]]}, count


def names_here() -> dict[str, str]:
    """The names of this host and user, and what stands in their place; under 4 letters they mean too much else."""
    host = socket.gethostname()
    names = {host: "host", host.split(".")[0]: "host"}
    with suppress(KeyError, OSError):  # of a user without a name, as in a container
        names[getpass.getuser()] = "user"
    return {name: instead for name, instead in names.items() if len(name) >= 4 and name not in ("root", "user")}


def _place(record: dict, folder: str | None, taken: dict[Path, dict], root: Path) -> Path:
    """results/<machine>; of N GPUs results/<machine>-xN; of a GPU that has a folder with another Triton,
    results/<machine>-triton-X.Y.

    Raises ValueError for a folder that holds another GPU. `taken` are the records that go with this one.
    """
    machine = as_run(record)["machine"]
    several = f"-x{machine['ranks']}" if record["gpu"] and machine.get("ranks", 1) > 1 else ""
    name, triton = folder or folder_name(record["gpu"]) + several, machine.get("triton")

    def held(name: str) -> list[dict]:
        place = root / "results" / name
        others = [other for path, other in taken.items() if path.parent == place]
        return others + [load(path) for path in sorted(place.glob("*.json"))]

    if triton and not folder and any(as_run(each)["machine"].get("triton") != triton for each in held(name)):
        name = f"{name}-triton-{'.'.join(triton.split('.')[:2])}"
    if others := {str(each["gpu"]) for each in held(name)} - {str(record["gpu"])}:
        raise ValueError(f"results/{name} holds records of {', '.join(sorted(others))}; name another --folder")
    return root / "results" / name / f"{record['topic']}.json"


def contribute(records: list[Path], folder: str | None = None, force: bool = False, root: Path = ROOT) -> int:
    """Check every record, then write all of them into results/ and renew the pages; 1 when one cannot be taken.

    Raises ValueError for what is no record, a topic that is not known or is there twice, a file that exists (without
    `force`), and a folder that cannot be written.
    """
    if folder is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", folder):
        raise ValueError(f"--folder {folder!r}: use lower-case letters, digits, - and . as in rtx-4090")
    known = {topic.name: topic for topic in topics(root)}
    ready, bad = {}, 0
    for path in records:
        try:
            record = load(path)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; name a record that --json wrote") from None
        if record["topic"] not in known:
            raise ValueError(f"{path}: of {record['topic']}, which is no topic; one is: {', '.join(known)}")
        wrong = wrong_with(record, known[record["topic"]], root)
        bad += len(wrong)
        for line in wrong:
            print(f"{path}: {line}")
        if not wrong:
            target = _place(record, folder, ready, root)
            if target in ready:
                raise ValueError(f"{path}: another record named here is of the same topic and machine; name one")
            if target.exists() and not force and target.resolve() != path.resolve():
                raise ValueError(f"{target.relative_to(root)} exists; replace it with --force, or name a --folder")
            ready[target] = record
    if bad:
        print(f"{bad} of these must be mended first; nothing was written")
        return 1
    for target, record in ready.items():
        record, names = anonymous(record, names_here())
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{target}: {error.strerror}; make results/ a folder that you may write") from None
        taken = f"; {names} paths and names of this machine were taken out" if names else ""
        print(f"{target.relative_to(root)}: {len(record['examples'])} techniques{taken}")
    readme(check=False, stale=False, root=root)
    claims(check=False, root=root)
    folders = sorted({target.parent.relative_to(root) for target in ready})
    add = " ".join(map(str, folders))
    print(
        f"now look at git diff, then: git switch -c record-{folders[0].name} && "
        f"git add {add} README.md CLAIMS.md docs && git commit && git push -u origin HEAD, and open a pull request"
    )
    return 0
