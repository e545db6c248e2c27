"""How much of examples/ and harness/ the tests run, lines and branches, beside what they ran before.

    python -m pytest -n 2 --dist worksteal -m "not slow" --cov --cov-config=coverage.rc --cov-report=    with pytest-cov
    python -m coverage combine --append --rcfile=coverage.rc && python -m coverage json --rcfile=coverage.rc -o now.json
    python -m tests.baseline.cover now.json              the shares of now against coverage.json; 1 if a folder's fell
    python -m tests.baseline.cover --write now.json      makes them the baseline

coverage.rc, which also counts what processes of the tests run; there is one data file for each of them:

    [run]
    branch = True
    parallel = True
    source = examples, harness        (and studies, companion, compile_inspect, once there are)
    patch = subprocess, _exit
    data_file = FOLDER/.coverage

A topic's studies count with the topic. Lines of kernels that only a GPU runs count as not covered, and so does the
topic on XLA where torch_xla is not installed. Under coverage a start takes longer than the 0.3 s that the tests of
--list and of `harness compare` allow; run in the background, where Ctrl-C is ignored, the tests of Ctrl-C fail.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

KEPT = Path(__file__).parent / "coverage.json"


def folder_of(path: str) -> str:
    first, *rest = Path(path).parts[:-1]
    return "/".join(["examples" if first == "studies" else first, *rest[:1]])


def shares(report: dict) -> dict[str, dict[str, dict]]:
    """By file and by folder: how many lines and branches there are, how many are covered, and the share."""
    counts: dict[str, dict[str, list[int]]] = {"folders": defaultdict(lambda: [0, 0]), "files": {}}
    for path, entry in sorted(report["files"].items()):
        s = entry["summary"]
        own = [s["covered_lines"] + s["covered_branches"], s["num_statements"] + s["num_branches"]]
        counts["files"][path] = own
        for name in (folder_of(path), "all"):
            counts["folders"][name] = [a + b for a, b in zip(counts["folders"][name], own, strict=True)]
    return {
        kind: {name: {"covered": a, "of": b, "share": round(a / b, 4) if b else 1.0} for name, (a, b) in each.items()}
        for kind, each in counts.items()
    }


def main(argv: list[str]) -> int:
    *options, path = argv
    now = shares(json.loads(Path(path).read_text(encoding="utf-8")))
    if options == ["--write"]:
        text = ",\n ".join(
            f'"{kind}": {{\n  ' + ",\n  ".join(f'"{name}": {json.dumps(each)}' for name, each in rows.items()) + "\n }"
            for kind, rows in now.items()
        )
        comment = (
            "lines and branches that the tests run without a GPU; tests/baseline/cover.py says how to make it again"
        )
        KEPT.write_text(f'{{"comment": "{comment}",\n {text}\n}}\n', encoding="utf-8")
        return 0
    before, fell = json.loads(KEPT.read_text(encoding="utf-8")), 0
    for name, old in before["folders"].items():
        new = now["folders"].get(name, {"share": 0.0})
        fell += new["share"] < old["share"] - 0.002
        print(f"{name:24} {old['share']:7.1%} {new['share']:7.1%}{'  fell' * (new['share'] < old['share'] - 0.002)}")
    return int(fell > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
