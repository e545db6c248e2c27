"""The command line, the same for every script: a topic's, and a lesson's run by itself.

Exit status: 0 all passed or skipped, 1 something failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from harness.catalog import ROOT, CatalogError, Needs, Technique, Topic, load_module, read_technique, read_topic

USAGE_ERROR, INTERRUPTED = 2, 130


def main(script: str, argv: list[str] | None = None) -> None:
    """Run the topic whose script this is: `main(__file__)`."""
    sys.exit(_status(Path(script), argv))


def run(demo: Callable, argv: list[str] | None = None) -> None:
    """Run the one lesson that `demo` is defined in, when it is run as a script; the same options. It is imported again
    under its dotted name, so that its study and its tests mean the same kernels."""
    sys.exit(_status(topic_of_one(Path(demo.__globals__["__file__"])), argv))


def skip_without_packages() -> None:
    """End the process as skipped when the script is a technique file whose packages are missing, and as failed when
    torch_xla is there and does not load. Called while that file is still importing harness, since its own import of the
    package would end in a traceback."""
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    try:
        topic = topic_of_one(Path(script))
    except (CatalogError, OSError, ValueError):  # a topic script, a test runner, a reader's own program, or no file
        return
    needs = topic.techniques[0].needs
    if not _missing(needs):
        with suppress(ImportError):
            if needs.xla:
                import_module("examples.common.xla")
            return
    sys.exit(_status(topic))


def topic_of_one(path: Path) -> Topic:
    """A topic of this technique alone, under the name of the topic that lists it: its record is that topic's."""
    technique = read_technique(path.resolve())
    scripts = (each for each in ROOT.glob("*.py") if f'"{technique.file}"' in each.read_text(encoding="utf-8"))
    name = next((each.stem for each in scripts), technique.name)
    return Topic(name, technique.path, technique.lesson, (technique,))


def _order(topic: Topic) -> list[str]:
    """The names of a topic's techniques as its script tells them, also where one of them runs by itself."""
    script = ROOT / f"{topic.name}.py"
    whole = read_topic(script) if topic.path != script and script.is_file() else topic
    return [technique.name for technique in whole.techniques]


def _missing(needs: Needs) -> str | None:
    """What keeps a technique from starting at all. Which GPU it needs is for the technique to say: without that
    one it may still compile its kernels offline and show them."""
    from harness import ranks
    from harness.hardware import machine

    return machine().lacks(Needs(packages=needs.packages, gpu=needs.gpu)) or ranks.lacks(needs)


def _xla():
    """examples.common.xla, where a technique has made its device: what is pending there outlives the technique."""
    if "torch_xla" not in sys.modules:
        return None
    from examples.common import xla

    return xla if xla.in_use() else None


def _status(topic: Topic | Path, argv: list[str] | None = None) -> int:
    try:
        topic = read_topic(topic) if isinstance(topic, Path) else topic
        return _run_topic(topic, sys.argv[1:] if argv is None else argv)
    except CatalogError as error:
        return _usage(str(error))
    except KeyboardInterrupt:  # before the first technique, or a second time
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _usage(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return USAGE_ERROR


def _parser(topic: Topic) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python {topic.path.name}", description=topic.title)
    parser.add_argument("techniques", nargs="*", metavar="technique", help="only these; all of them by default")
    parser.add_argument("--tour", action="store_true", help="only those that show the topic best")
    parser.add_argument("--list", action="store_true", help="names, questions and needs; runs nothing")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="small sizes (the default without a GPU)")
    sizes.add_argument("--full", action="store_true", help="large sizes (the default with a GPU)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check-only", action="store_true", help="correctness and generated code, no timing")
    how.add_argument("--profile", action="store_true", help="one warm, named call per variant for nsys or ncu to see")
    parser.add_argument("--study", action="store_true", help="after each lesson its study: how we know")
    parser.add_argument("-v", "--verbose", action="store_true", help="every check, every table, all generated code")
    parser.add_argument("--json", type=Path, metavar="PATH", help="record the run here; what it did not run is kept")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the inputs (default 0)")
    if _in_several(topic.techniques):
        parser.add_argument("--ranks", type=int, metavar="N", help="processes (default: one for each GPU; 2 on a CPU)")
    return parser


def _in_several(techniques: tuple[Technique, ...]) -> bool:
    """Whether one of them runs in several ranks."""
    return any(technique.needs.ranks > 1 for technique in techniques)


def _list(title: str, techniques: tuple[Technique, ...]) -> None:
    width = max(len(t.name) for t in techniques)
    print(title)
    for t in techniques:
        print(f"  {t.name:{width}}  {t.error or t.question}\n  {'':{width}}  needs {t.needs.text}")


def choose(topic: Topic, names: list[str]) -> tuple[Technique, ...]:
    """The techniques asked for, in the topic's order. Raises CatalogError for a name that it does not have."""
    known = {t.name: t for t in topic.techniques}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known)}"
            raise CatalogError(f"{topic.path.name} has no technique {name!r}; {hint}")
    return tuple(t for t in topic.techniques if not names or t.name in names)


def _run_topic(topic: Topic, argv: list[str]) -> int:
    options = _parser(topic).parse_args(argv)
    chosen = choose(topic, options.techniques or (list(topic.tour) if options.tour else []))
    if options.list:
        _list(topic.title, chosen)
        return 0
    path = options.json.resolve() if options.json else None  # now: a technique may change the working folder
    if _in_several(topic.techniques):
        from harness import ranks

        try:
            number = ranks.wanted(options.ranks)
        except ValueError as error:
            return _usage(str(error))
        if ranks.started():
            ranks.enter()
        elif number > 1 and _in_several(chosen):
            return _in_ranks(topic, argv, number, path, options.verbose)
    return _run_here(topic, argv, options, chosen, path)


def _in_ranks(topic: Topic, argv: list[str], number: int, path: Path | None, verbose: bool) -> int:
    """Run the script again in ranks of its own. Where one fails that is said here, once, and recorded."""
    from harness import ranks
    from harness.record import ExampleRecord, Record, load

    status, message = ranks.launch(number, [str(topic.path), *argv], verbose)
    if status == USAGE_ERROR:
        return _usage(message)
    if message:
        print(message if status == INTERRUPTED else f"FAILED: {message}", file=sys.stderr)
    if status == 1 and path and path.is_file():
        held = load(path)
        record = Record(path, topic.name, held["gpu"])
        if held["running"]:
            record.put(ExampleRecord(held["running"], "failed", message), _order(topic))
        record.save()
    return status


def _run_here(topic: Topic, argv: list[str], options, chosen: tuple[Technique, ...], path: Path | None) -> int:
    from harness import console as show
    from harness import ranks
    from harness.hardware import machine
    from harness.record import ExampleRecord, Record, git_state, recorded_answer

    this = machine()
    try:
        record = Record(None if ranks.rank() else path, topic.name, this.gpu)  # rank 0 records
        record.save()  # what cannot be written is known before anything runs
    except (ValueError, OSError) as error:
        return _usage(f"--json {error}")
    console = show.make_console(quiet=ranks.rank() > 0)
    commit, dirty = git_state()
    how = {"command": shlex.join(["python", topic.file, *argv]), "commit": commit, "dirty": dirty, "seed": options.seed}
    reasons = {None if technique.error else _missing(technique.needs) for technique in chosen}
    if len(reasons) == 1 and (reason := reasons.pop()):
        for technique in chosen:  # nothing that was asked for can start, for one and the same reason: said once
            record.put(ExampleRecord(technique.name, "skipped", reason, machine=this.record(), **how))
        record.save()
        show.say(console, f"SKIPPED: {reason}", style="yellow")
        return 0
    show.header(console, this.record(), topic.title, commit, dirty)
    if this.mode == "interpreted" and any(technique.needs.triton for technique in chosen):
        done = "called for the profiler and not" if options.profile else "ours and the baseline are"
        note = f"No GPU: Triton kernels are interpreted, {done} checked, nothing is timed."
        show.paragraph(console, note, "yellow", indent="")
    if ranks.world() > 1 and this.mode != "gpu":
        note = f"No GPU: {ranks.world()} ranks by gloo, for results alone; nothing is timed."
        show.paragraph(console, note, "yellow", indent="")
    if this.mode != "gpu" and options.profile:
        console.print("  no GPU: each variant is warmed, then called once inside torch.profiler.record_function")
    ran, order, stopped = [], _order(topic), False

    def keep() -> None:
        record.put(ran[-1], order)
        record.save()

    try:
        for technique in chosen:
            record.running = technique.name
            record.save()  # before as well: a run that is killed says in which technique
            try:
                _run_technique(topic, technique, options, console, how, ran, keep)
            finally:
                record.running = None
                keep()
    except KeyboardInterrupt:
        stopped = True
        console.print("\ninterrupted; this is what was done")
    known = {each.name: recorded_answer(topic.name, each.name) for each in ran if not each.answer}
    show.show_summary(console, ran, known)
    if path:
        show.say(console, f"record: {options.json}")
    if stopped:
        return INTERRUPTED
    ranks.end()
    return int(any("failed" in (each.status, each.study and each.study.status) for each in ran))


def _run_technique(topic: Topic, technique: Technique, options, console, how: dict, ran: list, keep) -> None:
    """Run a lesson, and its study if asked; what becomes of them is in the record that is appended to `ran`. `keep`
    saves that record before the study too: a study that is killed takes only itself along."""
    from harness.console import technique_heading
    from harness.hardware import machine
    from harness.session import Harness

    full = options.full or (machine().mode == "gpu" and not options.quick)
    given = {
        "topic": topic.name, "full": full, "timing": not options.check_only, "profile": options.profile,
        "verbose": options.verbose, "seed": options.seed, "console": console,
    }  # fmt: skip
    session = Harness(technique.name, technique.needs, **given)
    how = how | {"sizes": "interpreted" if session.interpreted else "full" if full else "quick"}
    ran.append(session.record)
    technique_heading(console, technique)
    _run_one(technique, session, how, [technique.path], "demo")
    if options.study and technique.studies and session.record.status == "passed":
        keep()
        study = Harness(technique.name, technique.needs, lesson=session.tables, **given)
        session.record.study = study.record
        technique_heading(console, technique, ", study")
        _run_one(technique, study, how, list(technique.studies), "study")


def _outcome(error: BaseException) -> tuple[str, str, list[tuple[str, str]]]:
    """The status and the reason of what ended so, and the lines to print, each with its style."""
    from harness.faults import explain, where
    from harness.hardware import Skip

    if isinstance(error, Skip):
        return "skipped", str(error), [(f"SKIPPED: {error}", "")]
    if isinstance(error, KeyboardInterrupt):
        return "failed", "interrupted", []
    if known := explain(error):
        return "failed", known, [(f"FAILED: {known}", "red"), *((f"  {line}", "dim") for line in where(error))]
    return "failed", f"{type(error).__name__}: {error}", [("".join(traceback.format_exception(error)), "red")]


def _run_one(technique: Technique, session, how: dict, files: list[Path], function: str) -> None:
    """Run demo(h) or study(h) of these files; whatever goes wrong becomes its status, and the next one runs."""
    from harness import ranks
    from harness.console import say
    from harness.faults import where
    from harness.hardware import Skip, ceilings, machine
    from harness.settings import settings_kept
    from harness.sources import sources_hash

    import numpy as np
    import torch

    console, record = session.console, session.record
    vars(record).update(how, question=technique.question if function == "demo" else "")
    if xla := _xla():
        xla.start_clean()
    started = time.perf_counter()
    try:
        if technique.error:
            raise CatalogError(technique.error)
        if reason := _missing(technique.needs):
            raise Skip(reason)
        if technique.needs.ranks > 1:
            ranks.begin(technique.name)
        if technique.needs.xla:
            from examples.common import xla  # before torch_xla, which then knows its device

            xla.device()  # before any backward pass on the CPU: after one, XLA's own would fail
        functions = [getattr(load_module(file), function) for file in files]
        # The interpreter computes with numpy, which warns where a GPU makes a NaN.
        with np.errstate(all="ignore"), warnings.catch_warnings(), settings_kept(technique.name, session.seed):
            # Inductor's advice at each compilation; TF32 is a technique of its own (numerics).
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication")
            warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled on the fly")
            for each in functions:
                each(session)
            if xla := _xla():
                xla.settle()  # what cannot be run is this technique's failure
        if not session.profile and not (record.checks or record.tables or record.codegen or record.facts):
            raise AssertionError(f"its {function}(h) checked, compared and recorded nothing")
        session.finish()
        record.status = "passed"
    except BaseException as error:  # a technique must not end the run, not even by sys.exit
        record.status, record.reason, lines = _outcome(error)
        if record.status == "failed" and ranks.world() > 1 and not isinstance(error, KeyboardInterrupt):
            place = "".join(f"\n  {line}" for line in where(error)[1:][-1:])
            ranks.give_up(f"{technique.name}: {record.reason}{place}")
        session.finish(passed=False)
        for line, style in lines:
            say(console, line, style)
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        record.seconds = round(time.perf_counter() - started, 3)
        together = {"ranks": ranks.world()} if technique.needs.ranks > 1 else {}
        record.machine = machine().record() | {"ceilings": ceilings().record()} | together
        with suppress(OSError, SyntaxError):  # what cannot be read has failed above
            peers = [Path(peer.__file__).resolve() for peer in session.peers]
            record.peers = sorted(str(peer.relative_to(ROOT)) for peer in peers)
            record.sources = sources_hash(files[0], [*files[1:], *peers])
        if session.device.type == "cuda":
            gc.collect()  # a model in a cycle of references
            with suppress(RuntimeError):  # a GPU that the technique has broken
                torch.cuda.empty_cache()
