"""training_loop, measured: what reading costs, steps that nothing ends, gradients in parts, and random numbers."""

from __future__ import annotations

from collections.abc import Callable

from harness import Harness

import torch
import torch_xla
from torch import nn
from torch_xla.core import xla_model

from examples.common import xla
from examples.common.transformer import Config
from examples.xla.training_loop import Trainer, lazy, sizes
from examples.xla.training_loop_model import LanguageModel

LOOP = 8  # steps of one batch, to count what reading runs
AFTER, EARLY = "their mean", "their mean, before the sync"
PARTS = 3  # micro-batches


def study(h: Harness) -> None:
    if h.profile:
        return
    xla.device()
    config, rows, data = sizes(h)
    placement(h, config, data[:rows].to(xla.device()))
    accumulation(h, config, data, rows)
    random_numbers(h)


# --- when to sync, and when to look


def reads(config: Config) -> dict[str, tuple[Trainer, Callable]]:
    """A loop's trainer, and what it does with each step's losses; the last trainer reads before the sync."""
    trainer, early = lazy(config), lazy(config)
    model = early.model

    def read_early(tokens: torch.Tensor) -> torch.Tensor:
        losses = model(tokens)
        losses.mean().item()
        return losses

    early.losses = read_early
    return {
        "nothing": (trainer, lambda step, losses: None),
        "the losses": (trainer, lambda step, losses: losses.cpu()),
        "the losses, every 4 steps": (trainer, lambda step, losses: losses.cpu() if step % 4 == 3 else None),
        AFTER: (trainer, lambda step, losses: losses.mean().item()),
        EARLY: (early, lambda step, losses: None),
    }


def looped(trainer: Trainer, read: Callable, tokens: torch.Tensor) -> xla.Ran:
    """What XLA does in LOOP steps of one batch."""
    with xla.watch() as ran:
        for step in range(LOOP):
            read(step, trainer(tokens))
    return ran


def placement(h: Harness, config: Config, tokens: torch.Tensor) -> None:
    """The same steps with the losses read at each place: what that runs, and its time; and steps without a sync."""
    ways, rows = reads(config), {}
    for what, way in ways.items():
        cold, ran = (looped(*way, tokens) for _ in range(2))
        rows[what] = {
            "compiled": cold.compiles, "run": ran.executions, "fetched": ran.from_device, "bytes": ran.from_bytes,
        }  # fmt: skip
    h.table(f"{LOOP} steps, reading", rows)
    unsynced(h, config, tokens)


def unsynced(h: Harness, config: Config, tokens: torch.Tensor) -> None:
    """What steps record when nothing ends them, and what a look at their loss would run."""
    never, nodes = lazy(config), []
    never.sync = lambda: None
    with xla.watch() as ran:
        forward = xla.operations(xla.hlo(never.model(tokens).mean()))["dot"]
        for _ in range(3):
            losses = never(tokens)
            results = (losses, *never.model.parameters())
            nodes.append(len(xla.ir(*results).splitlines()))
            if len(nodes) == 1:
                whole = xla.operations(xla.hlo(*results))["dot"]
        xla.forget_pending()
    h.fact("without a sync", {"nodes recorded after steps 1, 2, 3": str(nodes), "run": ran.executions})
    h.fact("matrix products", {"of a step": whole, "of its forward pass": forward})


# --- gradients of a batch, in parts


def micro_batches(tokens: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    """Parts of the same size, or the mean of their gradients would not be that of the batch; else ValueError."""
    if parts < 1 or len(tokens) % parts:
        raise ValueError(f"micro_batches: {len(tokens)} rows in {parts} parts; pass a divisor of the rows")
    return tokens.split(len(tokens) // parts)


def one_graph(model: nn.Module, tokens: torch.Tensor, end: Callable) -> None:
    for part in micro_batches(tokens, PARTS):
        (model(part).mean() / PARTS).backward()
    end()


def end_each(model: nn.Module, tokens: torch.Tensor, end: Callable) -> None:
    for p in model.parameters():  # so that the first part adds to a gradient, as the others do
        p.grad = torch.zeros_like(p)
    parts = micro_batches(tokens, PARTS)
    end()
    for part in parts:
        (model(part).mean() / PARTS).backward()
        end()


def one_loop(model: nn.Module, tokens: torch.Tensor, end: Callable) -> None:
    from torch_xla.experimental.gradient_accumulation import gradient_accumulation

    parts = torch.stack(micro_batches(tokens, PARTS))
    gradient_accumulation(lambda part: model(part).mean(), (parts,), model)
    end()


ACCUMULATED = {"one graph": one_graph, "a sync after each part": end_each, "one graph with a loop": one_loop}


def accumulation(h: Harness, config: Config, data: torch.Tensor, rows: int) -> None:
    """The same gradients in one program, in one for each part, and in one that repeats."""
    tokens, told = data[:rows], {}
    exact = LanguageModel(config).double()
    exact(tokens).mean().backward()
    want = tuple(p.grad for p in exact.parameters())
    for name, accumulate in ACCUMULATED.items():
        model, here, recorded = LanguageModel(config).to(xla.device()), tokens.to(xla.device()), []

        def end(model=model, recorded=recorded) -> None:
            recorded.append(xla.operations(xla.hlo(*(p.grad for p in model.parameters()))))
            torch_xla.sync()

        with h.progress(name), xla.watch() as ran:
            accumulate(model, here, end)
            xla.settle()
        got = tuple(p.grad for p in model.parameters())
        h.check(
            lambda *_, got=got: got, lambda _, want=want: want, tokens, what=f"gradients, {name}",
            dtype=torch.float32, terms=tokens.numel(), poison=False,
        )  # fmt: skip
        told[name] = {
            "compiled": ran.compiles, "run": ran.executions, "products in the largest": max(r["dot"] for r in recorded),
            "loops": sum(r["while"] for r in recorded), "compile s": round(ran.compile_s, 2),
        }  # fmt: skip
    h.table(f"gradients of {rows} rows in {PARTS} parts", told)


# --- random numbers


def random_numbers(h: Harness) -> None:
    """XLA draws its own, from a state of its own."""
    before, drawn = xla_model.get_rng_state(), {}
    with torch.random.fork_rng(devices=[]):
        for what in ("once", "twice", ""):
            (torch_xla.manual_seed if what else torch.manual_seed)(3)
            drawn[what] = torch.rand(5, device=xla.device()).cpu()
    xla_model.set_rng_state(before)
    same = {what: "the same" if torch.equal(drawn["once"], drawn[what]) else "others" for what in ("twice", "")}
    h.fact("random numbers", {"torch_xla.manual_seed twice": same["twice"], "torch.manual_seed": same[""]})
