"""torch.compile(backend="openxla"): whole graphs go to XLA without being recorded at each call; in training, how many?

Technique  The same compiler behind another front end. Lazy mode records the Python of a model again at every call and
           looks the recording up; torch.compile records once, guards, and then hands XLA the program's hash and its
           inputs. In training AOTAutograd cuts a step in two programs, forward and backward, and what stands outside of
           the compiled function (the loss, the first gradient, the optimizer) stays lazy: programs of their own around
           them, cut differently in the first step, where tracing backward runs all that is recorded, than in the later
           ones, which run only what backward needs. Take the loss in, then the optimizer, or the whole step at once.
Question   What does openxla save over lazy mode, what does it cost first, and how many programs is a training step?
Needs      torch_xla>=2.9
Shapes     tokens [batch, tokens] int64 -> the logits of each row's last token; steps are counted on an MLP of x.
Dtypes     float32.
Errors     through_openxla() raises TypeError for what cannot be called, ValueError for a model whose weights are not on
           the XLA device and, at the call, for a tensor that is not. torch itself only warns where all are on the CPU,
           and then runs there without XLA; where devices are mixed it raises TorchRuntimeError, in Dynamo's words.
           Trainer raises ValueError for a way that it does not know.
Wins when  the host is what limits: small models, many calls of the same shapes. The first call costs more than lazy
           mode's. Training gains most from one function for the whole step.
Source     chapter section "XLA": the openxla backend; torch_xla's dynamo_bridge.
Run        python examples/xla/openxla_backend.py
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

from harness import Harness, Work, run, xla
from harness.compiler import empty_cache, logs, wake_compiler
from harness.transformer import Config, Transformer

import torch
import torch.nn.functional as F
import torch_xla
from torch import nn

EAGER, INDUCTOR, LAZY, OPENXLA = "torch eager", "torch.compile inductor", "torch_xla lazy", "torch.compile openxla"
LIKE_EAGER = 2.0  # times eager's own error from float64
LR, STEPS = 0.05, 5


def through_openxla(fn: Callable, **options) -> Callable:
    """fn by torch.compile(backend="openxla"), one graph for fixed sizes; refuses tensors that are somewhere else."""
    if not callable(fn):
        raise TypeError(f"through_openxla: got {type(fn).__name__}; need a module or a function of XLA tensors")
    if isinstance(fn, nn.Module):
        tensors = (*fn.named_parameters(), *fn.named_buffers())
        if left := [name for name, x in tensors if x.device.type != "xla"]:
            more = f" and {len(left) - 1} more tensors of the model are" if left[1:] else " is"
            raise ValueError(f"through_openxla: {left[0]}{more} not on the XLA device; use model.to(xla.device())")
    compiled = torch.compile(fn, backend="openxla", **{"fullgraph": True, "dynamic": False, **options})

    def call(*args):
        for i, x in enumerate(args):
            if isinstance(x, torch.Tensor) and x.device.type != "xla":
                raise ValueError(f"through_openxla: argument {i} is on {x.device}; move it with .to(xla.device())")
        return compiled(*args)

    return call


def on_xla(fn: Callable, *inputs: torch.Tensor) -> Callable:
    """fn, waited for, on copies of the inputs that are on the device: what a table can call with its CPU tensors."""
    moved = [x.to(xla.device()) for x in inputs]
    return xla.waited(lambda *_: fn(*moved))


def host_ms(fn: Callable, *args, calls: int = 21) -> float:
    """Median time in ms until fn has returned; what it left to run is waited for outside of the clock."""
    times = []
    for _ in range(calls):
        xla.settle()
        started = time.perf_counter()
        fn(*args)
        times.append(1000 * (time.perf_counter() - started))
    xla.settle()
    return statistics.median(times)


def wake(h: Harness) -> None:
    """What only the first compilation of a process costs, and the one program that all backward passes begin with."""
    with h.progress("waking the compilers"), logs():
        wake_compiler(h.device)
        ones = torch.ones(8, device=xla.device(), requires_grad=True)
        torch.compile(lambda x: x.sin().sum(), backend="openxla")(ones).backward()
        xla.settle()
        torch.compiler.reset()


# --- inference


@torch.no_grad()
def inference(h: Harness) -> None:
    """One forward pass by all four: what the first call costs, what XLA does at each, and how long the host is busy."""
    config = h.pick(
        quick=Config(width=232, layers=1, heads=4, kv_heads=2, hidden=616, vocab=1192, max_tokens=128),
        full=Config(width=488, layers=4, heads=4, kv_heads=2, hidden=1304, vocab=4072, max_tokens=256),
    )
    tokens = h.randint(config.vocab, *h.pick(quick=(2, 24), full=(4, 96)))
    model = Transformer.random(config, h.device, torch.float32, h.seed)
    there, moved = copy.deepcopy(model).to(xla.device()), tokens.to(xla.device())
    ways = {LAZY: there, OPENXLA: through_openxla(there)}
    variants = {
        EAGER: model,
        INDUCTOR: torch.compile(model, fullgraph=True, dynamic=False),
        **{name: on_xla(fn, tokens) for name, fn in ways.items()},
    }
    seconds, first, later = {}, {}, {}
    for name, fn in {} if h.profile else variants.items():
        with h.progress(f"first call of {name}"), empty_cache(), xla.watch() as ran:
            fn(tokens)
        seconds[name] = ran.seconds
        if name in ways:
            with xla.watch() as again:
                fn(tokens)
            first[name], later[name] = ran, again
    table = h.compare(
        variants, model.float64, tokens, baseline=EAGER, work=Work(), title="forward", case=case_of(tokens),
        beside=LIKE_EAGER, first_calls=seconds or None, dtype=torch.float32,
    )  # fmt: skip
    if h.profile:
        return
    h.fact(
        "programs of a forward pass",
        {
            name: {"compiled": first[name].compiles, "run per call": later[name].executions}
            | {"recorded again per call": later[name].reused}
            for name in ways
        },
    )
    h.fact("s of the first call in XLA's compiler", {name: round(first[name].compile_s, 2) for name in ways})
    if not h.timing:
        return
    rows = {row.variant: row for row in table.rows}
    host = {name: host_ms(fn, moved) for name, fn in ways.items()}

    # Lazy mode has only recorded when the model returns; the sync, which looks the recording up, is part of its cost.
    def started(x: torch.Tensor) -> torch.Tensor:
        out = there(x)
        torch_xla.sync()
        return out

    synced = host_ms(started, moved)
    h.say(
        f"the host, until the call returns: openxla {host[OPENXLA]:.2f} ms; lazy mode {host[LAZY]:.2f} ms to record, "
        f"{synced:.2f} ms until a sync has started it. "
        f"The whole call: {rows[OPENXLA].ms:.2f} and {rows[LAZY].ms:.2f} ms"
    )
    extra, saved = seconds[OPENXLA] - seconds[LAZY], rows[LAZY].ms - rows[OPENXLA].ms
    pays = f"ahead of it after {extra * 1000 / saved:,.0f} calls" if saved > 0 else "and no later call is faster"
    if extra > 0:
        h.say(f"openxla's first call took {extra:.2f} s more than lazy mode's: {pays}")
    else:
        h.say(f"openxla's first call took {-extra:.2f} s less than lazy mode's, each later one {saved:.2f} ms less")
    best = min(rows, key=lambda name: rows[name].ms)
    h.say(
        f"fastest call: {best}, {rows[best].speedup:.2f}x eager; openxla {rows[OPENXLA].speedup:.2f}x, "
        f"Inductor {rows[INDUCTOR].speedup:.2f}x; first calls: Inductor {seconds[INDUCTOR]:.1f} s, openxla "
        f"{seconds[OPENXLA]:.1f} s"
    )


# --- tensors on the CPU


def cpu_tensors(h: Harness) -> None:
    """What becomes of tensors that were not moved: torch's own doing, and what through_openxla says instead."""
    w, x = h.randn(43, 43), h.randn(5, 43)
    there, moved = w.to(xla.device()), x.to(xla.device())
    scalar = torch.tensor(1.5)

    def layer(x, w):
        return torch.relu(x.to(w.device) @ w) if x.ndim else torch.relu(w * x)

    cases = {
        "all on the XLA device": (layer, moved, there),
        "all on the CPU": (layer, x, w),
        "x on the CPU": (lambda x, w: torch.relu(x @ w), x, there),
        "x on the CPU, moved in the graph": (layer, x, there),
        "a scalar tensor on the CPU": (layer, scalar, there),
    }
    told = {}
    for name, (fn, *args) in cases.items():
        torch.compiler.reset()
        compiled = torch.compile(fn, backend="openxla", fullgraph=True, dynamic=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                compiled(*args)
            except RuntimeError as error:  # TorchRuntimeError
                told[name] = {"raises": type(error).__name__}
                continue
            first = told_to_move(caught)
            # New values in the same tensors' place: a transfer that is needed at every call shows.
            args = [a + 1 if a.device.type == "cpu" else a for a in args]
            with xla.watch() as ran:
                out = compiled(*args)
                xla.settle()
        told[name] = {
            "warnings": first, "at the second call": told_to_move(caught) - first,
            "programs per call": ran.executions, "transfers per call": ran.to_device,
            "result on": out.device.type,
        }  # fmt: skip
        h.check(compiled, lambda *given: layer(*(a.cpu().double() for a in given)), *args, what=f"openxla, {name}",
                terms=43, poison=False)  # fmt: skip
    torch.compiler.reset()
    h.fact("tensors on the CPU, given to openxla", told)
    try:
        through_openxla(layer)(x, there)
    except ValueError as error:
        h.fact("through_openxla, x on the CPU", str(error))
    on_cpu, right = told["all on the CPU"], told["all on the XLA device"]
    if not on_cpu["programs per call"]:
        h.say(
            f"all on the CPU: {on_cpu['warnings']} warnings at the first call, "
            f"{on_cpu['at the second call']} at the second, and {on_cpu['programs per call']} XLA "
            "programs: torch runs the operations one by one"
        )
    if (scalar := told["a scalar tensor on the CPU"])["programs per call"] > right["programs per call"]:
        h.say(
            f"a scalar tensor on the CPU: {scalar['programs per call']} programs per call instead of "
            f"{right['programs per call']}, and {scalar['transfers per call']} transfer for a value that is new"
        )


def told_to_move(caught: list[warnings.WarningMessage]) -> int:
    return sum("move all tensors to xla device" in str(warning.message) for warning in caught)


# --- training


class Trainer:
    """(x, y) -> the loss before an SGD step, which it does. `lazy` and eager are the same code on two devices.

    `how` says what goes through openxla: "model"; "model, cut": the same, and at backward nothing is pending, for there
    is a sync before it, and the first gradient, 1.0, is there already; "model, loss"; "model, loss, update", the first
    gradient there already; "whole step". "inductor" is model and loss through that; None is eager, or lazy mode.
    """

    def __init__(self, model: nn.Module, how: str | None) -> None:
        self.model, self.how = model, how
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        self.start = [p.detach().cpu().clone() for p in model.parameters()]  # why there: snapshots() below
        self.forward, self.loss_of, self.update = model, self.uncompiled_loss, self.optimizer.step
        given = how in ("model, cut", "model, loss, update")
        self.seed = torch.ones((), device=next(model.parameters()).device) if given else None
        if how in ("model", "model, cut"):
            self.forward = through_openxla(model)
        elif how in ("model, loss", "model, loss, update"):
            self.loss_of = through_openxla(self.uncompiled_loss)
            if "update" in how:
                self.update = through_openxla(self.optimizer.step, fullgraph=False)
        elif how == "whole step":
            self.whole = through_openxla(self.whole_step)
        elif how == "inductor":
            self.loss_of = torch.compile(self.uncompiled_loss, fullgraph=True, dynamic=False)
        elif how is not None:
            raise ValueError(f"Trainer: {how!r} is none of the ways that its docstring names")

    def uncompiled_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), y)

    def whole_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def loss_of(weights: dict) -> torch.Tensor:
            return F.cross_entropy(torch.func.functional_call(self.model, weights, (x,)), y)

        weights = dict(self.model.named_parameters())
        gradients, loss = torch.func.grad_and_value(loss_of)({name: p.detach() for name, p in weights.items()})
        with torch.no_grad():
            for name, weight in weights.items():
                weight.sub_(gradients[name], alpha=LR)
        return loss

    def step(self, x: torch.Tensor, y: torch.Tensor) -> Iterator[str]:
        """One step, phase by phase: each is done when its name comes. self.loss is the result."""
        if self.how == "whole step":
            self.loss = self.whole(x, y)
            yield "whole step"
            return
        self.optimizer.zero_grad()
        if self.how in ("model", "model, cut"):
            logits = self.forward(x)
            yield "forward"
            loss = F.cross_entropy(logits, y)
            if self.how == "model, cut":
                xla.settle()
            yield "loss"
        else:
            loss = self.loss_of(x, y)
            yield "forward and loss"
        loss.backward(self.seed)
        self.loss = loss.detach()
        del loss
        yield "backward"
        self.update()
        yield "update"

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in self.step(x, y):
            pass
        return self.loss

    @torch.no_grad()
    def reset(self) -> None:
        for weight, start in zip(self.model.parameters(), self.start, strict=True):
            weight.copy_(start)

    def moved(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """How far each weight is from where it began after STEPS steps."""
        self.reset()
        for _ in range(STEPS):
            self(x, y)
            if x.device.type == "xla":
                xla.settle()
        with torch.no_grad():
            return tuple((p.cpu() - s).flatten() for p, s in zip(self.model.parameters(), self.start, strict=True))


WAYS = {
    LAZY: None,
    "openxla: model": "model",
    "openxla: model, nothing pending at backward": "model, cut",
    "openxla: model, loss": "model, loss",
    "openxla: model, loss, update": "model, loss, update",
    "openxla: whole step": "whole step",
}


def programs(h: Harness) -> None:
    """Programs compiled and run in each phase of the first steps of an MLP; each way has a width of its own."""
    per_step, phases = {}, {}
    for i, (name, how) in enumerate(WAYS.items()):
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(17 + 2 * i, 18), nn.ReLU(), nn.Linear(18, 11))
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(h.randn(*weight.shape, scale=weight.shape[-1] ** -0.5))
        x, y = h.randn(13, 17 + 2 * i), h.randint(11, 13)
        exact = Trainer(copy.deepcopy(model).double(), None)
        trainer = Trainer(model.to(xla.device()), how)
        x_there, y_there = x.to(xla.device()), y.to(xla.device())
        xla.settle()
        counts = []
        with h.progress(f"steps by {name}"), logs():  # logs: Dynamo warns that it leaves out torch's profiler marks
            for _ in range(STEPS):
                counts.append(count_phases(trainer, x_there, y_there))
            per_step[name] = {
                "compiled in steps 1 to 5": [sum(ran.compiles for ran in count.values()) for count in counts],
                "run in the last": sum(ran.executions for ran in counts[-1].values()),
            }
            phases[name] = counts
            h.check(
                lambda x, y, t=trainer: t.moved(x.to(xla.device()), y.to(xla.device())),
                lambda x, y, t=exact: t.moved(x.double(), y),
                x, y, what=f"{STEPS} steps, {name}", terms=10_000, poison=False,
            )  # fmt: skip
    torch.compiler.reset()
    h.fact("programs of a training step", per_step)
    for name in ("openxla: model", "openxla: model, nothing pending at backward", "openxla: model, loss"):
        steps = {"step 1": phases[name][0], "step 2": phases[name][1]}
        h.fact(
            f"by phase, {name}",
            {
                f"{step}, {what}": {phase: getattr(ran, field) for phase, ran in count.items()}
                for step, count in steps.items()
                for what, field in (("compiled", "compiles"), ("run", "executions"))
            },
        )
    compiled = {name: sum(each["compiled in steps 1 to 5"]) for name, each in per_step.items()}
    second = phases["openxla: model"][1]
    if again := [phase for phase, ran in second.items() if ran.compiles]:
        cut = per_step["openxla: model, nothing pending at backward"]["compiled in steps 1 to 5"][1]
        h.say(
            f"model alone: step 2 compiles again, in {' and '.join(again)}: tracing backward in step 1 ran all that "
            "was recorded, with the loss and the first gradient, 1.0, as results; later, only what backward takes "
            f"is run before it, and the loss is left to the sync. With neither pending there, step 2 compiles {cut}"
        )
    if not second["update"].executions and second["sync"].executions:
        h.say("the optimizer is no part of what openxla got: its step only records, and runs as a program at the sync")
    run_last = {name: each["run in the last"] for name, each in per_step.items()}
    h.say("programs compiled / run per step: " + ", ".join(f"{n} {compiled[n]} / {run_last[n]}" for n in WAYS))


def count_phases(trainer: Trainer, x: torch.Tensor, y: torch.Tensor) -> dict[str, xla.Ran]:
    """What XLA did in each phase of one step, and in the sync behind it."""
    steps, counts, name = trainer.step(x, y), {}, ""
    while name is not None:
        with xla.watch(settled=False) as ran:
            if (name := next(steps, None)) is None:
                xla.settle()
        counts[name or "sync"] = ran
    return counts


def snapshots(h: Harness) -> None:
    """Weights put back with copy_(), and then a step: is the snapshot still there? In lazy mode a sync decides it."""

    def as_is(snapshot: torch.Tensor) -> torch.Tensor:
        return snapshot

    cases = {
        "lazy": (None, False, as_is),
        "lazy, a sync after copy_()": (None, True, as_is),
        "openxla": ("model, loss", False, as_is),
        "openxla, copy_() of a clone": ("model, loss", False, torch.clone),
        "openxla, copy_() from the CPU": ("model, loss", False, torch.Tensor.cpu),
    }
    told = {}
    for name, (how, sync, given) in cases.items():
        torch.compiler.reset()
        trainer = Trainer(nn.Linear(29, 23).to(xla.device()), how)
        x, y = h.randn(7, 29).to(xla.device()), h.randint(23, 7).to(xla.device())
        weight = trainer.model.weight
        snapshot, want = weight.detach().clone(), weight.detach().cpu()
        for _ in range(2):
            with torch.no_grad():
                weight.copy_(given(snapshot))
            if sync:
                xla.settle()
            trainer(x, y)
            xla.settle()
            try:
                told[name] = "as it was" if torch.equal(snapshot.cpu(), want) else "changed"
            except RuntimeError as error:
                told[name] = f"gone: {type(error).__name__}"
                break
        del snapshot, trainer, weight
    torch.compiler.reset()
    h.fact("a snapshot on the device, after copy_() put it back and a step", told)
    if lost := [name for name, found in told.items() if found != "as it was"]:
        kept = [name for name in told if name not in lost]
        h.say(
            f"lost: {'; '.join(lost)}. Run by itself, copy_() copies nothing: weight and snapshot are one buffer, and "
            f"the update may reuse the weight's. Kept: {'; '.join(kept)}"
        )


def training(h: Harness) -> None:
    """The transformer's step by each of them, and where its weights are after some."""
    config = h.pick(
        quick=Config(width=248, layers=1, heads=4, kv_heads=2, hidden=680, vocab=2008, max_tokens=64),
        full=Config(width=328, layers=2, heads=4, kv_heads=2, hidden=872, vocab=2056, max_tokens=128),
    )
    tokens = h.randint(config.vocab, *h.pick(quick=(4, 64), full=(4, 96)))
    targets = h.randint(config.vocab, len(tokens))
    model = Transformer.random(config, h.device, torch.float32, h.seed).train().requires_grad_(True)
    exact = copy.deepcopy(model).double()
    exact.cos, exact.sin = exact.angles(config.max_tokens, h.device)
    reference = Trainer(exact, None)
    here = {EAGER: Trainer(copy.deepcopy(model), None)}
    if h.full:  # its forward and backward take a C++ compiler longer than all that XLA compiles here
        here[INDUCTOR] = Trainer(copy.deepcopy(model), "inductor")
    else:
        h.say("training: Inductor's row is part of --full")
    ways = {LAZY: None, f"{OPENXLA}, model and loss": "model, loss", f"{OPENXLA}, whole step": "whole step"}
    there = {name: Trainer(copy.deepcopy(model).to(xla.device()), how) for name, how in ways.items()}
    variants = {**here, **{name: on_xla(trainer, tokens, targets) for name, trainer in there.items()}}
    torch.compiler.reset()
    table = h.compare(
        variants, lambda x, y: reference.uncompiled_loss(x, y).detach(), tokens, targets, baseline=EAGER, work=Work(),
        title="training step", case=case_of(tokens), beside=LIKE_EAGER, cold=True, dtype=torch.float32,
    )  # fmt: skip
    if h.profile:
        return
    want = reference.moved(tokens, targets)
    for name, trainer in (here | there).items():

        def moved(*inputs, t=trainer):
            return t.moved(*(x.to(next(t.model.parameters()).device) for x in inputs))

        h.check(moved, lambda *_: want, tokens, targets, what=f"{STEPS} steps, {name}", terms=100_000,
                dtype=torch.float32, poison=False)  # fmt: skip
    torch.compiler.reset()
    if h.timing:
        rows = {row.variant: row for row in table.rows}
        for name in variants:
            if name != EAGER:
                # Eager as slow as it was in the rounds of this way, so that it agrees with the table's ratio.
                saved = rows[name].ms * (rows[name].speedup - 1)
                pays = f"pays after {rows[name].first_call_s * 1000 / saved:,.0f} steps" if saved > 0 else "never pays"
                h.say(f"{name}: {rows[name].ms:.2f} ms a step, {rows[name].speedup:.2f}x eager: {pays}")


def case_of(tokens: torch.Tensor) -> str:
    return f"{'x'.join(map(str, tokens.shape))} tokens"


def demo(h: Harness) -> None:
    torch.compiler.reset()
    wake(h)
    inference(h)
    torch.compiler.reset()
    if not h.profile:
        cpu_tensors(h)
        programs(h)
        snapshots(h)
    training(h)
    torch.compiler.reset()
    xla.settle()


if __name__ == "__main__":
    run(demo)
