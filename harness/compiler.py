"""torch.compile, watched: what it compiled, how often, why again, what it logged; and torch's settings left as found.

Everything here that is torch's own business (an underscore in its name) is used in this file only, in the form that
torch 2.11 to 2.13 share.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

# --- a compiler that knows nothing yet


@contextmanager
def empty_compiler() -> Iterator[None]:
    """Within it torch.compile starts from nothing: no graphs, no recompile counts, and an empty cache folder.

    What was compiled within is forgotten at the end; keep results, not compiled functions. A C++ compiler's headers,
    precompiled once per machine, stay.
    """
    torch.compiler.reset()
    try:
        with empty_cache():
            yield
    finally:
        torch.compiler.reset()


@contextmanager
def empty_cache() -> Iterator[None]:
    """Within it Inductor and Triton write to an empty folder; what is compiled within keeps working afterwards."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


# --- what was compiled


@dataclass(frozen=True)
class Frame:
    """One compilation of one Python frame. `reason` says which guard failed when it was not the first."""

    name: str
    graph_ops: int
    guards: int
    seconds: float
    reason: str | None
    failure: str | None


@dataclass
class Compiled:
    """What torch.compile did within watch()."""

    graphs: int = 0  # handed to a backend
    breaks: list[str] = field(default_factory=list)  # the first line of each distinct reason
    frames: list[Frame] = field(default_factory=list)
    counters: dict[str, dict[str, int]] = field(default_factory=dict)  # torch's own, as they grew
    seconds: float = 0.0  # of wall clock within

    @property
    def recompiles(self) -> list[str]:
        return [frame.reason for frame in self.frames if frame.reason]


@contextmanager
def watch() -> Iterator[Compiled]:
    """Count what torch.compile does within: watch() as seen, and after it seen.graphs, seen.recompiles and so on."""
    from torch._dynamo import utils

    seen, before = Compiled(), copy.deepcopy(dict(utils.counters))
    known = {id(metric) for metric in utils.get_compilation_metrics()}
    held = utils.get_compilation_metrics()  # alive, so that no new one gets an old one's id
    limit = utils._compilation_metrics.maxlen
    utils.set_compilation_metrics_limit(4096)
    started = time.perf_counter()
    try:
        yield seen
    finally:
        seen.seconds = time.perf_counter() - started
        for metric in utils.get_compilation_metrics():
            if id(metric) not in known:
                seen.frames.append(
                    Frame(
                        metric.co_name, metric.graph_op_count or 0, metric.guard_count or 0,
                        metric.entire_frame_compile_time_s or 0.0, metric.recompile_reason, metric.fail_reason,
                    )
                )  # fmt: skip
        utils.set_compilation_metrics_limit(limit)
        del held
        for group, counts in utils.counters.items():
            grown = {name: n - before.get(group, {}).get(name, 0) for name, n in counts.items()}
            if grown := {name: n for name, n in grown.items() if n > 0}:
                seen.counters[group] = grown
        seen.graphs = seen.counters.get("stats", {}).get("unique_graphs", 0)
        seen.breaks = [text.strip().splitlines()[0] for text in seen.counters.get("graph_break", {})]


def guards(fn: Callable) -> list[list[str]]:
    """The guards of each compiled form of fn (the plain function, not the compiled one), the newest form first."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return [
        [
            line.strip("| +-").strip()
            for line in str(entry.guard_manager).splitlines()
            if "+- " in line and "GuardManager" not in line
        ]
        for entry in _debug_get_cache_entry_list(fn.__code__)
    ]


def generated_code(fn: Callable, *inputs) -> list[str]:
    """The sources that Inductor writes while fn, a function not compiled yet, runs once on these inputs."""
    from torch._inductor.utils import run_and_get_code

    return run_and_get_code(torch.compile(fn), *inputs)[1]


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name.rsplit(".__", 1)[-1], record.getMessage()))


@contextmanager
def logs(**artifacts) -> Iterator[list[tuple[str, str]]]:
    """Switch torch's log artifacts on and collect them as (artifact, text): logs(recompiles=True) as lines.

    torch's loggers do not propagate, so their handlers are exchanged; a user's TORCH_LOGS is switched on again after.
    Raises ValueError, by torch, for a name that is no artifact.
    """
    from torch._logging import _internal, set_logs

    collector, replaced = _Collector(), []
    set_logs(**artifacts)
    registry = _internal.log_registry
    for name in registry.get_log_qnames() | registry.get_artifact_log_qnames() | {"torch"}:
        logger = logging.getLogger(name)
        if logger.handlers:
            replaced.append((logger, list(logger.handlers)))
            logger.handlers[:] = [collector]
    try:
        yield collector.records
    finally:
        for logger, handlers in replaced:
            logger.handlers[:] = handlers
        if os.environ.get("TORCH_LOGS"):
            _internal._init_logs()
        else:
            set_logs()


# --- settings, left as found


def _setting(read: str, write: str | None = None) -> tuple[Callable, Callable]:
    """(get, set) of a setting that is an attribute (`torch.x.y`) or a pair of functions."""

    def look(path: str):
        value = torch
        for part in path.split("."):
            value = getattr(value, part)
        return value

    if write is None:
        parent, _, name = read.rpartition(".")
        return (lambda: look(read)), (lambda value: setattr(look(parent), name, value))
    return (lambda: look(read)()), (lambda value: look(write)(value))


def _get_stance():
    frame = sys.modules.get("torch._dynamo.eval_frame")
    return frame._stance.stance if frame else "default"


def _get_environment() -> dict[str, str]:
    mine = re.compile(r"TORCH|PYTORCH|TRITON|CUDA_|CUBLAS|NVIDIA_TF32|MLIR|OMP_|MKL_")
    # Inductor sets these itself once it has compiled: where its cache and Triton's tools are.
    own = re.compile(
        r"TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR|TRITON_.*_PATH|TRITON_DISABLE_LINE_INFO|TORCHINDUCTOR_.*PID"
    )
    return {name: value for name, value in os.environ.items() if mine.match(name) and not own.fullmatch(name)}


def _set_environment(value: dict[str, str]) -> None:
    for name in set(_get_environment()) - set(value):
        del os.environ[name]
    os.environ.update(value)


CONFIGS = (
    "torch._dynamo.config", "torch._inductor.config", "torch._functorch.config", "torch.fx.experimental._config",
    "torch.compiler.config",
)  # fmt: skip


def _override(entry, value=None, *, write: bool = False):
    """Read or write what a user set; torch 2.13 keeps it in a ContextVar."""
    held = entry.user_override
    if isinstance(held, ContextVar):
        return held.set(value) if write else held.get()
    if write:
        entry.user_override = value
    return held


def _get_configs() -> dict[str, dict]:
    """What differs from its default in the compiler's configurations that are loaded."""
    changed = {}
    for name in CONFIGS:
        if (module := sys.modules.get(name)) is None:
            continue
        unset = sys.modules["torch.utils._config_module"]._UNSET_SENTINEL
        for key, entry in module._config.items():
            value = _override(entry)
            defaults = (entry.default, entry.env_value_default, entry.env_value_force)
            if value is not unset and not any(value is d or value == d for d in defaults):
                changed.setdefault(name, {})[key] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    return changed


def _set_configs(value: dict[str, dict]) -> None:
    unset = sys.modules["torch.utils._config_module"]._UNSET_SENTINEL
    for name, keys in _get_configs().items():
        for key in keys:
            _override(sys.modules[name]._config[key], value.get(name, {}).get(key, unset), write=True)


def _set_logs(value: tuple) -> None:
    from torch._logging._internal import log_state

    if value != _get_logs():
        torch._logging.set_logs()
        log_state.artifact_names.update(value[0])


def _get_logs() -> tuple:
    from torch._logging._internal import log_state

    return tuple(sorted(log_state.artifact_names)), tuple(sorted(log_state.log_qname_to_level.items()))


SETTINGS: dict[str, tuple[Callable, Callable]] = {
    "float32 matmul precision": _setting("get_float32_matmul_precision", "set_float32_matmul_precision"),
    "cuBLAS fp32 precision": _setting("backends.cuda.matmul.fp32_precision"),
    "cuDNN convolution fp32 precision": _setting("backends.cudnn.conv.fp32_precision"),
    "cuBLAS bf16 reduced precision": _setting("backends.cuda.matmul.allow_bf16_reduced_precision_reduction"),
    "deterministic algorithms": _setting("are_deterministic_algorithms_enabled", "use_deterministic_algorithms"),
    "fill uninitialized memory": _setting("utils.deterministic.fill_uninitialized_memory"),
    "cudnn.deterministic": _setting("backends.cudnn.deterministic"),
    "cudnn.benchmark": _setting("backends.cudnn.benchmark"),
    "default dtype": _setting("get_default_dtype", "set_default_dtype"),
    "grad mode": _setting("is_grad_enabled", "set_grad_enabled"),
    "threads": _setting("get_num_threads", "set_num_threads"),
    "working folder": (os.getcwd, os.chdir),
    "environment": (_get_environment, _set_environment),
    "stance": (_get_stance, lambda value: torch.compiler.set_stance(value)),
    "compiler configuration": (_get_configs, _set_configs),
    "logs": (_get_logs, _set_logs),
}


def settings() -> dict[str, object]:
    """torch's global settings now, by name."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


class SettingsChanged(AssertionError):
    """A technique left a global setting of torch, or the environment, other than it found it."""


@contextmanager
def settings_kept(what: str, seed: int) -> Iterator[None]:
    """Run a technique from known random numbers; afterwards put back what it changed, and say so.

    Random numbers (torch's, Python's and numpy's) start from `seed` and come back as they were. Raises SettingsChanged
    when a setting differs at the end, unless the technique already failed otherwise.
    """
    import numpy as np

    before, python, numpy_state = settings(), random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    failed = False
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    except BaseException:
        failed = True
        raise
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        changed = {name: value for name, value in settings().items() if value != before[name]}
        for name in changed:
            SETTINGS[name][1](before[name])
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        if changed and not failed:
            told = "; ".join(f"{name} was {before[name]!r}, is {value!r}" for name, value in changed.items())
            raise SettingsChanged(f"{what} left global settings changed: {told}; put them back, with a context manager")
