"""torch.compile, watched: what it compiled, how often, why again, what it logged; and torch's settings left as found.

Everything here that is torch's own business (an underscore in its name) is used in this file only, in the form that
torch 2.11 to 2.13 share.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

# --- a compiler that knows nothing yet


@functools.cache
def wake_compiler(device: torch.device | str) -> None:
    """Pay, once per process, what only its first compilation costs: imports, workers, precompiled headers.

    Called before the first compilation whose seconds are to be compared with another's.
    """
    torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    torch.compiler.reset()


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
    from torch._inductor.utils import clear_caches

    # As torch's fresh_cache does, which leaves its folder behind when what is compiled fails.
    with TemporaryDirectory(prefix="empty-cache-", ignore_cleanup_errors=True) as folder:
        before = _get_caches()
        clear_caches()
        _set_caches(_Caches(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=f"{folder}/triton"))
        try:
            yield
        finally:
            _set_caches(before)
            clear_caches()


# --- what was compiled


@dataclass(frozen=True)
class Frame:
    """One compilation of one Python frame. `reason` says which guard failed when it was not the first, and `failure`
    why nothing came of it: of a loop with a graph break in it, nothing is compiled.
    """

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
    kernels: int = 0  # that Inductor generated: C++ loops or Triton kernels, equal ones counted each time
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
    kernels = _kernels_generated()
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
        seen.kernels = _kernels_generated() - kernels
        utils.set_compilation_metrics_limit(limit)
        del held
        for group, counts in utils.counters.items():
            grown = {name: n - before.get(group, {}).get(name, 0) for name, n in counts.items()}
            if grown := {name: n for name, n in grown.items() if n > 0}:
                seen.counters[group] = grown
        seen.graphs = seen.counters.get("stats", {}).get("unique_graphs", 0)
        seen.breaks = [text.strip().splitlines()[0] for text in seen.counters.get("graph_break", {})]


def _kernels_generated() -> int:
    metrics = sys.modules.get("torch._inductor.metrics")  # not loaded: nothing generated yet
    return metrics.generated_kernel_count if metrics else 0


def guards(fn: Callable) -> list[list[str]]:
    """The guards of each compiled form of fn, the plain function or what torch.compile made of it; the newest first."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    return [
        [
            line.strip("| +-").strip()
            for line in str(entry.guard_manager).splitlines()
            if "+- " in line and "GuardManager" not in line
        ]
        for entry in _debug_get_cache_entry_list(fn.__code__)
    ]


def generated_code(fn: Callable, *inputs) -> list[str]:
    """The sources that Inductor writes while fn, a function not compiled yet, runs once on these inputs.

    Whatever was compiled before is forgotten, as after torch.compiler.reset().
    """
    from torch._inductor.utils import run_and_get_code

    return run_and_get_code(torch.compile(fn), *inputs)[1]


def kernels_run(fn: Callable, *inputs) -> tuple[list[str], int]:
    """(names of the kernels that one call of fn runs on the GPU, in their order; CUDA graphs that it launches).

    The names are empty where torch.profiler shows no kernels. Call fn first until it has settled.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        fn(*inputs)
        torch.cuda.synchronize()
    events = list(seen.events())
    on_gpu = [
        event for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]  # fmt: skip
    names = [event.name.removeprefix("void ") for event in sorted(on_gpu, key=lambda event: event.time_range.start)]
    names = [name for name in names if not name.startswith(("Memset", "Memcpy"))]
    return names, sum(event.name == "cudaGraphLaunch" for event in events)


def cuda_graphs() -> int:
    """CUDA graphs that torch.compile (mode="reduce-overhead") holds on the current device now; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    nodes, count = list(manager.get_roots()) if manager else [], 0
    while nodes:  # a graph recorded after another one within the same call is its child
        node = nodes.pop()
        count += 1
        nodes += [child for children in node.children.values() for child in children]
    return count


@dataclass(frozen=True)
class Split:
    """What a partitioner makes of a joint graph. Operations are counted without the getitems that unpack tuples.

    `saved` are the tensors that forward keeps for backward alone: neither parameters nor inputs, each memory once.
    """

    joint: int
    forward: int
    backward: int
    backward_matmuls: int  # matrix products and attention
    saved: int
    saved_bytes: int


def splits(fn: Callable, *inputs, cases: dict[str, tuple[str, float]]) -> dict[str, Split]:
    """AOTAutograd's joint graph of fn, cut in two in each of `cases`: name -> (partitioner, activation memory budget).

    The partitioner is "default" or "min-cut". fn is traced once, with Inductor's decompositions, as one graph; nothing
    is compiled further. Raises ValueError for another partitioner, and for an fn without a gradient.
    """
    from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._inductor.decomposition import select_decomp_table

    partitioners = {"default": default_partition, "min-cut": min_cut_rematerialization_partition}
    for name, (partitioner, _) in cases.items():
        if partitioner not in partitioners:
            raise ValueError(f"splits: {name}: partitioner {partitioner!r} is not one of {list(partitioners)}")
    found = {}

    def cut(joint, joint_inputs, **options):
        for name, (partitioner, budget) in cases.items():
            # copy.deepcopy of a graph walks a tree of torch's with an old name, which warns.
            with config.patch(activation_memory_budget=budget), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                found[name] = _split(joint, *partitioners[partitioner](copy.deepcopy(joint), joint_inputs, **options))
        return min_cut_rematerialization_partition(joint, joint_inputs, **options)

    def as_it_is(graph, _):
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=cut, decompositions=select_decomp_table()
    )
    torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    if cases and not found:
        raise ValueError(f"splits: {fn!r} has no gradient: no input or parameter requires grad, or grad mode is off")
    return found


def _split(joint, forward, backward) -> Split:
    def operations(graph) -> list[str]:
        return [
            str(node.target) for node in graph.graph.nodes
            if node.op == "call_function" and "getitem" not in str(node.target)
        ]  # fmt: skip

    def memory(graph) -> dict[int, int]:  # each storage that comes in, and its bytes
        values = [
            node.meta["val"] for node in graph.graph.nodes
            if node.op == "placeholder" and not node.name.startswith("tangents")
        ]  # fmt: skip
        storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
        return {storage._cdata: storage.nbytes() for storage in storages}

    given, wanted = memory(forward), memory(backward)
    saved = [size for storage, size in wanted.items() if storage not in given]
    ran = operations(backward)
    matmuls = sum(re.search(r"\b(mm|addmm|bmm|baddbmm)\b|attention", name) is not None for name in ran)
    return Split(len(operations(joint)), len(operations(forward)), len(ran), matmuls, len(saved), sum(saved))


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name.rsplit(".__", 1)[-1], record.getMessage()))


@contextmanager
def logs(**artifacts) -> Iterator[list[tuple[str, str]]]:
    """Switch torch's log artifacts on and collect them as (artifact, text): logs(recompiles=True) as lines.

    Only these, whatever TORCH_LOGS says, and torch's warnings with them; afterwards all is logged as before. Raises
    TypeError, by torch, for a name that is no artifact.
    """
    from torch._logging import _internal, set_logs

    # torch's loggers do not propagate to the root logger, so their handlers are exchanged.
    collector, replaced, before = _Collector(), [], _get_logs()
    try:
        with _without("TORCH_LOGS"):  # with it, set_logs does nothing
            set_logs(**artifacts)
        registry = _internal.log_registry
        for name in registry.get_log_qnames() | registry.get_artifact_log_qnames() | {"torch"}:
            logger = logging.getLogger(name)
            if logger.handlers:
                replaced.append((logger, list(logger.handlers)))
                logger.handlers[:] = [collector]
        yield collector.records
    finally:
        for logger, handlers in replaced:
            logger.handlers[:] = handlers
        _set_logs(before)


@contextmanager
def _without(variable: str) -> Iterator[None]:
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[variable] = value


def _get_logs() -> dict[str, object]:
    from torch._logging import _internal

    state = _internal.log_state
    return {"artifacts": sorted(state.artifact_names), "levels": dict(sorted(state.log_qname_to_level.items()))}


def _set_logs(value: dict[str, object]) -> None:
    from torch._logging import _internal

    _internal.log_state.clear()
    _internal.log_state.artifact_names.update(value["artifacts"])
    _internal.log_state.log_qname_to_level.update(value["levels"])
    with _without("TORCH_LOGS"):  # else it is read again instead
        _internal._init_logs()


# --- settings, left as found: for each, how it is read and how it is put back


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


class _Caches(_Meant):
    """The folders of the caches, as the environment has them. Inductor writes its defaults into it."""

    def meant(self) -> dict[str, str | None]:
        utils = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
        default = utils.default_cache_dir() if utils else None
        inductor, triton = self["TORCHINDUCTOR_CACHE_DIR"], self["TRITON_CACHE_DIR"]
        inductor = default if inductor is None else os.path.abspath(inductor)
        if inductor and triton and Path(triton).parent == Path(inductor, "triton"):
            triton = None  # one for each device
        return {"TORCHINDUCTOR_CACHE_DIR": inductor, "TRITON_CACHE_DIR": triton}


def _get_caches() -> _Caches:
    return _Caches({name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")})


def _set_caches(value: _Caches) -> None:
    for name, folder in value.items():
        os.environ.pop(name, None)
        if folder is not None:
            os.environ[name] = folder


def _get_environment() -> dict[str, str]:
    mine = re.compile(r"TORCH|PYTORCH|TRITON|CUDA_|CUBLAS|NVIDIA_TF32|MLIR|OMP_|MKL_")
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
        lambda: str(torch.get_default_device()),
        lambda value: torch.set_default_device(None if value == "cpu" else value),
    ),
    "grad mode": _setting("is_grad_enabled", "set_grad_enabled"),
    "threads": _setting("get_num_threads", "set_num_threads"),
    "working folder": (os.getcwd, os.chdir),
    "environment": (_get_environment, _set_environment),
    "cache folders": (_get_caches, _set_caches),
    "stance": (_get_stance, _set_stance),
    "compiler configuration": (_get_configs, _set_configs),
    "logs": (_get_logs, _set_logs),
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
