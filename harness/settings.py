"""torch's global settings, and the environment: read, put back, and left as a technique found them.

What is private to torch (an underscore in its name) is used here in the form that torch 2.9 to 2.15 share.
"""

from __future__ import annotations

import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from unittest.mock import patch

import numpy as np
import torch
from torch._logging import _internal as logs
from torch.backends import cuda

Setting = tuple[Callable[[], object], Callable[[object], object]]  # how it is read, and how it is put back


def _attribute(path: str) -> Setting:
    parent, _, name = path.rpartition(".")
    return partial(attrgetter(path), torch), partial(setattr, attrgetter(parent)(torch), name)


def _variables(pattern: str) -> Setting:
    """Those of the environment whose names match."""

    def read() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if re.fullmatch(pattern, name)}

    def put_back(value: dict[str, str]) -> None:
        for name in read().keys() - value.keys():
            del os.environ[name]
        os.environ.update(value)

    return read, put_back


def _configuration(name: str) -> Setting:
    """What differs from its default in one of the compiler's configurations, where that is loaded."""

    def read() -> dict[str, object]:
        if (module := sys.modules.get(name)) is None:
            return {}
        changed = {}
        for key, value in module._get_dict(skip_default=True).items():
            entry = module._config[key]
            if value not in (entry.default, entry.env_value_default, entry.env_value_force):
                changed[key] = value
        return changed

    def put_back(value: dict[str, object]) -> None:
        module = sys.modules[name]
        for key in read().keys() | value.keys():
            if key in value:
                setattr(module, key, value[key])
            else:
                delattr(module, key)  # back to its default; and hidden, for unittest.mock's sake
                module._config[key].hide = False

    return read, put_back


def _get_stance() -> dict[str, object]:
    frame = sys.modules.get("torch._dynamo.eval_frame")
    unchanged = {"stance": "default", "skip_guard_eval_unsafe": False, "backend": None}
    return dict(vars(frame._stance)) if frame else unchanged


def _set_stance(value: dict) -> None:
    frame = sys.modules["torch._dynamo.eval_frame"]
    frame._set_stance(frame.DynamoStance(**value))


def _get_logging() -> dict[str, object]:
    state = logs.log_state
    return {"artifacts": sorted(state.artifact_names), **dict(sorted(state.log_qname_to_level.items()))}


def _set_logging(value: dict) -> None:
    levels = dict(value)
    logs.log_state.clear()
    logs.log_state.artifact_names.update(levels.pop("artifacts"))
    logs.log_state.log_qname_to_level.update(levels)
    with patch.dict(os.environ):
        os.environ.pop("TORCH_LOGS", None)  # else it is read again instead
        logs._init_logs()


FLOAT32 = (  # the one that others follow first
    "", ".cudnn", ".mkldnn", ".cuda.matmul", ".cudnn.conv", ".cudnn.rnn", ".mkldnn.matmul", ".mkldnn.conv",
    ".mkldnn.rnn",
)  # fmt: skip
ATTRIBUTES = (
    *(f"backends{unit}.fp32_precision" for unit in FLOAT32),
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cudnn.deterministic", "backends.cudnn.benchmark", "utils.deterministic.fill_uninitialized_memory",
)  # fmt: skip
STEERING = "(TORCH|PYTORCH|TRITON|CUDA_|CUBLAS|NVIDIA_TF32|MLIR|OMP_|MKL_|XLA_|PT_XLA_|PJRT_|CPU_NUM_DEV).*"
CACHES = "TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR"
# Inductor sets these itself once it has compiled: where its caches and Triton's tools are.
INDUCTORS = f"{CACHES}|TRITON_.*_PATH|TRITON_DISABLE_LINE_INFO|TORCHIND.*PID"
SETTINGS: dict[str, Setting] = {
    # It writes the matmuls' attributes below, too.
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **{f"torch.{path}": _attribute(path) for path in ATTRIBUTES},
    **{f"{kind} attention": (getattr(cuda, f"{kind}_sdp_enabled"), getattr(cuda, f"enable_{kind}_sdp"))
       for kind in ("flash", "mem_efficient", "math", "cudnn")},
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (
        lambda: str(torch.empty(0).device),  # torch.get_default_device() of torch 2.9 fails after a device of None
        lambda value: torch.set_default_device(None if value == "cpu" else value),
    ),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "working folder": (os.getcwd, os.chdir),
    "environment": _variables(f"(?!({INDUCTORS})$){STEERING}"),
    "stance": (_get_stance, _set_stance),
    **{name: _configuration(name) for name in (
        "torch._dynamo.config", "torch._inductor.config", "torch._functorch.config",
        "torch.fx.experimental._config", "torch.compiler.config",
    )},
    "logs": (_get_logging, _set_logging),
    "cache folders": _variables(CACHES),
    "Python's random numbers": (random.getstate, random.setstate),
    "numpy's random numbers": (np.random.get_state, np.random.set_state),
    "torch's random numbers": (torch.get_rng_state, torch.set_rng_state),
    "random numbers of GPUs": (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all),
    "what was compiled": (lambda: None, lambda _: "torch._dynamo" in sys.modules and torch.compiler.reset()),
}  # fmt: skip
UNTOLD = [*SETTINGS][[*SETTINGS].index("cache folders") :]  # put back, and never a fault of a technique's


class SettingsChanged(AssertionError):
    """A technique left a global setting of torch, or the environment, other than it found it."""


def settings() -> dict[str, object]:
    """torch's global settings now, by name."""
    return {name: _read(name) for name in SETTINGS if name not in UNTOLD}


def _read(name: str) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch 2.9, on the old way to say it
            return SETTINGS[name][0]()
    except Exception as error:  # a working folder that is gone, or precisions that contradict each other
        return error


@contextmanager
def settings_kept(what: str, seed: int) -> Iterator[None]:
    """Run a technique from the random numbers of `seed` (torch's, Python's and numpy's); then put back what it changed.
    Raises SettingsChanged when a setting differs at the end, unless the technique already failed otherwise."""
    before, failed = {name: _read(name) for name in SETTINGS}, True
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
        failed = False
    finally:
        problems = [*_differences(before), *_put_back(before)]
        if problems and not failed:
            raise SettingsChanged(f"{what} left global settings changed: {'; '.join(problems)}; use a context manager")


def _differences(before: dict[str, object]) -> Iterator[str]:
    for name, new in settings().items():
        old = before[name]
        if isinstance(old, Exception) or _meant(old) == _meant(new):
            continue
        parts = [(name, old, new)]
        if isinstance(old, dict) and isinstance(new, dict):
            parts = [(f"{name}: {key}", old.get(key, "unset"), new.get(key, "unset")) for key in {**old, **new}]
        yield from (f"{part} was {was!r}, is {now!r}" for part, was, now in parts if was != now)


def _meant(value: object) -> object:
    """Of a precision of float32: "none" is as the place above says, full precision where none says more."""
    return "ieee" if value == "none" else value


def _put_back(before: dict[str, object]) -> Iterator[str]:
    for name, old in before.items():
        try:
            # What it is now: it may follow a setting that was put back before it.
            if not isinstance(old, Exception) and (name in UNTOLD or repr(_read(name)) != repr(old)):
                SETTINGS[name][1](old)
        except Exception as error:  # the others are put back all the same; a GPU may have stopped working
            yield f"{name} cannot be put back: {type(error).__name__}: {error}"
