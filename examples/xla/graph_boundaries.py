"""Graph boundaries: a line that looks at a value ends the graph there and runs it; each beside a line that does not.

A recorded step is one program until Python needs a number from it: to print it, to branch on it, to size a tensor, or
for an operation that XLA does not have. Whatever that number depends on is compiled and run in the middle of the step,
the host waits, and the sync at the end runs much of it again.

Below, each such line stands beside one that gives the same result without a boundary. To find boundaries in other code:
torch_xla.compile(full_graph=True) raises where a value is looked at, and PT_XLA_DEBUG_LEVEL=2 in the environment prints
the line behind each compile and each run.

Question   Which innocent lines cut a recorded step in two, what does each cost, and what replaces it?
Needs      torch_xla>=2.9
Wins when  the step is short, or the device far from the host, and the replacement is fast there (on a CPU kthvalue
           is not). A value read after the sync costs a copy and the wait, not a second run.
Study      studies/xla/graph_boundaries.py (two more, other lines of Python, what full_graph finds)
Source     goes beyond the chapter; torch_xla's own counters and messages
"""

from __future__ import annotations

import io
from collections.abc import Callable

from harness import Harness, Timing, Work, run

import torch
import torch_xla
from torch_xla.core import xla_model

from examples.common import xla

ROWS, WIDTH = 59, 331  # used by no other technique, whose programs would be found again here
STEPS = 6
LIMIT = 0.9  # of the values, above which the step halves them
CUT, WHOLE = "torch_xla with the boundary", "torch_xla without"


def advance(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def loop(lines: Callable, x: torch.Tensor, w: torch.Tensor, steps: int = STEPS) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps that end in `lines`, a sync after each: the last x, and the values of all steps, on the CPU.

    `lines` returns x and a value, a number or a tensor that is read at the end, or x and a function that is called
    after the sync and returns the value.
    """
    values = []
    for _ in range(steps):
        x, value = lines(advance(x, w))
        torch_xla.sync()
        values.append(value() if callable(value) else value)
    return x, torch.stack(values).cpu() if isinstance(value, torch.Tensor) else torch.tensor(values, dtype=x.dtype)


# --- steps with a boundary, and the same without


def size(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


def print_now(x):
    print(x[0, :4], file=io.StringIO())
    return x, size(x)


def print_after(x):
    xla_model.add_step_closure(lambda some: print(some, file=io.StringIO()), (x[0, :4],))
    return x, size(x)


def branch(x):
    # max() and not amax(): without dim, torch_xla 2.9's amax() reduces nothing
    if x.abs().max() > LIMIT:
        x = x * 0.5
    return x, size(x)


def where(x):
    x = torch.where(x.abs().max() > LIMIT, x * 0.5, x)
    return x, size(x)


PAIRS = {
    ".item() before the sync: after it": (
        lambda x: (x, size(x).item()),
        lambda x: (x, size(x).item),  # loop() calls it after the sync
    ),
    "print: step closure": (print_now, print_after),
    "if: torch.where": (branch, where),
    "boolean index: a mask": (
        lambda x: (x, x[x > 0].sum() / x.numel()),
        lambda x: (x, torch.where(x > 0, x, 0.0).sum() / x.numel()),
    ),
    "median: kthvalue": (
        lambda x: (x - x.median(), size(x)),
        lambda x: (x - x.flatten().kthvalue((x.numel() + 1) // 2).values, size(x)),
    ),
}


def counted(pair: tuple[Callable, Callable], x: torch.Tensor, w: torch.Tensor) -> dict[str, list | str]:
    """What XLA does in a loop of each step, from the first call on; a result is read at the end of each loop."""
    ran = []
    for fewer, lines in enumerate(pair, 1):
        fresh, there = x[fewer:].to(xla.device()), w.to(xla.device())  # a size that no other step has compiled
        with xla.watch() as each:
            loop(lines, fresh, there)
            xla.settle()
        ran.append(each)
    columns = {"compiled": "compiles", "run": "executions", "sent": "to_device", "fetched": "from_device"}
    row = {column: [getattr(each, name) for each in ran] for column, name in columns.items()}
    return row | {"on the host": ", ".join(name for name in ran[0].fallbacks if name != "aten::_local_scalar_dense")}


def measure(h: Harness, what: str, pair: tuple[Callable, Callable], width: int):
    """What the pair runs, and the table of its times; each pair has its own width, to find no other pair's programs."""
    x, w = h.randn(ROWS, width), h.randn(width, width, scale=1.5 * width**-0.5)  # the gain keeps x from dying out
    there, row = (x.to(xla.device()), w.to(xla.device())), {} if h.profile else counted(pair, x, w)
    loops = [xla.waited(lambda *_, lines=lines: loop(lines, *there)) for lines in pair]
    # Four times the terms: each step carries on the rounding of earlier steps, with that gain.
    return row, h.compare(
        dict(zip((CUT, WHOLE), loops, strict=True)), lambda x, w: loop(pair[0], x.double(), w.double()), x, w,
        baseline=CUT, work=Work(flops=2 * STEPS * ROWS * width * width, dtype=torch.float32), title=f"{STEPS} steps",
        case=what, terms=4 * STEPS * width, roundings=16, timing=Timing(first_calls=dict.fromkeys((CUT, WHOLE))),
    )  # fmt: skip


def demo(h: Harness) -> None:
    rows, tables = {}, {}
    for i, (what, pair) in enumerate(PAIRS.items()):
        rows[what], tables[what] = measure(h, what, pair, WIDTH + 2 * i)
    h.table(f"{STEPS} steps with the boundary / without", {} if h.profile else rows)
    xla.settle()

    def answer() -> str:
        speed = {what: table.over(CUT, WHOLE) for what, table in tables.items()}
        again = sum(row["run"][0] >= 2 * STEPS for row in rows.values())
        told = ", ".join(f"{what.replace(': ', ' -> ')} {ratio:.2f}x" for what, ratio in speed.items())
        return f"{again} of {len(rows)} lines make a step run two programs. Speed with the line replaced: {told}."

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
