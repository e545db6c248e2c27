"""torch's global settings, and the environment: read, put back, and left as a technique found them.

Everything here that is torch's own business (an underscore in its name) is used in this file only, in the form that
torch 2.9 to 2.13 share.
"""

from __future__ import annotations

import copy
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch

# --- for each setting, how it is read and how it is put back


def _torch(path: str):
    value = torch
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _setting(read: str, write: str | None = None) -> tuple[Callable, Callable]:
    """A setting that is an attribute (`torch.x.y`), or a pair of functions."""
    if write is None:
        parent, _, name = read.rpartition(".")
        return (lambda: _torch(read)), (lambda value: setattr(_torch(parent), name, value))
    return (lambda: _torch(read)()), (lambda value: _torch(write)(value))


class _Meant(dict):
    """A setting that can be written in several ways: equal when it means the same."""

    def __eq__(self, other) -> bool:
        return self.meant() == other.meant()

    def __ne__(self, other) -> bool:
        return not self == other


class _Float32(_Meant):
    """The precisions of float32 arithmetic. "none" is as the place above says, full precision where none says more."""

    def meant(self) -> dict[str, str]:
        return {name: "ieee" if value == "none" else value for name, value in self.items()}


FLOAT32_PLACES = tuple(  # the one that others follow first
    f"backends{unit}" for unit in (
        "", ".cudnn", ".mkldnn", ".cuda.matmul", ".cudnn.conv", ".cudnn.rnn",
        ".mkldnn.matmul", ".mkldnn.conv", ".mkldnn.rnn",
    )
)  # fmt: skip


def _get_float32() -> _Float32:
    found = _Float32()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch 2.9, on the old way to say it
            found["matmul precision"] = torch.get_float32_matmul_precision()
    except RuntimeError:  # what it says once the places below contradict each other
        found["matmul precision"] = "mixed"
    for place in FLOAT32_PLACES:
        found[place] = _torch(place).fp32_precision
    return found


def _set_float32(value: _Float32) -> None:
    if value["matmul precision"] != "mixed":
        torch.set_float32_matmul_precision(value["matmul precision"])  # this writes the matmuls' places below, too
    for place in FLOAT32_PLACES:
        if _torch(place).fp32_precision != value[place]:  # as it is now: it may follow one put back before it
            _torch(place).fp32_precision = value[place]


def _get_device() -> str:
    try:
        return str(torch.get_default_device())
    except AttributeError:  # torch 2.9, once set_default_device(None) was called
        return "cpu"


SDP = ("flash", "mem_efficient", "math", "cudnn")


def _get_attention() -> dict[str, bool]:
    return {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in SDP}


def _set_attention(value: dict[str, bool]) -> None:
    for name in SDP:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(value[name])


def _get_deterministic() -> dict[str, bool]:
    return {
        "enabled": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
    }


def _get_stance() -> dict[str, object]:
    frame = sys.modules.get("torch._dynamo.eval_frame")
    unchanged = {"stance": "default", "skip_guard_eval_unsafe": False, "backend": None}
    return dict(vars(frame._stance)) if frame else unchanged


def _set_stance(value: dict) -> None:
    frame = sys.modules["torch._dynamo.eval_frame"]
    frame._set_stance(frame.DynamoStance(**value))


@contextmanager
def without(variable: str) -> Iterator[None]:
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[variable] = value


def get_logging() -> dict[str, object]:
    from torch._logging import _internal

    state = _internal.log_state
    return {"artifacts": sorted(state.artifact_names), "levels": dict(sorted(state.log_qname_to_level.items()))}


def set_logging(value: dict[str, object]) -> None:
    from torch._logging import _internal

    _internal.log_state.clear()
    _internal.log_state.artifact_names.update(value["artifacts"])
    _internal.log_state.log_qname_to_level.update(value["levels"])
    with without("TORCH_LOGS"):  # else it is read again instead
        _internal._init_logs()


class Caches(_Meant):
    """The folders of the caches, as the environment has them. Inductor writes its defaults into it."""

    def meant(self) -> dict[str, str | None]:
        utils = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
        default = utils.default_cache_dir() if utils else None
        inductor, triton = self["TORCHINDUCTOR_CACHE_DIR"], self["TRITON_CACHE_DIR"]
        inductor = default if inductor is None else os.path.abspath(inductor)
        if inductor and triton and Path(triton).parent == Path(inductor, "triton"):
            triton = None  # one for each device
        return {"TORCHINDUCTOR_CACHE_DIR": inductor, "TRITON_CACHE_DIR": triton}


def get_caches() -> Caches:
    return Caches({name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")})


def set_caches(value: Caches) -> None:
    for name, folder in value.items():
        os.environ.pop(name, None)
        if folder is not None:
            os.environ[name] = folder


def _get_environment() -> dict[str, str]:
    mine = re.compile(r"TORCH|PYTORCH|TRITON|CUDA_|CUBLAS|NVIDIA_TF32|MLIR|OMP_|MKL_|XLA_|PT_XLA_|PJRT_|CPU_NUM_DEV")
    # Inductor sets these itself once it has compiled: where Triton's tools are. The caches are a setting of their own.
    own = re.compile(r"TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR|TRITON_.*_PATH|TRITON_DISABLE_LINE_INFO|TORCHIND.*PID")
    return {name: value for name, value in os.environ.items() if mine.match(name) and not own.fullmatch(name)}


def _set_environment(value: dict[str, str]) -> None:
    for name in set(_get_environment()) - set(value):
        del os.environ[name]
    os.environ.update(value)


CONFIGS = (
    "torch._dynamo.config", "torch._inductor.config", "torch._functorch.config", "torch.fx.experimental._config",
    "torch.compiler.config",
)  # fmt: skip


def _get_configs() -> dict[str, object]:
    """What differs from its default in the compiler's configurations that are loaded."""
    changed = {}
    for name in CONFIGS:
        if (module := sys.modules.get(name)) is None:
            continue
        unset = sys.modules["torch.utils._config_module"]._UNSET_SENTINEL
        for key, entry in module._config.items():
            held = entry.user_override  # torch 2.13 keeps it in a ContextVar
            value = held.get() if isinstance(held, ContextVar) else held
            from_environment = [v for v in (entry.env_value_force, entry.env_value_default) if v is not unset]
            default = [*from_environment, entry.default][0]
            if value is not unset and value is not default and value != default:
                own = copy.deepcopy(value) if isinstance(value, (dict, list, set)) else value
                changed[f"{name}.{key}"] = own
    return changed


def _set_configs(value: dict[str, object]) -> None:
    for full in value.keys() | _get_configs().keys():
        name = next(name for name in CONFIGS if full.startswith(f"{name}."))
        module, key = sys.modules[name], full.removeprefix(f"{name}.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that its name is old
            if full in value:
                setattr(module, key, copy.deepcopy(value[full]))
            else:
                delattr(module, key)  # back to its default; and hidden, for unittest.mock's sake
                module._config[key].hide = False


SETTINGS: dict[str, tuple[Callable, Callable]] = {
    "float32 precision": (_get_float32, _set_float32),
    "cuBLAS bf16 reduced precision": _setting("backends.cuda.matmul.allow_bf16_reduced_precision_reduction"),
    "cuBLAS fp16 reduced precision": _setting("backends.cuda.matmul.allow_fp16_reduced_precision_reduction"),
    "attention backends": (_get_attention, _set_attention),
    "deterministic algorithms": (
        _get_deterministic,
        lambda value: torch.use_deterministic_algorithms(value["enabled"], warn_only=value["warn_only"]),
    ),
    "fill uninitialized memory": _setting("utils.deterministic.fill_uninitialized_memory"),
    "cudnn.deterministic": _setting("backends.cudnn.deterministic"),
    "cudnn.benchmark": _setting("backends.cudnn.benchmark"),
    "default dtype": _setting("get_default_dtype", "set_default_dtype"),
    "default device": (
        _get_device,
        lambda value: torch.set_default_device(None if value == "cpu" else value),
    ),
    "grad mode": _setting("is_grad_enabled", "set_grad_enabled"),
    "threads": _setting("get_num_threads", "set_num_threads"),
    "working folder": (os.getcwd, os.chdir),
    "environment": (_get_environment, _set_environment),
    "cache folders": (get_caches, set_caches),
    "stance": (_get_stance, _set_stance),
    "compiler configuration": (_get_configs, _set_configs),
    "logs": (get_logging, set_logging),
}


@dataclass(frozen=True)
class _Unreadable:
    why: str


def settings() -> dict[str, object]:
    """torch's global settings now, by name."""
    found = {}
    for name, (read, _) in SETTINGS.items():
        try:
            found[name] = read()
        except Exception as error:  # a working folder that is gone
            found[name] = _Unreadable(f"{type(error).__name__}: {error}")
    return found


class SettingsChanged(AssertionError):
    """A technique left a global setting of torch, or the environment, other than it found it."""


@contextmanager
def settings_kept(what: str, seed: int) -> Iterator[None]:
    """Run a technique from known random numbers; afterwards put back what it changed, and say so.

    Random numbers (torch's, of the CPU and of the current GPU, Python's and numpy's) start from `seed` and come back as
    they were. Raises SettingsChanged when a setting differs at the end, unless the technique already failed otherwise.
    """
    import numpy as np

    before, numbers = settings(), _random_numbers()
    failed = False
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
    except BaseException:
        failed = True
        raise
    finally:
        problems = [*_put_back(before), *_at_the_end(numbers)]
        if problems and not failed:
            raise SettingsChanged(f"{what} left global settings changed: {'; '.join(problems)}; use a context manager")


def _random_numbers() -> list[tuple[Callable, object]]:
    """How to put each generator back, and its state now."""
    import numpy as np

    states = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        states.append((lambda state: torch.cuda.set_rng_state(state, device), torch.cuda.get_rng_state(device)))
    return states


def _put_back(before: dict[str, object]) -> Iterator[str]:
    """Put back each setting that is not written as it was; say of those that mean something else what they were."""
    for name, value in settings().items():
        old = before[name]
        if repr(value) == repr(old) or isinstance(old, _Unreadable):
            continue
        if value != old:
            yield f"{name} {_difference(old, value)}"
        try:
            SETTINGS[name][1](old)
        except Exception as error:  # the others are put back all the same
            yield f"{name} cannot be put back: {type(error).__name__}: {error}"


def _at_the_end(numbers: list[tuple[Callable, object]]) -> Iterator[str]:
    try:
        for put_back, state in numbers:
            put_back(state)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
    except Exception as error:  # a GPU that has stopped working, which is then what the technique failed for
        yield f"and then: {type(error).__name__}: {error}"


def _difference(old, new) -> str:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return f"was {old!r}, is {new!r}"
    keys = [key for key in {**old, **new} if (key in old, old.get(key)) != (key in new, new.get(key))]
    told = [f"{key} was {old.get(key, 'unset')!r}, is {new.get(key, 'unset')!r}" for key in keys]
    return f"({', '.join(told)})"
