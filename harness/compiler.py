"""torch.compile, watched: what it compiled, how often, why again, and what it logged.

Everything here that is torch's own business (an underscore in its name) is used in this file only, in the form that
torch 2.11 to 2.13 share.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

from harness.hardware import interpreted
from harness.settings import Caches, get_caches, get_logging, set_caches, set_logging, without

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
        before = get_caches()
        clear_caches()
        set_caches(Caches(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=f"{folder}/triton"))
        try:
            yield
        finally:
            set_caches(before)
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


def wrap_triton(kernel):
    """torch.library.wrap_triton(kernel); a kernel that is interpreted, which torch 2.11 refuses, as it is."""
    return kernel if interpreted() else torch.library.wrap_triton(kernel)


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
    collector, replaced, before = _Collector(), [], get_logging()
    try:
        with without("TORCH_LOGS"):  # with it, set_logs does nothing
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
        set_logging(before)
