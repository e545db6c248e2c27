"""CUDA graphs: launch many small kernels as one, and the rules that the recorded addresses bring with them.

Technique  A kernel that takes longer to launch than to run leaves the GPU waiting. A CUDA graph records the launches
           once and replays them all with one. The model here is STEPS launches of one tiny kernel, in two pairs:
           launched or replayed, as STEPS kernels or fused into one. Replaying removes the gaps between kernels; fusing
           removes the kernels. torch.compile fuses by default, mode="reduce-overhead" replays too, and with fusion
           switched off the compiled code shows what its own launches cost. The recording holds addresses, not tensors:
           hence the rules about inputs, outputs, weights and memory, each of them run here.
Question   What do launch gaps cost, what closes them, and what breaks when a graph is replayed?
Needs      torch
Shapes     x [n] -> [n]: x * scale and x + shift in turn, STEPS in all, with weights of the same shape.
Dtypes     float32.
Errors     Captured: ValueError for no input, or for one that is not on a GPU. A call of it, and refill(): ValueError
           for another number of inputs, shape or device, TypeError for another dtype, because copy_ would broadcast
           and cast in silence. What a capture forbids: RuntimeError by torch, shown in processes of their own.
Wins when  the host cannot keep ahead of the GPU: small batches, many small kernels. Where each kernel takes longer than
           its launch there is no gap to close, and the graph's memory and copies are all that remains of it.
Source     chapter section "CUDA Graphs and reduce-overhead".
Run        python examples/compiler/cuda_graphs.py
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from harness import Harness, Work, run
from harness.compiler import logs, watch
from harness.process import Child, ChildFailed, report

import torch
from torch import nn

STEPS = 100
WIDTH = 512  # a thread block, or less than Inductor splits over the threads of a CPU: all latency
WARM_UP = 3  # calls before a capture: libraries allocate and choose their kernels in the first ones
ROWS = 16 << 20  # for the memory of a pool: 64 MiB a tensor

EAGER, BY_HAND = "torch eager", "CUDA graph of eager"
UNFUSED, FUSED, REDUCED = "torch.compile unfused", "torch.compile", "torch.compile reduce-overhead"
# Each operation stays a kernel of its own: its result is stored (or it would become part of the next one), not fused.
NO_FUSION = {"max_fusion_size": 1, "realize_opcount_threshold": 0}


class Scale(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        # A parameter, because a graph reads those where they are; a plain tensor would be copied in at each call.
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Shift(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class Chain(nn.Module):
    """STEPS kernels, each of which waits for the one before; written, as models are, in modules."""

    def __init__(self, scale: torch.Tensor, shift: torch.Tensor) -> None:
        super().__init__()
        self.scale, self.shift = Scale(scale), Shift(shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(STEPS // 2):
            x = self.shift(self.scale(x))
        return x

    def float64(self, x: torch.Tensor) -> torch.Tensor:
        return copy.deepcopy(self).double()(x.double())


def make_chain(h: Harness, width: int = WIDTH) -> Chain:
    # Near 1: after all the steps the result still depends on x.
    return Chain(1 + h.randn(width, scale=0.01), h.randn(width, scale=0.02))


def refill(held: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Copy inputs into the tensors that a graph reads; limits and errors are in the module docstring."""
    if len(inputs) != len(held):
        raise ValueError(f"refill: {len(inputs)} inputs, but {len(held)} were captured; pass as many")
    for i, (to, given) in enumerate(zip(held, inputs, strict=True)):
        if given.dtype != to.dtype:
            raise TypeError(f"refill: input {i} is {given.dtype}, captured as {to.dtype}; cast it, or capture again")
        if given.shape != to.shape or given.device != to.device:
            raise ValueError(
                f"refill: input {i} is {tuple(given.shape)} on {given.device}, captured as {tuple(to.shape)} on "
                f"{to.device}; pad or move it, or capture another graph for it"
            )
    for to, given in zip(held, inputs, strict=True):
        to.copy_(given)


class Captured:
    """fn, recorded on inputs of one shape and replayed. Its result is overwritten by the next call: clone what stays.

    `pool` is the memory of graphs that are replayed one after the other: torch.cuda.graph_pool_handle() makes one.
    """

    def __init__(self, fn: Callable, *inputs: torch.Tensor, pool=None) -> None:
        if not inputs:
            raise ValueError("Captured: no inputs; pass an example of each")
        if wrong := [f"input {i} is on {x.device}" for i, x in enumerate(inputs) if not x.is_cuda]:
            raise ValueError(f"Captured: {wrong[0]}; a CUDA graph holds the GPU's work only, pass x.cuda()")
        self.inputs = [x.clone() for x in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(WARM_UP):
                fn(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool), torch.no_grad():
            self.output = fn(*self.inputs)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        refill(self.inputs, inputs)
        self.graph.replay()
        return self.output


def gpu_work(fn: Callable, x: torch.Tensor) -> tuple[int, float]:
    """Kernels and copies that one call of fn runs on the GPU, and the microseconds that they take."""
    from torch.profiler import ProfilerActivity, profile

    fn(x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        fn(x)
        torch.cuda.synchronize()
    ran = [
        event for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]  # fmt: skip
    return len(ran), sum(event.time_range.elapsed_us() for event in ran)


def first_line(text: object) -> str:
    return next(iter(str(text).split(". Found from")[0].strip().splitlines()), type(text).__name__)


# --- the gaps


def on_gpu(h: Harness, chain: Chain, x: torch.Tensor) -> None:
    variants = {
        EAGER: chain,
        BY_HAND: Captured(chain, x),
        UNFUSED: torch.compile(chain, fullgraph=True, options=NO_FUSION),
        FUSED: torch.compile(chain, fullgraph=True),
        REDUCED: torch.compile(chain, fullgraph=True, mode="reduce-overhead"),
    }
    table = h.compare(
        variants, chain.float64, x, baseline=EAGER, work=Work(), title=f"{STEPS} tiny kernels", whole_calls=True,
        terms=STEPS,
    )  # fmt: skip
    if not (table and h.timing):
        return
    rows = {row.variant: row for row in table.rows}
    work = {name: gpu_work(fn, x) for name, fn in variants.items()}
    if not all(count for count, _ in work.values()):
        h.say("torch.profiler shows no kernels here, so what the GPU waits for is not known")
        work = {}
    shown = {}
    for name, row in rows.items():
        shown[name] = {"us a call": round(row.ms * 1000, 1), "host us to launch": round(row.enqueue_us, 1)}
        if name in work:
            count, busy = work[name]
            shown[name] |= {
                "kernels and copies": count, "us of them": round(busy, 1),
                "host us each": round(row.enqueue_us / count, 2),
                "GPU waits, %": round(100 * idle(row.ms * 1000, busy)),
            }  # fmt: skip
    h.fact("where the time goes", shown)
    if work:
        explain(h, rows, work)


def idle(call_us: float, busy_us: float) -> float:
    """The share of a call in which the GPU runs nothing."""
    return max(0.0, 1 - busy_us / call_us)


def explain(h: Harness, rows: dict, work: dict[str, tuple[int, float]]) -> None:
    waits = {name: idle(row.ms * 1000, work[name][1]) for name, row in rows.items()}
    graph, eager = rows[BY_HAND], rows[EAGER]
    confirmed = graph.speedup > 1.1 and waits[BY_HAND] < waits[EAGER]
    h.say(
        f"claim graphs-gap, CUDA graphs remove launch gaps: {'confirmed' if confirmed else 'not here'}. "
        f"{work[EAGER][0]} kernels take {eager.ms * 1000:.0f} us launched one by one, {graph.ms * 1000:.0f} us replayed"
        f" ({graph.speedup:.1f}x); the GPU waits for {waits[EAGER]:.0%} of the one, {waits[BY_HAND]:.0%} of the other"
    )
    unfused, fused, reduced = rows[UNFUSED], rows[FUSED], rows[REDUCED]
    h.say(
        f"eager's {eager.enqueue_us / work[EAGER][0]:.1f} us of the host for each kernel hold that of its modules; "
        f"over the {work[UNFUSED][0]} launches of compiled code, which has no modules, the graph is "
        f"{unfused.ms / graph.ms:.1f}x"
    )
    h.say(
        f"fusing is another matter: torch.compile runs {work[FUSED][0]} kernel(s) instead of {work[EAGER][0]} and is "
        f"{fused.speedup:.1f}x eager; without fusion, its {work[UNFUSED][0]} launches give {unfused.speedup:.1f}x"
    )
    better = "gains" if reduced.ms < fused.ms else "loses"
    more = work[REDUCED][0] - work[FUSED][0]
    h.say(
        f"reduce-overhead {better} where fusion left {work[FUSED][0]} kernel(s): {reduced.ms * 1000:.0f} us against "
        f"{fused.ms * 1000:.0f}" + (f"; it runs {more} more, to copy the input into the graph" if more > 0 else "")
    )


def on_cpu(h: Harness, chain: Chain, x: torch.Tensor) -> None:
    """What remains of it: the cost to dispatch an operation, and why there is no graph."""
    variants = {EAGER: chain, FUSED: torch.compile(chain, fullgraph=True)}
    table = h.compare(
        variants, chain.float64, x, baseline=EAGER, work=Work(), title=f"{STEPS} tiny operations", terms=STEPS
    )
    if h.profile:
        return
    skips = {}
    ways = {"mode reduce-overhead": {"mode": "reduce-overhead"}, "backend cudagraphs": {"backend": "cudagraphs"}}
    for name, how in ways.items():
        torch.compiler.reset()
        with logs(cudagraphs=True) as lines, watch() as seen:
            h.check(torch.compile(chain, fullgraph=True, **how), chain.float64, x, terms=STEPS, what=f"{name} on a CPU")
        said = [first_line(text) for _, text in lines if "skipping cudagraphs" in text]
        skips[name] = {"skips counted": skip_count(seen), "says": said[0] if said else "nothing"}
    h.fact("CUDA graphs skipped", skips)
    if table and table.rows[0].ms:
        eager, fused = table.rows
        h.say(
            f"one by one {STEPS} operations on {WIDTH} numbers cost {eager.ms * 1000 / STEPS:.2f} us each; compiled to "
            f"one C++ function {fused.ms * 1000 / STEPS:.2f} us each ({fused.speedup:.1f}x): "
            + ("most of it was dispatch" if fused.speedup > 2 else "dispatch was not most of it, or the CPU was busy")
        )
    h.say("claim graphs-gap, CUDA graphs remove launch gaps: not measured, needs a GPU, as do the rules of replaying")


def skip_count(seen) -> int:
    return seen.counters.get("inductor", {}).get("cudagraph_skips", 0)


# --- the rules


def static_inputs(h: Harness, chain: Chain) -> None:
    """A graph reads the addresses it was captured with: inputs and weights are what is written there."""
    first, second = h.randn(WIDTH), h.randn(WIDTH)
    ran = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return chain(x)

    held = first.clone()
    captured = Captured(counted, held)
    told = {"Python of the function ran": f"{len(ran)} times up to the capture"}
    held.copy_(second)  # the caller's tensor, which the graph does not know
    captured.graph.replay()
    told["another input, not copied in"] = which(captured.output, {"first": chain(first), "second": chain(second)})
    h.check(lambda x: captured(x), chain.float64, second, terms=STEPS, what="copied in", poison=False)
    told["the same, copied in"] = which(captured.output, {"first": chain(first), "second": chain(second)})
    for _ in range(5):
        captured(second)
    told["and after more replays"] = f"{len(ran)} times"

    weight, old = chain.shift.weight, chain(second)
    chain.shift.weight = nn.Parameter(weight + 1, requires_grad=False)
    told["a weight replaced"] = which(captured(second), {"old weight's": old, "new weight's": chain(second)})
    weight.add_(1)
    told["a weight changed in place"] = which(captured(second), {"old weight's": old, "new weight's": chain(second)})
    chain.shift.weight = weight
    weight.sub_(1)
    h.fact("static inputs, the result is", told)


def which(got: torch.Tensor, candidates: dict[str, torch.Tensor]) -> str:
    """Whose result this is."""
    return next((name for name, want in candidates.items() if torch.allclose(got, want, 1e-3, 1e-3)), "none of them")


def kept_outputs(h: Harness, chain: Chain) -> None:
    """Each call's result, read after the next call: of reduce-overhead, cloned, and with both calls in one step."""
    torch.compiler.reset()
    inputs = [h.randn(WIDTH) for _ in range(6)]
    wants = [chain(x) for x in inputs]

    def read(result: torch.Tensor, i: int, last: int) -> str:
        try:
            result = result.clone()
        except RuntimeError as error:
            message = first_line(error)
            said.setdefault("RuntimeError", message)
            return "RuntimeError"
        whose = which(result, {"right": wants[i], "overwritten, no error": wants[last]})
        return whose if whose != "none of them" else "overwritten by something else, no error"

    said: dict[str, str] = {}
    fn = torch.compile(chain, fullgraph=True, mode="reduce-overhead")
    kept, cloned = {}, {}
    result = fn(inputs[0])
    copy = result.clone()
    for i in range(1, len(inputs)):
        following = fn(inputs[i])
        kept[f"call {i}"] = read(result, i - 1, i)
        cloned[f"call {i}"] = read(copy, i - 1, i)
        result, copy = following, following.clone()
    del result, following
    h.fact("reduce-overhead, a result read after the next call", kept)
    h.fact("the same, cloned before that call", cloned)
    if said:
        h.say(f"torch says: {said['RuntimeError']}")
    silent = [call for call, what in kept.items() if what.startswith("overwritten")]
    raised = list(kept.values()).count("RuntimeError")
    why = ": torch marks the results of the calls that warm up and record, and hands out one tensor for all replays"
    h.say(
        f"{raised} of {len(kept)} late reads raise, {len(silent)} are wrong without a word"
        + (why if raised and silent else "")
    )

    torch.compiler.reset()
    fn = torch.compile(chain, fullgraph=True, mode="reduce-overhead")
    steps = {}
    for step in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        results = [fn(inputs[2 * step]), fn(inputs[2 * step + 1])]
        steps[f"step {step + 1}"] = [read(results[i], 2 * step + i, 2 * step + 1) for i in range(2)]
        del results
    h.fact("two calls in a step that cudagraph_mark_step_begin() began, both read at its end", steps)
    torch.compiler.reset()  # the count of steps too


def forbidden() -> dict[str, Callable]:
    """What the host must wait for, or choose a shape by, cannot be recorded."""
    return {
        "x.sum().item()": lambda x: x.sum().item(),
        "x[x > 0]": lambda x: x[x > 0],
        "torch.cuda.synchronize()": lambda x: torch.cuda.synchronize(),
    }


def child_forbidden(name: str) -> None:
    """In a process of its own, because a capture that failed can leave torch on the wrong stream."""
    call, x = forbidden()[name], torch.ones(16, device="cuda")
    call(x)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call(x)
    except Exception as error:
        cause = error.__context__  # of the call itself; the end of the capture raises again
        said, then = first_line(cause or error), first_line(error) if cause else None
    else:
        said = then = None
    try:
        after = "works" if (x + 1).sum().item() == 32 else "computes nonsense"
    except Exception as error:
        after = first_line(error)
    report(said=said, then=then, after=after)


def capture_errors(h: Harness, children: dict[str, Child]) -> None:
    told = {}
    for name, child in children.items():
        try:
            result = child.result()
        except (ChildFailed, TimeoutError) as error:  # that, too, is what a failed capture can do
            told[name] = {"the process": str(error).strip().splitlines()[-1]}
            continue
        told[name] = {"raises": result["said"] or "nothing", "GPU work after it": result["after"]}
        if result["then"]:
            told[name]["and the capture's end"] = result["then"]
    h.fact("inside a capture", told)


def pools(h: Harness) -> None:
    """Memory that graphs keep: what they used is theirs until they are gone, unless they share a pool."""

    def wide(x: torch.Tensor) -> torch.Tensor:
        return ((x * 2).sin() + (x + 1).cos()).mean().reshape(1)

    inputs = [h.randn(rows) for rows in (ROWS, ROWS // 2, ROWS // 4)]

    def reserved() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    told = {"inputs, copied": sum(x.nbytes for x in inputs)}
    for name, share in (("own pools", False), ("one pool", True)):
        before = reserved()
        pool = torch.cuda.graph_pool_handle() if share else None
        graphs = [Captured(wide, x, pool=pool) for x in inputs]
        told[name] = reserved() - before - told["inputs, copied"]
        for graph, x in zip(graphs, inputs, strict=True):
            h.check(graph, lambda x: wide(x.double()), x, what=f"{name}, {len(x)} rows", poison=False, terms=len(x))
        del graph, graphs
        told[f"{name}, graphs deleted"] = reserved() - before
    h.fact("bytes held by graphs of 3 sizes", told)
    h.say(
        f"beside their inputs the graphs hold {told['own pools'] / 2**20:.0f} MiB with a pool each, "
        f"{told['one pool'] / 2**20:.0f} in one pool, which serves graphs that are replayed one after the other"
    )


def skipped(h: Harness) -> None:
    """What reduce-overhead leaves out of its graphs, or makes no graph of, as torch counts and says it."""

    def grows(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    cases = {
        "all on the GPU": (lambda x: (x + 1).sin() * 2, [h.randn(WIDTH)]),
        "an input changed in place": (grows, [h.randn(WIDTH)]),
        "a tensor on the CPU": (lambda x, table: x * table.to(x.device), [h.randn(WIDTH), torch.ones(WIDTH)]),
    }
    told = {}
    for name, (fn, inputs) in cases.items():
        torch.compiler.reset()
        compiled = torch.compile(fn, mode="reduce-overhead", fullgraph=True)
        with logs(cudagraphs=True, perf_hints=True) as lines, watch() as seen:
            for _ in range(3):
                compiled(*inputs)
        # Messages only: torch logs each recording as well.
        said = [
            first_line(text) for _, text in lines
            if re.search(r"skipping cudagraph|cudagraph partition|cudagraph-unsafe|Created \d+ graph part", text, re.I)
        ]  # fmt: skip
        inductor = seen.counters.get("inductor", {})
        told[name] = {"skips": skip_count(seen), "partitions": inductor.get("cudagraph_partitions", 0)}
        told[name]["says"] = " | ".join(dict.fromkeys(said)) or "nothing"
    torch.compiler.reset()
    h.fact("reduce-overhead, graphs skipped", told)


def demo(h: Harness) -> None:
    chain, x = make_chain(h), h.randn(WIDTH)
    torch.compiler.reset()
    if h.machine.mode != "gpu":
        on_cpu(h, chain, x)
        return
    on_gpu(h, chain, x)
    torch.compiler.reset()
    if h.profile:
        return
    with ExitStack() as running:
        children = {name: running.enter_context(Child(child_forbidden, name)) for name in forbidden()}
        static_inputs(h, chain)
        kept_outputs(h, chain)
        skipped(h)
        pools(h)
        capture_errors(h, children)


if __name__ == "__main__":
    run(demo)
