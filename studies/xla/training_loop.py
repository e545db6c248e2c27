"""training_loop, measured: what reading costs, and a learning rate that changes at each step."""

from __future__ import annotations

from harness import Harness

import torch

from examples.common import xla
from examples.common.transformer import Config
from examples.xla.training_loop import SLOW, Trainer, lazy, sizes

LOOP = 8  # steps of one batch


def study(h: Harness) -> None:
    if h.profile:
        return
    xla.device()
    config, rows, data = sizes(h)
    tokens = data[:rows].to(xla.device())
    reading(h, config, tokens)
    schedule(h, lazy(config), tokens)


def reading(h: Harness, config: Config, tokens: torch.Tensor) -> None:
    """The same steps with the losses read after each: the programs that this compiles and runs."""
    trainer, rows = lazy(config), {}
    ways = {"nothing": lambda losses: None, "the losses": torch.Tensor.cpu, "their mean": lambda x: x.mean().item()}
    for what, read in ways.items():
        with xla.watch() as cold:
            read(trainer(tokens))
        with xla.watch() as ran:
            for _ in range(LOOP):
                read(trainer(tokens))
        rows[what] = {"compiled": cold.compiles, "run": ran.executions, "fetched": ran.from_device}
    h.table(f"{LOOP} steps, reading", rows)


def schedule(h: Harness, trainer: Trainer, tokens: torch.Tensor) -> None:
    """A learning rate is an input of the program, until it is so small that weight decay multiplies by exactly 1."""
    trainer(tokens)  # compiled here, unless an earlier epoch had this shape

    def step(lr: float) -> None:
        trainer.optimizer.param_groups[0]["lr"] = lr
        trainer(tokens)

    with xla.watch() as ran:
        for i in range(LOOP):
            step(SLOW * (i + 1) / LOOP)
    with xla.watch() as small:
        step(1e-7)
    told = {"compiled": ran.compiles, "run": ran.executions, "compiled at a rate of 1e-7": small.compiles}
    h.fact(f"{LOOP} steps, each with its own learning rate", told)
    h.say("1 is a constant: where 1 - rate * weight_decay rounds to it, another program runs: let no schedule end at 0")
