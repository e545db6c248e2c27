"""Recompilation: which value a compiled form is tied to, why torch compiles again, and how to keep one form.

Technique  A compiled form holds for what its guards check: shapes, dtypes, grad mode, and every Python value that the
           code read. When a guard fails torch compiles another form, which costs seconds; past recompile_limit (per
           function) it gives up and runs eagerly. Each common cause is called with changing values, its forms are
           counted and the failed guard is shown in torch's words, then the same is done after the fix. Counted with
           the backend aot_eager, which has Inductor's guards and none of its code; Inductor compiles what is timed.
Question   Why does a compiled function compile again, and what keeps it at one form?
Needs      torch
Shapes     x [rows, width] -> [rows, width]; shapes stay the same here, dynamic_shapes is about those that change.
Dtypes     float32; the case about dtypes adds float16 and bfloat16.
Errors     count_forms raises TypeError for what cannot be called; ValueError for a function that is compiled already
           and for an empty list of calls. What the calls raise is passed on: RecompileError, FailOnRecompileLimitHit.
Wins when  a value changes from call to call: a step, a temperature, a learning rate, a history. A value that takes two
           or three settings for good is better left in Python: each form is then compiled for its own.
Source     chapter sections "Common Issues" and "Compiler Stances".
Run        python examples/compiler/recompilation.py
"""

from __future__ import annotations

import itertools
import re
import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from harness import Harness, Work, run
from harness.compiler import guards, logs, wake_compiler, watch

import torch
import torch.nn.functional as F
from torch import nn

CALLS = 12  # more than recompile_limit, which is 8 unless somebody set it
BUDGET = {"terms": 1, "roundings": 32}


# --- counting forms


@dataclass
class Forms:
    """What came of a series of calls."""

    graphs: int
    eager: list[bool]  # of each call, whether it reached no compiled graph
    reasons: list[str]
    warned: list[str]  # what torch logs unasked, as when it gives up
    outputs: list

    @property
    def eager_calls(self) -> int:
        return sum(self.eager)


def plain(reason: str) -> str:
    """The guard that failed, without the source line and the stack that torch adds to it."""
    return reason.splitlines()[0].split("  #")[0].strip()


def count_forms(fn: Callable | list[Callable], calls: list[Callable], backend: str = "aot_eager", **options) -> Forms:
    """Compile fn from nothing, hand it to each of `calls` in turn, and count: count_forms(f, [lambda f: f(x, 2), ...]).

    A list of functions is compiled one by one, and a call is given the list. `options` go to torch.compile.
    """
    for each in fn if isinstance(fn, list) else [fn]:
        if not callable(each):
            raise TypeError(
                f"count_forms: got {type(each).__name__}, which cannot be called; pass a function or a module"
            )
        if hasattr(each, "_torchdynamo_orig_callable") or hasattr(each, "_orig_mod"):
            raise ValueError("count_forms: fn is compiled already; pass the function or module that it was made of")
    if not calls:
        raise ValueError("count_forms: no calls; pass functions that call what they are given")
    reached = False

    def counted(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        compiled = torch._dynamo.lookup_backend(backend)(graph, inputs)

        def ran(*args):
            nonlocal reached
            reached = True
            return compiled(*args)

        return ran

    torch.compiler.reset()
    eager, outputs = [], []
    try:
        with watch() as seen, logs() as records, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            many = [torch.compile(f, backend=counted, **options) for f in (fn if isinstance(fn, list) else [fn])]
            compiled = many if isinstance(fn, list) else many[0]
            for call in calls:
                reached = False
                outputs.append(call(compiled))
                eager.append(not reached)
    finally:
        torch.compiler.reset()
    warned = [text.splitlines()[0] for _, text in records if "recompile_limit" in text]
    return Forms(seen.graphs, eager, [plain(reason) for reason in seen.recompiles], warned, outputs)


# --- functions that recompile, and the same that do not


def scales(x, k):
    return torch.tanh(x * k) + x


def repeats(x, k):
    for _ in range(k):
        x = torch.tanh(x) * 1.5
    return x


def repeats_masked(x, k):
    """The most repetitions always, those from k on without effect; k is a tensor."""
    for i in range(CALLS):
        x = torch.where(i < k, torch.tanh(x) * 1.5, x)
    return x


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return scales(x, self.calls)


class CountsCallsInABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        return scales(x, self.calls)


class Layer(nn.Module):
    """Knows which of the model's layers it is; `kind` is int, or torch.tensor."""

    def __init__(self, index: int, kind: Callable) -> None:
        super().__init__()
        self.index = kind(index)

    def forward(self, x):
        return scales(x, self.index)


class Remembers(nn.Module):
    """The mean of all that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return torch.stack(self.seen).mean(0)


class RemembersInPlace(nn.Module):
    """The same in a buffer of fixed size, and a count that is a tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", x.new_zeros(CALLS, *x.shape))
        self.register_buffer("count", torch.tensor(0, device=x.device))

    def forward(self, x):
        self.seen.index_copy_(0, self.count.view(1), x[None])
        self.count += 1  # what is not written yet is 0, and adds nothing
        return self.seen.sum(0) / self.count


def steps(
    kind: type, x: torch.Tensor, lr: float | torch.Tensor, calls: int = CALLS, **options
) -> tuple[Callable, list[Callable]]:
    """An optimizer's step and its calls, with a scheduler that changes lr after each; the outputs are the weights."""
    weight = nn.Parameter(x.clone())
    weight.grad = torch.tanh(x)
    optimizer = kind([weight], lr=lr, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def call(step: Callable) -> torch.Tensor:
        step()
        scheduler.step()
        return weight.detach().clone()

    return optimizer.step, [call] * calls


# --- the cases


@dataclass(frozen=True)
class Way:
    """A function with calls of it, made anew by start(); options of torch.compile and settings of Dynamo."""

    start: Callable[[], tuple[Callable, list[Callable]]]
    options: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)

    def forms(self) -> Forms:
        with torch._dynamo.config.patch(**self.config) if self.config else nullcontext():
            return count_forms(*self.start(), **self.options)


@dataclass(frozen=True)
class Case:
    broken: Way
    fixes: dict[str, Way]
    want: list[torch.Tensor]  # float64, one for each call
    budget: dict = field(default_factory=lambda: BUDGET)


def passing(fn: Callable, x: torch.Tensor, values: list) -> Callable:
    return lambda: (fn, [lambda f, v=v: f(x, v) for v in values])


def under(context: Callable, x: torch.Tensor) -> Callable:
    def call(f: Callable) -> torch.Tensor:
        with context():
            return f(x, 2.0)

    return call


def cases(x: torch.Tensor) -> dict[str, Case]:
    exact, ints = x.double(), list(range(2, CALLS + 2))
    floats, counts = [k / 10 for k in ints], list(range(1, CALLS + 1))
    halves = [torch.float32, torch.float16, torch.bfloat16]
    modes = [torch.enable_grad, torch.no_grad, torch.inference_mode]

    def tensors(values: list) -> list[torch.Tensor]:
        return [torch.tensor(v, device=x.device) for v in values]

    def made(module: nn.Module) -> tuple[Callable, list[Callable]]:
        return module.to(x.device), [lambda f: f(x)] * CALLS

    def layers(kind: Callable) -> tuple[list[Callable], list[Callable]]:
        return [Layer(k, kind) for k in counts], [lambda each, i=i: each[i](x) for i in range(CALLS)]

    def remembered(module: nn.Module) -> tuple[Callable, list[Callable]]:
        return module, [lambda f, i=i: f(x + i) for i in counts]

    def exact_steps(kind: type, **options) -> list[torch.Tensor]:
        step, calls = steps(kind, exact, 0.1, foreach=False, **options)
        return [call(step) for call in calls]

    def tensor_lr() -> torch.Tensor:
        return torch.tensor(0.1, device=x.device)

    def adam(lr: Callable, **options) -> Way:
        return Way(lambda: steps(torch.optim.AdamW, x, lr(), **betas, **options))

    # Compiled, AdamW has its step count in a float32 tensor: 1 - 0.999**step, by default, would cost four digits there.
    betas = {"betas": (0.8, 0.9), "calls": 4}
    SGD = torch.optim.SGD
    return {
        "int argument": Case(
            Way(passing(scales, x, ints)),
            {
                "dynamic=True": Way(passing(scales, x, ints), {"dynamic": True}),
                "tensor": Way(passing(scales, x, tensors(ints))),
            },
            [scales(exact, k) for k in ints],
        ),
        "float argument": Case(
            Way(passing(scales, x, floats)),
            {
                "dynamic=True": Way(passing(scales, x, floats), {"dynamic": True}),
                "tensor": Way(passing(scales, x, tensors(floats))),
            },
            [scales(exact, k) for k in floats],
        ),
        "int that a loop runs to": Case(
            Way(passing(repeats, x, counts)),
            {"fixed loop, masked": Way(passing(repeats_masked, x, tensors(counts)))},
            [repeats(exact, k) for k in counts],
        ),
        "int attribute of a module": Case(
            Way(lambda: made(CountsCalls())),
            {
                "buffer": Way(lambda: made(CountsCallsInABuffer())),
                "allow_unspec_int_on_nn_module": Way(
                    lambda: made(CountsCalls()), config={"allow_unspec_int_on_nn_module": True}
                ),
            },
            [scales(exact, k) for k in counts],
        ),
        "int attribute, a layer each": Case(
            Way(lambda: layers(int)),
            {"tensor": Way(lambda: layers(lambda k: torch.tensor(k, device=x.device)))},
            [scales(exact, k) for k in counts],
        ),
        "growing list": Case(
            Way(lambda: remembered(Remembers())),
            {"buffer of fixed size": Way(lambda: remembered(RemembersInPlace(x)))},
            [torch.stack([(x + i).double() for i in counts[:k]]).mean(0) for k in counts],
        ),
        "learning rate, SGD": Case(
            Way(lambda: steps(SGD, x, 0.1)),
            {"tensor lr": Way(lambda: steps(SGD, x, tensor_lr()))},
            exact_steps(SGD),
        ),
        "learning rate, AdamW foreach": Case(  # foreach is what a GPU gets unasked
            adam(lambda: 0.1, foreach=True),
            {
                "tensor lr, capturable": adam(tensor_lr, foreach=True, capturable=True),
                "foreach=False": adam(lambda: 0.1, foreach=False),
            },
            exact_steps(torch.optim.AdamW, **betas),
        ),
        "dtype": Case(
            Way(lambda: (scales, [lambda f, d=d: f(x.to(d), 2.0) for d in halves])),
            {"cast before the call": Way(lambda: (scales, [lambda f, d=d: f(x.to(d).float(), 2.0) for d in halves]))},
            [scales(x.to(d).double(), 2.0) for d in halves],
            {"terms": 0, "roundings": 8, "acc": torch.bfloat16},
        ),
        "grad mode": Case(
            Way(lambda: (scales, [under(mode, x) for mode in modes])),
            {"one mode around every call": Way(lambda: (scales, [under(torch.no_grad, x) for _ in modes]))},
            [scales(exact, 2.0) for _ in modes],
        ),
    }


# --- the demo


def explore(h: Harness, x: torch.Tensor) -> dict[str, dict]:
    """Each case: its forms and the first guard that failed; each fix: its forms; all outputs against float64."""
    table = {}
    for name, case in cases(x).items():
        want = torch.stack(case.want)
        forms = {"": case.broken.forms()} | {fix: way.forms() for fix, way in case.fixes.items()}
        for fix, found in forms.items():
            got = torch.stack([output.detach().float() for output in found.outputs])
            what = f"{name}, {fix or 'as found'}, {len(want)} calls"
            h.check(lambda *_, got=got: got, lambda *_, want=want: want, x, what=what, poison=False, **case.budget)
        broken = forms.pop("")
        table[name] = {
            "calls": len(want),
            "forms": broken.graphs,
            "eager calls": broken.eager_calls,
            "guards that failed": broken.reasons,
            "forms after": {fix: found.graphs for fix, found in forms.items()},
            "eager calls after": {fix: found.eager_calls for fix, found in forms.items()},
        }
        more = [f"and {len(broken.reasons) - 3} more"] if len(broken.reasons) > 3 else []
        h.fact(name, table[name] | {"guards that failed": "; ".join(broken.reasons[:3] + more)})
    return table


def guards_on_a_scalar(h: Harness, x: torch.Tensor) -> None:
    """What the first form of an argument checks, and what the second: its value, then only its type."""
    told = {}
    for kind, values in (("int", (2, 3)), ("float", (0.2, 0.3))):
        torch.compiler.reset()
        fn = torch.compile(scales, backend="eager")
        for value in values:
            fn(x, value)
        for nth, lines in zip(("second", "first"), guards(scales), strict=True):
            mine = [re.sub(r", \d{9,}", "", line.split("  #")[0]) for line in lines if "L['k']" in line]
            told[f"{kind}, {nth} form"] = "; ".join(line.strip() for line in mine)
    torch.compiler.reset()
    h.fact("guards on a scalar argument", told)


def who_specializes(h: Harness, x: torch.Tensor, aot_eager: int) -> None:
    """The same float learning rate, for Dynamo alone and with the operators' own rules behind it."""
    alone = count_forms(*steps(torch.optim.SGD, x, 0.1), backend="eager").graphs
    told = {"eager": alone, "aot_eager": aot_eager}
    h.fact("forms for a float learning rate, by backend", told)
    if alone < aot_eager:
        h.say(
            "Dynamo makes the float dynamic; the operator that takes it (add_ with alpha=) ties it to its value again"
        )


def the_limit(h: Harness, x: torch.Tensor) -> None:
    """Where recompiling ends, and what makes that loud."""
    limit = torch._dynamo.config.recompile_limit
    values = [k / 10 for k in range(2, limit + 6)]
    found = count_forms(scales, [lambda f, k=k: f(x, k) for k in [*values, values[0]]], dynamic=False)
    h.fact(
        "recompile_limit, floats under dynamic=False",
        {
            "limit": limit,
            "values": len(values),
            "forms": found.graphs,
            "eager calls": found.eager_calls,
            "an earlier value after it": "eager" if found.eager[-1] else "compiled",
            "logged": "; ".join(found.warned) or "nothing",
        },
    )

    loud = {}
    for name, config, options in (
        ("fail_on_recompile_limit_hit, limit 2", {"fail_on_recompile_limit_hit": True, "recompile_limit": 2}, {}),
        ("fullgraph=True, limit 2", {"recompile_limit": 2}, {"fullgraph": True}),
        ("error_on_recompile", {"error_on_recompile": True}, {}),
    ):
        made = 0

        def counted(f: Callable, k: float) -> torch.Tensor:
            nonlocal made
            made += 1
            return f(x, k)

        try:
            with torch._dynamo.config.patch(**config):
                count_forms(scales, [lambda f, k=k: counted(f, k) for k in values], dynamic=False, **options)
            loud[name] = "quiet"
        except (torch._dynamo.exc.RecompileError, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            first = re.sub(r"\S*/", "", str(error).splitlines()[0])  # a file by its name
            loud[name] = f"call {made}: {type(error).__name__}: {first}"
    h.fact("made loud by", loud)


def chain(x, k):
    y = F.silu(x * k)
    return torch.tanh(y + k) * y + x


def chain_reference(x):
    return chain(x.double(), VALUE)


EARLIER, VALUE = 0.5, 0.75  # exact in every dtype
COPIES = itertools.count()


def called_with(value, earlier: tuple = (), config: dict | None = None, **options) -> Callable:
    """chain(x, value), compiled for the `earlier` values first, within the first call. A limit is per code object,
    whoever compiles it, and which values have changed is remembered by name: so each gets a copy with its own."""
    own = types.FunctionType(chain.__code__.replace(co_name=f"chain_{next(COPIES)}"), chain.__globals__)
    fn, ready = torch.compile(own, **options), False

    def call(x: torch.Tensor) -> torch.Tensor:
        nonlocal ready
        if ready:
            return fn(x, value)
        ready = True
        with torch._dynamo.config.patch(**config) if config else nullcontext():
            for each in earlier:
                fn(x, each)
            return fn(x, value)

    return call


def cost(h: Harness, x: torch.Tensor) -> None:
    """A call once all forms exist: of a form per value, of the dynamic form, with a tensor, and past the limit."""
    wake_compiler(h.device)
    torch.compiler.reset()
    past = "torch.compile, past the limit"
    variants = {
        "torch eager": lambda x: chain(x, VALUE),
        "torch.compile, a form per float": called_with(VALUE, (EARLIER,), dynamic=False),
        "torch.compile, float made dynamic": called_with(VALUE, (EARLIER,)),
        "torch.compile, tensor": called_with(torch.tensor(VALUE, device=x.device)),
        past: called_with(VALUE, (EARLIER,), {"recompile_limit": 1}, dynamic=False),
    }
    with logs():  # that the limit was hit is what is shown
        table = h.compare(
            variants, chain_reference, x, baseline="torch eager", work=Work(bytes=2 * x.nbytes),
            title="one function", whole_calls=True, cold=True, **BUDGET,
        )  # fmt: skip
    torch.compiler.reset()
    if table is None:
        return
    first = {row.variant: row.first_call_s for row in table.rows}
    h.fact("seconds to compile", {name: round(s, 2) for name, s in first.items() if name.startswith("torch.compile")})
    speedup = {row.variant: row.speedup for row in table.rows}
    if speedup[past] is None:
        return
    best = max((name for name in speedup if name not in (past, "torch eager")), key=speedup.get)
    h.say(
        f"past the limit a call takes {1 / speedup[past]:.2f} times eager's; "
        f"the best compiled form ({best.partition(', ')[2]}) takes {1 / speedup[best]:.2f} times"
    )


def demo(h: Harness) -> None:
    if not h.profile:
        x = h.randn(16, 64)
        table = explore(h, x)
        guards_on_a_scalar(h, x)
        who_specializes(h, x, table["learning rate, SGD"]["forms"])
        the_limit(h, x)
    cost(h, h.randn(*h.pick(quick=(256, 1024), full=(4096, 4096))))
    if h.profile:
        return

    h.say("")
    wide = max(map(len, table))
    h.say(f"{'what changes':{wide}}  calls  forms  eager  fixed by: forms after")
    for name, row in table.items():
        fixes = ", ".join(f"{fix}: {forms}" for fix, forms in row["forms after"].items())
        h.say(f"{name:{wide}}  {row['calls']:5}  {row['forms']:5}  {row['eager calls']:5}  {fixes}")
        h.say(f"{'':{wide}}  {row['guards that failed'][0] if row['guards that failed'] else 'no guard failed'}")
    h.say("(0/0: of the first function, the first form: its guard that failed)")
    lost = [name for name, row in table.items() if row["eager calls"]]
    mended = [name for name, row in table.items() if row["forms after"] and min(row["forms after"].values()) == 1]
    h.say(f"given up for eager after {torch._dynamo.config.recompile_limit} forms: {', '.join(lost) or 'none'}")
    h.say(f"one form after the fix: {len(mended)} of {len(table)}")


if __name__ == "__main__":
    run(demo)
