"""A training step: what compiling the model and compiling the optimizer each add, and what waits for backward.

torch.compile of a model that trains traces forward and backward into one joint graph and cuts it in two. Where it cuts
decides which activations wait in memory for backward: Inductor's min-cut partitioner keeps less than eager's autograd
and recomputes what is cheap. The optimizer is compiled apart: its loop over all parameters becomes a few kernels.

AdamW reads a float32 parameter, its gradient and two moments and writes all but the gradient: 28 bytes a parameter,
3 GB for 107 million. Matrix products need 6 FLOPs for each parameter and token, forward and backward together.

Question   Which part of a training step does the compiler speed up, and what does it do to its memory?
Needs      torch
Wins when  eager waits for the host (small batches), or moves activations between many small kernels. Where matrix
           products fill the GPU, or AdamW is torch's fused kernel already, there is little to win.
Study      studies/compiler/training_step.py, studies/compiler/training_step_parts.py
Source     chapter section "AOTAutograd".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace

from harness import Harness, Timing, Work, run

import torch
import torch.nn.functional as F
from torch import nn

from compile_inspect import logs, splits
from examples.common.transformer import TINY, Config, Transformer

LARGE = Config(width=2048, layers=2, heads=16, kv_heads=4, hidden=5632, vocab=8192)  # 107 million
LR = 5e-5
EAGER, MODEL, WHOLE = "torch eager, fused AdamW", "torch.compile, fused AdamW", "torch.compile, compiled AdamW"


class LanguageModel(nn.Module):
    """tokens [batch, n + 1] int64 -> the loss of each next token, [batch, n] float32, by a random transformer.

    `mixed` is autocast to bfloat16, as mixed precision training has it; parameters and gradients stay float32. Raises
    TypeError for other tokens than int64, ValueError unless they are a matrix of 2 to max_tokens + 1 columns.
    """

    def __init__(self, config: Config, device: torch.device, mixed: bool) -> None:
        super().__init__()
        self.body = Transformer.random(config, device, torch.float32).train().requires_grad_(True)
        self.mixed = mixed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        body, most = self.body, self.body.config.max_tokens + 1
        if tokens.dtype != torch.int64:
            raise TypeError(f"LanguageModel: tokens are {tokens.dtype}; pass tokens.long()")
        if tokens.ndim != 2 or not 2 <= tokens.shape[1] <= most:
            raise ValueError(f"LanguageModel: tokens are {tuple(tokens.shape)}; pass [batch, 2..{most}]")
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.mixed):
            x = body.embedding(given)
            cos, sin = (table[: given.shape[1]] for table in (body.cos, body.sin))
            if self.mixed:  # else queries and keys would be widened to float32, and rounded again for attention
                cos, sin = cos.bfloat16(), sin.bfloat16()
            for block in body.blocks:
                x = block(x, cos, sin)
            logits = F.linear(body.norm(x), body.embedding.weight)
            return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)

    def float64(self) -> LanguageModel:
        model = copy.deepcopy(self).double()
        model.mixed = False
        return model


def adamw(parameters: Iterable[nn.Parameter], how: str) -> tuple[torch.optim.AdamW, Callable[[], None]]:
    """(AdamW, its step): "foreach" and "fused" are torch's own, "compiled" is torch.compile of the step.

    Raises ValueError for another way, and for no parameters.
    """
    parameters = list(parameters)
    if not parameters:
        raise ValueError("adamw: no parameters; pass model.parameters() of a model that has some")
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

    def after(self, steps: int, tokens: torch.Tensor) -> torch.Tensor:
        """The losses that the first weights have after that many updates."""
        self.reset()
        for _ in range(steps):
            self(tokens)
        return self(tokens)


def saved_by_autograd(model: nn.Module, *inputs) -> tuple[int, int]:
    """(tensors, bytes) that eager forward keeps for backward, parameters and inputs left out, each memory once."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # held, so that no later one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    return len(kept), sum(storage.nbytes() for storage in kept.values())


def case_of(tokens: torch.Tensor) -> str:
    return f"{tokens.shape[0]}x{tokens.shape[1] - 1} tokens"


def bytes_that_wait(model: LanguageModel, tokens: torch.Tensor) -> dict[str, int]:
    """For backward, between it and forward: in eager, and after Inductor's partitioner."""
    cut = splits(model, tokens, cases={"min-cut": ("min-cut", 1.0)})["min-cut"]
    return {"eager autograd": saved_by_autograd(model, tokens)[1], "min-cut": cut.saved_bytes}


def make_trainers(new: Callable[[], LanguageModel]) -> dict[str, Trainer]:
    """One for each way to run a step, on models of their own with the same weights."""
    eager, half, whole = new(), new(), new()
    options = {"fullgraph": True, "dynamic": False}
    return {
        EAGER: Trainer(eager, eager, "fused"),
        MODEL: Trainer(half, torch.compile(half, **options), "fused"),
        WHOLE: Trainer(whole, torch.compile(whole, **options), "compiled"),
    }


def sizes(h: Harness) -> tuple[Config, list[tuple[int, int]]]:
    """The model, and (batch, columns) of the tokens."""
    tiny = replace(TINY, layers=h.pick(quick=1, full=4))
    if h.machine.mode != "gpu":
        return tiny, [h.pick(quick=(2, 65), full=(4, 129))]
    large = [(h.fit(16, bytes_each=3 * 2**30), 1025), (1, 129)]
    return h.pick(quick=tiny, full=LARGE), h.pick(quick=[(4, 129)], full=large)


def demo(h: Harness) -> None:
    config, shapes = sizes(h)
    tokens = [h.randint(config.vocab, *shape) for shape in shapes]

    def new() -> LanguageModel:
        return LanguageModel(config, h.device, mixed=h.machine.mode == "gpu")

    exact, waiting = new().float64(), {} if h.profile else bytes_that_wait(new(), tokens[0])
    h.fact(f"bytes that wait for backward, {case_of(tokens[0])}", waiting)
    torch.compiler.reset()
    trainers, tables = make_trainers(new), {}
    for batch in tokens:
        with logs():  # Dynamo warns that it leaves out torch's profiler marks
            tables[case_of(batch)] = h.compare(
                trainers, torch.no_grad()(exact.forward), batch, baseline=EAGER, work=Work(),
                title="training step", case=case_of(batch), timing=Timing(end_to_end=True), max_error_ratio=2.0,
                dtype=torch.float32,
            )  # fmt: skip
        for trainer in trainers.values():
            trainer.reset()

    def answer() -> str:
        speeds = "; ".join(
            f"{case}: compiling the model {table.over(EAGER, MODEL):.2f}x, its AdamW {table.over(MODEL, WHOLE):.2f}x "
            "torch's fused" for case, table in tables.items()
        )  # fmt: skip
        memory = waiting["min-cut"] / waiting["eager autograd"]
        return f"A step of {speeds}. Compiled, {memory:.2f}x eager's bytes wait for backward."

    h.answer(answer)


if __name__ == "__main__":
    run(demo)
