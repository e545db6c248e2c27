"""`python -m compile_inspect.main`: every phase, or one as `python -m compile_inspect.PHASE`.

    python -m compile_inspect.main --model pkg.module:make_model --input 8x128:int64 --html out.html
    python -m compile_inspect.graph_breaks --model script.py:step --input 32x64

The phases run in a process of their own, the worker, which sends each phase as it grows. One that takes longer than
`--timeout`, or is killed, ends as such with what it had seen, and the next phase starts in a new worker. What the model
prints is kept out of the report; of a worker that is lost the last line is told. Exit status: 0; 1 where a phase
failed; 2, with one sentence, where the model cannot be had or called; 130 after ctrl-C, with what was seen until then.
"""

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from importlib import import_module as loaded
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

from compile_inspect.report import PHASES, Phase, Report, closing, phase_lines, reason_of

LOADING = 120.0  # seconds in which the model must be imported, made and called once, if --timeout is shorter


def parser(phase: str | None) -> argparse.ArgumentParser:
    prog = f"python -m compile_inspect.{phase or 'main'}"
    parser = argparse.ArgumentParser(prog=prog, description="what torch.compile does with a model, and what to change")
    add = parser.add_argument
    add("--model", default="decoder", metavar="WHAT", help="pkg.module:name or file.py:name: a function, an nn.Module, "
        "a class or a factory without arguments; or one of decoder (default), mlp, pointwise, planted")  # fmt: skip
    add("--input", action="append", default=[], metavar="SHAPE[:DTYPE]", help="a random tensor, as 8x128:int64 "
        "(default float32), or python:0.5; once for each argument")  # fmt: skip
    add("--inputs", metavar="WHAT", help="pkg:make_inputs: returns a tuple, or a dict of keywords")
    add("--train", action="store_true", help="a call is forward and backward (default: no gradients)")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: the GPU, if there is one)")
    add("--timeout", type=float, default=120.0, metavar="S", help="seconds for a phase (default 120)")
    add("--html", type=Path, metavar="FILE", help="write the report as one page")
    add("--png", type=Path, metavar="FILE", help="draw the phase benchmark")
    add("--json", type=Path, metavar="FILE", help="write it as a record (schema 2)")
    add("-v", "--verbose", action="store_true", help="show code, bytecode and guards whole")
    if phase is None:
        add("--phases", nargs="+", choices=PHASES, default=list(PHASES), metavar="PHASE",
            help=f"only these of {', '.join(PHASES)}")  # fmt: skip
    return parser


def main(argv: list[str] | None = None, phase: str | None = None) -> int:
    options = parser(phase).parse_args(argv)
    command = " ".join([f"python -m compile_inspect.{phase or 'main'}", *(sys.argv[1:] if argv is None else argv)])
    options.phases = [phase] if phase else options.phases
    if not options.timeout > 0:
        return complain(f"--timeout {options.timeout:g}: give seconds above 0")
    writers = {
        options.html: Report.html, options.json: lambda report, path: write_record(report, command, path),
        options.png: lambda report, path: loaded("compile_inspect.benchmark").png(report.facts("benchmark"), path),
    }  # fmt: skip
    writers.pop(None, None)
    for path in writers:
        if not path.absolute().parent.is_dir():
            return complain(f"{path}: its folder does not exist; make it, or name another file")
    report = Report(options.model)
    # What a worker leaves when it is killed is no news to the user, though Python's resource tracker says so.
    ignored = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]))
    with (
        patch.dict(os.environ, PYTHONWARNINGS=ignored),
        tempfile.TemporaryDirectory(prefix="compile-inspect-", ignore_cleanup_errors=True) as folder,
    ):
        try:
            status = supervise(options, report, Path(folder) / "printed")
        except KeyboardInterrupt:  # what was seen until then is told, and written
            status = complain("interrupted", 130)
    if status == 2:
        return 2
    print(closing(report))
    for path, write in writers.items():
        try:
            write(report, path)
            print(f"{path}: written")
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            status = max(status, complain(f"{path}: {reason}; name another file", 1))
    return status


def complain(text: str, status: int = 2) -> int:
    print(f"error: {text}", file=sys.stderr)
    return status


def supervise(options: argparse.Namespace, report: Report, log: Path) -> int:
    """Run the phases in workers, show each as it ends, and put it into the report; the exit status."""
    todo, status = list(options.phases), 0
    while todo:
        channel, theirs = multiprocessing.Pipe(duplex=False)
        worker = multiprocessing.get_context("spawn").Process(target=work, args=(options, todo, log, theirs))
        worker.start()
        theirs.close()
        current, seconds, began = None, max(options.timeout, LOADING), time.monotonic()  # the model is being loaded
        try:
            while todo:
                kind, held = "lost", ("timed out", f"it took longer than {seconds:g} s; --timeout allows more")
                if channel.poll(max(began + seconds - time.monotonic(), 0.01)):
                    try:
                        kind, held = json.loads(channel.recv())
                    except EOFError:  # it ended, be it with status 0, as after os._exit(0)
                        held = "failed", how_it_ended(worker, log)
                if kind == "lost" and current is None:
                    kind, held = "error", f"the model could not be loaded and called: {held[1]}"
                if kind == "error":  # after a phase: a model that can be had once only; what was seen is kept
                    return complain(held, 1 if report.phases else 2)
                if kind == "loaded":
                    (report.machine, report.shared), current = held, Phase(todo[0])
                elif kind == "phase":
                    current = Phase.from_dict(held)
                else:
                    current.status, current.reason = held
                    current.seconds = round(time.monotonic() - began, 2)
                if current.status != "running":
                    report.phases.append(current)
                    todo.remove(current.name)
                    print("\n".join(phase_lines(current, options.verbose)), flush=True)
                    status = max(status, int(current.status in ("failed", "timed out")))
                    current = Phase(todo[0]) if todo else None
                if kind == "lost":
                    break
                if kind == "loaded" or held["status"] != "running":  # a phase begins
                    seconds, began = options.timeout, time.monotonic()
        finally:
            kill(worker)
    return status


def how_it_ended(worker: BaseProcess, log: Path) -> str:
    worker.join()
    code = worker.exitcode
    by = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    memory = "; most likely out of memory: try smaller inputs" if code == -signal.SIGKILL else ""
    text = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return f"the process {by}{memory}" + (f"; it printed last: {text[-1][:200]}" if text else "")


def kill(worker: BaseProcess) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
        os.killpg(worker.pid, signal.SIGKILL)  # with what it started, as g++; not on Windows
    worker.kill()
    worker.join()


def work(options: argparse.Namespace, phases: list[str], log: Path, channel: Connection) -> None:
    """The worker: load the model, call it once, then run the phases; each message is (kind, what), as JSON."""
    if hasattr(os, "setsid"):
        os.setsid()
    if not options.verbose:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(2, 1)  # what the model prints joins its standard error

    def send(kind: str, held: object) -> None:
        channel.send(json.dumps([kind, held], default=str))

    from compile_inspect.inspecting import machine, run_phase
    from compile_inspect.subject import SubjectError, make_subject

    try:
        subject = make_subject(options.model, options.input, options.inputs, options.device, options.train)
        subject.call_once()
    except SubjectError as error:
        return send("error", str(error))
    except BaseException as error:
        said = f"{options.model}: the model itself fails in eager: {reason_of(error)}; see --input and --inputs"
        return send("error", said)
    send("loaded", [machine(subject), subject.shared])
    for name in phases:
        run_phase(name, subject, lambda phase: send("phase", asdict(phase)))


def write_record(report: Report, command: str, path: Path) -> None:
    """The report as a record of the topic compile_inspect, an example for each phase. Raises ValueError and OSError."""
    record, sources = loaded("harness.record"), loaded("harness.sources")
    commit, dirty = record.git_state()
    described = report.machine | {"host": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}}
    described["triton"] = version("triton") if importlib.util.find_spec("triton") else None
    held = record.Record(path, "compile_inspect", described["gpu"])
    for phase in report.phases:
        status = phase.status if phase.status in ("passed", "skipped") else "failed"
        held.put(
            record.ExampleRecord(
                phase.name, status, phase.reason or None, phase.seconds, commit=commit, dirty=dirty,
                command=command, machine=described, sizes="full",
                sources=sources.sources_hash(Path(__file__).with_name(f"{phase.name}.py")),
                question=phase.question, answer=phase.answer or None, facts=phase.facts | {"model": report.model},
                conclusions=[f"{each.what}: {each.cost}. {each.fix}" for each in phase.findings],
            ),
            list(PHASES),
        )  # fmt: skip
    held.save()


if __name__ == "__main__":
    sys.exit(main())
