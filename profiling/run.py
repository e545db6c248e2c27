"""Run a script of this repository with something in its process watching it: what profiling/*.sh start.

    python -m profiling.run launches OUT SCRIPT ARGS    for a sanitizer: count Triton's launches, by kernel, into
                                                              the file OUT, and leave out what is not theirs
    python -m profiling.run unguarded OUT SCRIPT ARGS   the same, and outputs are neither poisoned nor guarded
    python -m profiling.run bounded OUT SCRIPT ARGS     for ncu: so many seconds of it for each technique
    python -m profiling.run torch OUT SCRIPT ARGS       torch.profiler, a trace per named call into the folder OUT
    python -m profiling.run proton OUT SCRIPT ARGS      Triton's profiler, into OUT.hatchet

bounded, torch and proton want --profile among ARGS: they put themselves around each call that it names, and see no
warm-up.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import re
import runpy
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from harness import bench, check, session
from harness.hardware import interpreted, machine, package_version

import torch
from torch.profiler import ProfilerActivity, profile, record_function


@contextmanager
def tuned_in_one_call() -> Iterator[None]:
    """Triton's autotuners call each configuration once, take the first that runs, and leave no timings on disk.

    Times mean nothing where every instruction is looked at, and a hundred launches to get one take minutes.
    """
    import triton
    from triton.runtime.autotuner import Autotuner

    def once(fn, *args, quantiles=None, **options):
        fn()
        torch.cuda.synchronize()
        return 1.0 if quantiles is None else [1.0] * len(quantiles)

    def search(tuner, key, configs, bench) -> bool:
        bench()
        return False

    timers = patch.multiple(triton.testing, do_bench=once, do_bench_cudagraph=once)
    with timers, patch.object(Autotuner, "check_disk_cache", search):
        yield


@contextmanager
def launches_counted(out: Path, guarded: bool = True) -> Iterator[None]:
    """For a sanitizer: write {"kernel": launches} to `out` at the end, tune in one call of each configuration, take the
    smallest sizes and few SMs, and compile for no other architecture. The interpreter launches nothing.

    Memory that a check has poisoned counts as initialized, and its guarded edges as part of the tensor: a sanitizer
    that looks for what is not initialized, or beyond a tensor's end, wants it not `guarded`.
    """
    counted: Counter[str] = Counter()

    def keep() -> None:
        out.write_text(json.dumps(counted) + "\n", encoding="utf-8")

    def count(metadata) -> None:
        name = metadata.data["name"]  # not .get(), which would evaluate what a kernel says of its launch
        counted[name] += 1
        if counted[name] == 1:  # a process that a fault ends, or a time limit, leaves at least the names
            keep()

    with ExitStack() as stack:
        stack.callback(keep)
        stack.enter_context(patch.object(session.Harness, "SANITIZED", True))
        if not guarded:
            stack.enter_context(patch.object(check, "poisoned_outputs", lambda what: nullcontext()))
        if package_version("triton"):
            stack.enter_context(patch.object(import_module("examples.common.device"), "FEW_SMS", 5))
        if package_version("triton") and not interpreted():
            hook = import_module("triton").knobs.runtime.launch_enter_hook
            hook.add(count)
            stack.callback(hook.remove, count)
            stack.enter_context(tuned_in_one_call())
        yield


SECONDS = 120  # what a profiler may take for one technique


@contextmanager
def bounded(out: Path) -> Iterator[None]:
    """Of each technique, its named calls of the first PROFILING_SECONDS; `out` says why others are not in the profile.

    A profiler that runs every launch many times takes minutes over a call of thousands, and may not come back from one.
    When the seconds are spent the call goes on without being looked at, and so do the technique's later calls. A call
    that is not back after half as many seconds again ends this process; what was profiled before it stays.
    """
    seconds = float(os.environ.get("PROFILING_SECONDS") or SECONDS)
    left_out: dict[str, str] = {}
    spent = 0.0

    def note(call: str, why: str) -> None:  # written at once: the process may not come to its end
        left_out[call] = why
        out.write_text(json.dumps(left_out, indent=1) + "\n", encoding="utf-8")

    def enough(call: str) -> None:
        note(call, f"in part: its technique's {seconds:g} s were spent")
        torch.cuda.profiler.stop()

    @contextmanager
    def capture(name: str, on_gpu: bool) -> Iterator[None]:
        nonlocal spent
        if spent >= seconds:
            note(name, f"not at all: its technique's {seconds:g} s were spent")
            yield
            return
        started = time.monotonic()
        timer = threading.Timer(seconds - spent, enough, (name,))
        timer.daemon = True
        if on_gpu:
            timer.start()
        # From a thread of its own in C: it also ends a process whose every Python thread waits for the launch.
        faulthandler.dump_traceback_later(1.5 * seconds - spent, exit=True, file=sys.__stderr__)
        try:
            with before(name, on_gpu):
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            timer.cancel()
            spent += time.monotonic() - started

    def made(*args, **kwargs):
        nonlocal spent
        spent = 0.0  # the next technique, or its study
        return harness(*args, **kwargs)

    out.unlink(missing_ok=True)  # an earlier run's
    before, harness = bench.capture, session.Harness
    with patch.object(bench, "capture", capture), patch.object(session, "Harness", made):
        yield


@contextmanager
def traced(out: Path) -> Iterator[None]:
    """torch.profiler around each named call: a Chrome trace for each, and names.json with the name of each trace."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities):  # the first one waits until CUPTI is ready
            torch.zeros(1, device="cuda").add_(1)
            torch.cuda.synchronize()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.json"):
        old.unlink()
    names: dict[str, str] = {}

    @contextmanager
    def capture(name: str, on_gpu: bool) -> Iterator[None]:
        with profile(activities=activities, record_shapes=True) as seen, record_function(name):
            yield
            if on_gpu:
                torch.cuda.synchronize()
        file = f"{len(names) + 1:02}-{re.sub(r'[^a-zA-Z0-9]+', '-', name).strip('-')[:80]}.json"
        seen.export_chrome_trace(str(out / file))
        names[file] = name
        (out / "names.json").write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")

    with patch.object(bench, "capture", capture):
        yield


@contextmanager
def scoped(out: Path) -> Iterator[None]:
    """Proton around each named call, which is a scope of its tree."""
    if machine().mode != "gpu":
        sys.exit("error: Proton profiles kernels on a GPU, and none is here; profiling/torch_profile.sh needs none")
    if not package_version("triton"):
        sys.exit("error: Proton is part of Triton: pip install triton; profiling/torch_profile.sh needs it not")

    import triton.profiler as proton

    tree = proton.start(str(out))
    proton.deactivate(tree)

    @contextmanager
    def capture(name: str, on_gpu: bool) -> Iterator[None]:
        proton.activate(tree)
        try:
            with proton.scope(name):
                yield
                torch.cuda.synchronize()
        finally:
            proton.deactivate(tree)

    with patch.object(bench, "capture", capture):
        try:
            yield
        finally:
            proton.finalize(tree)


WATCHERS = {
    "launches": launches_counted, "unguarded": functools.partial(launches_counted, guarded=False),
    "bounded": bounded, "torch": traced, "proton": scoped,
}  # fmt: skip


def main(argv: list[str]) -> None:
    watcher, out, script, *rest = argv
    with WATCHERS[watcher](Path(out)):
        sys.argv = [script, *rest]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
