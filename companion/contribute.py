"""`python -m companion contribute RECORD ...`: records of a machine, checked and put into results/<machine>/.

A record counts when a reader of this repository could have made it: of today's code, at full sizes, with every
technique of its topic passed or skipped for a reason, on one machine. Paths of the reader's home, and the names of the
host and of the user, are taken out of it.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
from contextlib import suppress
from pathlib import Path

from harness.catalog import ROOT, Topic, topics
from harness.record import as_run, load

from companion.readme import is_stale, readme

_NO_PART_OF_A_NAME = {"nvidia", "geforce", "gpu", "corporation"}
_MEMORY = re.compile(r"\d+gb|hbm\w*")
_HOME = re.compile(r"(?<![\w.])(?:/(?:home|Users)/[^/\s\"']+|/root)(?=/)")
_SAME = ("gpu", "capability", "torch", "triton", "torch_xla")  # of the machine: one folder holds one of each


def folder_name(gpu: str | None) -> str:
    """The folder of a GPU: "NVIDIA H100 80GB HBM3" is h100, "NVIDIA GeForce RTX 4090" rtx-4090; without one, cpu."""
    words = [word for word in re.split(r"[^a-z0-9]+", (gpu or "cpu").lower()) if word]
    return "-".join(word for word in words if word not in _NO_PART_OF_A_NAME and not _MEMORY.fullmatch(word))


def wrong_with(record: dict, topic: Topic, root: Path = ROOT) -> list[str]:
    """What keeps a record of this topic from being contributed, one line each, with what to do about it."""
    again = f"python {topic.file}"
    known = {technique.name: technique for technique in topic.techniques}
    recorded = {example["name"]: example for example in record["examples"]}
    found = [f"{record['running']}: the run ended in it; run it again"] if record["running"] else []
    if unknown := recorded.keys() - known.keys():
        found.append(f"{', '.join(sorted(unknown))}: no technique of {topic.name}; run on today's main")
    if missing := [name for name in known if name not in recorded]:
        found.append(f"{', '.join(missing)}: not recorded; {again} {' '.join(missing)} --study --json PATH")
    for name, example in recorded.items():
        for what, part in ((name, example), (f"the study of {name}", example.get("study"))):
            if part and part["status"] not in ("passed", "skipped"):
                found.append(f"{what}: {part['status']}: {part['reason']}; run it again, or report it as an issue")
        if name not in known or example["status"] != "passed":
            continue
        if example["sizes"] != "full" and record["gpu"]:
            found.append(f"{name}: at {example['sizes']} sizes; run it with --full")
        if example["dirty"] or not example["commit"]:
            found.append(f"{name}: of a checkout with local changes, or of none; run it on a commit of main")
        if is_stale(known[name], example, root):
            found.append(f"{name}: of other code than this checkout's; run it again here")
    if not any(row["ms"] for each in record["examples"] for table in each["tables"] for row in table["rows"]):
        found.append("nothing was timed in it; kernels are timed on a GPU only")
    machines = [[example["machine"].get(name) for name in _SAME] for example in record["examples"]]
    if any(machine != machines[0] for machine in machines):
        found.append("it mixes GPUs or versions of torch and Triton; record them into a file each")
    return found


def anonymous(record: dict, names: dict[str, str]) -> tuple[dict, int]:
    """The record without paths of a home folder and without `names` ({"myhost": "host"}), and how many there were."""
    count = 0

    def cleaned(value):
        nonlocal count
        if isinstance(value, dict):
            return {key: cleaned(each) for key, each in value.items()}
        if isinstance(value, list):
            return [cleaned(each) for each in value]
        if not isinstance(value, str):
            return value
        value, homes = _HOME.subn("~", value.replace(f"{ROOT}/", ""))
        count += homes
        for name, instead in names.items():
            value, named = re.subn(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, value)
            count += named
        return value

    return cleaned(record), count


def names_here() -> dict[str, str]:
    """The names of this host and user, short and long, and what stands in their place; names of under 4 letters mean
    something else too often."""
    host = socket.gethostname()
    names = {host: "host", host.split(".")[0]: "host"}
    with suppress(KeyError, OSError):  # of a user without a name, as in a container
        names[getpass.getuser()] = "user"
    return {name: instead for name, instead in names.items() if len(name) >= 4 and name not in ("root", "user")}


def _place(record: dict, folder: str | None, root: Path) -> Path:
    """results/<machine>; of a GPU that has a folder with another Triton, results/<machine>-triton-X.Y."""
    newest = as_run(record)["machine"]
    name = folder or folder_name(record["gpu"])
    for path in [] if folder else sorted((root / "results" / name).glob("*.json")):
        if as_run(load(path))["machine"].get("triton") != newest.get("triton"):
            name = f"{name}-triton-{'.'.join(newest['triton'].split('.')[:2])}"
            break
    return root / "results" / name / f"{record['topic']}.json"


def contribute(paths: list[Path], folder: str | None = None, force: bool = False, root: Path = ROOT) -> int:
    """Check every record, then write all of them into results/ and renew the tables; 1 when one cannot be taken.

    Raises ValueError for what is no record, a topic that is not known, or a file that exists (without `force`).
    """
    if folder is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", folder):
        raise ValueError(f"--folder {folder!r}: use lower-case letters, digits, - and . as in rtx-4090")
    known = {topic.name: topic for topic in topics(root)}
    ready, bad = {}, 0
    for path in paths:
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
            target = _place(record, folder, root)
            if target.exists() and not force and target.resolve() != path.resolve():
                raise ValueError(f"{target.relative_to(root)} exists; replace it with --force, or name a --folder")
            ready[target] = anonymous(record, names_here())
    if bad:
        print(f"{bad} of these must be mended first; nothing was written")
        return 1
    for target, (record, names) in ready.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        taken = f"; {names} paths and names of this machine were taken out" if names else ""
        print(f"{target.relative_to(root)}: {len(record['examples'])} techniques{taken}")
    if root == ROOT:
        readme(check=False, stale=False)
    folders = " ".join(sorted({str(target.parent.relative_to(root)) for target in ready}))
    print(f"now: git switch -c record && git add {folders} README.md docs && git commit && git push")
    return 0
