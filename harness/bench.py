"""Check every variant of a table, then time them all with one timer, and only what was found right.

On a GPU: as triton.testing.do_bench does it, L2 is emptied before each call, which is timed with events; but L2 then
holds as many bytes that wait to be written as a call of the table leaves there, and variants alternate call by call. A
round calls each once; a speed-up is the median over rounds of the ratio within a round, whose two calls are
milliseconds apart and find the GPU at the same clocks. Under a power limit these wander by several percent from one
tenth of a second to the next: with a block of calls for each variant, one GEMM under two names differed by 1 to 3 %,
with single calls by less than 0.1 %. Each round has a random order, the same in every run: a variant pays for what ran
before it. The host's time to launch is kept out of the events and recorded by itself. A table about whole calls
(Timing.end_to_end) is timed the way its caller waits: calls back to back, launched by the host, over the wall clock.
On a CPU: torch.utils.benchmark, a few rounds of a block for each variant (its caches stay warm, for every variant
alike). In Triton's interpreter nothing is timed: an interpreted kernel has no speed. Where a run has several ranks they
agree on the number of calls, and the slowest of them is the time.
"""

from __future__ import annotations

import functools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory
from unittest.mock import patch

from harness.check import CheckError, check, rms_errors, tensors_of
from harness.hardware import (
    Ceilings,
    Machine,
    enqueue_ms,
    gpu_busy_ms,
    gpu_round_ms,
    power_watch,
    whole_call_ms,
    written_bytes,
)
from harness.ranks import gathered, slowest

import numpy as np
import torch

GPU_BUDGET_MS = 300  # of a variant, over all rounds
LEAST_ROUNDS, MOST_ROUNDS = 30, 200
BLOCKS = 7  # rounds of whole calls, and on a CPU
WHOLE_BUDGET_MS, CPU_BUDGET_S = 25, 0.05  # of a block

# What a library does, by the first words of a variant's name; every other variant is this repository's own.
LIBRARIES = ("torch", "cuBLAS", "_scaled_mm", "cuDNN", "FlexAttention", "CUDA graph", "JAX")


def is_ours(variant: str) -> bool:
    return not variant.startswith(LIBRARIES)


@dataclass(frozen=True)
class Work:
    """The least work a call must do: bytes moved to and from memory, and floating-point operations of `dtype`.

    `steps` are (bytes, flops) of work that must be done one after the other, as the layers of a model: their sums are
    then `bytes` and `flops`, and the floor is the sum of the steps' floors.
    """

    bytes: int = 0
    flops: int = 0
    dtype: torch.dtype | None = None
    steps: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.flops and self.dtype is None:
            raise ValueError("Work: flops need a dtype, so that they can be put next to a ceiling; pass dtype=")

    def record(self) -> dict:
        """As JSON; Work.load() reads it."""
        return {**asdict(self), "dtype": self.dtype and str(self.dtype).removeprefix("torch.")}

    @classmethod
    def load(cls, record: dict) -> Work:
        dtype = record["dtype"] and getattr(torch, record["dtype"])
        return cls(record["bytes"], record["flops"], dtype, tuple(map(tuple, record["steps"])))

    @classmethod
    def in_steps(cls, steps: Iterable[tuple[int, int]], dtype: torch.dtype) -> Work:
        steps = tuple(steps)
        return cls(sum(moved for moved, _ in steps), sum(flops for _, flops in steps), dtype, steps)

    def floor_ms(self, ceilings: Ceilings) -> float | None:
        """The time the measured ceilings allow: the slower of moving the bytes and doing the arithmetic."""
        if self.steps:
            return sum(Work(moved, flops, self.dtype).floor_ms(ceilings) or 0.0 for moved, flops in self.steps)
        times = []
        if self.bytes:
            times.append(self.bytes / ceilings.copy_tbps() / 1e9)
        if self.flops and (rate := ceilings.gemm_tflops(self.dtype)):
            times.append(self.flops / rate / 1e9)
        return max(times, default=None)


@dataclass(frozen=True)
class Timing:
    """How a table is timed, where it is not each kernel by itself with a cold L2.

    `end_to_end` times calls as a caller in a loop sees them, the host's launching included. `cold` empties the
    compiler's caches for first calls. `first_calls` (seconds) replaces those that the technique has timed itself; None:
    compiled before this table.
    """

    end_to_end: bool = False
    cold: bool = False
    first_calls: dict[str, float | None] | None = None


@dataclass
class Row:
    """One variant of a table; times in ms, None where nothing was timed.

    `enqueue_us` is what the host needs to launch a call; where whole calls were timed, in a loop of them (after a pause
    it takes up to twice as long), and `gpu_ms` is the GPU's part of one. A `peer` is a kernel of this repository, but
    not the technique's: it is never the technique's best row.
    """

    variant: str
    ours: bool
    first_call_s: float | None
    error: float
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    tbps: float | None = None
    tflops: float | None = None
    of_ceiling: float | None = None
    speedup: float | None = None
    enqueue_us: float | None = None
    gpu_ms: float | None = None
    peer: bool = False


def on_host(row: Row | dict, speed: float) -> float:
    """The time in ms of a row's call on a host `speed` times as fast: the GPU's part of it stays what it is."""
    row = asdict(row) if isinstance(row, Row) else row
    gpu_ms = row.get("gpu_ms")
    return max(gpu_ms, row["ms"] / speed) if gpu_ms else row["ms"]


@dataclass
class Table:
    """One table: its variants over one case, against one baseline. It is true where it has times.

    `default` is the row of the call without options, which is what a user gets; None: the first of our own.
    """

    title: str
    case: str
    baseline: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    default: str | None = None

    @property
    def uneven(self) -> Row | None:
        """A row timed on a CPU of which one call takes twice as long as another: other work runs beside it."""
        return next((row for row in self.rows if row.enqueue_us is None and row.ms and row.p80 > 2 * row.p20), None)

    @property
    def timed(self) -> bool:
        return bool(self.rows) and all(row.ms is not None for row in self.rows)

    def __bool__(self) -> bool:
        return self.timed

    def __getitem__(self, variant: str) -> Row:
        for row in self.rows:
            if row.variant == variant:
                return row
        raise KeyError(f"{self.title} {self.case} has no row {variant!r}; it has {[row.variant for row in self.rows]}")

    def __contains__(self, variant: str) -> bool:
        return any(row.variant == variant for row in self.rows)

    @property
    def best(self) -> Row:
        """The fastest row of this technique's own: no library's and no peer's; where all are a library's, of those that
        are put beside the baseline. Raises ValueError where nothing was timed."""
        if not self.timed:
            raise ValueError(f"{self.title} {self.case}: nothing was timed here; ask only within h.answer(...)")
        own = [row for row in self.rows if row.ours and not row.peer]
        return min(own or [row for row in self.rows if row.variant != self.baseline], key=lambda row: row.ms)

    def over(self, other: str, variant: str | None = None, host: float = 1) -> float:
        """How many times as fast as the row `other` the row `variant` is (the best one unless given).

        With `host`, what that ratio becomes where the host is so many times as fast: see on_host(). It stays what it is
        where no GPU's part was timed, as on a CPU.
        """
        mine = self.best if variant is None else self[variant]
        if mine.speedup is None:
            raise ValueError(f"{self.title} {self.case}: {mine.variant} was not timed here; ask within h.answer(...)")
        if host != 1 and mine.gpu_ms and self[other].gpu_ms:
            return on_host(self[other], host) / on_host(mine, host)
        return mine.speedup / self[other].speedup

    def by_host(self, other: str, variant: str | None = None) -> str:
        """over() as text, with what it becomes on a host twice as fast, where that is another number."""
        here, faster = self.over(other, variant), self.over(other, variant, host=2)
        return f"{here:.2f}x" + ("" if near(here, faster) else f" (host twice as fast: {faster:.2f}x)")

    def record(self) -> dict:
        return asdict(self)


def geomean(tables: Iterable[Table], over: str, of: str | None = None) -> float:
    """The geometric mean of table.over(over, of) over tables that have both rows. Raises ValueError when none has."""
    having = [table for table in tables if table.timed and over in table and (of is None or of in table)]
    if not having:
        raise ValueError(f"geomean: no timed table has a row {over!r}" + (f" and a row {of!r}" if of else ""))
    return statistics.geometric_mean(table.over(over, of) for table in having)


def near(a: float | Row, b: float | Row, within: float = 0.02) -> bool:
    """Whether two numbers, or the times of two rows, differ by at most that part of the larger one."""
    a, b = (each.ms if isinstance(each, Row) else each for each in (a, b))
    return abs(a - b) <= within * max(abs(a), abs(b))


@contextmanager
def _fresh_cache() -> Iterator[None]:
    """Within it Inductor and Triton write to an empty folder, which goes at the end, whatever happens within."""
    from torch._inductor.utils import clear_caches

    with TemporaryDirectory(prefix="fresh-cache-", ignore_cleanup_errors=True) as folder:
        try:
            with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}):
                clear_caches()
                yield
        finally:
            clear_caches()


def _random_state() -> Callable[[], None]:
    """What puts torch's random numbers (of the CPU and of the current GPU) back to where they are now."""
    cpu = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def rewind() -> None:
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)

    return rewind


def is_compiled(fn: Callable) -> bool:
    """Whether torch.compile made it, of a function or of a module."""
    return hasattr(fn, "_torchdynamo_orig_callable") or hasattr(fn, "_orig_mod")


def check_variants(
    table: Table,
    variants: dict[str, Callable],
    reference: Callable,
    inputs: tuple,
    progress,
    references: dict[str, Callable] | None = None,
    max_error_ratio: float | None = None,
    timing: Timing = Timing(),
    peers: Iterable[str] = (),
    wrong: dict[str, Callable] | None = None,
    library: dict | None = None,
    budgets: dict[str, dict] | None = None,
    **budget,
) -> None:
    """Check each variant against the float64 reference and note how long its first call took.

    `library` holds what the rows of a library are allowed beyond `budget` (they may store a value twice), `budgets`
    what single variants are. `wrong` holds faults that must not pass, see harness.check.

    With `max_error_ratio` there is no budget for each element, which does not fit a network of many layers: a variant
    must stay within that many times the baseline's own error (rms, per output); its row's error is a fraction of that.
    `timing` says whether first calls find the caches of Inductor and Triton empty.

    `references` holds the variants that need one of their own, because they draw random numbers of their own: each
    call of such a variant and of its reference finds torch's random state the same. The reference comes after the
    first call, so that it may ask the variant itself for its random numbers and yet leave compiling to that call.

    Memory is poisoned for our own variants only, and not for a compiled one: a library's outputs are the library's
    business, and poisoned allocation would change what torch.compile traces.
    """
    references, peers, beside = references or {}, set(peers), max_error_ratio
    if beside and next(iter(variants)) != table.baseline:
        raise ValueError(f"compare: max_error_ratio={beside} needs the baseline first, got {list(variants)}")
    if beside and set(budget) - {"dtype"}:
        raise ValueError(
            f"compare: max_error_ratio={beside} replaces the budget; leave out {sorted(set(budget) - {'dtype'})}"
        )
    allowed = None
    rewind = _random_state()
    want = reference(*inputs)
    faults = {fault: fn(*inputs) for fault, fn in (wrong or {}).items()}  # once for all variants, as the reference
    for name, fn in variants.items():
        seconds = None

        def call(*args, fn=fn):
            nonlocal seconds
            rewind()
            if seconds is not None:
                return fn(*args)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the float64 reference may still be running
            with _fresh_cache() if timing.cold else nullcontext():
                started = time.perf_counter()
                out = fn(*args)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - started
            return out

        def own_reference(*args, call=call, name=name):
            call(*args)
            rewind()
            return references[name](*args)

        wanted = own_reference if name in references else lambda *_: want
        what = f"{table.title} {table.case}: {name}"
        with progress(f"first call of {name}"):
            if beside:
                errors = rms_errors(
                    call(*inputs), tensors_of(wanted(*inputs)), what=what, dtype=budget.get("dtype", inputs[0].dtype)
                )
                allowed = allowed or [beside * e for e in errors]
                error = max(e / most for e, most in zip(errors, allowed, strict=True))
            else:
                allowances = budget_of(name, budget, library, budgets)
                poison = is_ours(name) and not is_compiled(fn)
                demanded = faults if is_ours(name) else None  # a library may be allowed more
                error = check(call, wanted, *inputs, what=what, poison=poison, wrong=demanded, **allowances)
        if error > 1:  # check() raises by itself
            raise CheckError(f"{what}: off by {error * beside:.1f} times what {table.baseline} is, {beside:g} allowed")
        row = Row(name, is_ours(name), (timing.first_calls or {}).get(name, seconds), error, peer=name in peers)
        table.rows.append(row)


def budget_of(name: str, budget: dict, library: dict | None, budgets: dict[str, dict] | None) -> dict:
    """The error budget of one variant: a library may round to the output's dtype twice, and what `library` adds."""
    others = {} if is_ours(name) else {"stores": 2} | budget | (library or {})
    return budget | others | (budgets or {}).get(name, {})


def check_again(table: Table, variants: dict[str, Callable], reference: Callable, inputs: tuple, **budgets) -> None:
    """After timing: our own variants once more, on other inputs in the same memory. A result kept from the last call,
    or a counter that the timed calls left wrong, would pass the check before it.

    The first tensor's elements move on by one place for it, and back. Raises CheckError.
    """
    first = next(x for x in inputs if isinstance(x, torch.Tensor))
    budget, library, each = budgets.pop("budget"), budgets.pop("library", None), budgets.pop("budgets", None)

    def shift(by: int) -> None:
        raw = first.view(torch.uint8) if first.element_size() == 1 else first
        with torch.no_grad():
            raw.copy_(raw.roll(by))

    shift(1)
    try:
        want = reference(*inputs)
        for name, fn in variants.items():
            if is_ours(name) and not is_compiled(fn):
                what = f"{table.title} {table.case}: {name}, after it was timed"
                check(fn, lambda *_: want, *inputs, what=what, **budget_of(name, budget, library, each))
    finally:
        shift(-1)


def time_rounds(
    calls: dict[str, Callable], enqueue: dict[str, float | None], end_to_end: bool = False
) -> dict[str, list[list[float]]]:
    """The times of every call in ms, in rounds of a random order each, which is the same in every run.

    `enqueue` is the host's time to launch each on a GPU, in ms; None for one that runs on the CPU. Where whole calls
    are timed it becomes what launching in a loop takes, unless the GPU held that up.
    """
    names, order = list(calls), random.Random(0)
    if end_to_end or None in enqueue.values():
        samples: dict[str, list[list[float]]] = {name: [] for name in names}
        launches: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(BLOCKS):
            for name in order.sample(names, len(names)):
                if enqueue[name] is None:
                    samples[name].append(cpu_ms(calls[name]))
                else:
                    times, launched = zip(*whole_call_ms(calls[name], budget=WHOLE_BUDGET_MS), strict=True)
                    samples[name].append(list(times))
                    launches[name] += launched
        for name in filter(launches.get, names):
            enqueue[name] = min(enqueue[name], statistics.median(launches[name]))
        return samples
    longest, written = max(enqueue.values()), written_bytes(calls[names[0]]())
    warm = gpu_round_ms(calls, longest, [names] * 3, written)
    round_ms = max(gathered(sum(statistics.median(each[name] for each in warm) for name in names)))
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, math.ceil(GPU_BUDGET_MS * len(names) / round_ms)))
    timed = gpu_round_ms(calls, longest, [order.sample(names, len(names)) for _ in range(rounds)], written)
    return {name: [[each[name]] for each in timed] for name in names}


def time_variants(
    table: Table,
    variants: dict[str, Callable],
    inputs: tuple,
    work: Work,
    ceilings: Ceilings,
    end_to_end: bool = False,
) -> None:
    """Fill in the times of every row, in rounds. `end_to_end` counts the host's time too: see the module."""
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)
    names = [row.variant for row in table.rows]
    calls = {name: functools.partial(variants[name], *inputs) for name in names}
    alone = {name: enqueue_ms(calls[name]) if on_gpu else None for name in names}
    enqueue = dict(alone)
    held_share = power_watch()
    samples = slowest(time_rounds(calls, enqueue, end_to_end))
    held = held_share()

    medians = {name: [statistics.median(times) for times in rounds] for name, rounds in samples.items()}
    floor = work.floor_ms(ceilings) if on_gpu else None
    for row in table.rows:
        pooled = [t for times in samples[row.variant] for t in times]
        row.ms, row.p20, row.p80 = np.quantile(pooled, (0.5, 0.2, 0.8)).tolist()
        row.tbps = work.bytes / row.ms / 1e9 if work.bytes else None
        row.tflops = work.flops / row.ms / 1e9 if work.flops else None
        row.of_ceiling = floor / row.ms if floor else None
        pairs = zip(medians[table.baseline], medians[row.variant], strict=True)
        row.speedup = statistics.median(base / own for base, own in pairs)
        row.enqueue_us = enqueue[row.variant] * 1000 if on_gpu else None
        if on_gpu and end_to_end:
            row.gpu_ms = min(row.ms, gpu_busy_ms(calls[row.variant], alone[row.variant]))
    if held and held > 0.02:
        share = f"{min(held, 1):.0%} of the time"
        table.notes.append(f"the power limit held the clocks down for {share}: ratios hold, times would be shorter")
    if end_to_end:
        return
    if slow := [row for row in table.rows if row.enqueue_us and row.enqueue_us > row.ms * 1000]:
        hosts_say = ", ".join(f"{row.variant} {row.enqueue_us:.0f} us" for row in slow)
        table.notes.append(
            f"where the GPU has nothing else queued the host limits the call: to launch it takes longer ({hosts_say})"
        )


def cpu_ms(fn: Callable) -> list[float]:
    """Times of fn() in ms on the CPU, with all of torch's threads."""
    from torch.utils.benchmark import Timer

    timer = Timer("fn()", globals={"fn": fn}, num_threads=torch.get_num_threads())
    return [seconds * 1000 for seconds in timer.blocked_autorange(min_run_time=CPU_BUDGET_S).times]


@contextmanager
def named_range(name: str, on_gpu: bool) -> Iterator[None]:
    """What nsys and ncu are to see, and nothing else: an NVTX range between the profiler's start and stop."""
    from torch.profiler import record_function

    if not on_gpu:
        with record_function(name):
            yield
        return
    torch.cuda.profiler.start()
    try:
        with torch.cuda.nvtx.range(name), record_function(name):
            yield
            torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


capture = named_range  # around the call that is profiled; a profiler within the process puts itself here


def range_name(table: Table, variant: str) -> str:
    return f"{table.title} {table.case}: {variant}"


def profile_variants(table: Table, variants: dict[str, Callable], inputs: tuple, machine: Machine, progress) -> None:
    """Warm and tune each variant, then call it once under its name, between profiler start and stop."""
    on_gpu = machine.device == "cuda"
    for name, fn in variants.items():
        with progress(f"warming {name}"):
            for _ in range(3):
                fn(*inputs)
            if on_gpu:
                torch.cuda.synchronize()
        with capture(range_name(table, name), on_gpu):
            fn(*inputs)


def describe(inputs: tuple) -> str:
    """A case by its first tensor: sizes, then dtype."""
    first = next(x for x in inputs if isinstance(x, torch.Tensor))
    return f"{'x'.join(map(str, first.shape))} {str(first.dtype).removeprefix('torch.')}"
