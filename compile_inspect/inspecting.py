"""The phases run in one process, one after another, with torch's state put back afterwards."""

from __future__ import annotations

import importlib
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from compile_inspect.breaks import NOT_THE_USERS
from compile_inspect.logs import logs
from compile_inspect.report import PHASES, Phase, Report, Skip
from compile_inspect.subject import Subject, SubjectError

HERE = Path(__file__).parent
CONFIGURATIONS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")


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
    except SubjectError as error:
        phase.status, phase.reason = "failed", str(error)
    except BaseException as error:  # the user's model may do anything, sys.exit() too
        phase.status, phase.reason = "failed", reason_of(error)
    phase.seconds = round(time.perf_counter() - started, 2)
    changed(phase)
    return phase


def reason_of(error: BaseException) -> str:
    """An error in one line: its type, the first sentence of its text, and the innermost line of the model's code."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(said[: 2 if said[0].endswith(":") else 1])
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*NOT_THE_USERS, str(HERE)))]
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        text += "; try smaller inputs"
    where = f" (at {own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text}{where}"


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

    modules = [sys.modules[name] for name in CONFIGURATIONS]
    held = [_values(module) for module in modules]
    numbers, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    grad, dtype, python = torch.is_grad_enabled(), torch.get_default_dtype(), random.getstate()
    threads, numpy = torch.get_num_threads(), getattr(sys.modules.get("numpy"), "random", None)
    drawn = numpy and numpy.get_state()
    try:
        yield
    finally:
        for module, values in zip(modules, held, strict=True):
            for key, value in _values(module).items():
                if value != values[key]:
                    setattr(module, key, values[key])
        torch.set_rng_state(numbers)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if numpy:
            numpy.set_state(drawn)
        torch.compiler.reset()


def _values(configuration) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading a setting that is deprecated warns
        return configuration.get_config_copy()
