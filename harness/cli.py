"""The command line, the same for every script: a topic's, and a technique file's run by itself.

Exit status: 0 all passed or skipped, 1 something failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from harness.catalog import ROOT, CatalogError, Needs, Technique, Topic, read_technique, read_topic

USAGE_ERROR, INTERRUPTED = 2, 130


def main(script: str, argv: list[str] | None = None) -> None:
    """Run the topic whose script this is: `main(__file__)`. Ends the process with the exit status."""
    try:
        topic = read_topic(Path(script))
    except CatalogError as error:
        sys.exit(_usage(str(error)))
    sys.exit(_run_topic(topic, sys.argv[1:] if argv is None else argv))


def run(demo: Callable, argv: list[str] | None = None) -> None:
    """Run the one technique file that `demo` is defined in, when it is run as a script; the same options."""
    path = Path(demo.__globals__["__file__"]).resolve()
    try:
        technique = read_technique(path)
    except CatalogError as error:
        sys.exit(_usage(str(error)))
    topic = Topic(technique.name, path, technique.lesson, (technique,))
    sys.exit(_run_topic(topic, sys.argv[1:] if argv is None else argv, demos={technique.name: demo}))


def skip_without_packages() -> None:
    """End the process as skipped when the script is a technique file whose packages are missing.

    Called while that file is still importing harness, since its own import of the package would end in a traceback.
    """
    script = sys.modules["__main__"]
    if getattr(script, "__file__", None) is None:
        return
    try:
        technique = read_technique(Path(script.__file__).resolve())
    except CatalogError:  # not a technique file: a topic script, a test runner, a reader's own code
        return
    if reason := _missing_package(technique.needs):
        if "--list" in sys.argv:
            _list(Topic(technique.name, technique.path, technique.lesson, (technique,)))
        else:
            print(f"SKIPPED: {reason}")
        sys.exit(0)


def _missing_package(needs: Needs) -> str | None:
    from harness.hardware import machine

    return machine().lacks(Needs(packages=needs.packages))


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
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the inputs (default 0)")
    return parser


def _list(topic: Topic) -> None:
    width = max(len(t.name) for t in topic.techniques)
    print(topic.title)
    for t in topic.techniques:
        print(f"  {t.name:{width}}  {t.lesson}\n  {'':{width}}  needs {t.needs.text}")


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
    if path.is_dir():
        return f"--json {path}: is a folder; name a file"
    if not path.absolute().parent.is_dir():
        return f"--json {path}: the folder {path.absolute().parent} does not exist; make it first"
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        return f"--json {path}: cannot be written ({error.strerror})"
    return None


def _run_topic(topic: Topic, argv: list[str], demos: dict[str, Callable] | None = None) -> int:
    parser = _parser(topic)
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:
        return stop.code
    if options.list:
        _list(topic)
        return 0
    chosen = _choose(topic, options.techniques)
    if isinstance(chosen, str):
        return _usage(chosen)
    if options.json and (problem := _json_problem(options.json)):
        return _usage(problem)

    from harness import report
    from harness.hardware import ceilings, machine

    this = machine()
    full = options.full or (this.mode == "gpu" and not options.quick)
    console = report.make_console()
    command = " ".join(["python", topic.file, *argv])
    record = report.RunRecord(topic.name, command, this, ceilings(), options.seed, "full" if full else "quick")
    report.header(console, record, topic.title)
    if this.mode != "gpu" and options.profile:
        console.print("  no GPU: each variant is called once inside torch.profiler.record_function and nothing else")
    interrupted = False
    try:
        for technique in chosen:
            session = _session(technique, options, full, console)
            record.examples.append(session.record)
            _run_one(technique, session, (demos or {}).get(technique.name))
            if options.json:
                record.save(options.json)
    except KeyboardInterrupt:
        interrupted = True
        record.examples[-1].status, record.examples[-1].reason = "failed", "interrupted"
        console.print("\ninterrupted; this is what was done")
    report.show_summary(console, record)
    if options.json:
        record.save(options.json)
        console.print(f"record: {options.json}")
    if interrupted:
        return INTERRUPTED
    return int(any(example.status == "failed" for example in record.examples))


def _session(technique: Technique, options, full: bool, console):
    from harness.session import Harness

    return Harness(
        technique.name, technique.needs, full=full, timing=not options.check_only, profile=options.profile,
        seed=options.seed, console=console,
    )  # fmt: skip


def _run_one(technique: Technique, session, demo: Callable | None) -> None:
    """Run one technique; whatever goes wrong in it becomes its status, and the next one runs."""
    from harness.codegen import load_module
    from harness.hardware import Skip

    import numpy as np
    import torch

    console, record = session.console, session.record
    console.rule(f"[bold]{technique.name}[/]  {technique.lesson}", align="left")
    started = time.perf_counter()
    try:
        # A missing package is known before the import would fail; a missing GPU is for the technique to decide,
        # which may still compile its kernels offline and show them.
        if reason := _missing_package(technique.needs):
            raise Skip(reason)
        demo = demo or load_module(technique.path).demo
        with np.errstate(all="ignore"):  # the interpreter computes with numpy, which warns where a GPU makes a NaN
            demo(session)
        record.status = "passed"
    except Skip as skip:
        record.status, record.reason = "skipped", str(skip)
        console.print(f"SKIPPED: {skip}", markup=False)
    except KeyboardInterrupt:
        raise
    except torch.OutOfMemoryError as error:
        record.status = "failed"
        record.reason = f"out of GPU memory: {str(error).splitlines()[0]}; try --quick, or free the GPU"
    except BaseException as error:  # a technique must not end the run, not even by sys.exit
        record.status, record.reason = "failed", f"{type(error).__name__}: {error}"
        console.print("".join(traceback.format_exception(error)), markup=False, style="red")
    finally:
        record.seconds = round(time.perf_counter() - started, 3)
        if session.device.type == "cuda":
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
            if reason := this.lacks(technique.needs):
                here = f"skipped: {reason}"
            elif this.mode == "interpreted" and technique.needs.triton:
                here = "interpreted"
            else:
                here = "runs"
            table.add_row(topic.name, technique.name, technique.needs.text, here)
    console.print(table)
    return 0


def readme(check: bool) -> int:
    """Renew README's generated tables, or with `check` only say whether they are up to date."""
    from harness.report import readme_text

    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = readme_text(old)
    if check:
        if old != new:
            print("README.md differs from the docstrings and results/; run: python -m harness readme", file=sys.stderr)
        return int(old != new)
    path.write_text(new, encoding="utf-8")
    print("README.md: unchanged" if old == new else "README.md: renewed")
    return 0
