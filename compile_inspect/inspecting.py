"""The phases run in one process, one after another, with torch's state put back afterwards."""

import importlib
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch.backends import cudnn

from compile_inspect.logs import logs
from compile_inspect.report import PHASES, Phase, Report, Skip, reason_of
from compile_inspect.subject import Subject, SubjectError

CONFIGS = torch._dynamo.config, torch._inductor.config, torch._functorch.config
SETTINGS = (  # how each is read, and put back
    (random.getstate, random.setstate), (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype), (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *((partial(getattr, cudnn, x), partial(setattr, cudnn, x)) for x in ("enabled", "benchmark", "deterministic")),
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
        with subject.left_alone():
            subject.call_once()
            report = Report(subject.name, machine(subject), shared=subject.shared)
            report.phases += [run_phase(each, subject) for each in phases]
    return report


def run_phase(name: str, subject: Subject, changed: Callable[[Phase], None] = Phase.changed) -> Phase:
    """One phase, which is told to `changed` as it grows. What it raises becomes its status and reason."""
    module = importlib.import_module(f"compile_inspect.{name}")
    phase, started = Phase(name, module.QUESTION), time.perf_counter()
    phase.changed = changed
    changed(phase)
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
    settings = [(read, put_back, read()) for read, put_back in SETTINGS]
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    drawn = numpy and numpy.get_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading a setting that is deprecated warns
        configs = [(config, config.get_config_copy()) for config in CONFIGS]
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        for read, put_back, value in settings:
            if read() != value:
                put_back(value)
        if numpy:
            numpy.set_state(drawn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for config, values in configs:
                now = config.get_config_copy()
                config.load_config({key: value for key, value in values.items() if value != now[key]})
        torch.compiler.reset()
