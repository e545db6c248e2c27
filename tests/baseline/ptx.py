"""Is what runs on a GPU still the same? The kernels of new records against those of before, by the hash of their PTX.

    python triton_examples.py --check-only --json new.json       compiles for sm_80 to sm_120, on any machine
    python -m tests.baseline.ptx new.json ...                    compares; 1 if a kernel changed or is missing
    python -m tests.baseline.ptx --write new.json ...            makes the records the baseline, of their techniques

A kernel may be renamed and moved: its hash stays. Where the hash differs, `same counts` says that it still takes the
same registers, spills, memory and counted instructions (parameters in another order do that, and so does another
constant: look at it), `changed` that it does not. accepted.json says which differences are meant: [{"technique": ...,
"kernel": ..., "sm": 90, "reason": ...}], where a kernel or an architecture that is left out stands for all of them.
Another Triton makes other PTX, so against its records only counts are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
BASELINE, ACCEPTED = HERE / "ptx.json", HERE / "accepted.json"
COUNTS = ("registers", "spills", "shared", "warps", "found")


def entries(example: dict) -> list[dict]:
    """The kernels of one recorded technique and of its study, each once, in a fixed order."""
    found = [*example.get("codegen", []), *(example.get("study") or {}).get("codegen", [])]
    short = [
        {"kernel": k["kernel"], "sm": k["sm"], "hash": k.get("ptx_hash")} | {name: k[name] for name in COUNTS[:4]}
        | {"found": dict(sorted(k["found"].items())), "config": k["config"]}
        | ({"error": k["error"]} if k["error"] else {})
        for k in found
    ]  # fmt: skip
    unique = {json.dumps(each): each for each in short}
    return sorted(unique.values(), key=lambda k: (k["kernel"], k["sm"], k["config"], str(k["hash"]), json.dumps(k)))


def read(paths: list[Path]) -> tuple[str, dict[str, list[dict]]]:
    """(Triton's version, topic/technique -> kernels) of records; a topic is where the technique's file is."""
    versions, techniques = set(), {}
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        for example in record["examples"]:
            versions.add((example.get("machine") or record["machine"])["triton"])
            techniques[example["name"]] = entries(example)
    if len(versions) != 1:
        raise SystemExit(f"these records are of Triton {sorted(map(str, versions))}; one version at a time")
    return versions.pop(), techniques


def compare(old: list[dict], new: list[dict], hashes: bool = True) -> list[tuple[str, dict, dict | None]]:
    """(verdict, kernel of before, kernel of now or None) for each kernel of before.

    Each kernel of now answers for one of before at most, and the most alike find each other first.
    """
    steps = [
        ("same", lambda k: hashes and (k["sm"], k["hash"] or "does not compile")),
        ("same counts", lambda k: json.dumps([k["sm"], *(k.get(name) for name in COUNTS)])),
        ("changed", lambda k: (k["sm"], k["kernel"], k["config"])),
        ("changed", lambda k: (k["sm"], k["kernel"])),
    ]
    todo, left, verdicts = list(old), list(new), []
    for verdict, key in steps:
        for kernel in list(todo):
            match = next((k for k in left if key(k) and key(k) == key(kernel)), None)
            if match is not None:
                todo.remove(kernel)
                left.remove(match)
                verdicts.append((verdict, kernel, match))
    return verdicts + [("missing", kernel, None) for kernel in todo]


def reason(accepted: list[dict], technique: str, kernel: dict) -> str | None:
    """Why a difference is meant, if somebody said so."""
    for entry in accepted:
        if entry["technique"] == technique and all(entry.get(x, kernel[x]) == kernel[x] for x in ("kernel", "sm")):
            return entry["reason"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.baseline.ptx", description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="make these records the baseline of their techniques")
    options = parser.parse_args(argv)
    version, techniques = read(options.records)
    kept = json.loads(BASELINE.read_text(encoding="utf-8"))
    if options.write:
        rows = (
            f'  "{name}": [\n    ' + ",\n    ".join(map(json.dumps, kernels)) + "\n  ]"
            for name, kernels in sorted((kept["techniques"] | techniques).items())
            if kernels
        )
        BASELINE.write_text(f'{{"triton": "{version}", "techniques": {{\n' + ",\n".join(rows) + "\n}}\n")
        return 0
    accepted = json.loads(ACCEPTED.read_text(encoding="utf-8"))
    hashes, wrong = version == kept["triton"], 0
    if not hashes:
        print(f"Triton {version}, and the baseline is of {kept['triton']}: only counts are compared")
    for name, new in techniques.items():
        if not (old := kept["techniques"].get(name, [])) and not new:
            continue
        verdicts = compare(old, new, hashes)
        counted = Counter(verdict for verdict, _, _ in verdicts)
        counted["new"] = len(new) - sum(now is not None for _, _, now in verdicts)
        print(f"{name:28}" + ", ".join(f"{n} {what}" for what, n in counted.items() if n))
        for verdict, was, now in verdicts:
            if verdict == "same" or (verdict == "same counts" and not hashes):
                continue
            why = reason(accepted, name, was)
            differing = [x for x in ("kernel", "hash", *COUNTS) if now and was.get(x) != now.get(x)]
            details = [f"{x} {was.get(x)} -> {now.get(x)}" for x in differing] + [f"accepted: {why}"] * bool(why)
            print(f"    {verdict}: {was['kernel']} sm_{was['sm']} {was['config']}", *details, sep="  ")
            wrong += verdict != "same counts" and why is None
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
