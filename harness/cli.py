"""The command line, the same for every script: a topic's, and a technique file's run by itself.

Exit status: 0 all passed or skipped, 1 something failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import os
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from harness.catalog import ROOT, CatalogError, Needs, Technique, Topic, read_technique, read_topic

USAGE_ERROR, INTERRUPTED = 2, 130


def main(script: str, argv: list[str] | None = None) -> None:
    """Run the topic whose script this is: `main(__file__)`. Ends the process with the exit status."""
    try:
        topic = read_topic(Path(script))
    except CatalogError as error:
        sys.exit(_usage(str(error)))
    sys.exit(_status(topic, argv))


def run(demo: Callable, argv: list[str] | None = None) -> None:
    """Run the one technique file that `demo` is defined in, when it is run as a script; the same options."""
    topic = _topic_of_one(Path(demo.__globals__["__file__"]))
    sys.exit(_status(topic, argv, {topic.techniques[0].name: demo}))


def skip_without_packages() -> None:
    """End the process as skipped when the script is a technique file whose packages are missing.

    And as failed when torch_xla is there and does not load. Called while that file is still importing harness, since
    its own import of the package would end in a traceback.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        return
    try:
        topic = _topic_of_one(Path(script))
    except (CatalogError, OSError, ValueError):  # a topic script, a test runner, a reader's own program
        return
    (technique,) = topic.techniques
    if _missing(technique.needs):
        sys.exit(_status(topic))
    if technique.needs.xla:
        try:
            import_module("harness.xla")
        except ImportError as error:
            sys.exit(_status(topic, demos={technique.name: _raising(error)}))


def _raising(error: Exception) -> Callable:
    def demo(h) -> None:
        raise error

    return demo


def _topic_of_one(path: Path) -> Topic:
    technique = read_technique(path.resolve())
    return Topic(technique.name, technique.path, technique.lesson, (technique,))


def _missing(needs: Needs) -> str | None:
    """What keeps a technique from starting at all. Which GPU it needs is for the technique to say: without that
    one it may still compile its kernels offline and show them."""
    from harness.hardware import machine

    return machine().lacks(Needs(packages=needs.packages, gpu=needs.gpu))


def _xla():
    """harness.xla, where a technique has made its device: what is pending there outlives the technique."""
    if "torch_xla" not in sys.modules:
        return None
    from harness import xla

    return xla if xla.in_use() else None


def _status(topic: Topic, argv: list[str] | None = None, demos: dict[str, Callable] | None = None) -> int:
    try:
        return _run_topic(topic, sys.argv[1:] if argv is None else argv, demos or {})
    except KeyboardInterrupt:  # before the first technique, or a second time
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _usage(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return USAGE_ERROR


def _parser(topic: Topic) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python {topic.path.name}", description=topic.title)
    parser.add_argument("techniques", nargs="*", metavar="technique", help="only these; all of them by default")
    parser.add_argument("--list", action="store_true", help="names, lessons and needs; runs nothing")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="small sizes (the default without a GPU)")
    sizes.add_argument("--full", action="store_true", help="large sizes (the default with a GPU)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check-only", action="store_true", help="correctness and generated code, no timing")
    how.add_argument("--profile", action="store_true", help="one warm, named call per variant for nsys or ncu to see")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the record of the run here")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="seed of the inputs (default 0)")
    return parser


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if abs(value) >= 2**62:
        raise argparse.ArgumentTypeError(f"{text} is beyond 2**62")
    return value


def _list(title: str, techniques: tuple[Technique, ...]) -> None:
    width = max(len(t.name) for t in techniques)
    print(title)
    for t in techniques:
        print(f"  {t.name:{width}}  {t.error or t.lesson}\n  {'':{width}}  needs {t.needs.text}")


def _choose(topic: Topic, names: list[str]) -> tuple[Technique, ...] | str:
    """The techniques asked for, in the topic's order, or what is wrong with the names."""
    known = {t.name: t for t in topic.techniques}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known)}"
            return f"{topic.path.name} has no technique {name!r}; {hint}"
    return tuple(t for t in topic.techniques if not names or t.name in names)


def _json_problem(path: Path) -> str | None:
    """Why the record cannot be written to this (resolved) path; None when it can."""
    from harness.report import load_record

    try:
        if path.is_dir():
            return f"--json {path}: is a folder; name a file"
        if not path.parent.is_dir():
            return f"--json {path}: the folder {path.parent} does not exist; make it first"
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            return f"--json {path}: cannot be written; choose a place where you may write"
        if path.is_file() and path.stat().st_size:
            load_record(path)
    except ValueError:
        return f"--json {path}: exists and is not a record of an earlier run; choose another name, or remove it"
    except OSError as error:
        return f"--json {path}: {error.strerror}"
    return None


def _run_topic(topic: Topic, argv: list[str], demos: dict[str, Callable]) -> int:
    parser = _parser(topic)
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:
        return stop.code
    chosen = _choose(topic, options.techniques)
    if isinstance(chosen, str):
        return _usage(chosen)
    if options.list:
        _list(topic.title, chosen)
        return 0
    path = options.json.resolve() if options.json else None  # now: a technique may change the working folder
    if path and (problem := _json_problem(path)):
        return _usage(problem)

    from harness import report
    from harness.hardware import ceilings, machine

    this = machine()
    reasons = {technique.error or _missing(technique.needs) for technique in chosen}
    if len(reasons) == 1 and (reason := reasons.pop()) and not any(technique.error for technique in chosen):
        return _skip_all(topic, argv, chosen, options, path, reason)
    full = options.full or (this.mode == "gpu" and not options.quick)
    interpreted = this.mode == "interpreted" and any(technique.needs.triton for technique in chosen)
    sizes = "interpreted" if interpreted else "full" if full else "quick"
    console = report.make_console()
    record = report.RunRecord(
        topic.name, shlex.join(["python", topic.file, *argv]), this, ceilings(), options.seed, sizes
    )
    report.header(console, record, topic.title)
    if interpreted:
        done = "called for the profiler and not" if options.profile else "ours and the baseline are"
        note = f"Triton kernels are interpreted: {done} checked, nothing is timed."
        report.say(console, note, style="yellow")
    if this.mode != "gpu" and options.profile:
        console.print("  no GPU: each variant is warmed, then called once inside torch.profiler.record_function")
    stopped = False
    try:
        for technique in chosen:
            session = _session(technique, options, full, console)
            record.examples.append(session.record)
            record.save(path)  # before as well: a run that is killed says in which technique
            _run_one(technique, session, demos.get(technique.name))
            record.save(path)
    except KeyboardInterrupt:
        stopped = True
        for example in record.examples[-1:]:
            example.status, example.reason = "failed", "interrupted"
        console.print("\ninterrupted; this is what was done")
    report.show_summary(console, record)
    report.show_architectures(console, record, topic.architectures)
    record.save(path)
    if path:
        report.say(console, f"record: {options.json}")
    if stopped:
        return INTERRUPTED
    return int(any(example.status == "failed" for example in record.examples))


def _skip_all(topic: Topic, argv, chosen, options, path: Path | None, reason: str) -> int:
    """Nothing that was asked for can start, for one and the same reason: said once, and recorded."""
    from harness import report
    from harness.hardware import ceilings, machine

    record = report.RunRecord(
        topic.name, shlex.join(["python", topic.file, *argv]), machine(), ceilings(), options.seed, "none"
    )
    record.examples = [report.ExampleRecord(technique.name, "skipped", reason) for technique in chosen]
    record.save(path)
    report.say(report.make_console(), f"SKIPPED: {reason}", style="yellow")
    return 0


def _session(technique: Technique, options, full: bool, console):
    from harness.session import Harness

    return Harness(
        technique.name, technique.needs, full=full, timing=not options.check_only, profile=options.profile,
        seed=options.seed, console=console,
    )  # fmt: skip


def _run_one(technique: Technique, session, demo: Callable | None) -> None:
    """Run one technique; whatever goes wrong in it becomes its status, and the next one runs."""
    from harness.catalog import load_module
    from harness.faults import explain, where
    from harness.hardware import Skip
    from harness.report import say, technique_heading
    from harness.settings import settings_kept

    import numpy as np
    import torch

    console, record = session.console, session.record
    technique_heading(console, technique)
    if xla := _xla():
        xla.start_clean()
    started = time.perf_counter()
    try:
        if technique.error:
            raise CatalogError(technique.error)
        if reason := _missing(technique.needs):
            raise Skip(reason)
        demo = demo or load_module(technique.path).demo
        if technique.needs.xla:
            from harness import xla

            xla.device()  # before any backward pass on the CPU: after one, XLA's own would fail
        # The interpreter computes with numpy, which warns where a GPU makes a NaN.
        with np.errstate(all="ignore"), warnings.catch_warnings(), settings_kept(technique.name, session.seed):
            # Inductor's advice at each compilation; TF32 is a technique of its own (numerics).
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication")
            warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled on the fly")
            demo(session)
            if xla := _xla():
                xla.settle()  # what cannot be run is this technique's failure
        if not session.profile and not (record.checks or record.comparisons or record.codegen or record.facts):
            raise AssertionError("its demo(h) checked, compared and recorded nothing")
        record.status = "passed"
    except Skip as skip:
        record.status, record.reason = "skipped", str(skip)
        say(console, f"SKIPPED: {skip}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a technique must not end the run, not even by sys.exit
        known = explain(error)
        record.status, record.reason = "failed", known or f"{type(error).__name__}: {error}"
        if known:
            say(console, f"FAILED: {known}", style="red")
            for line in where(error):
                say(console, f"  {line}", style="dim")
        else:
            say(console, "".join(traceback.format_exception(error)), style="red")
    finally:
        record.seconds = round(time.perf_counter() - started, 3)
        if session.device.type == "cuda":
            gc.collect()  # a model in a cycle of references
            with suppress(RuntimeError):  # a GPU that the technique has broken
                torch.cuda.empty_cache()


def doctor() -> int:
    """This machine, its versions and ceilings, and for every technique: runs, interpreted, or why it is skipped."""
    from harness import report
    from harness.catalog import topics
    from harness.hardware import ceilings, machine, package_version

    import torch
    from rich import box
    from rich.table import Table

    console, this = report.make_console(), machine()
    record = report.RunRecord("doctor", "python -m harness doctor", this, ceilings(), 0, "none")
    report.header(console, record, "doctor")
    versions = ("numpy", "rich", "nvidia-ml-py", "pytest", "hypothesis", "matplotlib", "torch_xla")
    console.print("  " + "  ".join(f"{name} {package_version(name) or 'not installed'}" for name in versions))
    if this.mode == "gpu":
        with report.progress(console, "measuring this GPU's ceilings"):
            limits = ceilings()
            copy = f"copy {limits.copy_tbps():.2f} TB/s"
            dtypes = (torch.bfloat16, torch.float16, torch.float32)
            gemms = [f"cuBLAS {str(d)[6:]} {limits.gemm_tflops(d):.0f} TFLOP/s" for d in dtypes]
        console.print("  measured: " + ", ".join([copy, *gemms, f"empty launch {limits.launch_floor_us():.1f} us"]))
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("topic", "technique", "needs", "here"):
        table.add_column(head)
    for topic in topics(ROOT):
        for technique in topic.techniques:
            if technique.error:
                here = f"broken: {technique.error}"
            elif reason := this.lacks(technique.needs):
                here = f"skipped: {reason}"
            elif this.mode == "interpreted" and technique.needs.triton:
                here = "interpreted"
            else:
                here = "runs"
            table.add_row(topic.name, technique.name, technique.needs.text, here)
    report.show_table(console, table)
    return 0


def readme(check: bool) -> int:
    """Renew the generated tables of README.md and docs/, or with `check` only say whether they are up to date."""
    from harness.report import documents

    texts = documents()
    differing = [path for path, (old, new) in texts.items() if old != new]
    for path, (_, new) in texts.items():
        name = path.relative_to(ROOT)
        if check and path in differing:
            said = f"{name} differs from the docstrings and results/; run: python -m harness readme"
            print(said, file=sys.stderr)
        elif not check:
            if path in differing:
                path.write_text(new, encoding="utf-8")
            print(f"{name}: {'renewed' if path in differing else 'unchanged'}")
    return int(check and bool(differing))
