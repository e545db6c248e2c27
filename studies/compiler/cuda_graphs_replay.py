"""cuda_graphs, measured: late reads of reduce-overhead's results, and the memory that graphs keep."""

from __future__ import annotations

from harness import Harness

import torch

from examples.compiler.cuda_graphs import WIDTH, Captured, make_chain, which

ROWS = 16 << 20  # for the memory of a pool: 64 MiB a tensor


def study(h: Harness) -> None:
    if not h.profile and h.machine.mode == "gpu":
        kept_outputs(h)
        pools(h)


def kept_outputs(h: Harness) -> None:
    """Each call's result, read after the next call: of reduce-overhead, cloned, and with both calls in one step."""
    torch.compiler.reset()
    chain, inputs = make_chain(h), [h.randn(WIDTH) for _ in range(6)]
    wants = [chain(x) for x in inputs]

    def read(result: torch.Tensor, i: int, last: int) -> str:
        try:
            return which(result.clone(), {"right": wants[i], "overwritten, no error": wants[last]})
        except RuntimeError:
            return "RuntimeError"

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
    raised, right = (list(kept.values()).count(what) for what in ("RuntimeError", "right"))
    h.say(
        f"{raised} of {len(kept)} late reads raise, {len(kept) - raised - right} are wrong without an error: torch "
        "marks the results of the calls that warm up and record, and replays share one tensor"
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


def pools(h: Harness) -> None:
    """Memory that graphs keep: what they used is theirs until they are gone, unless they share a pool."""

    def wide(x: torch.Tensor) -> torch.Tensor:
        return ((x * 2).sin() + (x + 1).cos()).mean().reshape(1)

    def reserved() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    inputs = [h.randn(rows) for rows in (ROWS, ROWS // 2, ROWS // 4)]
    found = {"inputs, copied": sum(x.nbytes for x in inputs)}
    for name, pool in (("own pools", None), ("one pool", torch.cuda.graph_pool_handle())):
        before = reserved()
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
