"""Is what runs on a GPU still the same? The kernels of new records against those of before, by the hash of their PTX.

    python triton_examples.py --study --quick --check-only --json new.json     compiles for sm_80 to sm_120, anywhere
    python -m tests.baseline.ptx new.json ...                    compares; 1 if a kernel changed or is missing
    python -m tests.baseline.ptx --write new.json ...            makes the records the baseline, of their techniques

A kernel may be renamed and moved: its hash stays. Where the hash differs, `same counts` says that it still takes the
same registers, spills, memory and counted instructions (parameters in another order do that, and so does another
constant: look at it), `changed` that it does not. accepted.json says which differences are meant: [{"technique": ...,
"kernel": ..., "sm": 90, "reason": ...}], where a kernel or an architecture that is left out stands for all of them.
Another Triton makes other PTX, so against its records only counts are compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
BASELINE, ACCEPTED = HERE / "ptx.json", HERE / "accepted.json"
COUNTS = ("registers", "spills", "shared", "warps", "found")


def entries(example: dict) -> list[dict]:
    """The kernels of one recorded technique and of its study, each once, in a fixed order."""
    found = [*example.get("codegen", []), *(example.get("study") or {}).get("codegen", [])]
    unique = {}
    for k in found:
        short = {name: k[name] for name in ("kernel", "sm", *COUNTS[:4])} | {"hash": k.get("ptx_hash")}
        short |= {"found": dict(sorted(k["found"].items())), "config": k["config"]}
        short |= {"error": k["error"]} if k["error"] else {}
        unique[json.dumps(short)] = short
    return sorted(unique.values(), key=lambda k: (k["kernel"], k["sm"], k["config"], str(k["hash"]), json.dumps(k)))


def read(paths: list[str]) -> tuple[str, dict[str, list[dict]]]:
    """(Triton's version, technique -> kernels) of records."""
    records = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    examples = [example for record in records for example in record["examples"]]
    versions = {example["machine"]["triton"] for example in examples}
    if len(versions) != 1:
        raise SystemExit(f"these records are of Triton {sorted(map(str, versions))}; one version at a time")
    return versions.pop(), {example["name"]: entries(example) for example in examples}


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


def main(argv: list[str]) -> int:
    version, techniques = read([path for path in argv if path != "--write"])
    kept = json.loads(BASELINE.read_text(encoding="utf-8"))
    if "--write" in argv:
        together = sorted((kept["techniques"] | techniques).items())
        rows = (f'  "{name}": [\n    ' + ",\n    ".join(map(json.dumps, ks)) + "\n  ]" for name, ks in together if ks)
        BASELINE.write_text(f'{{"triton": "{version}", "techniques": {{\n' + ",\n".join(rows) + "\n}}\n")
        return 0
    accepted, wrong = json.loads(ACCEPTED.read_text(encoding="utf-8")), 0
    hashes = version == kept["triton"]
    for name, new in techniques.items():
        for verdict, was, now in compare(kept["techniques"].get(name, []), new, hashes):
            if verdict == "same" or (verdict == "same counts" and not hashes):
                continue
            meant = [
                entry["reason"] for entry in accepted
                if entry["technique"] == name and all(entry.get(x, was[x]) == was[x] for x in ("kernel", "sm"))
            ]  # fmt: skip
            fields = [x for x in ("kernel", *COUNTS) if now and was.get(x) != now.get(x)]
            differing = [f"{x} {was.get(x)} -> {now.get(x)}" for x in fields]
            print(f"{name}: {verdict}: {was['kernel']} sm_{was['sm']} {was['config']}", *differing, *meant, sep="  ")
            wrong += verdict in ("changed", "missing") and not meant
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
