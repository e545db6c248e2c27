"""What was compiled: guards of each cache entry, generated code, the kernels that a call runs, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compile_inspect.logs import logs


def guards_of(fn: Callable) -> list[list[str]]:
    """The guards of each cache entry of fn, the plain function or what torch.compile made of it; the newest first."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    return [
        [line.strip("| +-").strip() for line in str(entry.guard_manager).splitlines()
         if "+- " in line and "GuardManager" not in line]
        for entry in _debug_get_cache_entry_list(fn.__code__)
    ]  # fmt: skip


def generated_code(fn: Callable, *inputs, **keywords) -> list[str]:
    """The sources that Inductor writes while fn, not compiled yet, runs once; what was compiled before is forgotten."""
    from torch._inductor.utils import run_and_get_code

    return run_and_get_code(torch.compile(fn), *inputs, **keywords)[1]


def aten_graphs(fn: Callable, *inputs, fullgraph: bool = False) -> list[list[str]]:
    """fn compiled and called once: the operations of each graph that a compiler behind AOTAutograd would get."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def forward(graph, _):
        names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        graphs.append([name for name in names if not name.startswith("<built-in")])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))
    torch.compiler.reset()
    try:
        with logs():
            torch.compile(fn, backend=backend, fullgraph=fullgraph, dynamic=False)(*inputs)
    finally:
        torch.compiler.reset()
    return graphs


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


def cuda_graphs_held() -> int:
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
