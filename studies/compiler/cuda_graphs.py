"""cuda_graphs, measured: results of reduce-overhead that are read after the next call."""

from __future__ import annotations

from harness import Harness, Skip

import torch

from examples.common.shown import require
from examples.compiler.cuda_graphs import WIDTH, make_chain, which


def study(h: Harness) -> None:
    if h.machine.mode != "gpu":
        raise Skip("needs a GPU: a CPU has no CUDA graphs")
    if not h.profile:
        kept_outputs(h)


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
    conclude(h, kept, cloned, steps)


def conclude(h: Harness, kept: dict[str, str], cloned: dict[str, str], steps: dict[str, list[str]]) -> None:
    """What a user may rely on: a clone, and all calls of one step; nothing else that is read late is right."""
    require(set(cloned.values()) == {"right"}, f"cloned before the next call: {cloned}")
    require(all(each == "right" for step in steps.values() for each in step), f"within a marked step: {steps}")
    require("right" not in kept.values(), f"read after the next call: {kept}")
    silent = sum(each != "RuntimeError" for each in kept.values())
    h.say(f"of {len(kept)} results read after the next call {silent} are wrong without an error; clones are right")
