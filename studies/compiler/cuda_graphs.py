"""cuda_graphs, measured: what the GPU waits for, and what torch.compile makes no CUDA graph of."""

from __future__ import annotations

import re
from collections.abc import Callable

from harness import Harness

import torch

from compile_inspect import logs, watch
from examples.compiler.cuda_graphs import BY_HAND, EAGER, FUSED, REDUCED, UNFUSED, WIDTH, make_chain, variants_of


def study(h: Harness) -> None:
    if h.profile:
        return
    if h.lesson and h.lesson[0].timed and h.machine.mode == "gpu":
        where_the_time_goes(h)
    skipped(h)


def gpu_work(fn: Callable, x: torch.Tensor) -> tuple[int, float]:
    """Kernels and copies that one call of fn runs on the GPU, and the microseconds that they take."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
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


def where_the_time_goes(h: Harness) -> None:
    """The lesson's table again, with what the GPU runs in each call."""
    chain, x = make_chain(h), h.randn(WIDTH)
    rows = {row.variant: row for row in h.lesson[0].rows}
    work = {name: gpu_work(fn, x) for name, fn in variants_of(chain, x).items()}
    if not all(count for count, _ in work.values()):
        h.say("torch.profiler shows no kernels here, so what the GPU waits for is not known")
        return
    shown = {}
    for name, row in rows.items():
        count, busy = work[name]
        shown[name] = {
            "us a call": round(row.ms * 1000, 1), "host us to launch": round(row.enqueue_us, 1),
            "kernels and copies": count, "us of them": round(busy, 1), "host us each": round(row.enqueue_us / count, 2),
            "GPU waits, %": round(100 * idle(row.ms * 1000, busy)),
        }  # fmt: skip
    h.table("where the time goes", shown)
    explain(h, rows, work)


def idle(call_us: float, busy_us: float) -> float:
    """The share of a call in which the GPU runs nothing; a profile and a timing are two measurements."""
    return max(0.0, 1 - busy_us / call_us)


def explain(h: Harness, rows: dict, work: dict[str, tuple[int, float]]) -> None:
    waits = {name: idle(row.ms * 1000, work[name][1]) for name, row in rows.items()}
    graph, eager, unfused, fused, reduced = (rows[name] for name in (BY_HAND, EAGER, UNFUSED, FUSED, REDUCED))
    confirmed = graph.speedup > 1.1 and waits[BY_HAND] < waits[EAGER]
    h.say(
        f"claim graphs-gap, CUDA graphs remove launch gaps: {'confirmed' if confirmed else 'not here'}. "
        f"{work[EAGER][0]} kernels take {eager.ms * 1000:.0f} us launched one by one, {graph.ms * 1000:.0f} us replayed"
        f" ({graph.speedup:.1f}x); the GPU waits for {waits[EAGER]:.0%} of the one, {waits[BY_HAND]:.0%} of the other; "
        f"compiled without fusion, which launches as often but has no modules to walk, is {unfused.speedup:.1f}x"
    )
    h.say(
        f"reduce-overhead {'gains' if reduced.ms < fused.ms else 'loses'} beside fusion alone: {reduced.ms * 1000:.0f} "
        f"us against {fused.ms * 1000:.0f}, for {work[REDUCED][0]} kernels and copies (its input goes into the graph) "
        f"against {work[FUSED][0]}"
    )


def skipped(h: Harness) -> None:
    """What reduce-overhead leaves out of its graphs, or makes no graph of, as torch counts and says it."""

    def grows(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    cases = {
        f"all on the {h.device.type}": (lambda x: (x + 1).sin() * 2, [h.randn(WIDTH)]),
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
            text.split(". Found from")[0].strip().splitlines()[0] for _, text in lines
            if re.search(r"skipping cudagraph|cudagraph partition|cudagraph-unsafe|Created \d+ graph part", text, re.I)
        ]  # fmt: skip
        inductor = seen.counters.get("inductor", {})
        found[name] = {
            "skips": inductor.get("cudagraph_skips", 0), "partitions": inductor.get("cudagraph_partitions", 0),
            "message": " | ".join(dict.fromkeys(messages)) or "nothing",
        }  # fmt: skip
    torch.compiler.reset()
    h.fact("reduce-overhead, graphs skipped", found)
