"""Eager against compiled by batch size: speed-up, calls until compiling has paid, and what a roofline allows."""

from __future__ import annotations

import functools
import math
import time
from pathlib import Path

import torch

from compile_inspect.fresh import fresh_cache, warm_up
from compile_inspect.main import main
from compile_inspect.report import Phase, Skip, reason_of
from compile_inspect.roofline import ceilings, count, roofline
from compile_inspect.subject import Subject, batch_of, resized
from compile_inspect.timing import once, time_both
from compile_inspect.watching import watch

QUESTION = "At which batch sizes is compiled faster, after how many calls has it paid, and what could it reach?"
WAITS = 0.8  # launching that takes above this share of a GPU's call bounds it
SIZES, MOST, SECONDS = 8, 4, 10.0  # batch sizes, the largest over the given one, seconds after which none is begun
LOSS, GAIN = 0.95, 1.05  # a speed-up of which the middle half lies below the one, above the other, is not noise
COLUMNS = {
    "batch": "batch", "eager_ms": "eager, ms", "compiled_ms": "compiled", "speedup": "x eager",
    "break_even_calls": "paid after", "roofline_eager_ms": "bound: eager",
    "roofline_compiled_ms": "compiled", "roofline_speedup": "x eager", "bound": "by",
}  # fmt: skip

in_eager = functools.partial(torch.compiler.set_stance, "force_eager")


def look(subject: Subject, phase: Phase) -> None:
    warm_up(subject.device)
    given, rows, left_out, top = batch_of(subject), [], [], None
    model = subject.fresh()[0]
    compiled = torch.compile(model)

    def inputs(size: int | None) -> tuple[tuple, dict]:
        # Unlike mark_dynamic it does not fail where the model needs one size.
        return resized(subject, size, torch._dynamo.maybe_mark_dynamic)

    try:
        with fresh_cache(), watch() as seen:
            first_s = once(subject.caller(compiled, *inputs(given)), subject)[0] / 1e3
    except Exception as error:
        raise Skip(f"the compiled model fails: {reason_of(error)}; see the phase triage") from error
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
            calls = (subject.caller(each, *inputs(size)) for each in (model, compiled))
            with watch() as seen:  # in eager is also what the model compiles inside
                eager, timed, (low, times, high) = time_both(*calls, subject, in_eager)
        except Exception as error:
            if size == given:
                raise
            left_out.append(f"{size} ({reason_of(error)})")
            continue
        gain = eager.ms - timed.ms
        paid = max(0, math.ceil((first_s * 1e3 - eager.ms) / gain)) if gain > 0 else None
        row = {"batch": size, "eager_ms": eager.ms, "compiled_ms": timed.ms, "speedup": times, "from": low, "to": high,
               "break_even_calls": paid, "host_ms": timed.host_ms, "recompiled": seen.graphs}  # fmt: skip
        try:
            with in_eager():
                work = count(subject, model, *inputs(size))
            top = top or ceilings(subject, work["compiled_bytes"])
            row |= roofline(work, launches, top, subject.on_gpu)
        except Exception as error:  # tensors without storage, an operator that a dispatch mode cannot see
            row["no_roofline"] = reason_of(error)
        rows.append(row)
    here = rows[0]  # the given size is the first
    # A break that reads a number, as .item() does, has the host wait for the GPU: then host_ms says nothing.
    bound = subject.on_gpu and graphs == 1 and here["host_ms"] > WAITS * here["compiled_ms"]
    rows.sort(key=lambda row: row["batch"] or 0)
    phase.facts |= {key: here[key] for key in ("batch", "eager_ms", "compiled_ms", "speedup", "break_even_calls")}
    phase.facts |= {"first_call_s": first_s, "launches": launches, "graphs": graphs, "sizes": rows,
                    "ceilings": top, "left_out": left_out, "launch_bound": bound}  # fmt: skip
    show(phase, given, here, rows)


def show(phase: Phase, given: int | None, here: dict, rows: list[dict]) -> None:
    """The table, the plot, what it is worth to change, and the answer."""
    facts, ms, speedup = phase.facts, here["compiled_ms"], here["speedup"]
    cells = [[row.get(key) for key in COLUMNS] for row in rows]
    phase.table("a call, the calls until it has paid, and the roofline's bound in ms", [*COLUMNS.values()], cells)
    if len(rows) > 1:
        phase.bars("speed-up by batch size", "x", {f"batch {row['batch']}": row["speedup"] for row in rows})
    if anew := [str(row["batch"]) for row in rows if row["recompiled"]]:
        phase.note(f"The dynamic batch was compiled anew for batch {', '.join(anew)}.")
    if facts["left_out"]:
        phase.note(f"Batch sizes left out: {'; '.join(facts['left_out'])}.")
    if top := facts["ceilings"]:
        phase.note(
            f"Measured here: {top['bytes_per_s'] / 1e9:.3g} GB/s (a copy), {top['flops_per_s'] / 1e12:.3g} TFLOP/s "
            f"({top['dtype']} matmul), {top['launch_us']:.3g} us an operation; "
            "the bound is of these ceilings, which a cache may beat."
        )
    if facts["launch_bound"]:
        phase.note("The call is launch-bound: the host launches for as long as it takes. See the phase cuda_graphs.")
    if here["to"] < LOSS:
        better = next((row for row in rows if row["from"] > GAIN and row["batch"] > given), None)
        fix = f"call it with batches of {better['batch']}: {better['speedup']:.2f}x" if better else "leave it in eager"
        fix += ", or mend what the other phases find"
        if here["recompiled"] > 2:
            fix = "calls with the same inputs compile again: see the phase guards"
        cost = {"ms": ms - here["eager_ms"], "share": 1 - speedup}
        phase.finding("the compiled model is slower than eager", fix, **cost)
    after = "never pays" if here["break_even_calls"] is None else f"has paid after {here['break_even_calls']:,} calls"
    if "roofline_speedup" in here and (here["flops"] or facts["launches"]):
        after += f"; the roofline would allow {here['roofline_speedup']:.2f}x"
    faster = sum(row["from"] > GAIN for row in rows)
    phase.answer = (
        f"{f'batch {given}: ' if given else ''}{ms:.3g} ms for eager's {here['eager_ms']:.3g}, {speedup:.2f}x, "
        f"which {after}; faster at {faster} of {len(rows)} batch sizes"
    )


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
    styles = {"eager_ms": "o-", "compiled_ms": "s-", "roofline_eager_ms": "--", "roofline_compiled_ms": ":"}
    for key, style in styles.items():
        shown = [(row["batch"], row[key]) for row in rows if key in row]
        if shown:
            axes.plot(*zip(*shown, strict=True), style, label=key.removesuffix("_ms").replace("_", ", "))
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="ms a call", title="eager against compiled")
    axes.set_xticks([row["batch"] for row in rows], [str(row["batch"]) for row in rows], minor=False)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


if __name__ == "__main__":
    raise SystemExit(main(phase="benchmark"))
