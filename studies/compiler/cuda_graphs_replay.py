"""cuda_graphs, measured: late reads of results, what a capture forbids, and the memory that graphs keep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from harness import Harness
from harness.process import Child, ChildFailed, report

import torch

from examples.compiler.cuda_graphs import WIDTH, Captured, Chain, make_chain, which
from studies.compiler.cuda_graphs import first_line

ROWS = 16 << 20  # for the memory of a pool: 64 MiB a tensor


def study(h: Harness) -> None:
    if h.profile or h.machine.mode != "gpu":
        return
    chain, x = make_chain(h), h.randn(WIDTH)
    with ExitStack() as running:
        children = {name: running.enter_context(Child(child_forbidden, name)) for name in forbidden()}
        python_of_a_replay(h, chain, x)
        kept_outputs(h, chain)
        pools(h)
        capture_errors(h, children)


def python_of_a_replay(h: Harness, chain: Chain, x: torch.Tensor) -> None:
    """The function's Python runs while it warms up and is captured, and never again."""
    calls = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return chain(x)

    captured = Captured(counted, x)
    before = len(calls)
    for _ in range(5):
        captured(x)
    h.fact("calls of the captured function", {"up to the capture": before, "and after 5 replays": len(calls)})


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
    found = {}
    for name, child in children.items():
        try:
            result = child.result()
        except (ChildFailed, TimeoutError) as error:  # that, too, is what a failed capture can do
            found[name] = {"the process": str(error).strip().splitlines()[-1]}
            continue
        found[name] = {"raises": result["said"] or "nothing", "GPU work after it": result["after"]}
        if result["then"]:
            found[name]["and the capture's end"] = result["then"]
    h.fact("inside a capture", found)


def pools(h: Harness) -> None:
    """Memory that graphs keep: what they used is theirs until they are gone, unless they share a pool."""

    def wide(x: torch.Tensor) -> torch.Tensor:
        return ((x * 2).sin() + (x + 1).cos()).mean().reshape(1)

    inputs = [h.randn(rows) for rows in (ROWS, ROWS // 2, ROWS // 4)]

    def reserved() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    found = {"inputs, copied": sum(x.nbytes for x in inputs)}
    for name, share in (("own pools", False), ("one pool", True)):
        before = reserved()
        pool = torch.cuda.graph_pool_handle() if share else None
        graphs = [Captured(wide, x, pool=pool) for x in inputs]
        found[name] = reserved() - before - found["inputs, copied"]
        for graph, x in zip(graphs, inputs, strict=True):
            h.check(graph, lambda x: wide(x.double()), x, what=f"{name}, {len(x)} rows", poison=False, terms=len(x))
        del graph, graphs
        found[f"{name}, graphs deleted"] = reserved() - before
    h.fact("bytes held by graphs of 3 sizes", found)
    h.say(
        f"beside their inputs the graphs hold {found['own pools'] / 2**20:.0f} MiB with a pool each, "
        f"{found['one pool'] / 2**20:.0f} in one pool, which serves graphs that are replayed one after the other"
    )
