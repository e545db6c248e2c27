"""cuda_graphs, measured: what the GPU waits for, and what torch.compile makes no CUDA graph of."""

from __future__ import annotations

import re
from collections.abc import Callable

from harness import Harness

import torch

from compile_inspect import logs, watch
from examples.compiler.cuda_graphs import (
    BY_HAND,
    EAGER,
    FUSED,
    NO_FUSION,
    REDUCED,
    STEPS,
    UNFUSED,
    WIDTH,
    Captured,
    Chain,
    make_chain,
)


def study(h: Harness) -> None:
    if h.profile:
        return
    chain, x = make_chain(h), h.randn(WIDTH)
    if h.machine.mode != "gpu":
        skipped_on_a_cpu(h, chain, x)
        return
    where_the_time_goes(h, chain, x)
    skipped(h)


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


def where_the_time_goes(h: Harness, chain: Chain, x: torch.Tensor) -> None:
    """The lesson's table again, with what the GPU runs in each call."""
    if not (h.lesson and h.lesson[0].timed):
        return
    torch.compiler.reset()
    variants = {
        EAGER: chain,
        BY_HAND: Captured(chain, x),
        UNFUSED: torch.compile(chain, fullgraph=True, options=NO_FUSION),
        FUSED: torch.compile(chain, fullgraph=True),
        REDUCED: torch.compile(chain, fullgraph=True, mode="reduce-overhead"),
    }
    for fn in variants.values():
        for _ in range(3):
            fn(x)
    rows = {row.variant: row for row in h.lesson[0].rows}
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
    h.table("where the time goes", shown)
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


def skipped_on_a_cpu(h: Harness, chain: Chain, x: torch.Tensor) -> None:
    """Why there is no CUDA graph, in torch's words; the result is right all the same."""
    skips = {}
    ways = {"mode reduce-overhead": {"mode": "reduce-overhead"}, "backend cudagraphs": {"backend": "cudagraphs"}}
    for name, how in ways.items():
        torch.compiler.reset()
        with logs(cudagraphs=True) as lines, watch() as seen:
            h.check(torch.compile(chain, fullgraph=True, **how), chain.float64, x, terms=STEPS, what=f"{name} on a CPU")
        messages = [first_line(text) for _, text in lines if "skipping cudagraphs" in text]
        skips[name] = {"skips counted": skip_count(seen), "message": messages[0] if messages else "none"}
    h.fact("CUDA graphs skipped", skips)
    h.say("claim graphs-gap, CUDA graphs remove launch gaps: not measured, needs a GPU, as do the rules of replaying")


def skip_count(seen) -> int:
    return seen.counters.get("inductor", {}).get("cudagraph_skips", 0)


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
    found = {}
    for name, (fn, inputs) in cases.items():
        torch.compiler.reset()
        compiled = torch.compile(fn, mode="reduce-overhead", fullgraph=True)
        with logs(cudagraphs=True, perf_hints=True) as lines, watch() as seen:
            for _ in range(3):
                compiled(*inputs)
        # Messages only: torch logs each recording as well.
        messages = [
            first_line(text) for _, text in lines
            if re.search(r"skipping cudagraph|cudagraph partition|cudagraph-unsafe|Created \d+ graph part", text, re.I)
        ]  # fmt: skip
        inductor = seen.counters.get("inductor", {})
        found[name] = {"skips": skip_count(seen), "partitions": inductor.get("cudagraph_partitions", 0)}
        found[name]["message"] = " | ".join(dict.fromkeys(messages)) or "nothing"
    torch.compiler.reset()
    h.fact("reduce-overhead, graphs skipped", found)
