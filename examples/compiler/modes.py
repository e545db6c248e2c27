"""Compile modes: what default, reduce-overhead and max-autotune change, and what each costs before it pays.

torch.compile has four modes. default fuses what lies between the matrix products. reduce-overhead also records the
launches into a CUDA graph, so that the host launches once a call. max-autotune times several implementations of each
matrix product, tunes the generated kernels, and records a CUDA graph too; max-autotune-no-cudagraphs leaves that out.
Here it is compiled after max-autotune and finds its choices in the cache, so its first call is not in the table.

Which of them helps follows from what the model waits for. At one token a model of 1.2 billion parameters reads 2.5 GB
of weights, under a millisecond on an H200; eager launches some 300 kernels for it, and the host is slower than that.

Question   Which mode for which size, how many calls until it is as fast as it gets, and when has it paid?
Needs      torch
Wins when  calls repeat one shape often enough to pay for compiling. On a CPU there are no CUDA graphs, and the modes
           with and without them compile the same code.
Source     chapter sections "Compiler modes" and "torch.compile fundamentals", whose ratios name no batch or tokens.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO

from harness import Harness, Timing, Work, run

import torch

from compile_inspect import fresh_cache, kernels_run, logs, warm_up
from examples.common.transformer import ONE_BILLION, SMALL, TINY, Transformer, steps

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CALLS = 14  # the first of which compiles
STABLE = 1.10  # of the median of the last calls
EAGER, TUNED = "torch eager", "torch max-autotune"


def first_calls(fn: Callable, tokens: torch.Tensor) -> list[float]:
    """Milliseconds of each of the first calls, waiting for the GPU after each."""
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        fn(tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1000)
    return times


def calls_until_stable(times: list[float]) -> int:
    """How many calls come before the first after which every second one is within STABLE of the last calls' median.

    Every second one, since a single call that the machine disturbed is not the compiler's.
    """
    settled = statistics.median(times[len(times) // 2 :])
    slow = [time > STABLE * settled for time in times]
    for done in range(len(times)):
        rest = slow[done:]
        if not rest[0] and sum(rest) <= len(rest) // 2 and not all(rest[1:3] or [False]):
            return done
    return len(times)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the tables of max-autotune, and the choices that it cannot run, from the console."""
    shown = torch._inductor.config.patch(autotune_num_choices_displayed=0)
    with shown, warnings.catch_warnings(), logs(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        yield


def start(fn: Callable, tokens: torch.Tensor, then: Callable | None = None) -> dict:
    """The first calls of fn from an empty cache, then one of `then`, and what a call of fn launches on a GPU."""
    with fresh_cache(), quiet():
        times = first_calls(fn, tokens)
        if then is not None:
            then(tokens)
    facts = {"first call s": float(f"{times[0] / 1000:.3g}"), "calls until stable": calls_until_stable(times)}
    if tokens.is_cuda:
        names, facts["CUDA graphs"] = kernels_run(fn, tokens)
        facts["kernels"] = len(names)
    return facts


def first_calls_s(facts: dict[str, dict]) -> dict[str, float]:
    return {name: fact["first call s"] for name, fact in facts.items()}


def paid(table, variant: str, first_call_s: float) -> str:
    """When a compiled variant has made up for its first call."""
    saved = table[EAGER].ms - table[variant].ms
    return f"after {first_call_s / saved * 1000:.0f} calls" if saved > 0 else "never"


def demo(h: Harness) -> None:
    gpu = h.device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    config = h.pick(quick=SMALL, full=ONE_BILLION) if gpu else h.pick(quick=replace(TINY, layers=1), full=SMALL)
    model = Transformer.random(config, h.device, dtype, h.seed)
    modes = MODES if gpu or h.full else MODES[::2]  # what differs on a CPU
    tables, facts = {}, {}
    warm_up(h.device)
    for tokens in h.pick(quick=(16,), full=(1, 128)):
        case, ids = f"1x{tokens} tokens", h.randint(config.vocab, 1, tokens)
        variants = {EAGER: model} | {f"torch {mode}": h.compiled(model, mode=mode) for mode in modes}
        with torch.no_grad(), h.progress(f"first calls at {case}"):
            untimed = variants.get(f"{TUNED}-no-cudagraphs")
            facts[case] = {} if h.profile else {
                name: start(fn, ids, untimed if name == TUNED else None)
                for name, fn in variants.items() if fn is not untimed
            }  # fmt: skip
            tables[case] = h.compare(
                variants, model.float64, ids, baseline=EAGER, case=case,
                work=Work.in_steps(steps(config, 1, tokens, dtype.itemsize), dtype),
                timing=Timing(end_to_end=True, first_calls=dict.fromkeys(variants) | first_calls_s(facts[case])),
                max_error_ratio=2.0, dtype=dtype,
            )  # fmt: skip
    report(h, tables, facts)


def report(h: Harness, tables: dict, facts: dict) -> None:
    rows = {}
    for case, variants in facts.items():
        for name, fact in variants.items():
            row = rows[f"{case}, {name.removeprefix('torch ')}"] = dict(fact)
            if tables[case].timed and name != EAGER:
                row["paid"] = paid(tables[case], name, fact["first call s"])
    h.table("first calls", rows)

    def answer() -> str:
        parts = []
        for case, table in tables.items():
            best = table.best.variant
            when = paid(table, best, facts[case].get(best, facts[case].get(TUNED))["first call s"])
            parts.append(f"{case}: {best.removeprefix('torch ')}, {table.over(EAGER):.2f}x eager, paid {when}")
        settled = max(row["calls until stable"] for row in rows.values())
        return f"{'; '.join(parts)}. All settle within {settled} calls."

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
