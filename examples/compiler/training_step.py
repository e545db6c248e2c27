"""A training step: what AOTAutograd traces and saves, what a memory budget costs, and what a compiled optimizer adds.

Technique  torch.compile of a model that trains traces forward and backward into one joint graph, and cuts it in two.
           Where it cuts decides which activations wait in memory for backward: the default partitioner keeps all that
           the traced backward uses, the min-cut partitioner (Inductor's) keeps less and recomputes what is cheap, and
           an activation memory budget below 1 recomputes matrix products too. The optimizer is compiled apart: its loop
           over all parameters becomes a few kernels, for every step of a scheduler if its learning rate is a tensor.
Question   Which part of a training step does the compiler speed up, and what does it do to its memory?
Needs      torch
Shapes     tokens [batch, n + 1] int64 -> the loss of each next token, [batch, n] float32. n is at most max_tokens.
Dtypes     Parameters, gradients and AdamW's state are float32. On a GPU the matrix products and attention are bfloat16,
           by autocast, as mixed precision training has it; on a CPU all is float32.
Errors     LanguageModel: TypeError for tokens that are not int64, ValueError unless they are a matrix of at least two
           columns and no more than max_tokens + 1. adamw: ValueError for a way it does not know, or for no parameters.
           compiled: ValueError for an activation memory budget outside 0 to 1.
Wins when  eager waits for the host (small batches), or moves activations between many small kernels. Where matrix
           products fill the GPU, or AdamW is torch's fused kernel already, there is little to win: see the tables.
Source     chapter section "AOTAutograd".
Run        python examples/compiler/training_step.py
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from harness import Harness, Work, run
from harness.check import CheckError, VacuousCheck
from harness.compiler import kernels_run, logs, splits, watch
from harness.transformer import TINY, Config, Transformer

import torch
import torch._functorch.config
import torch._inductor
import torch.nn.functional as F
from torch import nn

LARGE = Config(width=2048, layers=2, heads=16, kv_heads=4, hidden=5632, vocab=8192)  # 107 million
BUDGETS = (1.0, 0.5, 0.2, 0.0)
LR, STEPS = 5e-5, 4
NEAR = 4  # times eager's own error, after some steps
EAGER = "torch eager, fused AdamW"
ADAMW_BYTES = (
    28  # for each float32 parameter: it, its gradient and two moments are read, and all but the gradient written
)


class LanguageModel(nn.Module):
    """The loss of each next token, by a transformer with random weights; `mixed` is autocast to bfloat16."""

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
    """(AdamW, its step): "foreach" and "fused" are torch's own, "compiled" is torch.compile of the step."""
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


@functools.cache
def inductor_within(budget: float) -> Callable:
    """Inductor with this activation memory budget: to Dynamo a backend of its own, for all models that use it."""

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return torch._inductor.compile(graph, inputs)

    return backend


def compiled(model: LanguageModel, budget: float = 1.0) -> Callable:
    """The model by torch.compile, for one shape after another. Raises ValueError for a budget outside 0 to 1."""
    if not 0 <= budget <= 1:
        raise ValueError(f"compiled: an activation memory budget of {budget}; it is a share, from 0 to 1")
    return torch.compile(model, backend=inductor_within(budget), fullgraph=True, dynamic=False)


def gradients(model: LanguageModel, losses: Callable) -> Callable:
    """tokens -> the gradient of the mean loss by each parameter."""
    parameters = list(model.parameters())
    return lambda tokens: torch.autograd.grad(losses(tokens).mean(), parameters)


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


def peak_bytes(fn: Callable, *inputs) -> int:
    """GPU memory that one call of fn needs at its peak, beyond what is allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def graphs_with_a_scheduler(device: torch.device, lr: float | torch.Tensor, steps: int = 4) -> tuple[int, list[str]]:
    """(graphs that Dynamo makes of AdamW.step while a scheduler lowers lr, the guards that failed on the way)."""
    parameters = [nn.Parameter(torch.ones(4, device=device)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=lr, capturable=device.type == "cuda")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.compiler.reset()
    step = torch.compile(optimizer.step, backend="eager")
    with logs(), watch() as seen:  # logs: Dynamo warns that it leaves out torch's profiler marks
        for _ in range(steps):
            step()
            scheduler.step()
    torch.compiler.reset()
    return seen.graphs, [reason.partition(": ")[2].split("  #")[0].strip() for reason in seen.recompiles]


def show_graphs(h: Harness, model: LanguageModel, tokens: torch.Tensor) -> None:
    """The joint graph, and what waits in memory between its two parts."""
    cases = {"default partitioner": ("default", 1.0)}
    cases |= {f"min-cut, budget {budget}": ("min-cut", budget) for budget in BUDGETS}
    found = splits(model, tokens, cases=cases)
    torch.compiler.reset()
    number, size = saved_by_autograd(model, tokens)
    h.fact("saved for backward by eager autograd", {"saved": number, "saved_bytes": size})
    h.fact("joint graph, cut by", {name: asdict(cut) for name, cut in found.items()})
    default, full = found["default partitioner"], found["min-cut, budget 1.0"]
    recomputed = full.backward_matmuls - default.backward_matmuls
    h.say(
        f"waiting for backward: {size / 1e6:.1f} MB in eager, {default.saved_bytes / 1e6:.1f} cut by default, "
        f"{full.saved_bytes / 1e6:.1f} by min-cut, for {full.backward - default.backward:+d} operations in backward, "
        f"{recomputed} of them matrix products or attention"
    )
    for budget in BUDGETS[1:]:
        cut = found[f"min-cut, budget {budget}"]
        share = cut.saved_bytes / full.saved_bytes if full.saved_bytes else 1.0
        more = cut.backward_matmuls - full.backward_matmuls
        h.say(
            f"budget {budget}: {share:.0%} of those bytes, for {more:+d} matrix products or attention in backward, "
            f"which has {full.backward_matmuls}"
        )


def show_gradients(h: Harness, model: LanguageModel, tokens: torch.Tensor) -> None:
    """Forward and backward: every gradient against float64, time, and on a GPU the memory really used."""
    variants = {"torch eager": gradients(model, model)}
    for budget in BUDGETS if tokens.is_cuda else BUDGETS[:1]:
        variants[f"torch.compile, budget {budget}"] = gradients(model, compiled(model, budget))
    exact = model.float64()
    table = h.compare(
        variants, gradients(exact, exact), tokens, baseline="torch eager", work=Work(), title="forward and backward",
        case=case_of(tokens), whole_calls=True, beside=2.0, dtype=torch.float32,
    )  # fmt: skip
    if tokens.is_cuda:
        peaks = {name: peak_bytes(fn, tokens) for name, fn in variants.items()}
        h.fact("peak bytes of forward and backward", peaks)
    for row in table.rows[1:] if h.timing else []:
        memory = f", {peaks[row.variant] / peaks['torch eager']:.2f}x its memory at the peak" if tokens.is_cuda else ""
        h.say(f"{row.variant}: {against(row.speedup)} eager{memory}")
    if tokens.is_cuda:
        lowest, last = min(peaks, key=peaks.get), next(reversed(peaks))
        if lowest != last:
            h.say(f"to save less is not always to need less: the lowest peak is that of {lowest}, not of {last}")


def show_steps(h: Harness, trainers: dict[str, Trainer], exact: Trainer, sizes: list[torch.Tensor]) -> None:
    """The whole step, and how far training has come after some of them."""
    for tokens in sizes:
        for trainer in trainers.values():
            trainer.reset()
        with logs():  # Dynamo warns that it leaves out torch's profiler marks
            table = h.compare(
                trainers, torch.no_grad()(exact.model.forward), tokens, baseline=EAGER, work=Work(),
                title="training step", case=case_of(tokens), whole_calls=True, beside=2.0, dtype=torch.float32,
                first_calls=dict.fromkeys(trainers),  # they share what is compiled
            )  # fmt: skip
        for row in table.rows if table and h.timing else []:
            launching = f", {min(1.0, row.enqueue_us / row.ms / 1000):.0%} of it launching" if row.enqueue_us else ""
            speed = "" if row.variant == EAGER else f"; {against(row.speedup)} eager"
            h.say(f"{case_of(tokens)}, {row.variant}: {row.ms:.2f} ms{launching}{speed}")
    if h.profile:
        return
    tokens = sizes[-1]
    exact_first, want = exact.after(0, tokens), exact.after(STEPS, tokens)
    moved = (want - exact_first).square().mean().sqrt().item()
    losses = {"float64": {"first": exact_first.mean().item(), "last": want.mean().item(), "rms off": 0.0}}
    for name, trainer in trainers.items():
        first, got = trainer.after(0, tokens), trainer.after(STEPS, tokens)
        off = (got - want).square().mean().sqrt().item()
        losses[name] = {"first": first.mean().item(), "last": got.mean().item(), "rms off": off}
        # Errors grow from step to step, so what a compiled step may be off follows from eager's own.
        allowed = NEAR * max(losses[EAGER]["rms off"], 2**-22 * want.square().mean().sqrt().item())
        if not allowed < moved:
            raise VacuousCheck(
                f"losses after {STEPS} steps: {allowed:.3g} (rms) allowed, but no step at all is only {moved:.3g} off"
            )
        if not off <= allowed:
            raise CheckError(f"losses after {STEPS} steps: {name} is off by {off:.3g} (rms), {allowed:.3g} allowed")
    told = {name: {key: float(f"{value:.6g}") for key, value in each.items()} for name, each in losses.items()}
    h.fact(f"mean loss, and after {STEPS} steps", told)


def show_optimizer(h: Harness, trainers: dict[str, Trainer], grads: tuple[torch.Tensor, ...], exact: Trainer) -> None:
    """AdamW alone, on these gradients, by the optimizers of these trainers."""

    def update(trainer: Trainer) -> Callable:
        trainer.reset()
        for parameter, grad in zip(trainer.model.parameters(), grads, strict=True):
            parameter.grad = grad.to(parameter.dtype)

        def call(*_) -> tuple[torch.Tensor, ...]:
            trainer.update()
            return tuple(p.detach() for p in trainer.model.parameters())

        return call

    variants = {name: update(trainer) for name, trainer in trainers.items()}
    number, fused = sum(grad.numel() for grad in grads), next(iter(variants))
    with logs():
        table = h.compare(
            variants, update(exact), *grads, baseline=fused, work=Work(bytes=ADAMW_BYTES * number), title="AdamW",
            case=f"{number} parameters float32", first_calls=dict.fromkeys(variants),  # in the whole steps, before
        )  # fmt: skip
    if grads[0].is_cuda:
        h.fact("kernels of AdamW", {name: len(kernels_run(fn)[0]) for name, fn in variants.items()})
    for row in table.rows[1:] if h.timing else []:
        h.say(f"{row.variant}: {against(row.speedup)} {fused}")


def show_scheduler(h: Harness) -> None:
    lrs = {"float": LR, "tensor": torch.tensor(LR, device=h.device)}
    made = {kind: graphs_with_a_scheduler(h.device, lr) for kind, lr in lrs.items()}
    h.fact("graphs of AdamW.step in 4 steps of a scheduler", {kind: graphs for kind, (graphs, _) in made.items()})
    for kind, (graphs, reasons) in made.items():
        why = f"; a guard failed: {'; '.join(reasons)}" if reasons else ""
        h.say(f"lr as a {kind}: {graphs} graph{'s' if graphs > 1 else ''}{why}")


def against(speedup: float) -> str:
    return f"{'slower, ' if round(speedup, 2) < 1 else ''}{speedup:.2f}x the speed of"


def case_of(tokens: torch.Tensor) -> str:
    return f"{tokens.shape[0]}x{tokens.shape[1] - 1} tokens"


def demo(h: Harness) -> None:
    config, sizes = replace(TINY, layers=h.pick(quick=1, full=4)), [h.pick(quick=(2, 65), full=(4, 129))]
    if mixed := h.machine.mode == "gpu":
        config = h.pick(quick=config, full=LARGE)
        sizes = h.pick(quick=[(4, 129)], full=[(h.fit(16, bytes_each=3 * 2**30), 1025), (1, 129)])
    tokens = [h.randint(config.vocab, *size) for size in sizes]

    def new() -> LanguageModel:
        return LanguageModel(config, h.device, mixed)  # the same weights each time

    torch.compiler.reset()
    model = new()
    if not h.profile:
        show_graphs(h, model, tokens[0])
        show_gradients(h, model, tokens[0])
    eager, half, whole, other, double = new(), new(), new(), new(), new().float64()
    trainers = {
        EAGER: Trainer(eager, eager, "fused"),
        "torch.compile, fused AdamW": Trainer(half, compiled(half), "fused"),
        "torch.compile, compiled AdamW": Trainer(whole, compiled(whole), "compiled"),
    }
    exact = Trainer(double, double, "foreach")
    show_steps(h, trainers, exact, tokens)
    if h.profile:
        return
    alone = {
        "torch AdamW fused": trainers[EAGER],
        "torch AdamW foreach": Trainer(other, other, "foreach"),
        "torch.compile AdamW": trainers["torch.compile, compiled AdamW"],
    }
    show_optimizer(h, alone, gradients(model, model)(tokens[-1]), exact)
    show_scheduler(h)


if __name__ == "__main__":
    run(demo)
