"""The phases run in one process, one after another, with torch's state put back afterwards."""

from __future__ import annotations

import importlib
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from compile_inspect.logs import logs
from compile_inspect.report import PHASES, Phase, Report, Skip, reason_of
from compile_inspect.subject import Subject, SubjectError

FLAGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config", "torch.backends.cudnn")
SETTINGS = (  # how each is read, and put back
    (random.getstate, random.setstate), (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype), (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)  # fmt: skip


def inspect(
    model: Callable, *args, phases: tuple[str, ...] = PHASES, train: bool = False, name: str = "", **kwargs
) -> Report:
    """Look at what torch.compile makes of model(*args, **kwargs), phase by phase, in this process.

    The model, a function or an nn.Module that is not compiled yet, and its arguments are copied and stay as they are;
    so do torch's settings and random numbers, but what was compiled in this process is forgotten
    (torch.compiler.reset()). A phase that fails is in the report with its reason. Raises ValueError for an unknown
    phase and for what cannot be called or is compiled already, and what the model itself raises when it is called.
    """
    if unknown := [each for each in phases if each not in PHASES]:
        raise ValueError(f"inspect: there is no phase {unknown[0]!r}; the phases are {', '.join(PHASES)}")
    with state_kept():
        subject = Subject(model, args, kwargs, name, train)
        report = Report(subject.name, machine(subject))
        with subject.left_alone():
            call_once(subject)
            report.shared = subject.shared
            for each in phases:
                report.phases.append(run_phase(each, subject))
    return report


def call_once(subject: Subject) -> None:
    """Call the model in eager: an error here is the model's own."""
    fn, args, kwargs = subject.fresh()
    subject.caller(fn, args, kwargs)()
    subject.synchronize()


def run_phase(name: str, subject: Subject, changed: Callable[[Phase], None] = lambda phase: None) -> Phase:
    """One phase, which is told to `changed` as it grows. What it raises becomes its status and reason."""
    module = importlib.import_module(f"compile_inspect.{name}")
    phase = Phase(name, module.QUESTION, changed=changed)
    changed(phase)
    started = time.perf_counter()
    try:
        with state_kept(), logs():
            module.look(subject, phase)
        phase.status = "passed"
    except Skip as reason:
        phase.status, phase.reason = "skipped", str(reason)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's model may do anything, sys.exit() too
        phase.status, phase.reason = "failed", str(error) if isinstance(error, SubjectError) else reason_of(error)
    phase.seconds = round(time.perf_counter() - started, 2)
    changed(phase)
    return phase


def machine(subject: Subject) -> dict:
    """What a report says of where it was made."""
    gpu = torch.cuda.get_device_name(subject.device) if subject.on_gpu else None
    return {"gpu": gpu, "device": gpu or f"CPU, {torch.get_num_threads()} threads", "torch": torch.__version__,
            "python": sys.version.split()[0]}  # fmt: skip


@contextmanager
def state_kept() -> Iterator[None]:
    """Within it torch's settings and random numbers may change; afterwards they are as before, and caches are empty."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    settings = [(read, put_back, read()) for read, put_back in SETTINGS]
    flags = {name: _values(name) for name in FLAGS}
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    drawn = numpy and numpy.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        for name, values in flags.items():
            for key, value in _values(name).items():
                if value != values[key]:
                    setattr(sys.modules[name], key, values[key])
        for read, put_back, value in settings:
            if read() != value:
                put_back(value)
        if numpy:
            numpy.set_state(drawn)
        torch.compiler.reset()


def _values(name: str) -> dict:
    module = sys.modules[name]
    if name == "torch.backends.cudnn":
        return {key: getattr(module, key) for key in ("enabled", "benchmark", "deterministic")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading a setting that is deprecated warns
        return module.get_config_copy()
