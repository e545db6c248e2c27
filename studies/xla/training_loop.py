"""training_loop, measured: what reading costs, steps that nothing ends, gradients in parts, and random numbers."""

from __future__ import annotations

import statistics
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
    xla.settle()


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
            "values asked for": sum(ran.fallbacks.values()),
        }  # fmt: skip
    h.table(f"{LOOP} steps, reading", rows)
    runs = {what: row["run"] for what, row in rows.items()}
    if h.timing:
        names, taken = list(ways), {what: [] for what in ways}
        for turn in range(5):
            for what in names[turn % len(names) :] + names[: turn % len(names)]:
                taken[what].append(1000 * looped(*ways[what], tokens).seconds / LOOP)
        medians = {what: statistics.median(times) for what, times in taken.items()}
        h.fact("ms a step, reading", {what: round(ms, 2) for what, ms in medians.items()})
        none = medians.pop("nothing")
        more = ", ".join(f"{ms - none:+.2f} ms ({what})" for what, ms in medians.items())
        h.say(f"a step that reads nothing takes {none:.2f} ms; reading adds {more}")
    unsynced(h, config, tokens, runs)


def unsynced(h: Harness, config: Config, tokens: torch.Tensor, runs: dict[str, int]) -> None:
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
    h.say(
        f"without a sync {ran.executions} programs run and the graph grows, to {nodes[-1] / nodes[0]:.1f}x in three "
        "steps"
    )
    h.fact("matrix products", {"of a step": whole, "of its forward pass": forward})
    h.say(
        f"a mean read after the sync: {runs[AFTER]} runs in {LOOP} steps, "
        f"{runs[AFTER] - LOOP} of them only to sum. Before it: {runs[EARLY]}, "
        f"{runs[EARLY] - LOOP} of them a forward pass that the step's program does again, "
        f"{whole + forward} products a step for {whole}"
    )


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
    whole, each, loop = told.values()
    h.say(
        f"unrolled, {PARTS} parts are one program of {whole['products in the largest']} matrix products. With a sync "
        f"after each, {each['run']} runs: the zeros to add to, then a program of {each['products in the largest']} for "
        f"each part. With a loop, {loop['products in the largest']} products and {loop['run']} runs: inputs come first"
    )


# --- random numbers


def random_numbers(h: Harness) -> None:
    """XLA draws its own, from a state of its own."""
    device, before = torch_xla.device(), xla_model.get_rng_state()
    drawn = []
    with torch.random.fork_rng(devices=[]):
        for seed in (lambda: torch_xla.manual_seed(3), lambda: torch_xla.manual_seed(3), lambda: torch.manual_seed(3)):
            seed()
            drawn.append(torch.rand(5, device=device).cpu())
        torch.manual_seed(3)
        on_cpu = torch.rand(5)
    state, resumed = xla_model.get_rng_state(), []
    for _ in range(2):
        xla_model.set_rng_state(state)
        resumed.append(torch.rand(5, device=device).cpu())
    xla_model.set_rng_state(before)
    a, again, by_torch = drawn
    h.fact(
        "random numbers",
        {
            "torch_xla.manual_seed twice": "the same" if torch.equal(a, again) else "others",
            "the state of a checkpoint twice": "the same" if torch.equal(*resumed) else "others",
            "torch.manual_seed": "the same" if torch.equal(a, by_torch) else "others: it does not reach XLA",
            "on the CPU": "the same" if torch.equal(a, on_cpu) else "others",
        },
    )
