"""`python -m compile_inspect.main`: every phase, or one as `python -m compile_inspect.PHASE`.

    python -m compile_inspect.main --model pkg.module:make_model --input 8x128:int64 --html out.html
    python -m compile_inspect.graph_breaks --model script.py:step --input 32x64

The phases run in a process of their own, the worker, which sends each phase as it grows. One that takes longer than
`--timeout`, or is killed, ends as such with what it had seen, and the next phase starts in a new worker. What the model
prints is kept out of the report; of a worker that is lost the last line is told. Exit status: 0; 1 where a phase
failed; 2, with one sentence, where the model cannot be had or called; 130 after ctrl-C, with what was seen until then.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from compile_inspect.report import PHASES, Phase, Report, closing, phase_lines

LOADING = 120.0  # seconds in which the model must be imported, made and called once, if --timeout is shorter


def parser(phase: str | None) -> argparse.ArgumentParser:
    prog = f"python -m compile_inspect.{phase or 'main'}"
    parser = argparse.ArgumentParser(prog=prog, description="what torch.compile does with a model, and what to change")
    parser.add_argument(
        "--model", default="decoder", metavar="WHAT",
        help="pkg.module:name or file.py:name: a function, an nn.Module, a class or a factory without arguments; "
        "or one of the bundled decoder (default), mlp, pointwise, planted",
    )  # fmt: skip
    parser.add_argument(
        "--input", action="append", default=[], metavar="SHAPE[:DTYPE]",
        help="a random tensor, as 8x128:int64 (default float32), or python:0.5; once for each argument",
    )  # fmt: skip
    parser.add_argument("--inputs", metavar="WHAT", help="pkg:make_inputs: returns a tuple, or a dict of keywords")
    parser.add_argument("--train", action="store_true", help="a call is forward and backward (default: no gradients)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: the GPU, if there is one)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for a phase (default 120)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one page")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the phase benchmark")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it as a record (schema 2)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show code, bytecode and guards whole")
    if phase is None:
        parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES), metavar="PHASE",
                            help=f"only these of {', '.join(PHASES)}")  # fmt: skip
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None, phase: str | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parser(phase).parse_args(argv)
    if phase is not None:
        options.phases = [phase]
    if options.worker is not None:
        return work(options)
    if not options.timeout > 0:
        print(f"error: --timeout {options.timeout:g}: give seconds above 0", file=sys.stderr)
        return 2
    for path in (options.html, options.png, options.json):
        if path is not None and not path.absolute().parent.is_dir():
            print(f"error: {path}: its folder does not exist; make it, or name another file", file=sys.stderr)
            return 2
    report = Report(options.model)
    with tempfile.TemporaryDirectory(prefix="compile-inspect-", ignore_cleanup_errors=True) as folder:
        status = supervise(options, argv, report, Path(folder) / "printed")
    if status == 2:
        return 2
    print(closing(report))
    writers = {"html": report.html, "png": lambda path: write_png(report, path),
               "json": lambda path: write_record(report, argv, path)}  # fmt: skip
    for kind, write in writers.items():
        if (path := getattr(options, kind)) is not None:
            try:
                write(path)
            except OSError as error:
                print(f"error: {path}: {error.strerror}; name another file", file=sys.stderr)
                status = max(status, 1)
            except (ValueError, RuntimeError) as error:
                print(f"error: {error}", file=sys.stderr)
                status = max(status, 1)
            else:
                print(f"{path}: written")
    return status


def write_png(report: Report, path: Path) -> None:
    """The times by batch size. Raises RuntimeError where they were not measured, or without matplotlib."""
    from compile_inspect.benchmark import png

    png(report["benchmark"].facts if "benchmark" in report else {}, path)


def supervise(options: argparse.Namespace, argv: list[str], report: Report, log: Path) -> int:
    """Run the phases in workers, show each as it ends, and put it into the report; the exit status."""
    todo, status = list(options.phases), 0
    while todo:
        worker = Worker(argv, todo, log, options.verbose)
        try:
            for kind, held in worker.messages(max(options.timeout, LOADING), options.timeout):
                if kind == "error":
                    print(f"error: {held}", file=sys.stderr)
                    return 1 if report.phases else 2  # a model that can be had once only: what was seen is kept
                if kind == "machine":
                    report.machine, worker.current = held, Phase(todo[0])
                    continue
                phase = Phase.from_dict(held)
                if kind == "lost":
                    phase.status, phase.reason = phase.reason.split(": ", 1)
                if phase.status == "running":
                    worker.current = phase
                    continue
                report.phases.append(phase)
                todo.remove(phase.name)
                worker.current = Phase(todo[0]) if todo else None
                print("\n".join(phase_lines(phase, options.verbose)), flush=True)
                status = max(status, int(phase.status in ("failed", "timed out")))
        except KeyboardInterrupt:
            if worker.current and worker.current.name in todo:
                worker.current.status, worker.current.reason = "failed", "interrupted"
                report.phases.append(worker.current)
            print("\ninterrupted", file=sys.stderr)
            return 130
        finally:
            worker.kill()
    return status


class Worker:
    """The process that runs the phases, and the messages that it sends."""

    def __init__(self, argv: list[str], phases: list[str], log: Path, verbose: bool) -> None:
        command = [sys.executable, "-m", "compile_inspect.main", *argv, "--phases", *phases, "--worker", "1"]
        own = {} if os.name == "nt" else {"start_new_session": True}  # so that g++ and its like are killed with it
        self.log, self.current = log, None
        with log.open("wb") as printed:
            errors = None if verbose else printed
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, **own)
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def messages(self, loading: float, timeout: float) -> Iterator[tuple[str, object]]:
        """("machine", ...), ("phase", ...) as it grows, ("error", ...); ("lost", phase) where the worker was lost."""
        deadline, name = time.monotonic() + loading, None
        while True:
            try:
                line = self.lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                seconds = timeout if name else loading
                yield self._lost(f"timed out: it took longer than {seconds:g} s; --timeout allows more")
                return
            if line is None:  # before it said that it is done, be it with status 0, as after os._exit(0)
                code = self.process.wait()
                by = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
                memory = "; most likely out of memory: try smaller inputs" if code == -signal.SIGKILL else ""
                yield self._lost(f"failed: the process {by}{memory}{self._tail()}")
                return
            kind, held = json.loads(line)
            if kind == "done":
                return
            if kind == "machine":
                deadline = time.monotonic() + timeout
            if kind == "phase" and held["name"] != name:
                deadline, name = time.monotonic() + timeout, held["name"]
            yield kind, held

    def _lost(self, reason: str) -> tuple[str, object]:
        if self.current is None:
            return "error", f"the model could not be loaded and called: {reason.split(': ', 1)[1]}"
        self.current.reason = reason
        return "lost", self.current.as_dict()

    def _tail(self) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"; it printed last: {text[-1][:200]}" if text else ""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self.process.kill() if os.name == "nt" else os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def work(options: argparse.Namespace) -> int:
    """The worker: load the model, call it once, then run the phases; each message is a line of JSON."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the model prints joins its standard error

    def send(kind: str, held: object) -> None:
        channel.write(json.dumps([kind, held], default=str) + "\n")
        channel.flush()

    from compile_inspect.inspecting import call_once, machine, reason_of, run_phase
    from compile_inspect.subject import SubjectError, make_subject

    try:
        subject = make_subject(options.model, options.input, options.inputs, options.device, options.train)
        call_once(subject)
    except SubjectError as error:
        send("error", str(error))
        return 0
    except BaseException as error:
        send("error", f"{options.model}: the model itself fails in eager: {reason_of(error)}; see --input and --inputs")
        return 0
    send("machine", machine(subject))
    for name in options.phases:
        run_phase(name, subject, lambda phase: send("phase", phase.as_dict()))
    send("done", None)
    return 0


def write_record(report: Report, argv: list[str], path: Path) -> None:
    """The report as a record of the topic compile_inspect, an example for each phase. Raises ValueError and OSError."""
    record, sources = importlib.import_module("harness.record"), importlib.import_module("harness.sources")
    commit, dirty = record.git_state()
    described = report.machine | {"host": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}}
    described["triton"] = version("triton") if importlib.util.find_spec("triton") else None
    held = record.Record(path, "compile_inspect", described["gpu"])
    for phase in report.phases:
        status = phase.status if phase.status in ("passed", "skipped") else "failed"
        held.put(
            record.ExampleRecord(
                phase.name, status, phase.reason or None, phase.seconds, commit=commit, dirty=dirty,
                command=" ".join(["python -m compile_inspect.main", *argv]), machine=described, sizes="full",
                sources=sources.sources_hash(Path(__file__).with_name(f"{phase.name}.py")),
                question=phase.question, answer=phase.answer or None, facts=phase.facts | {"model": report.model},
                conclusions=[f"{each.what}: {each.cost}. {each.fix}" for each in phase.findings],
            ),
            list(PHASES),
        )  # fmt: skip
    held.save()


if __name__ == "__main__":
    sys.exit(main())
