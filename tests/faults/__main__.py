"""Plant each fault in a copy of the tree and record what catches it: the technique's demo, its tests, or nothing.

    python -m tests.faults --jobs 2 --json out.json              all of them, 75 minutes on two cores of one's own
    python -m tests.faults --only triton/softmax --planted       one technique, or a topic: --only triton
    python -m tests.faults --compare --json out.json             the record against caught.json: 1 if it is worse

Both halves run even where the first catches the fault: what the tests catch is the question. A half that takes longer
than its time counts as catching it (a lost signal hangs). What was done is in the record after every fault, and a
second run with the same --json does the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

from . import ROOT, Fault, NotFound, all_planted, planted
from .mutants import sampled

CAUGHT = Path(__file__).parent / "caught.json"
SLOW_TOPICS = ("compiler", "xla")  # torch.compile runs for real
TIMEOUT_S = {True: 900, False: 300}
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "out")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_WORKER_START": "fork",
}  # fmt: skip


def tests_of(fault: Fault) -> list[str]:
    """The test files that are to catch a fault: its own, or those that are named after its technique."""
    if fault.tests:
        return list(fault.tests)
    topic, name = fault.technique.split("/")
    folders = ["tests/harness"] if topic == "harness" else [f"tests/examples/{topic}", f"tests/studies/{topic}"]
    return [
        str(path.relative_to(ROOT))
        for folder in folders
        for pattern in (f"test_{name}.py", f"test_{name}_*.py")
        for path in sorted((ROOT / folder).glob(pattern))
    ]


class Runner:
    """Python processes in a copy of the tree."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.server = tree, None
        self.environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(tree)}
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            self.environment[name] = str(tree.parent / name.lower())
        if shutil.which("nvidia-smi") is None:
            self.server = self._start("tests.faults.warm", stdout=subprocess.PIPE, stdin=subprocess.PIPE)

    def _start(self, *argv: str, **pipes) -> subprocess.Popen:
        options = {"cwd": self.tree, "env": self.environment, "text": True, "start_new_session": True}
        return subprocess.Popen([sys.executable, "-m", *argv], **options, **pipes)

    def run(self, *argv: str, limit: float) -> tuple[int | None, str]:
        """(exit status, output) of `python -m argv`; None when it took too long."""
        if self.server is not None:
            self.server.stdin.write(json.dumps({"argv": argv, "limit": limit}) + "\n")
            self.server.stdin.flush()
            answer = json.loads(self.server.stdout.readline())
            return answer["status"], answer["output"]
        process = self._start(*argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = process.communicate(timeout=limit)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, ""

    def close(self) -> None:
        if self.server is not None:
            self.server.stdin.close()
            self.server.wait()


def _first(output: str, pattern: str) -> str:
    lines = [line for line in output.splitlines() if re.match(pattern, line)] or output.splitlines()[-1:]
    return re.sub(r"0x[0-9a-f]{6,}|/tmp/\S*/", "", lines[0])[:200] if lines else ""


def demo(fault: Fault, runner: Runner, limit: float) -> dict:
    if fault.technique.startswith("harness/"):
        return {"demo": None}
    status, output = runner.run("tests.faults.demo", fault.technique, limit=limit)
    if status == 0:
        return {"demo": None if "SKIPPED  " in output else False}
    by = "hang" if status is None else _first(output, "FAILED  |FAILED: |ERROR|[A-Z]\\w+Error")
    return {"demo": True, "demo_by": by}


def tests(fault: Fault, runner: Runner, limit: float) -> dict:
    files = tests_of(fault)
    if not files:
        return {"tests": None}
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=line", "--no-header"]
    status, output = runner.run("pytest", *options, *files, limit=limit)
    if status in (0, 5):
        return {"tests": False}
    if status == 4:
        return {"tests": None, "by": f"pytest does not find {' '.join(files)}"}
    crashed = f"crashed: signal {-status}" if status is not None and status < 0 else ""
    return {"tests": True, "by": "hang" if status is None else crashed or _first(output, "FAILED |ERROR ")}


def judge(fault: Fault, runner: Runner) -> dict:
    """What catches the fault, in the runner's tree, which is afterwards as it was before."""
    tree, started = runner.tree, time.perf_counter()
    result = {"id": fault.id, "kind": "mutant" if fault.nth is not None else "planted"}
    if fault.technique.startswith("xla/") and find_spec("torch_xla") is None:
        return result | {"demo": None, "tests": None, "by": "not run: needs torch_xla"}
    try:
        path, text = planted(fault, tree)
    except NotFound as error:
        return result | {"demo": None, "tests": None, "by": str(error)}
    result["file"] = str(path.relative_to(tree))
    before = path.read_text(encoding="utf-8")
    limit = TIMEOUT_S[fault.technique.startswith(SLOW_TOPICS)]
    path.write_text(text, encoding="utf-8")
    try:
        result |= demo(fault, runner, limit) | tests(fault, runner, limit)
    finally:
        path.write_text(before, encoding="utf-8")
    return result | {"seconds": round(time.perf_counter() - started, 1)}


def summary(results: list[dict]) -> str:
    ran = [r for r in results if r["tests"] is not None or r["demo"] is not None]
    parts = []
    for kind in ("planted", "mutant"):
        of_kind = [r for r in ran if r["kind"] == kind]
        by_tests, by_demo = (sum(bool(r[half]) for r in of_kind) for half in ("tests", "demo"))
        neither = sum(not r["tests"] and not r["demo"] for r in of_kind)
        parts.append(f"{len(of_kind)} {kind}: tests {by_tests}, demo {by_demo}, neither {neither}")
    return "; ".join(parts) + f"; {len(results) - len(ran)} not run"


def compare(now: list[dict], before: list[dict]) -> int:
    """Print what was caught before and is no longer; 1 if there is any."""
    results, lost = {result["id"]: result for result in now}, 0
    for old in before:
        new = results.get(old["id"])
        for half in ("tests", "demo"):
            if old[half] and new is not None and not new[half]:
                still = " (the other half does)" if new["tests"] or new["demo"] else ""
                reason = f"; {new.get('by')}" if new[half] is None else ""
                print(f"no longer caught by {half}{still}: {old['id']}{reason}")
                lost += half == "tests"
    absent = [old["id"] for old in before if old["id"] not in results]
    print(f"not in this record: {len(absent)}", *absent[:10], sep="\n    ")
    print("before:", summary(before), "\nnow:   ", summary(now))
    return int(lost > 0)


def chosen(options: argparse.Namespace) -> list[Fault]:
    faults = all_planted() + ([] if options.planted else sampled())
    wanted = [name.strip("/") for name in options.only]
    return [f for f in faults if not wanted or any(f.technique == w or f.technique.startswith(f"{w}/") for w in wanted)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="TECHNIQUE", help="triton/softmax, or a topic")
    parser.add_argument("--planted", action="store_true", help="only the faults that somebody thought of")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True, metavar="PATH")
    parser.add_argument("--compare", action="store_true", help="run nothing: PATH against caught.json")
    options = parser.parse_args(argv)
    record = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    results = record.pop("results", [])
    if options.compare:
        return compare(results, json.loads(CAUGHT.read_text(encoding="utf-8"))["results"])
    faults = chosen(options)
    done, lock, runners = {result["id"] for result in results}, Lock(), queue.SimpleQueue()
    todo = [fault for fault in faults if fault.id not in done]

    def one(fault: Fault) -> None:
        runner = runners.get()
        try:
            result = judge(fault, runner)
        finally:
            runners.put(runner)
        with lock:
            results.append(result)
            rows = sorted(results, key=lambda r: (r["kind"], r["id"]))
            comments = "".join(f"{json.dumps(name)}: {json.dumps(text)},\n " for name, text in record.items())
            text = f'{{{comments}"results": [\n ' + ",\n ".join(map(json.dumps, rows)) + "\n]}\n"
            options.json.write_text(text, encoding="utf-8")
            marks = "".join("?" if result[half] is None else ".X"[result[half]] for half in ("demo", "tests"))
            print(f"{len(results):4} {marks} {result.get('seconds', 0):6.1f} s  {result['id'][:110]}", flush=True)

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for number in range(options.jobs):
            tree = Path(folder) / str(number) / "tree"
            shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
            runners.put(Runner(tree))
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(one, todo))
        for _ in range(options.jobs):
            runners.get().close()
    print(summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
