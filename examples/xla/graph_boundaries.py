"""Graph boundaries: a line that looks at a value ends the graph there and runs it; each beside a line that does not.

A recorded step is one program until Python needs a number out of it: to print it, to branch on it, to size a tensor, or
for an operation that XLA does not have. What is pending for that number is compiled and run in the middle of the step,
the host waits, and the sync at the end runs much of it once more.

Below, each such line stands beside one that gives the same result without: torch.where for `if`, a mask for a
selection, values that stay on the device and are read at the end, a step closure for what must be printed. To find the
boundaries of other code: torch_xla.compile(full_graph=True) raises where a value is looked at, and
PT_XLA_DEBUG_LEVEL=2 in the environment prints the line behind each compile and each run.

Question   Which innocent lines cut a recorded step in two, what does each cost, and what replaces it?
Needs      torch_xla>=2.9
Wins when  the step is short, or the device far from the host: then waiting is most of it. A value read after the sync
           costs a copy and the wait, not a second run.
Study      studies/xla/graph_boundaries.py (33 lines of Python; a loop that a value ends),
           studies/xla/graph_boundaries_guards.py (what the guards find, tensors left on the CPU)
Source     chapter section "XLA and torch_xla"; torch_xla's own counters and messages.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

from harness import Harness, Timing, Work, run

import torch
import torch_xla
from torch_xla.core import xla_model

from examples.common import xla

ROWS, WIDTH = 59, 331  # of no other technique: a program compiled there would be found here
STEPS = 6
LIMIT = 0.9  # of the values, above which the step halves them
CUT, WHOLE = "torch_xla with the boundary", "torch_xla without"


def advance(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


@dataclass(frozen=True)
class Step:
    """(x, w) -> (x, value): a step before its sync, which ends in `lines`; `after` is what happens to the value."""

    lines: Callable
    after: Callable = lambda value: value

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        return self.lines(advance(x, w))


def size(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


def require_xla(name: str, *tensors: torch.Tensor) -> None:
    for i, x in enumerate(tensors):
        if x.device.type != "xla":
            raise ValueError(f"{name}: tensor {i} is on {x.device}; move it once, before: .to(torch_xla.device())")


def loop(step: Step, x: torch.Tensor, w: torch.Tensor, steps: int = STEPS) -> tuple[torch.Tensor, torch.Tensor]:
    """`steps` steps, a sync after each: the last x, on the device, and the values of all, read at the end."""
    require_xla("loop", x, w)
    if steps < 1:
        raise ValueError(f"loop: {steps} steps; there is no value to return, pass 1 or more")
    values = []
    for _ in range(steps):
        x, value = step(x, w)
        torch_xla.sync()
        values.append(step.after(value))
    if isinstance(values[0], torch.Tensor):
        return x, torch.stack(values).cpu()
    return x, torch.tensor(values)


def loop64(step: Callable, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The step as it was first written, on the CPU, where looking at values costs nothing, in float64."""
    x, w, values = x.double(), w.double(), []
    for _ in range(STEPS):
        x, value = step(x, w)
        values.append(value)
    return x, torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])


# --- steps with a boundary, and the same without


def read_early(x):
    return x, size(x).item()


def keep(x):
    return x, size(x)


def print_now(x):
    print(x[0, :4], file=io.StringIO())
    return x, size(x)


def print_after(x):
    xla_model.add_step_closure(lambda some: print(some, file=io.StringIO()), (x[0, :4],))
    return x, size(x)


def branch(x):
    # max() and not amax(): without dim, that of torch_xla 2.9 reduces nothing
    if x.abs().max() > LIMIT:
        x = x * 0.5
    return x, size(x)


def where(x):
    x = torch.where(x.abs().max() > LIMIT, x * 0.5, x)
    return x, size(x)


def select(x):
    return x, x[x > 0].sum() / x.numel()


def mask(x):
    return x, torch.where(x > 0, x, 0.0).sum() / x.numel()


def over_the_host(x):
    peak = x.cpu().abs().max().to(x.device)
    return x / peak, size(x)


def on_the_device(x):
    return x / x.abs().max(), size(x)


def median(x):
    return x - x.median(), size(x)


def sorted_median(x):
    middle = (x.numel() + 1) // 2
    return x - x.flatten().kthvalue(middle).values, size(x)


def adding(bias: torch.Tensor) -> Callable:
    def add(x):
        x = x + bias
        return x, size(x)

    return add


def pairs(bias: torch.Tensor) -> dict[str, tuple[Step, Step]]:
    """Of each boundary the step that has it, and one that does without."""
    read = Step(keep, after=torch.Tensor.item)
    return {
        ".item() before the sync: after it": (Step(read_early), read),
        ".item() after the sync: at the end": (read, Step(keep)),
        "print: step closure": (Step(print_now), Step(print_after)),
        "if: torch.where": (Step(branch), Step(where)),
        "boolean index: a mask": (Step(select), Step(mask)),
        ".cpu(): on the device": (Step(over_the_host), Step(on_the_device)),
        "median: kthvalue": (Step(median), Step(sorted_median)),
        "bias on the CPU: moved before": (Step(adding(bias)), Step(adding(bias.to(xla.device())))),
    }


def counted(steps: tuple[Step, Step], x: torch.Tensor, w: torch.Tensor) -> dict[str, list | str]:
    """What XLA does in a loop of each step, from its first call on; a result is read at the end of both."""
    ran = []
    for fewer, step in enumerate(steps, 1):
        fresh, there = x[fewer:].to(xla.device()), w.to(xla.device())  # a size that no other step has compiled
        with xla.watch() as each:
            loop(step, fresh, there)
            xla.settle()
        ran.append(each)
    columns = {"compiled": "compiles", "run": "executions", "sent": "to_device", "fetched": "from_device"}
    row = {column: [getattr(each, name) for each in ran] for column, name in columns.items()}
    row["compile s"] = [round(each.compile_s, 2) for each in ran]
    return row | {"on the host": ", ".join(name for name in ran[0].fallbacks if name != "aten::_local_scalar_dense")}


def demo(h: Harness) -> None:
    rows, tables = {}, {}
    # A width for each case, so that none finds the programs of another; the gain keeps the values from dying out.
    for i, what in enumerate(pairs(torch.zeros(1))):
        width = WIDTH + 2 * i
        x, w, bias = h.randn(ROWS, width), h.randn(width, width, scale=1.5 * width**-0.5), h.randn(width, scale=0.1)
        there, steps = (x.to(xla.device()), w.to(xla.device())), pairs(bias)[what]
        rows |= {} if h.profile else {what: counted(steps, x, w)}
        variants = {
            name: xla.waited(lambda *_, step=step, there=there: loop(step, *there))
            for name, step in zip((CUT, WHOLE), steps, strict=True)
        }
        tables[what] = h.compare(
            variants, lambda x, w, step=steps[0]: loop64(step, x, w), x, w, baseline=CUT, case=what,
            work=Work(flops=2 * STEPS * ROWS * width * width, dtype=torch.float32), title=f"{STEPS} steps",
            terms=STEPS * width, roundings=16, timing=Timing(first_calls=dict.fromkeys((CUT, WHOLE))),
        )  # fmt: skip
    h.table(f"{STEPS} steps with the boundary / without", rows)
    xla.settle()

    def answer() -> str:
        speed = {what: table.over(CUT, WHOLE) for what, table in tables.items()}
        least, *_, most = sorted(speed, key=speed.get)
        again = sum(row["run"][0] >= 2 * STEPS for row in rows.values())
        return (
            f"{again} of {len(rows)} lines run a second program in each step. Replaced, a loop has "
            f"{speed[least]:.2f}x ({least}) to {speed[most]:.2f}x the speed ({most})."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
