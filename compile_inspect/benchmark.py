"""Eager against compiled by batch size: speed-up, calls until compiling has paid, and what a roofline allows."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves, tree_map

from compile_inspect.fresh import fresh_cache, warm_up
from compile_inspect.inspecting import reason_of
from compile_inspect.report import Phase, Skip
from compile_inspect.roofline import ceilings, count, roofline
from compile_inspect.subject import Subject
from compile_inspect.timing import time_calls
from compile_inspect.watching import watch

QUESTION = "At which batch sizes is compiled faster, after how many calls has it paid, and what could it reach?"
SIZES, MOST, SECONDS = 8, 4, 10.0  # batch sizes, the largest over the given one, seconds after which none is begun
LOSS, GAIN = 0.95, 1.05  # a speed-up below the one, above the other, is not noise
COLUMNS = {
    "batch": "batch", "eager_ms": "eager, ms", "compiled_ms": "compiled", "speedup": "x eager",
    "break_even_calls": "paid after", "roofline_eager_ms": "bound: eager",
    "roofline_compiled_ms": "compiled", "roofline_speedup": "x eager", "bound": "by",
}  # fmt: skip


def look(subject: Subject, phase: Phase) -> None:
    warm_up(subject.device)
    given, rows, left_out, top = batch_of(subject), [], [], None
    model = subject.fresh()[0]
    compiled = torch.compile(model)
    call, started = subject.caller(compiled, *resized(subject, given)), time.perf_counter()
    try:
        with fresh_cache(), watch() as seen:
            call()
            subject.synchronize()
    except Exception as error:
        raise Skip(f"the compiled model fails: {reason_of(error)}; see the phase triage") from error
    first_s = time.perf_counter() - started
    launches, graphs = seen.kernels + seen.counters.get("inductor", {}).get("extern_calls", 0), seen.graphs
    if not graphs:
        raise Skip("Dynamo captures no graph: torch.compile leaves the whole model to eager")
    started = time.perf_counter()
    for size in sizes_around(given):
        compiles = first_s if size == 1 else 0.0  # a dynamic graph is for sizes from 2 on
        if rows and time.perf_counter() - started + compiles > SECONDS:
            left_out.append(f"{size} (no time left)")
            continue
        try:
            with torch.compiler.set_stance("force_eager"):  # also what the model compiles inside
                eager = time_calls(subject.caller(model, *resized(subject, size)), subject)
            with watch() as seen:
                timed = time_calls(subject.caller(compiled, *resized(subject, size)), subject)
        except Exception as error:
            if size == given:
                raise
            left_out.append(f"{size} ({reason_of(error)})")
            continue
        gain = eager.ms - timed.ms
        paid = max(0, math.ceil((first_s * 1e3 - eager.ms) / gain)) if gain > 0 else None
        row = {"batch": size, "eager_ms": eager.ms, "compiled_ms": timed.ms, "speedup": eager.ms / timed.ms,
               "break_even_calls": paid, "host_ms": timed.host_ms, "recompiled": seen.graphs}  # fmt: skip
        try:
            with torch.compiler.set_stance("force_eager"):
                work = count(subject, model, *resized(subject, size))
            top = top or ceilings(subject, work["compiled_bytes"])
            row |= roofline(work, launches, top, subject.on_gpu)
        except Exception as error:  # tensors without storage, an operator that a dispatch mode cannot see
            row["no_roofline"] = reason_of(error)
        rows.append(row)
        if size == given:
            here, bound = row, timed.waits_for_host and subject.on_gpu
    rows.sort(key=lambda row: row["batch"] or 0)
    phase.facts |= {key: here[key] for key in ("batch", "eager_ms", "compiled_ms", "speedup", "break_even_calls")}
    phase.facts |= {"first_call_s": first_s, "launches": launches, "graphs": graphs, "sizes": rows,
                    "ceilings": top, "left_out": left_out, "launch_bound": bound}  # fmt: skip
    cells = [[row.get(key) for key in COLUMNS] for row in rows]
    phase.table("a call, the calls until it has paid, and the roofline's bound in ms", [*COLUMNS.values()], cells)
    if len(rows) > 1:
        phase.bars("speed-up by batch size", "x", {f"batch {row['batch']}": row["speedup"] for row in rows})
    if anew := [row["batch"] for row in rows if row["recompiled"]]:
        phase.note(f"The dynamic batch was compiled anew for batch {', '.join(map(str, anew))}.")
    if left_out:
        phase.note(f"Batch sizes left out: {'; '.join(left_out)}.")
    if top:
        phase.note(
            f"Measured here: {top['bytes_per_s'] / 1e9:.3g} GB/s (a copy), {top['flops_per_s'] / 1e12:.3g} TFLOP/s "
            f"({top['dtype']} matmul), {top['launch_us']:.3g} us an operation; "
            "the bound is of these ceilings, which a cache may beat."
        )
    ms, speedup = here["compiled_ms"], here["speedup"]
    if bound:
        phase.note("The call is launch-bound: the host launches for as long as it takes. See the phase cuda_graphs.")
    if speedup < LOSS:
        better = next((row for row in rows if row["speedup"] > GAIN and row["batch"] > given), None)
        again = "calls with the same inputs compile again: see the phase guards"
        fix = f"call it with batches of {better['batch']}: {better['speedup']:.2f}x" if better else "leave it in eager"
        gain = {"ms": ms - here["eager_ms"], "share": 1 - speedup}
        fix = again if here["recompiled"] > 2 else f"{fix}, or mend what the other phases find"
        phase.finding("the compiled model is slower than eager", fix, **gain)
    could = f"; the roofline would allow {here['roofline_speedup']:.2f}x" if here.get("flops") or launches else ""
    after = "never pays" if here["break_even_calls"] is None else f"has paid after {here['break_even_calls']:,} calls"
    faster = [row["batch"] for row in rows if row["speedup"] > GAIN]
    phase.answer = (
        f"{f'batch {given}: ' if given else ''}{ms:.3g} ms for eager's {here['eager_ms']:.3g}, {speedup:.2f}x, "
        f"which {after}{could}; faster at {len(faster)} of {len(rows)} batch sizes"
    )


def batch_of(subject: Subject) -> int | None:
    """Dimension 0 of the first tensor input that has one."""
    leaves = tree_leaves((subject.args, subject.kwargs))
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), None)


def resized(subject: Subject, size: int | None) -> tuple[tuple, dict]:
    """(args, kwargs) with `size` rows in the tensors that have the batch as dimension 0, which is marked as dynamic."""
    given = batch_of(subject)

    def change(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not given or not leaf.dim() or leaf.shape[0] != given:
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        rows = leaf.detach().index_select(0, torch.arange(size, device=leaf.device) % given)
        rows.requires_grad_(leaf.requires_grad)
        torch._dynamo.maybe_mark_dynamic(rows, 0)  # unlike mark_dynamic it does not fail where the model needs one size
        return rows

    return tree_map(change, (subject.args, subject.kwargs))


def sizes_around(given: int | None) -> list[int | None]:
    """The given size, then powers of two, the nearest first."""
    if not given:
        return [given]
    powers = {2**i for i in range(30) if 2**i <= MOST * given} - {given}
    return [given, *sorted(powers, key=lambda size: (abs(math.log2(size / given)), -size))[: SIZES - 1]]


def png(facts: dict, path: Path) -> None:
    """Draw the times by batch size. Raises RuntimeError where matplotlib is missing or nothing was measured by size."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("--png needs matplotlib: pip install matplotlib") from None
    rows = [row for row in facts.get("sizes", []) if row["batch"]]
    if not rows:
        raise RuntimeError("--png: nothing was measured by batch size")
    axes = (figure := Figure((7, 4.5), layout="constrained")).subplots()
    for key, label, style in (("eager_ms", "eager", "o-"), ("compiled_ms", "compiled", "s-"),
                              ("roofline_eager_ms", "roofline, eager", "--"),
                              ("roofline_compiled_ms", "roofline, compiled", ":")):  # fmt: skip
        shown = [(row["batch"], row[key]) for row in rows if key in row]
        axes.plot(*zip(*shown, strict=True), style, label=label) if shown else None
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="ms a call", title="eager against compiled")
    axes.set_xticks([row["batch"] for row in rows], [str(row["batch"]) for row in rows], minor=False)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


if __name__ == "__main__":
    from compile_inspect.main import main

    sys.exit(main(phase="benchmark"))
