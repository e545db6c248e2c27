"""PyTorch/XLA, watched: what was compiled, run, synchronized and moved; the recorded graph as text; waiting for it.

Importing it imports torch_xla, which has an environment of its own: `make xla` sets it up. All that is torch_xla's own
business (an underscore in its name) is used in this file only, in the form of torch_xla 2.9.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

# torch_xla would choose the CPU by itself, with a warning on the root logger, where no TPU library is installed.
if not any(importlib.util.find_spec(name) for name in ("libtpu", "libneuronxla")):
    os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import torch_xla
from torch_xla.core import xla_model
from torch_xla.debug import metrics

# Inductor's first import says that CUDA_HOME leads to no CUDA, which is no news in this environment.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

_XLAC = torch_xla._XLAC

# torch_xla tells them apart in counters and timers; an operation that XLA cannot do is a counter named "aten::...".
TIMERS = {
    "compiles": "CompileTime",
    "executions": "ExecuteTime",
    "to_device": "TransferToDeviceTime",
    "from_device": "TransferFromDeviceTime",
}
COUNTERS = {"reused": "CachedCompile", "syncs": "MarkStep"}


@dataclass
class Ran:
    """What XLA did within watch(); a program is a compiled graph, seconds are wall clock.

    `executions` are runs of programs; those that no sync asked for were forced by something that needed a value, or are
    torch.compile's. `reused` are lazy graphs that were recorded again and found compiled. `to_device` and `from_device`
    count tensors that were copied, scalars too. `fallbacks` are operations that ran outside XLA, on the host, by name:
    `aten::_local_scalar_dense` is what .item() and a Python `if` on a tensor do.
    """

    compiles: int = 0
    executions: int = 0
    reused: int = 0
    syncs: int = 0
    to_device: int = 0
    from_device: int = 0
    compile_s: float = 0.0
    seconds: float = 0.0
    fallbacks: dict[str, int] = field(default_factory=dict)


def device() -> torch.device:
    """The XLA device of this process. Raises, as PJRT does, RuntimeError or OSError for a PJRT_DEVICE that is not here.

    PJRT is asked once: for a TPU that is not here, the second question would abort the process.
    """
    if problem := _no_device():
        raise problem.with_traceback(None)
    return torch_xla.device()


@functools.cache
def _no_device() -> Exception | None:
    try:
        torch_xla.device()
    except Exception as error:
        return error
    return None


def settle() -> None:
    """Run all that is pending and wait until it is done.

    A program that fails in the background does not raise here: the error comes to whoever reads its result.
    """
    device()
    torch_xla.sync(wait=True)
    xla_model.wait_device_ops()


def waited(fn: Callable) -> Callable:
    """fn, run to its end: what it recorded is synchronized and waited for. For clocks and for checks."""

    @functools.wraps(fn)
    def run(*args, **kwargs):
        with torch.autograd.set_multithreading_enabled(False):  # as in watch()
            out = fn(*args, **kwargs)
        settle()
        return out

    return run


def warm_up() -> None:
    """Compile a small graph and its backward pass, so that nothing measured later pays for a process's first
    compilation or for the one program with which all backward passes begin."""
    ones = torch.ones(8, device=device(), requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend="openxla")(ones).backward()
    settle()
    torch.compiler.reset()


def forget_pending() -> None:
    """Drop what is recorded, and the error of what could not be run: the next sync would meet both again.

    To read a tensor that was pending ends the process.
    """
    _XLAC._clear_pending_irs(str(device()))
    with suppress(RuntimeError):  # raised once more, by whoever waits next
        xla_model.wait_device_ops()


def in_use() -> bool:
    """Whether this process has an XLA device already; device() would make one."""
    return _XLAC._xla_runtime_is_initialized()


def start_clean() -> None:
    """Run what an earlier piece of work left pending, or drop it where it cannot be run. Does not raise."""
    gc.collect()  # what nobody holds any more is not pending either
    try:
        settle()
    except Exception:
        forget_pending()


@contextmanager
def watch() -> Iterator[Ran]:
    """Count what XLA does within: watch() as ran, and after it ran.compiles, ran.executions and so on.

    What was pending before is run first; what is pending at the end is left so: call settle() within to have it
    counted. A graph compiled earlier in this process is not compiled again, whoever compiled it.

    Backward passes within run in the thread that asks for them. In autograd's own thread, their tensors may live on
    until the next sync, which then has more results and is a different program: compilations would be a matter of luck.
    """
    settle()
    ran, before = Ran(), _read()
    started = time.perf_counter()
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield ran
    finally:
        xla_model.wait_device_ops()
        ran.seconds = time.perf_counter() - started
        for name, value in (_read() - before).items():
            if name.startswith("aten::"):
                ran.fallbacks[name] = value
            else:
                setattr(ran, name, value)
        ran.compile_s /= 1e9


def _read() -> Counter:
    found = Counter({name: metrics.counter_value(counter) or 0 for name, counter in COUNTERS.items()})
    for name, timer in TIMERS.items():
        if data := metrics.metric_data(timer):
            found[name] = data[0]
            if name == "compiles":
                found["compile_s"] = data[1]  # nanoseconds, until watch() divides
    found.update({n: metrics.counter_value(n) for n in metrics.counter_names() if n.startswith("aten::")})
    return found


# --- the recorded graph, as text; nothing is run


def _on_xla(name: str, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    for index, x in enumerate(tensors):
        if x.device.type != "xla":
            raise ValueError(f"xla.{name}: tensor {index} is on {x.device}; record it with inputs .to(xla.device())")
    return list(tensors)


def hlo(*tensors: torch.Tensor) -> str:
    """The HLO module that computes them, before any optimization; empty where nothing is pending.

    Raises ValueError for a tensor that is not on the XLA device.
    """
    return _XLAC._get_xla_tensors_hlo(_on_xla("hlo", tensors))


def stablehlo(*tensors: torch.Tensor) -> str:
    """The same as StableHLO, the form in which other compilers take it. Raises as hlo() does."""
    return xla_model.get_stablehlo(_on_xla("stablehlo", tensors))


def operations(text: str) -> Counter:
    """How often each operation occurs in one of these texts: Counter({"dot": 2, "add": 5, ...})."""
    if "func.func" in text:
        return Counter(re.findall(r'= "?stablehlo\.(\w+)', text))
    text = re.sub(r"/\*.*?\*/", "", text)  # "/*index=5*/", in the shapes of long tuples
    return Counter(re.findall(r"^\s*(?:ROOT )?%?[\w.-]+ = (?:\([^=]*?\)|\S+) ([\w:-]+)\(", text, re.MULTILINE))
