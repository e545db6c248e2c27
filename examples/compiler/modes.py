"""Compile modes: what default, reduce-overhead and max-autotune change, and what each costs before it pays.

Technique  torch.compile has four modes for a finished model. default fuses what lies between the matrix products.
           reduce-overhead records the launches into a CUDA graph besides, so that the host launches once a call.
           max-autotune times several implementations of each matrix product and tunes the generated kernels, and
           records a CUDA graph too; max-autotune-no-cudagraphs leaves that out. Which of them helps follows from what
           the model waits for: at one token the host, which launches some hundred kernels, is slower than the GPU.
           Each starts with an empty cache (the two that tune share one), and its first calls are timed one by one:
           compiling, then recording.
Question   Which mode for which size, how many calls until it is as fast as it gets, and when has it paid?
Needs      torch
Shapes     tokens [batch, tokens] int64 -> logits of each row's last token, [batch, vocab].
Dtypes     bfloat16 on a GPU, float32 on a CPU.
Errors     ValueError from compiled() for a mode that torch does not have.
Wins when  calls repeat one shape often enough to pay for compiling; on a CPU there are no CUDA graphs, and the modes
           with and without them compile the same code.
Source     chapter sections "Compiler modes" and "torch.compile fundamentals", whose 1.03x, 1.16x and 1.18x for a
           model of a billion parameters name neither batch nor tokens.
Run        python examples/compiler/modes.py
"""

from __future__ import annotations

import difflib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO

from harness import Harness, Work, run
from harness.compiler import empty_cache, kernels_run, logs, wake_compiler, watch
from harness.transformer import ONE_BILLION, SMALL, TINY, Config, Transformer, pieces

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
WITHOUT_GRAPHS = ("default", "max-autotune-no-cudagraphs")  # what differs on a CPU, where there are no CUDA graphs
CALLS = 14  # the first of which compiles
STABLE = 1.10  # of the median of the last calls
EAGER = "torch eager"
# What is compiled into one cache folder: the tuned modes time the same choices, and one round of it is long enough.
FOLDERS = (
    (EAGER,),
    ("torch.compile default",),
    ("torch.compile reduce-overhead",),
    ("torch.compile max-autotune-no-cudagraphs", "torch.compile max-autotune"),
)


def compiled(model: torch.nn.Module, mode: str) -> Callable:
    """torch.compile(model) in this mode, for one shape. Raises ValueError for a mode that torch does not have."""
    known = torch._inductor.list_mode_options()
    if mode not in known:
        near = difflib.get_close_matches(str(mode), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        raise ValueError(f"compiled: torch.compile has no mode {mode!r}; {hint}")
    return torch.compile(model, mode=mode, dynamic=False)


def first_calls(fn: Callable, tokens: torch.Tensor, calls: int = CALLS) -> list[float]:
    """Milliseconds of each of the first calls, waiting for the GPU after each."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        fn(tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1000)
    return times


def calls_until_stable(times: list[float]) -> int:
    """How many calls come before the first after which every second one is within STABLE of the last calls' median.

    Every second one: a single call that the machine disturbed is not the compiler's.
    """
    settled = statistics.median(times[len(times) // 2 :])
    slow = [time > STABLE * settled for time in times]
    for done in range(len(times)):
        rest = slow[done:]
        if not rest[0] and sum(rest) <= len(rest) // 2 and not all(rest[1:3] or [False]):
            return done
    return len(times)


class CountOps(TorchDispatchMode):
    """Operations that eager execution dispatches, less views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def memory_in_use() -> int:
    """Bytes of the GPU that are taken, by whomever, once torch has given back what it only keeps."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def start(fn: Callable, tokens: torch.Tensor) -> dict:
    """The first calls of fn, and what they left: the facts of one mode."""
    from torch._inductor import metrics

    before = memory_in_use() if tokens.is_cuda else 0
    metrics.reset()
    with watch() as seen:
        times = first_calls(fn, tokens)
    facts = {"first call s": float(f"{times[0] / 1000:.3g}"), "calls until stable": calls_until_stable(times)}
    facts["calls ms"] = [round(ms, 2) for ms in times[1:]]
    inductor = seen.counters.get("inductor", {})
    if tokens.is_cuda:
        facts["extra MiB"] = round((memory_in_use() - before) / 2**20)
        names, graphs = kernels_run(fn, tokens)
        facts["kernels"], facts["CUDA graphs"] = len(names), graphs
    elif seen.frames:
        facts["kernels"] = metrics.generated_kernel_count + inductor.get("extern_calls", 0)
        facts["CUDA graphs skipped"] = inductor.get("cudagraph_skips", 0)
    else:
        with CountOps() as ops:
            fn(tokens)
        facts["kernels"] = ops.count
    return facts


def demo(h: Harness) -> None:
    gpu = h.device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    config: Config = h.pick(quick=SMALL, full=ONE_BILLION) if gpu else h.pick(quick=replace(TINY, layers=1), full=SMALL)
    cases = h.pick(quick=((1, 16),), full=((1, 1), (1, 128)))
    model = Transformer.random(config, h.device, dtype, h.seed)
    h.fact("parameters", config.parameters)
    wake_compiler(h.device)
    with torch.no_grad():
        for batch, tokens in cases:
            one_case(h, model, batch, tokens)


def one_case(h: Harness, model: Transformer, batch: int, tokens: int) -> None:
    config, dtype, case = model.config, model.embedding.weight.dtype, f"{batch}x{tokens} tokens"
    ids = h.randint(config.vocab, batch, tokens)
    torch.compiler.reset()
    variants: dict[str, Callable] = {EAGER: model}
    modes = MODES if h.device.type == "cuda" or h.full else WITHOUT_GRAPHS
    variants |= {f"torch.compile {mode}": compiled(model, mode) for mode in modes}
    facts = {}
    if not h.profile:
        for together in FOLDERS:
            with empty_cache():
                for name in (each for each in together if each in variants):
                    with h.progress(f"first calls of {name}"), quiet() as refused:
                        facts[name] = start(variants[name], ids)
                    if refused:
                        facts[name]["choices that did not fit"] = len(refused)
        h.fact(f"{case}: ms of each call after the first", {name: each.pop("calls ms") for name, each in facts.items()})
        h.fact(case, facts)
    work = Work.in_steps(
        ((p.bytes, p.flops) for p in pieces(config, batch, tokens, dtype.itemsize) for _ in range(p.count)), dtype
    )
    table = h.compare(
        variants, model.float64, ids, baseline=EAGER, work=work, title="modes", case=case, whole_calls=True, beside=2.0,
        first_calls={name: each["first call s"] for name, each in facts.items()}, dtype=dtype,
    )  # fmt: skip
    if len(modes) < len(MODES):
        h.say("reduce-overhead and max-autotune: the same with CUDA graphs, which a CPU skips; --full times all four")
    if table and table.rows[0].ms:
        explain(h, table, facts)


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Keep the tables of max-autotune from the console; what is yielded collects the choices that a GPU cannot run."""
    refused: list[str] = []
    with (
        torch._inductor.config.patch(autotune_num_choices_displayed=0),
        warnings.catch_warnings(),
        logs() as lines,
        redirect_stderr(StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield refused
    refused += [text for _, text in lines if "Ignoring this choice" in text]


def break_even(row, eager) -> str:
    if row.ms >= eager.ms:
        return f"never pays: {row.speedup:.2f}x"
    # A first call that found another mode's tuning in the folder would have been longer alone.
    folder = next(together for together in FOLDERS if row.variant in together)
    reused = folder[: folder.index(row.variant)]
    note = f", on the tuning of {reused[0].removeprefix('torch.compile ')}" if reused else ""
    return f"has paid after {row.first_call_s / (eager.ms - row.ms) * 1000:.0f} calls{note}"


def explain(h: Harness, table, facts: dict) -> None:
    eager, rows = table.rows[0], table.rows[1:]
    graphs = [row.variant for row in rows if facts[row.variant].get("CUDA graphs")]
    if len(graphs) > 1 and facts[graphs[-1]]["extra MiB"] < facts[graphs[0]]["extra MiB"]:
        first, last = facts[graphs[0]]["extra MiB"], max(0, facts[graphs[-1]]["extra MiB"])
        h.say(f"{graphs[-1]} added {last} MiB to {graphs[0]}'s {first}: CUDA graphs of one process share their memory")
    if eager.enqueue_us:
        share = min(1.0, eager.enqueue_us / eager.ms / 1000)
        each = eager.enqueue_us / max(1, facts[EAGER]["kernels"])
        h.say(
            f"{table.case}: eager launches {facts[EAGER]['kernels']} kernels at {each:.1f} us of the host each, "
            f"{share:.0%} of its {eager.ms:.2f} ms"
        )
    for row in rows:
        fact = facts[row.variant]
        graphs = f", in {fact['CUDA graphs']} CUDA graph" if fact.get("CUDA graphs") else ""
        h.say(
            f"{row.variant}: {row.speedup:.2f}x, {fact['kernels']} kernels{graphs}; stable after "
            f"{fact['calls until stable']} calls, {break_even(row, eager)}"
        )
    h.fact(f"{table.case}: break-even in calls", {row.variant: break_even(row, eager) for row in rows})


if __name__ == "__main__":
    run(demo)
