"""A training loop on a lazy device: what makes a step one program, and what sync() does.

On an XLA device the forward pass, the backward pass and the optimizer are only recorded. torch_xla.sync() at the end of
a step hands all of it to XLA as one program, compiled once for each shape of a step. The context manager
torch_xla.step() does the same.

What a loop does around the sync decides how many programs there are. A smaller last batch makes another program. So
does a first step in which AdamW makes its state: its zeros are constants of that program, but data of the later ones.

Question   How many programs does a training loop compile and run, and what in the loop decides that?
Needs      torch_xla>=2.9
Wins when  steps repeat with few shapes and nothing is read between. In the recorded run, on a CPU, eager is faster.
Variants   training_loop_model.py (the model and its data)
Study      studies/xla/training_loop.py (what reading costs, a learning rate that changes)
Source     goes beyond the chapter; the troubleshooting page of PyTorch/XLA's documentation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from harness import Harness, Timing, Work, run

import torch
import torch_xla
from torch import nn

from examples.common import xla
from examples.common.transformer import Config
from examples.xla.training_loop_model import CONFIG, LARGE, LanguageModel, batches, sequences

SLOW = 5e-4  # the learning rate: AdamW's first steps divide by moments that a rounding can change
FIRST = 6  # steps whose losses are compared
EAGER, OPENXLA, LAZY = "torch eager", "torch.compile openxla", "torch_xla lazy"
LATE = f"{LAZY}, AdamW makes its state"


class Trainer:
    """tokens -> their losses before the update of that step. `sync` ends a step; on XLA it is torch_xla.sync.

    `ready` makes AdamW's state before the first step, which to XLA is then like all others. `losses`, a compiled
    version of the model, replaces it. Raises ValueError for tokens on another device than the model's.
    """

    def __init__(
        self, model: nn.Module, sync: Callable = lambda: None, losses: Callable | None = None, ready: bool = True
    ) -> None:
        parameters = list(model.parameters())
        self.model, self.sync, self.losses, self.device = model, sync, losses or model, parameters[0].device
        self.optimizer = torch.optim.AdamW(parameters, lr=SLOW)
        if ready:
            for p in parameters:
                moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
        sync()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.device != self.device:
            raise ValueError(f"Trainer: tokens are on {tokens.device}; pass tokens.to({str(self.device)!r})")
        losses = self.losses(tokens)
        losses.mean().backward()
        self.optimizer.step()
        # Before the sync: gradients still alive then would be results of the program too, and written to memory.
        self.optimizer.zero_grad()
        self.sync()
        return losses.detach()


def train(trainer: Trainer, data: Iterator[torch.Tensor]) -> tuple[list[torch.Tensor], list[xla.Ran]]:
    """The loop: nothing is read before it is over. The losses of each step, and what XLA did in each."""
    losses, seen = [], []
    for tokens in data:
        tokens = tokens.to(trainer.device)
        with xla.watch() as ran:
            losses.append(trainer(tokens))
        seen.append(ran)
    return [each.cpu() for each in losses], seen


def eager(config: Config, dtype: torch.dtype = torch.float32) -> Trainer:
    return Trainer(LanguageModel(config).to(dtype))


def lazy(config: Config, **options) -> Trainer:
    return Trainer(LanguageModel(config).to(torch_xla.device()), torch_xla.sync, **options)


def openxla(config: Config) -> Trainer:
    model = LanguageModel(config).to(torch_xla.device())
    return Trainer(model, torch_xla.sync, torch.compile(model, backend="openxla", dynamic=False))


def count(h: Harness, config: Config, data: torch.Tensor, rows: int) -> tuple[dict, dict]:
    """An epoch whose last batch is smaller: each loop's first step in seconds, and its programs; its losses checked."""
    whole, full = (partial(batches, data, rows, drop_last=drop) for drop in (False, True))
    loops = {
        EAGER: (eager(config), whole()), LAZY: (lazy(config), whole()),
        f"{LAZY}, drop_last": (lazy(config), full()), LATE: (lazy(config, ready=False), full()),
        OPENXLA: (openxla(config), full()),
    }  # fmt: skip
    first, programs = {}, {}
    for name, (trainer, given) in loops.items():
        found, seen = train(trainer, given)
        # The head's sums of `width` products are four times as far off, because the updates before them are off too.
        h.check(lambda *_, got=found[:FIRST]: torch.stack(got),
                lambda data: torch.stack(train(eager(config, torch.float64), batches(data, rows))[0]),
                data[: FIRST * rows], what=f"{name}: losses of the first {FIRST} steps", dtype=torch.float32,
                terms=16 * config.width, poison=False)  # fmt: skip
        compiled, first[name] = [ran.compiles for ran in seen], seen[0].seconds
        programs[name] = {"compiled": str(compiled), "in all": sum(compiled), "run by the last": seen[-1].executions}
    h.table(f"an epoch of {FIRST} batches and a smaller one", programs)
    return first, programs


def sizes(h: Harness) -> tuple[Config, int, torch.Tensor]:
    """The model's configuration, the rows of a batch, and an epoch of FIRST batches and a smaller one."""
    config, rows, tokens = h.pick((CONFIG, 30, 18), (LARGE, 60, 20))
    generator = torch.Generator().manual_seed(h.seed)
    return config, rows, sequences(FIRST * rows + rows // 2 + 1, tokens, config.vocab, generator)


def demo(h: Harness) -> None:
    xla.device()  # before the first backward pass on the CPU: after that, one on XLA would fail
    config, rows, data = sizes(h)
    first, programs = ({}, {}) if h.profile else count(h, config, data, rows)
    tokens, here = data[:rows], data[:rows].to(xla.device())
    there = {OPENXLA: openxla(config), LAZY: lazy(config)}
    waited = {name: xla.waited(lambda _, step=step: step(here)) for name, step in there.items()}
    body = config.layers * config.block_parameters + config.vocab * config.width
    table = h.compare(
        {EAGER: eager(config), **waited}, eager(config, torch.float64), tokens, baseline=EAGER, max_error_ratio=4.0,
        dtype=torch.float32, work=Work(flops=6 * body * tokens.numel(), dtype=torch.float32), title="a training step",
        case=f"{rows}x{tokens.shape[1]} tokens", timing=Timing(first_calls=first or None),
    )  # fmt: skip

    def answer() -> str:
        runs = {name: programs[name]["run by the last"] for name in (LAZY, OPENXLA)}
        return (
            f"{FIRST + 1} steps with a smaller last batch compile {programs[LAZY]['in all']} programs, and "
            f"{programs[LATE]['in all']} more if AdamW makes its state. A step runs {runs[LAZY]} of them "
            f"(openxla: {runs[OPENXLA]}). Speed: lazy {table.over(EAGER, LAZY):.2f}x eager's, openxla "
            f"{table.over(EAGER, OPENXLA):.2f}x."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
