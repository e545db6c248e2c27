"""A training step: what compiling the model and compiling the optimizer each add, and what waits for backward.

torch.compile of a model that trains traces forward and backward into one joint graph and cuts it in two. Where it cuts
decides which activations wait in memory for backward: Inductor's min-cut partitioner keeps less than eager's autograd
and recomputes what is cheap. The optimizer is compiled separately: its loop over all parameters becomes a few kernels.

AdamW reads a float32 parameter, its gradient and two moments, and writes all but the gradient: 28 bytes a parameter,
3 GB for 107 million. Matrix products need 6 FLOPs per parameter and token, forward and backward together.

Question   Which part of a training step does the compiler speed up, and what does it do to its memory?
Needs      torch
Wins when  eager waits for the host (small batches), or moves activations between many small kernels. Compiling AdamW as
           well gains little over torch's fused kernel: it could save less than 3 % of a step (study). Where a run shows
           more, with few tokens, that is noise from the host, which sets the time there.
Variants   training_step_model.py (the language model; what eager's autograd keeps for backward)
Study      studies/compiler/training_step.py (the joint graph and its cuts; AdamW apart, and its share of a step)
Source     chapter sections "How torch.compile Works Internally" and "Key Concepts".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from harness import Harness, Timing, Work, run

import torch
from torch import nn

from compile_inspect import logs, splits
from examples.common.transformer import TINY, Config
from examples.compiler.training_step_model import LanguageModel, saved_by_autograd

LARGE = Config(width=2048, layers=2, heads=16, kv_heads=4, hidden=5632, vocab=8192)  # 107 million
LR = 5e-5
EAGER, MODEL, WHOLE = "torch eager, fused AdamW", "torch.compile, fused AdamW", "torch.compile, compiled AdamW"


def adamw(parameters: Iterable[nn.Parameter], how: str) -> tuple[torch.optim.AdamW, Callable[[], None]]:
    """(AdamW, its step): "foreach" and "fused" are torch's own, "compiled" is torch.compile of the step.

    Raises ValueError for another way.
    """
    parameters = list(parameters)
    if how in ("foreach", "fused"):
        optimizer = torch.optim.AdamW(parameters, lr=LR, **{how: True})
        return optimizer, optimizer.step
    if how == "compiled":
        device = parameters[0].device
        # A tensor, so that a scheduler changes a value and no guard; capturable keeps the step counts on the GPU.
        optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(LR, device=device), capturable=device.type == "cuda")
        return optimizer, torch.compile(optimizer.step, dynamic=False)
    raise ValueError(f'adamw: {how!r} is not one of "foreach", "fused" or "compiled"')


class Trainer:
    """tokens -> the losses before this step's update. `reset` goes back to the first weights and moments, in place."""

    def __init__(self, model: LanguageModel, losses: Callable, how: str) -> None:
        self.model, self.losses = model, losses
        self.optimizer, self.update = adamw(model.parameters(), how)
        self.start = [p.detach().clone() for p in model.parameters()]

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        losses = self.losses(tokens)
        losses.mean().backward()
        self.update()
        return losses.detach()

    @torch.no_grad()
    def reset(self) -> None:
        for parameter, start in zip(self.model.parameters(), self.start, strict=True):
            parameter.copy_(start)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()


def make_trainers(new: Callable[[], LanguageModel]) -> dict[str, Trainer]:
    """One for each way to run a step, on models of their own with the same weights."""
    eager, half, whole = new(), new(), new()
    options = {"fullgraph": True, "dynamic": False}
    return {
        EAGER: Trainer(eager, eager, "fused"),
        MODEL: Trainer(half, torch.compile(half, **options), "fused"),
        WHOLE: Trainer(whole, torch.compile(whole, **options), "compiled"),
    }


def case_of(tokens: torch.Tensor) -> str:
    return f"{tokens.shape[0]}x{tokens.shape[1] - 1} tokens"


def sizes(h: Harness) -> tuple[Callable[[], LanguageModel], list[torch.Tensor]]:
    """A function that makes the model, always with the same weights, and batches of tokens."""
    gpu, tiny = h.machine.mode == "gpu", replace(TINY, layers=h.pick(quick=1, full=4))
    if gpu:
        large = [(h.fit(16, bytes_each=3 * 2**30), 1025), (1, 129)]
        config, shapes = h.pick(quick=(tiny, [(4, 129)]), full=(LARGE, large))
    else:
        config, shapes = tiny, [h.pick(quick=(2, 65), full=(4, 129))]
    return partial(LanguageModel, config, h.device, gpu), [h.randint(config.vocab, *shape) for shape in shapes]


def answer(tables: dict, waiting: dict[str, int]) -> str:
    more = [table.over(MODEL, WHOLE) for table in tables.values()]
    take = f"Compile the model{' and AdamW' * (max(more) > 1.02)}"
    if max(table.over(EAGER) for table in tables.values()) <= 1:
        take = "Stay with eager"
    speeds = ", ".join(f"{case} {table.by_host(EAGER, MODEL)}" for case, table in tables.items())
    gains = " and ".join(f"{ratio:.2f}x" for ratio in more)
    return (
        f"{take}. The model compiled, over eager: {speeds}; AdamW too, over its fused kernel: {gains}. "
        f"{waiting['min-cut'] / waiting['eager autograd']:.2f}x eager's bytes wait for backward."
    )


def demo(h: Harness) -> None:
    new, batches = sizes(h)
    model, waiting = new(), {}
    if not h.profile:
        cut = splits(model, batches[0], cases={"min-cut": ("min-cut", 1.0)})["min-cut"]
        waiting = {"eager autograd": saved_by_autograd(model, batches[0])[1], "min-cut": cut.saved_bytes}
    h.fact(f"bytes that wait for backward, {case_of(batches[0])}", waiting)
    torch.compiler.reset()
    trainers, exact, tables = make_trainers(new), new().float64(), {}
    # No first calls: the models share code, so each finds what the one before it compiled.
    timing = Timing(end_to_end=True, first_calls=dict.fromkeys(trainers))
    for tokens in batches:
        with logs():  # Dynamo warns that it leaves out torch's profiler marks
            tables[case_of(tokens)] = h.compare(
                trainers, torch.no_grad()(exact.forward), tokens, baseline=EAGER, work=Work(), title="training step",
                case=case_of(tokens), timing=timing, max_error_ratio=2.0, dtype=torch.float32,
            )  # fmt: skip
        for trainer in trainers.values():
            trainer.reset()

    h.answer(lambda: answer(tables, waiting))


if __name__ == "__main__":
    run(demo)
