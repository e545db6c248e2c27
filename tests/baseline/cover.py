"""How much of examples/ and harness/ the tests run, lines and branches, beside what they ran before.

    python -m pytest -n 2 --dist worksteal -m "not slow" --cov --cov-config=coverage.rc --cov-report=    with pytest-cov
    python -m coverage combine --append --rcfile=coverage.rc && python -m coverage json --rcfile=coverage.rc -o now.json
    python -m tests.baseline.cover now.json              the shares of now against coverage.json; 1 if a folder's fell
    python -m tests.baseline.cover now.json --write      makes them the baseline

coverage.rc: [run] branch = True, parallel = True, source = examples, harness, studies, patch = subprocess, _exit,
data_file = FOLDER/.coverage. Kernels that only a GPU runs count as not covered; most of a study is run by the slow
tests and by `make run-all`.
Under coverage the tests that allow a start 0.3 s fail, and in the background those of Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

KEPT = Path(__file__).parent / "coverage.json"


def shares(report: dict) -> dict[str, float]:
    """By folder: the share of its lines and branches that is covered."""
    covered, there = Counter(), Counter()
    for path, entry in report["files"].items():
        first, *rest = Path(path).parts[:-1]
        for name in ("/".join([first, *rest[:1]]), "all"):
            covered[name] += entry["summary"]["covered_lines"] + entry["summary"]["covered_branches"]
            there[name] += entry["summary"]["num_statements"] + entry["summary"]["num_branches"]
    return {name: covered[name] / count for name, count in there.items() if count}


def main(path: str, *options: str) -> int:
    now, before = (json.loads(Path(each).read_text(encoding="utf-8")) for each in (path, KEPT))
    now, fell = shares(now), 0
    if options == ("--write",):
        folders = {name: {"share": round(share, 4)} for name, share in now.items()}
        KEPT.write_text(json.dumps(before | {"folders": folders}, indent=1) + "\n", encoding="utf-8")
        return 0
    for name, old in before["folders"].items():
        less = now.get(name, 0.0) < old["share"] - 0.002
        fell += less
        print(f"{name:24} {old['share']:7.1%} {now.get(name, 0.0):7.1%}{'  fell' * less}")
    return int(fell > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
