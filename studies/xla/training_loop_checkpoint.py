"""training_loop, measured: a run that learns, and its checkpoint, which a process without torch_xla trains on.

That process loads this file too: hence the imports within functions.
"""

from __future__ import annotations

import copy
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from harness import Harness
from harness.check import CheckError
from harness.process import Child, report

import torch

from examples.common.transformer import Config
from examples.xla.training_loop_model import LanguageModel, batches, sequences

if TYPE_CHECKING:
    from examples.xla.training_loop import Trainer

LR, WARM_UP = 1e-2, 20  # steps


def study(h: Harness) -> None:
    if h.profile:
        return
    from examples.common import xla
    from examples.xla.training_loop import sizes

    xla.device()  # before the first backward pass on the CPU: see child_resume
    config, rows, data = sizes(h)
    generator = torch.Generator().manual_seed(h.seed + 1)
    more = sequences(4096, data.shape[1], config.vocab, generator)
    trainer = learning(h, config, more, rows, h.pick(160, 240))
    checkpoint(h, config, trainer, data, rows)


def set_lr(trainer: Trainer, lr: float) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] = lr


def learning(h: Harness, config: Config, data: torch.Tensor, rows: int, steps: int) -> Trainer:
    """A whole run with a learning rate that changes at each step, and losses fetched at its end."""
    import torch_xla

    from examples.common import xla
    from examples.xla.training_loop import SLOW, lazy

    trainer, generator, losses = lazy(config), torch.Generator().manual_seed(h.seed), []
    trainer(data[:rows].to(trainer.device))  # compiled here, unless an epoch before was of this shape
    trainer.sync = lambda: None
    with h.progress("learning"), xla.watch() as ran:
        for step in range(steps):
            decayed = 0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2
            set_lr(trainer, LR * min(1, (step + 1) / WARM_UP) * decayed)
            picked = torch.randint(len(data), (rows,), generator=generator)
            with torch_xla.step():  # syncs when it is left, as the trainer would
                losses.append(trainer(data[picked].to(trainer.device)))
    trainer.sync = torch_xla.sync
    with xla.watch() as small:
        set_lr(trainer, 1e-7)
        losses.append(trainer(data[picked].to(trainer.device)))
    set_lr(trainer, SLOW)
    h.fact(
        f"{steps} steps, each with its own learning rate",
        {
            "compiled": ran.compiles, "run": ran.executions, "sent": ran.to_device, "fetched": ran.from_device,
            "compiled at a rate of 1e-7": small.compiles,
        },
    )  # fmt: skip
    h.say("1 is a constant: where 1 - rate * weight_decay rounds to it, another program runs: let no schedule end at 0")
    losses = torch.stack([each.cpu() for each in losses]).mean(dim=(1, 2))
    tenth = max(1, steps // 10)
    start, end = losses[:tenth].mean().item(), losses[-tenth:].mean().item()
    h.fact(
        "learning",
        {
            "loss, first tenth": round(start, 3), "loss, last tenth": round(end, 3),
            "by guessing": round(math.log(config.vocab), 3),
        },
    )  # fmt: skip
    if not end < start / 2:
        raise CheckError(f"the loss went from {start:.3f} to {end:.3f}: this has not learned")
    return trainer


def resume(trainer: Trainer, state: dict) -> Trainer:
    trainer.model.load_state_dict(state["model"])
    # A copy: AdamW would go on counting its steps in the very tensors of `state`.
    trainer.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    trainer.sync()
    return trainer


def save(trainer: Trainer, path: Path) -> None:
    """Its state, and XLA's random numbers, which torch's do not include; every tensor is on the CPU in the file."""
    from torch_xla.core import xla_model

    state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    xla_model.save({**state, "xla_rng": xla_model.get_rng_state()}, str(path))


def load(path: Path) -> dict:
    """What save() wrote, on any machine."""
    # map_location: tensors saved from XLA's device by torch.save come to the CPU too.
    return torch.load(path, map_location="cpu", weights_only=True)


def child_resume(folder: str, config: list[int]) -> None:
    """Load and train on, without torch_xla; then what importing it so late does to its backward."""
    given = torch.load(Path(folder, "given.pt"), weights_only=True)
    state = load(Path(folder, "checkpoint.pt"))
    model = LanguageModel(Config(*config))
    model.load_state_dict(state["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(state["optimizer"])  # the learning rate comes with it
    losses = []
    for tokens in given:
        losses.append(model(tokens))
        losses[-1].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(torch.stack(losses).detach(), Path(folder, "resumed.pt"))
    told = {"torch_xla imported": "torch_xla" in sys.modules}
    for what, options in {"torch.load of XLA tensors": {}, "with map_location": {"map_location": "cpu"}}.items():
        told[what] = error_of(lambda options=options: torch.load(Path(folder, "raw.pt"), **options))

    import torch_xla

    x = torch.ones(3, device=torch_xla.device(), requires_grad=True)
    told["XLA's backward, after one on the CPU"] = error_of(lambda: x.square().sum().backward())
    report(**told)


def error_of(fn: Callable) -> str:
    """What fn() raises, shortened."""
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:140]}"
    return "works"


def checkpoint(h: Harness, config: Config, trainer: Trainer, data: torch.Tensor, rows: int) -> None:
    """Save, and go on in three ways."""
    from examples.common import xla
    from examples.xla.training_loop import FIRST, eager, lazy

    given = list(batches(data, rows, drop_last=True))[:FIRST]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        save(trainer, path)
        torch.save(given, Path(folder, "given.pt"))
        torch.save(trainer.model.body.norm.weight.detach(), Path(folder, "raw.pt"))
        with Child(child_resume, folder, astuple(config)) as child, h.progress("without torch_xla"):
            told = child.result()
        resumed, state = torch.load(Path(folder, "resumed.pt"), weights_only=True), load(path)
    h.fact("the process that loads", told)
    with xla.watch() as ran:
        here = resume(lazy(config), state)
        again = torch.stack([here(tokens.to(here.device)).cpu() for tokens in given])
    h.fact("compiled to go on here", ran.compiles)
    went_on = torch.stack([trainer(tokens.to(trainer.device)).cpu() for tokens in given])

    def exact(*given):
        reference = resume(eager(config, torch.float64), state)
        return torch.stack([reference(tokens) for tokens in given])

    budget = {"terms": 16 * config.width, "dtype": torch.float32, "poison": False}
    ways = {"not interrupted": went_on, "loaded here": again, "loaded without torch_xla": resumed}
    for what, losses in ways.items():
        h.check(lambda *_, got=losses: got, exact, *given, what=f"losses, {what}", **budget)
