"""torch.compile(backend="openxla"): whole graphs go to XLA without being recorded at each call; in training, how many?

Lazy mode records the Python of a model again at every call and looks the recording up. torch.compile records once,
guards, and then hands XLA the program's hash and its inputs: the same compiler behind another front end.

In training AOTAutograd cuts a step into two programs, forward and backward. What is not compiled (the loss, the first
gradient, the optimizer) stays lazy: more programs. Only a step compiled as one function is one, as in lazy mode.

Question   What does openxla save over lazy mode, what does it cost first, and how many programs is a training step?
Needs      torch_xla>=2.9
Wins when  the host limits lazy mode: small models, equal shapes; in training, one function.
Variants   openxla_backend_training.py (a training step, compiled in four ways)
Study      studies/xla/openxla_backend.py (the host's time, tensors on the CPU, times of a training step)
Source     chapter sections "PyTorch XLA Backend" and "Ecosystem Context"; torch_xla's dynamo_bridge
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from harness import Harness, Timing, Work, run

import torch
from torch import nn

from compile_inspect import fresh_cache, logs, warm_up
from examples.common import xla
from examples.common.transformer import Config, Transformer
from examples.xla.openxla_backend_training import LAZY, STEPS, WAYS, Trainer

EAGER, INDUCTOR, OPENXLA = "torch eager", "torch.compile inductor", "torch.compile openxla"
LIKE_EAGER = 2.0  # times eager's own error from float64


def through_openxla(fn: Callable) -> Callable:
    """fn by torch.compile(backend="openxla"): one graph for fixed sizes, for tensors on the XLA device.

    Raises TypeError for what cannot be called, ValueError for a model whose weights are not on the XLA device and, at
    the call, for a tensor that is not. torch itself only warns if all are on the CPU, and then runs without XLA.
    """
    if not callable(fn):
        raise TypeError(f"through_openxla: got {type(fn).__name__}; need a module or a function of XLA tensors")
    tensors = (*fn.named_parameters(), *fn.named_buffers()) if isinstance(fn, nn.Module) else ()
    if left := [name for name, x in tensors if x.device.type != "xla"]:
        raise ValueError(
            f"through_openxla: {left[0]} and {len(left) - 1} more tensors are not on the XLA device; use "
            "model.to(xla.device())"
        )
    compiled = torch.compile(fn, backend="openxla", fullgraph=True, dynamic=False)

    def call(*args):
        for i, x in enumerate(args):
            if isinstance(x, torch.Tensor) and x.device.type != "xla":
                raise ValueError(f"through_openxla: argument {i} is on {x.device}; move it with .to(xla.device())")
        return compiled(*args)

    return call


def on_xla(fn: Callable, *inputs: torch.Tensor) -> Callable:
    """fn, waited for, on device copies of the inputs: a function that a table can call with its CPU tensors."""
    moved = [x.to(xla.device()) for x in inputs]
    return xla.waited(lambda *_: fn(*moved))


def case_of(tokens: torch.Tensor) -> str:
    return f"{'x'.join(map(str, tokens.shape))} tokens"


def given(h: Harness) -> tuple[Transformer, torch.Tensor]:
    config = h.pick(
        quick=Config(width=232, layers=1, heads=4, kv_heads=2, hidden=616, vocab=1192, max_tokens=128),
        full=Config(width=488, layers=4, heads=4, kv_heads=2, hidden=1304, vocab=4072, max_tokens=256),
    )
    tokens = h.randint(config.vocab, *h.pick(quick=(2, 24), full=(4, 96)))
    return Transformer.random(config, h.device, torch.float32, h.seed), tokens


@torch.no_grad()
def inference(h: Harness):
    """One forward pass by all four: what the first call costs, and what XLA does at each."""
    model, tokens = given(h)
    there = copy.deepcopy(model).to(xla.device())
    ways = {LAZY: on_xla(there, tokens), OPENXLA: on_xla(through_openxla(there), tokens)}
    variants = {EAGER: model, INDUCTOR: torch.compile(model, fullgraph=True, dynamic=False), **ways}
    seconds, programs = {}, {}
    for name, fn in {} if h.profile else variants.items():
        with h.progress(f"first call of {name}"), fresh_cache(), xla.watch() as ran:
            fn(tokens)
        with xla.watch() as later:
            fn(tokens)
        seconds[name] = ran.seconds
        if name in ways:
            programs[name] = {"compiled": ran.compiles, "run per call": later.executions,
                              "recorded again": later.reused}  # fmt: skip
    h.table("programs of a forward pass", programs)
    return h.compare(
        variants, model.float64, tokens, baseline=EAGER, work=Work(), title="forward", case=case_of(tokens),
        max_error_ratio=LIKE_EAGER, timing=Timing(first_calls=seconds or None), dtype=torch.float32,
    )  # fmt: skip


def steps_of(name: str, x: torch.Tensor, y: torch.Tensor) -> tuple[list[xla.Ran], Trainer, Trainer]:
    """What XLA did in each of the first steps of an MLP; its trainer, and one in float64."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(x.shape[1], 18), nn.ReLU(), nn.Linear(18, 11))
    exact, trainer = Trainer(copy.deepcopy(model).double(), None), Trainer(model.to(xla.device()), WAYS[name])
    there, counts = (x.to(xla.device()), y.to(xla.device())), []
    for _ in range(STEPS):
        with logs(), xla.watch() as ran:  # Dynamo warns that it leaves out torch's profiler marks
            trainer(*there)
            xla.settle()
        counts.append(ran)
    return counts, trainer, exact


def demo(h: Harness) -> None:
    with logs():
        warm_up(h.device)
        xla.warm_up()
    table, per_step = inference(h), {}
    for i, name in enumerate([] if h.profile else WAYS):
        x, y = h.randn(13, 17 + 2 * i), h.randint(11, 13)  # a width for each: no way finds another's programs
        counts, trainer, exact = steps_of(name, x, y)
        h.check(lambda x, y, t=trainer: t.moved(x.to(xla.device()), y.to(xla.device())),
                lambda x, y, t=exact: t.moved(x.double(), y),
                x, y, what=f"{STEPS} steps, {name}", terms=10_000, poison=False)  # fmt: skip
        per_step[name] = {
            "compiled": str([ran.compiles for ran in counts]),
            "run in the last": counts[-1].executions,
        }
    h.table(f"programs of {STEPS} training steps", per_step)

    def answer() -> str:
        first = table[OPENXLA].first_call_s - table[LAZY].first_call_s
        runs = "; ".join(
            f"{name.partition(': ')[2].replace(', ', ' + ') or 'nothing'} {row['run in the last']}"
            for name, row in per_step.items()
        )
        return (
            f"A call runs at {table.over(LAZY, OPENXLA):.2f}x lazy mode's speed, the first takes {abs(first):.1f} s "
            f"{'more' if first > 0 else 'less'}. Programs of a training step, by what is compiled: {runs}."
        )

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
