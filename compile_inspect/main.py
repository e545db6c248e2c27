"""`python -m compile_inspect.main`: every phase, or one as `python -m compile_inspect.PHASE`.

    python -m compile_inspect.main --model pkg.module:make_model --input 8x128:int64 --html out.html
    python -m compile_inspect.graph_breaks --model script.py:step --input 32x64

The phases run in a process of their own, the worker, which sends each phase as it grows; after one that takes longer
than `--timeout`, or is killed, the next one starts in a new worker. Exit status: 0; 1 where a phase failed; 2, with one
sentence, where the model cannot be loaded or called; 130 after ctrl-C.
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

import torch

from compile_inspect.inspecting import machine, run_phase
from compile_inspect.report import PHASES, Phase, Report, closing, phase_lines, reason_of
from compile_inspect.subject import SubjectError, make_subject

LOADING = 120.0  # seconds in which the model must be imported, made and called once, if --timeout is shorter
# What a worker leaves when it is killed is no news to the user, though Python's resource tracker says so.
IGNORED = "ignore:resource_tracker:UserWarning"


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
    else:
        parser.set_defaults(phases=[phase])
    return parser


def main(argv: list[str] | None = None, phase: str | None = None) -> int:
    options = parser(phase).parse_args(argv)
    if not options.timeout > 0:
        return complain(f"--timeout {options.timeout:g}: give seconds above 0")
    command = " ".join([f"python -m compile_inspect.{phase or 'main'}", *(sys.argv[1:] if argv is None else argv)])
    writers = {
        options.html: Report.html, options.json: lambda report, path: write_record(report, command, path),
        options.png: lambda report, path: loaded("compile_inspect.benchmark").png(report.facts("benchmark"), path),
    }  # fmt: skip
    writers.pop(None, None)
    for path in writers:
        if not path.absolute().parent.is_dir():
            return complain(f"{path}: its folder does not exist; make it, or name another file")
    report = Report(options.model)
    environ = {"PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), IGNORED]))}
    if not torch.cuda.is_available():  # lessons switch Triton's interpreter on, but torch._dynamo imports triton first
        environ["TRITON_INTERPRET"] = os.environ.get("TRITON_INTERPRET") or "1"
    with (
        patch.dict(os.environ, environ),
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
    todo = list(options.phases)
    while todo:
        channel, theirs = multiprocessing.Pipe(duplex=False)
        worker = multiprocessing.get_context("spawn").Process(target=work, args=(options, todo, log, theirs))
        worker.start()
        theirs.close()
        try:
            loading, lost = follow("loading", channel, max(options.timeout, LOADING), worker, log)
            if lost:
                loading.reason = f"the model could not be loaded and called: {loading.reason}"
            if loading.status != "passed":  # after a phase: a model that can be had once only; what was seen is kept
                return complain(loading.reason, 1 if report.phases else 2)
            report.machine, report.shared = loading.facts["machine"], loading.facts["shared"]
            while todo and not lost:
                phase, lost = follow(todo.pop(0), channel, options.timeout, worker, log)
                report.phases.append(phase)
                print("\n".join(phase_lines(phase, options.verbose)), flush=True)
        finally:
            kill(worker)
    return int(any(phase.status in ("failed", "timed out") for phase in report.phases))


def follow(name: str, channel: Connection, limit: float, worker: BaseProcess, log: Path) -> tuple[Phase, bool]:
    """The phase as it is at its end, and whether its worker is lost: it takes longer than the limit, or is gone."""
    phase, began = Phase(name), time.monotonic()
    while phase.status == "running" and channel.poll(max(began + limit - time.monotonic(), 0.01)):
        try:
            phase = Phase.from_dict(json.loads(channel.recv()))
        except EOFError:  # it ended, be it with status 0, as after os._exit(0)
            worker.join()
            code = worker.exitcode
            by = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            memory = "; most likely out of memory: try smaller inputs" if code == -signal.SIGKILL else ""
            said = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
            last = f"; it printed last: {said.splitlines()[-1][:200]}" if said else ""
            phase.status, phase.reason = "failed", f"the process {by}{memory}{last}"
            break
    else:
        if phase.status != "running":
            return phase, False
        phase.status, phase.reason = "timed out", f"it took longer than {limit:g} s; --timeout allows more"
    phase.seconds = round(time.monotonic() - began, 2)
    return phase, True


def kill(worker: BaseProcess) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
        os.killpg(worker.pid, signal.SIGKILL)  # with what it started, as g++; not on Windows
    worker.kill()
    worker.join()


def work(options: argparse.Namespace, phases: list[str], log: Path, channel: Connection) -> None:
    """The worker: load the model and call it once, which is a phase too; then the phases, each sent as JSON."""
    if hasattr(os, "setsid"):
        os.setsid()
    if not options.verbose:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(2, 1)  # what the model prints joins its standard error

    def send(phase: Phase) -> None:
        channel.send(json.dumps(asdict(phase), default=str))

    try:
        subject = make_subject(options.model, options.input, options.inputs, options.device, options.train)
        subject.call_once()
    except BaseException as error:
        fails = f"{options.model}: the model itself fails in eager: {reason_of(error)}; see --input and --inputs"
        return send(Phase("loading", "", "failed", str(error) if isinstance(error, SubjectError) else fails))
    send(Phase("loading", "", "passed", facts={"machine": machine(subject), "shared": subject.shared}))
    for name in phases:
        run_phase(name, subject, send)


def write_record(report: Report, command: str, path: Path) -> None:
    """The report as a record of the topic compile_inspect, an example for each phase. Raises ValueError and OSError."""
    from harness.record import ExampleRecord, Record, git_state
    from harness.sources import sources_hash

    commit, dirty = git_state()
    host = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    triton = version("triton") if importlib.util.find_spec("triton") else None
    record = Record(path, "compile_inspect", report.machine["gpu"])
    for phase in report.phases:
        example = ExampleRecord(
            phase.name, phase.status if phase.status in ("passed", "skipped") else "failed", phase.reason or None,
            phase.seconds, commit=commit, dirty=dirty, command=command, sizes="full", question=phase.question,
            machine=report.machine | {"host": host, "triton": triton}, answer=phase.answer or None,
            sources=sources_hash(Path(__file__).with_name(f"{phase.name}.py")),
            facts=phase.facts | {"model": report.model},
            conclusions=[f"{each.what}: {each.cost}. {each.fix}" for each in phase.findings],
        )  # fmt: skip
        record.put(example, list(PHASES))
    record.save()


if __name__ == "__main__":
    sys.exit(main())
