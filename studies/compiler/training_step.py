"""training_step, measured: the joint graph and its cuts, gradients under each memory budget, and the memory used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict

from harness import Harness, Timing, Work

import torch
import torch._functorch.config
import torch._inductor

from compile_inspect import splits
from examples.compiler.training_step import LanguageModel, case_of, saved_by_autograd, sizes

BUDGETS = (1.0, 0.5, 0.2, 0.0)


def study(h: Harness) -> None:
    if h.profile:
        return
    new, (tokens, *_) = sizes(h)
    model = new()
    show_graphs(h, model, tokens)
    show_gradients(h, model, tokens)


@functools.cache
def inductor_within(budget: float) -> Callable:
    """Inductor with this activation memory budget: to Dynamo a backend of its own, for all models that use it."""

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return torch._inductor.compile(graph, inputs)

    return backend


def gradients(model: LanguageModel, losses: Callable) -> Callable:
    """tokens -> the gradient of the mean loss by each parameter."""
    parameters = list(model.parameters())
    return lambda tokens: torch.autograd.grad(losses(tokens).mean(), parameters)


def within(budget: float, model: LanguageModel) -> Callable:
    """The gradients by torch.compile with this activation memory budget, a share from 0 to 1."""
    compiled = torch.compile(model, backend=inductor_within(budget), fullgraph=True, dynamic=False)
    return gradients(model, compiled)


def peak_bytes(fn: Callable, *inputs) -> int:
    """GPU memory that one call of fn needs at its peak, beyond what is allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def show_graphs(h: Harness, model: LanguageModel, tokens: torch.Tensor) -> None:
    """The joint graph, and what waits in memory between its two parts."""
    cases = {"default partitioner": ("default", 1.0)}
    cases |= {f"min-cut, budget {budget}": ("min-cut", budget) for budget in BUDGETS}
    torch.compiler.reset()
    found = splits(model, tokens, cases=cases)
    torch.compiler.reset()
    number, size = saved_by_autograd(model, tokens)
    h.fact("saved for backward by eager autograd", {"saved": number, "saved_bytes": size})
    h.table("joint graph, cut by", {name: asdict(cut) for name, cut in found.items()})
    default, full = found["default partitioner"], found["min-cut, budget 1.0"]
    h.say(
        f"waiting for backward: {size / 1e6:.1f} MB in eager, {default.saved_bytes / 1e6:.1f} cut by default, "
        f"{full.saved_bytes / 1e6:.1f} by min-cut, for {full.backward - default.backward:+d} operations in backward, "
        f"{full.backward_matmuls - default.backward_matmuls} of them matrix products or attention"
    )


def show_gradients(h: Harness, model: LanguageModel, tokens: torch.Tensor) -> None:
    """Forward and backward: every gradient against float64, time, and on a GPU the memory really used."""
    variants = {"torch eager": gradients(model, model)}
    for budget in BUDGETS if tokens.is_cuda else BUDGETS[:1]:
        variants[f"torch.compile, budget {budget}"] = within(budget, model)
    exact = model.float64()
    h.compare(
        variants, gradients(exact, exact), tokens, baseline="torch eager", work=Work(), title="forward and backward",
        case=case_of(tokens), timing=Timing(end_to_end=True), max_error_ratio=2.0, dtype=torch.float32,
    )  # fmt: skip
    if tokens.is_cuda:
        peaks = {name: peak_bytes(fn, tokens) for name, fn in variants.items()}
        h.fact("peak bytes of forward and backward", peaks)
        lowest, last = min(peaks, key=peaks.get), next(reversed(peaks))
        if lowest != last:
            h.say(f"to save less is not always to need less: the lowest peak is that of {lowest}, not of {last}")
