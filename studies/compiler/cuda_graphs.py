"""cuda_graphs, measured: the gaps between kernels, and results of reduce-overhead that are read after the next call.

Gaps are measured by torch.profiler, which slows launches and so lengthens gaps. Each call's time without it stands
beside its time with it.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from unittest.mock import patch

from harness import Harness, Skip
from harness.hardware import whole_call_ms

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from examples.common.shown import require
from examples.compiler.cuda_graphs import EAGER, FUSED, STEPS, WARM_UP, WIDTH, Captured, make_chain, which

REPLAYED = "CUDA graph replayed"
CALLS, SHOWN = 4, 20  # profiled calls, of which the last is shown; its kernels shown, from its middle
EVENTS = "start and duration of kernels in us, event by event"


def study(h: Harness) -> None:
    if h.machine.mode != "gpu":
        raise Skip("needs a GPU: a CPU has no CUDA graphs")
    if not h.profile:
        kept_outputs(h)
    if h.timing and not h.profile and not h.SANITIZED:
        launch_gaps(h)


def launch_gaps(h: Harness) -> None:
    """The kernels of one call in the profiler's times: launched one by one, replayed, and fused into one."""
    torch.compiler.reset()
    chain, x = make_chain(h), h.randn(WIDTH)
    captured = Captured(chain, x)
    calls = {EAGER: partial(chain, x), REPLAYED: captured.graph.replay}
    calls[FUSED] = partial(torch.compile(chain, fullgraph=True), x)
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    alone = {name: 1000 * statistics.median(ms for ms, _ in whole_call_ms(call, 25)) for name, call in calls.items()}
    beside = {}
    # One profile for all, and CUPTI is kept running: stopping and restarting it has crashed beside CUDA graphs.
    with patch.dict(os.environ, TEARDOWN_CUPTI="0"), profile(activities=[ProfilerActivity.CUDA]) as seen:
        for name, call in calls.items():
            call()  # the first under the profiler
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(CALLS - 1):
                call()
            torch.cuda.synchronize()
            beside[name] = (time.perf_counter() - started) * 1e6 / (CALLS - 1)
    found = sorted(
        (each.time_range.start, each.time_range.end)
        for each in seen.events()
        if each.device_type == DeviceType.CUDA and not each.name.startswith(("Memcpy", "Memset"))
    )
    one_by_one = CALLS * STEPS  # kernels of eager, and as many of the graph
    rest = len(found) - 2 * one_by_one
    require(rest > 0 and rest % CALLS == 0, f"the profiler saw {len(found)} kernels; more than {2 * one_by_one} ran")
    middle = slice(one_by_one - (STEPS + SHOWN) // 2, one_by_one - (STEPS - SHOWN) // 2)
    kernels = {EAGER: found[:one_by_one][middle], REPLAYED: found[one_by_one:][middle], FUSED: found[-rest // CALLS :]}
    events, rows = {}, {}
    for name, each in kernels.items():
        first, busy = each[0][0], sum(end - start for start, end in each)
        whole = each[-1][1] - first
        events[name] = [round(at, 2) for start, end in each for at in (start - first, end - start)]
        rows[name] = {
            "kernels": len(each), "running us": round(busy, 1), "gaps us": round(whole - busy, 1),
            "gaps %": round(100 * (1 - busy / whole), 1), "us a call": round(alone[name], 1),
            "us a call, profiled": round(beside[name], 1),
        }  # fmt: skip
    h.record.facts[EVENTS] = events  # for the page's picture; what is printed is the sum
    h.table(f"consecutive kernels of a call under torch.profiler, {SHOWN} where there are as many", rows)
    slowed = beside[EAGER] / alone[EAGER]
    h.say(
        f"under the profiler an eager call takes {beside[EAGER]:.0f} us, without it {alone[EAGER]:.0f}: "
        + (f"it slows launches {slowed:.2f}x, and lengthens these gaps" if slowed > 1.02 else "these gaps are real")
    )
    torch.compiler.reset()


def kept_outputs(h: Harness) -> None:
    """Each call's result, read after the next call: under reduce-overhead, cloned, and with both calls in one step."""
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
