"""A training loop on a lazy device: one program for each shape of a step, where to sync, and a checkpoint for anywhere.

Technique  Forward, backward and optimizer are recorded, and torch_xla.sync() makes one program of them: compiled once
           for each shape of a step, however often it runs. What a loop does around it decides how many programs that
           are: state that the optimizer makes in its first step, a last batch that is smaller, a loss that is read, a
           sync that is forgotten. A small transformer learns to continue a sequence, lazily and by
           torch.compile(backend="openxla"), next to eager float32, all against float64. Gradients are accumulated over
           micro-batches in three ways. A checkpoint is loaded by a process without torch_xla, which trains on.
Question   How many programs does a training loop compile and run, and what in the loop decides that?
Needs      torch_xla>=2.9
Shapes     tokens [batch, n] int64 -> losses [batch, n - 2] of all tokens that the two before them determine.
Dtypes     float32 on every device; weights, AdamW's state and losses. The references are float64.
Errors     LanguageModel: TypeError for tokens that are not int64, ValueError unless [batch, 3..max_tokens + 1].
           Trainer: ValueError for no parameters, or tokens on another device than the model. batches, micro_batches:
           ValueError for rows that cannot be split so; sequences: for fewer than three tokens. load: ValueError for a
           file without a model or an optimizer. Shown: XLA's backward fails (RuntimeError, an internal assert) in a
           process that did one on the CPU before it first touched XLA's device.
Wins when  steps repeat with few shapes and nothing is read between them. On a CPU a small model's eager step can be the
           faster one: see the table.
Source     chapter section "XLA"; "Troubleshooting" in the documentation of PyTorch/XLA.
Run        python examples/xla/training_loop.py
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path

from harness import Harness, Work, run
from harness.check import CheckError
from harness.process import Child, report
from harness.transformer import Config, Transformer

import torch
import torch.nn.functional as F
from torch import nn

# The process that loads a checkpoint loads this file too, and goes without.
WITHOUT_XLA = "TRAINING_LOOP_WITHOUT_XLA"
if WITHOUT_XLA not in os.environ:
    from harness import xla

    import torch_xla
    from torch_xla.core import xla_model

CONFIG = Config(width=52, layers=1, heads=2, kv_heads=1, hidden=116, vocab=23, max_tokens=24)
LARGE = replace(CONFIG, width=96, layers=2, heads=4, kv_heads=2, hidden=260, vocab=43)
LR, WARM_UP = 1e-2, 20  # steps
SLOW = LR / WARM_UP  # its first rate: AdamW's first steps divide by moments that a rounding can change
FIRST = 6  # steps whose losses are compared
PARTS = 3  # micro-batches
EAGER, OPENXLA, LAZY = "torch eager", "torch.compile openxla", "torch_xla lazy"


def sequences(rows: int, tokens: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, tokens]: two random tokens, and from then on each follows from the two before it."""
    if tokens < 3:
        raise ValueError(f"sequences: {tokens} tokens a row; the third is the first to learn, so pass at least 3")
    columns = list(torch.randint(vocab, (2, rows), generator=generator))
    while len(columns) < tokens:
        columns.append((columns[-1] + 2 * columns[-2] + 3) % vocab)
    return torch.stack(columns, dim=1)


def batches(data: torch.Tensor, rows: int, drop_last: bool = False) -> Iterator[torch.Tensor]:
    """An epoch: its last batch holds what is left over, unless it is dropped."""
    if not 1 <= rows <= len(data):
        raise ValueError(f"batches: {rows} rows of {len(data)}; pass 1 to {len(data)}")
    return (part for part in data.split(rows) if len(part) == rows or not drop_last)


def micro_batches(tokens: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    """Parts of the same size, or the mean of their gradients would not be that of the batch."""
    if parts < 1 or len(tokens) % parts:
        raise ValueError(f"micro_batches: {len(tokens)} rows in {parts} parts; pass a divisor of the rows")
    return tokens.split(len(tokens) // parts)


class LanguageModel(nn.Module):
    """The loss of each token from the third on, by a transformer with random weights."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.body = Transformer.random(config, torch.device("cpu"), torch.float32).train().requires_grad_(True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits, wanted = self.logits(tokens), tokens[:, 2:]
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, n - 2, vocab]: of each token from the third on, by those before it."""
        body, most = self.body, self.body.config.max_tokens + 1
        if tokens.dtype != torch.int64:
            raise TypeError(f"LanguageModel: tokens are {tokens.dtype}; pass tokens.long()")
        if tokens.ndim != 2 or not 3 <= tokens.shape[1] <= most:
            raise ValueError(f"LanguageModel: tokens are {tuple(tokens.shape)}; pass [batch, 3..{most}]")
        x = body.embedding(tokens[:, :-1])
        cos, sin = (table[: x.shape[1]] for table in (body.cos, body.sin))
        for block in body.blocks:
            x = block(x, cos, sin)
        return F.linear(body.norm(x[:, 1:]), body.embedding.weight)


class Trainer:
    """tokens -> their losses before the update of that step. `sync` ends a step; on XLA it is torch_xla.sync.

    `ready` makes AdamW's state before the first step, which is then a step like all others to XLA. `losses` stands in
    for the model, as a compiled form of it.
    """

    def __init__(
        self, model: nn.Module, sync: Callable = lambda: None, losses: Callable | None = None, ready: bool = True
    ) -> None:
        parameters = list(model.parameters())
        if not parameters:
            raise ValueError("Trainer: the model has no parameters; pass one that has some")
        self.model, self.sync, self.losses = model, sync, losses or model
        self.device = parameters[0].device
        self.optimizer = torch.optim.AdamW(parameters, lr=SLOW)
        if ready:
            for p in parameters:
                moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
        sync()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.device != self.device:
            raise ValueError(
                f"Trainer: tokens are on {tokens.device}, the model on {self.device}; pass tokens.to(trainer.device)"
            )
        losses = self.losses(tokens)
        losses.mean().backward()
        self.optimizer.step()
        # Before the sync: gradients that are alive then are results of the program too, and written to memory.
        self.optimizer.zero_grad()
        self.sync()
        return losses.detach()

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def state(self) -> dict:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        # A copy: AdamW would go on counting its steps in the very tensors of `state`.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.sync()


def lazy(config: Config, **options) -> Trainer:
    return Trainer(LanguageModel(config).to(torch_xla.device()), torch_xla.sync, **options)


def openxla(config: Config) -> Trainer:
    model = LanguageModel(config).to(torch_xla.device())
    return Trainer(model, torch_xla.sync, torch.compile(model, backend="openxla", dynamic=False))


def eager(config: Config) -> Trainer:
    return Trainer(LanguageModel(config))


def float64(config: Config) -> Trainer:
    return Trainer(LanguageModel(config).double())


def watched(trainer: Trainer, given: Iterator[torch.Tensor]) -> tuple[list[torch.Tensor], list]:
    """The losses of each step, on the CPU at the end, and what XLA did in each."""
    losses, seen = [], []
    for tokens in given:
        tokens = tokens.to(trainer.device)
        with xla.watch() as ran:
            losses.append(trainer(tokens))
        seen.append(ran)
    return [each.cpu() for each in losses], seen


# --- how many programs


def programs(
    h: Harness, config: Config, data: torch.Tensor, rows: int
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Compilations by step, of each way; its losses in the first steps, and the seconds that the first one took."""
    ways = {
        LAZY: (lazy(config), batches(data, rows)),
        f"{LAZY}, drop_last": (lazy(config), batches(data, rows, drop_last=True)),
        f"{LAZY}, AdamW makes its state": (lazy(config, ready=False), batches(data, rows, drop_last=True)),
        OPENXLA: (openxla(config), batches(data, rows, drop_last=True)),
    }
    losses, first, compiles, told = {}, {}, {}, {}
    for name, (trainer, given) in ways.items():
        with h.progress(name):
            found, seen = watched(trainer, given)
        losses[name] = torch.stack(found[:FIRST])
        compiles[name] = [ran.compiles for ran in seen]
        first[name] = seen[0].seconds
        told[name] = {
            "compiled": str(compiles[name]), "run by the last": seen[-1].executions,
            "compile s": round(sum(ran.compile_s for ran in seen), 2),
        }  # fmt: skip
    h.fact("programs by step", told)
    if not any(map(sum, compiles.values())):
        h.say("nothing is compiled twice in a process: another run before this one compiled it all")
        return losses, first
    left = len(data) % rows
    made = compiles[f"{LAZY}, AdamW makes its state"]
    h.say(
        f"{len(compiles[LAZY])} steps compile {sum(compiles[LAZY])} programs: {compiles[LAZY][0]} for {rows} rows and "
        f"{compiles[LAZY][-1]} for the last {left}; drop_last leaves {left} rows of {len(data)} out and compiles "
        f"{sum(compiles[f'{LAZY}, drop_last'])} more"
    )
    h.say(
        f"AdamW that makes its state in the first step compiles {made[0]} for it: zeros are constants of that program, "
        f"and data of the next ones, which compile {sum(made[1:])} more"
    )
    return losses, first


def agreement(h: Harness, config: Config, given: list[torch.Tensor], losses: dict[str, torch.Tensor]) -> None:
    """The losses of the first steps, each after the updates before it."""

    def first_losses(trainer: Trainer) -> torch.Tensor:
        return torch.stack([trainer(tokens) for tokens in given])

    # The bound: 16 eps sqrt(terms) of the losses' size, with the head's sums of `width` products four times as far
    # off, because the updates before them are off too.
    budget = {"dtype": torch.float32, "terms": 16 * config.width, "poison": False}
    for name, got in {EAGER: first_losses(eager(config)), **losses}.items():
        what = f"{name}: losses of the first {len(given)} steps"
        h.check(lambda *_, got=got: got, lambda *_: first_losses(float64(config)), *given, what=what, **budget)


def step_times(h: Harness, config: Config, tokens: torch.Tensor, first: dict[str, float]) -> None:
    here = tokens.to(xla.device())
    trainers = {EAGER: eager(config), OPENXLA: openxla(config), LAZY: lazy(config)}
    variants = {EAGER: trainers[EAGER]} | {
        name: xla.waited(lambda _, name=name: trainers[name](here)) for name in (OPENXLA, LAZY)
    }
    body = config.layers * config.block_parameters + config.vocab * config.width
    h.compare(
        variants, float64(config), tokens, baseline=EAGER, beside=4.0, dtype=torch.float32,
        work=Work(flops=6 * body * tokens.numel(), dtype=torch.float32), title="a training step",
        case=f"{len(tokens)}x{tokens.shape[1]} tokens",
        first_calls={name: s for name, s in first.items() if name in variants},
    )  # fmt: skip


# --- when to sync, and when to look


def nothing(step: int, losses: torch.Tensor) -> None:
    """What a loop reads that looks at nothing."""


READS = {
    "nothing": nothing,
    "the losses": lambda step, losses: losses.cpu(),
    "the losses, every 4 steps": lambda step, losses: losses.cpu() if step % 4 == 3 else None,
    "their mean": lambda step, losses: losses.mean().item(),
}
EARLY = "their mean, before the sync"
LOOP = 8  # steps


def read_early(model: nn.Module) -> Callable:
    """The model's losses, in a loop that reads their mean before the step is over."""

    def losses(tokens: torch.Tensor) -> torch.Tensor:
        found = model(tokens)
        found.mean().item()
        return found

    return losses


def placement(h: Harness, config: Config, data: torch.Tensor, rows: int) -> None:
    """The same steps with the losses read at other places; and without a sync."""
    tokens = data[:rows].to(xla.device())
    trainer, early = lazy(config), lazy(config)
    early.losses = read_early(early.model)
    loops = {what: (trainer, read) for what, read in READS.items()} | {EARLY: (early, nothing)}

    def go(what: str) -> xla.Ran:
        each, read = loops[what]
        with xla.watch() as ran:
            for step in range(LOOP):
                read(step, each(tokens))
        return ran

    told = {}
    for what in loops:
        with h.progress(f"reading {what}"):
            cold, ran = go(what), go(what)
        told[what] = {
            "compiled": cold.compiles, "run": ran.executions, "fetched": ran.from_device,
            "bytes": ran.from_bytes, "values asked for": sum(ran.fallbacks.values()),
        }  # fmt: skip
    h.fact(f"{LOOP} steps, reading", told)
    if h.timing:
        names, taken = list(loops), {what: [] for what in loops}
        for turn in range(5):
            for what in names[turn % len(names) :] + names[: turn % len(names)]:
                taken[what].append(1000 * go(what).seconds / LOOP)
        medians = {what: statistics.median(times) for what, times in taken.items()}
        h.fact("ms a step, reading", {what: round(ms, 2) for what, ms in medians.items()})
        none = medians.pop("nothing")
        more = ", ".join(f"{ms - none:+.2f} ms ({what})" for what, ms in medians.items())
        h.say(f"a step that reads nothing takes {none:.2f} ms; reading adds {more}")
    unsynced(h, config, tokens, told)


def unsynced(h: Harness, config: Config, tokens: torch.Tensor, told: dict) -> None:
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
        f"a mean read after the sync: {told['their mean']['run']} runs in {LOOP} steps, "
        f"{told['their mean']['run'] - LOOP} of them only to sum. Before it: {told[EARLY]['run']}, "
        f"{told[EARLY]['run'] - LOOP} of them a forward pass that the step's program does again, "
        f"{whole + forward} products a step for {whole}"
    )


# --- gradients of a batch, in parts


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
    h.fact(f"gradients of {rows} rows in {PARTS} parts", told)
    whole, each, loop = told.values()
    h.say(
        f"unrolled, {PARTS} parts are one program of {whole['products in the largest']} matrix products. With a sync "
        f"after each, {each['run']} runs: the zeros to add to, then a program of {each['products in the largest']} for "
        f"each part. With a loop, {loop['products in the largest']} products and {loop['run']} runs: inputs come first"
    )


# --- train, save, go on elsewhere


def learning(h: Harness, config: Config, data: torch.Tensor, rows: int, steps: int) -> Trainer:
    """A whole run with a learning rate that changes at each step, and losses fetched at its end."""

    trainer, generator, losses = lazy(config), torch.Generator().manual_seed(h.seed), []
    trainer(data[:rows].to(trainer.device))  # compiled here, unless an epoch before was of this shape
    trainer.sync = lambda: None
    with h.progress("learning"), xla.watch() as ran:
        for step in range(steps):
            decayed = 0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2
            trainer.set_lr(LR * min(1, (step + 1) / WARM_UP) * decayed)
            picked = torch.randint(len(data), (rows,), generator=generator)
            with torch_xla.step():  # syncs when it is left, as the trainer would
                losses.append(trainer(data[picked].to(trainer.device)))
    trainer.sync = torch_xla.sync
    with h.progress("a learning rate near 0"), xla.watch() as small:
        trainer.set_lr(1e-7)
        losses.append(trainer(data[picked].to(trainer.device)))
    trainer.set_lr(SLOW)
    h.fact(
        f"{steps} steps, each with its own learning rate",
        {
            "compiled": ran.compiles, "run": ran.executions, "sent": ran.to_device, "fetched": ran.from_device,
            "compiled at a rate of 1e-7": small.compiles,
        },
    )  # fmt: skip
    h.say(
        f"{steps} rates compile {ran.compiles} programs{'' if ran.compiles else ': numbers are sent'}; but 1 is a "
        f"constant: where 1 - rate * weight_decay rounds to it, another program runs ({small.compiles} compiled here), "
        "so let no schedule end at 0"
    )

    losses = torch.stack([each.cpu() for each in losses]).mean(dim=(1, 2))
    unseen = sequences(8 * rows, data.shape[1], config.vocab, generator)
    on_cpu = LanguageModel(config)
    on_cpu.load_state_dict({name: t.cpu() for name, t in trainer.model.state_dict().items()})
    with torch.no_grad():
        right = (on_cpu.logits(unseen).argmax(-1) == unseen[:, 2:]).float().mean().item()
    tenth = max(1, steps // 10)
    start, end = losses[:tenth].mean().item(), losses[-tenth:].mean().item()
    h.fact(
        "learning",
        {
            "loss, first tenth": round(start, 3), "loss, last tenth": round(end, 3),
            "by guessing": round(math.log(config.vocab), 3), "right on unseen sequences": round(right, 3),
        },
    )  # fmt: skip
    if not end < start / 2:
        raise CheckError(f"the loss went from {start:.3f} to {end:.3f}: this has not learned")
    return trainer


def save(trainer: Trainer, path: Path) -> None:
    """Its state, and XLA's random numbers, which torch's do not include; every tensor is on the CPU in the file."""

    xla_model.save({**trainer.state(), "xla_rng": xla_model.get_rng_state()}, str(path))


def load(path: Path) -> dict:
    """What save() wrote, on any machine; errors are in the module docstring."""
    # map_location: tensors saved from XLA's device by torch.save come to the CPU too.
    state = torch.load(path, map_location="cpu", weights_only=True)
    if missing := {"model", "optimizer"} - set(state if isinstance(state, dict) else ()):
        raise ValueError(f"load: {path} holds no {' and no '.join(sorted(missing))}; pass a file of save()")
    return state


def child_resume(folder: str, config: list[int]) -> None:
    """Load, answer and train on, without torch_xla; then what importing it so late does to its backward."""
    given = torch.load(Path(folder, "given.pt"), weights_only=True)
    trainer = eager(Config(*config))
    trainer.load(load(Path(folder, "checkpoint.pt")))
    with torch.no_grad():
        logits = trainer.model.logits(given[0])
    torch.save({"logits": logits, "losses": torch.stack([trainer(t) for t in given])}, Path(folder, "resumed.pt"))
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
    given = list(batches(data, rows, drop_last=True))[:FIRST]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        save(trainer, path)
        torch.save(given, Path(folder, "given.pt"))
        torch.save(trainer.model.body.norm.weight.detach(), Path(folder, "raw.pt"))
        child = Child(child_resume, folder, astuple(config), env={WITHOUT_XLA: "1"})
        with child, h.progress("without torch_xla"):
            told = child.result()
        resumed, state = torch.load(Path(folder, "resumed.pt"), weights_only=True), load(path)
    h.fact("the process that loads", told)
    with xla.watch() as ran:
        here = lazy(config)
        here.load(state)
        again = torch.stack([here(tokens.to(here.device)).cpu() for tokens in given])
    h.fact("compiled to go on here", ran.compiles)
    went_on = torch.stack([trainer(tokens.to(trainer.device)).cpu() for tokens in given])

    def exact(*given):
        reference = float64(config)
        reference.load(state)
        return torch.stack([reference(tokens) for tokens in given])

    def exact_logits(tokens):
        reference = float64(config)
        reference.load(state)
        return reference.model.logits(tokens).detach()

    budget = {"terms": 16 * config.width, "dtype": torch.float32, "poison": False}
    h.check(lambda *_: resumed["logits"], exact_logits, given[0], what="logits without torch_xla", **budget)
    ways = {"not interrupted": went_on, "loaded here": again, "loaded without torch_xla": resumed["losses"]}
    for what, losses in ways.items():
        h.check(lambda *_, got=losses: got, exact, *given, what=f"losses, {what}", **budget)


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


def demo(h: Harness) -> None:
    xla.device()  # before the first backward pass on the CPU: see child_resume
    config = h.pick(CONFIG, LARGE)
    rows, tokens, steps = h.pick((30, 18, 160), (60, 20, 240))
    generator = torch.Generator().manual_seed(h.seed)
    data = sequences(FIRST * rows + rows // 2 + 1, tokens, config.vocab, generator)
    if h.profile:
        step_times(h, config, data[:rows], {})
    else:
        losses, first = programs(h, config, data, rows)
        agreement(h, config, list(batches(data, rows, drop_last=True)), losses)
        if h.timing:
            step_times(h, config, data[:rows], first)
        placement(h, config, data, rows)
        trainer = learning(h, config, sequences(4096, tokens, config.vocab, generator), rows, steps)
        accumulation(h, config, data, rows)
        checkpoint(h, config, trainer, data, rows)
        random_numbers(h)
    xla.settle()


if __name__ == "__main__":
    run(demo)
