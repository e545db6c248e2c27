"""Recompilation: which value a cache entry is specialized on, why torch compiles again, and how to keep one entry.

A cache entry is valid while its guards pass: on shapes, dtypes, grad mode, and the Python values that the code read. A
call that no entry accepts compiles another, which takes seconds; past recompile_limit (8 per function) it runs eagerly
instead (fullgraph=True: it raises), and old entries stay in use. A float becomes dynamic at its second value: two
entries. random.random() gives two entries and a graph break in torch 2.11, one entry and no break in 2.15; a
random.Random of your own gives its first number in every call in 2.11, without a guard (study). Below, the entries are
counted for each cause and its mended form, with the guard that failed first. In your own program TORCH_LOGS=recompiles
prints that guard, and the line of your code that it is for.

What changes from call to call should be a tensor. A value that only ever takes two or three settings may stay in
Python, with an entry for each.

Question   Why does a compiled function compile again, and what keeps it at one cache entry?
Needs      torch
Wins when  a value changes from call to call, as a step, a temperature, a learning rate or a history does: keep it in a
           tensor or buffer. TORCH_LOGS=recompiles names the guard that failed.
Study      studies/compiler/recompilation.py (the limit, once named cache_size_limit, made loud; random numbers)
Source     chapter sections "Common Issues" and "Guards"; chapter section "Tracing", which says that all
           non-tensors are constants: a float is one at its first value only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from harness import Harness, Timing, Work, run

import torch
import torch.nn.functional as F
from torch import nn

from compile_inspect import Entries, count_entries, logs, own_code, warm_up

CALLS = 12  # more than recompile_limit
BUDGET = {"terms": 1, "roundings": 32}


# --- what recompiles, and the same mended


def scales(x, k):
    return torch.tanh(x * k) + x


def scales_at_random(x):
    return scales(x, random.random())


def repeats(x, k):
    for _ in range(k):
        x = torch.tanh(x) * 1.5
    return x


def repeats_masked(x, k):
    """Always CALLS repetitions, of which those from k on have no effect; k is a tensor, at most CALLS (not checked)."""
    for i in range(CALLS):
        x = torch.where(i < k, torch.tanh(x) * 1.5, x)
    return x


class CountsCalls(nn.Module):
    def __init__(self, calls: int | torch.Tensor) -> None:
        super().__init__()
        if isinstance(calls, torch.Tensor):
            self.register_buffer("calls", calls)
        else:
            self.calls = calls

    def forward(self, x):
        self.calls += 1
        return scales(x, self.calls)


class Remembers(nn.Module):
    """The mean of all that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return torch.stack(self.seen).mean(0)


class RemembersInPlace(nn.Module):
    """The same in a buffer of fixed size, for CALLS calls at most, and a count that is a tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", x.new_zeros(CALLS, *x.shape))
        self.register_buffer("count", torch.tensor(0, device=x.device))

    def forward(self, x):
        self.seen.index_copy_(0, self.count.view(1), x[None])
        self.count += 1  # rows not written yet are 0, and add nothing
        return self.seen.sum(0) / self.count


def steps(x: torch.Tensor, lr: float | torch.Tensor) -> tuple[Callable, list[Callable]]:
    """SGD's step and its calls, with a scheduler that changes lr after each; the outputs are the weights."""
    weight = nn.Parameter(x.clone())
    weight.grad = torch.tanh(x)
    optimizer = torch.optim.SGD([weight], lr=lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def call(step: Callable) -> torch.Tensor:
        step()
        scheduler.step()
        return weight.detach().clone()

    return optimizer.step, [call] * CALLS


@dataclass
class Case:
    """A function that recompiles, the calls that cause it, the fix, and the same calls for the mended function."""

    broken: Callable
    calls: list[Callable]
    fix: str
    mended: Callable
    same_calls: list[Callable]


def cases(x: torch.Tensor) -> dict[str, Case]:
    """By cause."""
    counts = list(range(1, CALLS + 1))
    floats = [k / 10 for k in counts]

    def given(values: list) -> list[Callable]:
        return [lambda f, v=v: f(x, v) for v in values]

    def tensors(values: list) -> list[Callable]:
        return given([*torch.tensor(values, device=x.device)])

    def seeded(f: Callable, k: int) -> torch.Tensor:
        random.seed(k)
        return f(x)

    same, shifted = [lambda f: f(x)] * CALLS, [lambda f, k=k: f(x + k) for k in counts]
    drawn = [random.Random(k).random() for k in counts]  # what random.random() gives after random.seed(k)
    zero, lr = torch.tensor(0, device=x.device), torch.tensor(0.1, device=x.device)
    return {
        "float argument": Case(scales, given(floats), "tensor", scales, tensors(floats)),
        "random.random()": Case(
            scales_at_random, [lambda f, k=k: seeded(f, k) for k in counts], "drawn outside, tensor",
            scales, tensors(drawn),
        ),
        "int that a loop runs to": Case(repeats, given(counts), "fixed loop, masked", repeats_masked, tensors(counts)),
        "int attribute of a module": Case(CountsCalls(0), same, "buffer", CountsCalls(zero), same),
        "growing list": Case(Remembers(), shifted, "buffer of fixed size", RemembersInPlace(x), shifted),
        "learning rate": Case(*steps(x, lr=0.1), "tensor", *steps(x, lr=lr)),
    }  # fmt: skip


# --- what it costs


def chain(x, k):
    y = F.silu(x * k)
    return torch.tanh(y + k) * y + x


EAGER, PER_FLOAT, TENSOR = "torch eager", "torch.compile, an entry per float", "torch.compile, tensor"
PAST = "torch.compile, past the limit"
EARLIER, VALUE = 0.5, 0.75  # exact in every dtype


def called_with(*values, limit: int = 8, **options) -> Callable:
    """chain(x, the last value); its first call also compiles for the values before it."""
    fn, waiting = torch.compile(own_code(chain), **options), list(values)

    def call(x: torch.Tensor) -> torch.Tensor:
        if waiting:
            with torch._dynamo.config.patch(recompile_limit=limit):
                while waiting:
                    fn(x, waiting.pop(0))
        return fn(x, values[-1])

    return call


def cost(h: Harness, x: torch.Tensor):
    """A call once all entries exist."""
    warm_up(h.device)
    torch.compiler.reset()
    variants = {
        EAGER: lambda x: chain(x, VALUE),
        PER_FLOAT: called_with(EARLIER, VALUE, dynamic=False),
        "torch.compile, float made dynamic": called_with(EARLIER, VALUE),
        TENSOR: called_with(torch.tensor(VALUE, device=x.device)),
        PAST: called_with(EARLIER, VALUE, limit=1, dynamic=False),
    }
    with logs():  # the warning about the limit, which is hit on purpose
        return h.compare(
            variants, lambda x: chain(x.double(), VALUE), x, baseline=EAGER, work=Work(bytes=2 * x.nbytes),
            title="one function", timing=Timing(end_to_end=True, cold=True), **BUDGET,
        )  # fmt: skip


def check_outputs(h: Harness, what: str, found: Entries, want: list[torch.Tensor]) -> None:
    got, want = torch.stack([output.detach().float() for output in found.outputs]), torch.stack(want)
    h.check(lambda _: got, lambda _: want, got, what=what, poison=False, **BUDGET)


def answer(rows: dict[str, dict], table) -> str:
    """The mended form and the limit: an entry per float, even if it is fastest, is what this lesson warns against."""
    lost = [name for name, row in rows.items() if row["eager"]]
    one = sum(row["mended"].endswith(": 1") for row in rows.values())
    limit = torch._dynamo.config.recompile_limit
    return (
        f"{len(lost)} of {len(rows)} causes fill the cache ({limit} entries), then run in eager; mended, {one} keep "
        f"one entry. Over eager: a float mended to a tensor {table.by_host(EAGER, TENSOR)}, past the limit "
        f"{table.by_host(EAGER, PAST)}."
    )


def demo(h: Harness) -> None:
    rows, x = {}, h.randn(16, 64)
    exact = cases(x.double())
    for name, case in {} if h.profile else cases(x).items():
        want = [call(exact[name].broken) for call in exact[name].calls]
        found, after = count_entries(case.broken, case.calls), count_entries(case.mended, case.same_calls)
        check_outputs(h, name, found, want)
        check_outputs(h, f"{name}, mended", after, want)
        rows[name] = {
            "entries": found.compiled,
            "eager": found.eager_calls,
            "guard that fails first": found.reasons[0].partition(": ")[2] if found.reasons else "none",
            "mended": f"{case.fix}: {after.compiled}",
        }
    h.table(f"{CALLS} calls each: cache entries, and calls left to eager", rows)
    table = cost(h, h.randn(*h.pick(quick=(256, 1024), full=(4096, 4096))))

    h.answer(lambda: answer(rows, table))


if __name__ == "__main__":
    run(demo)
